"""Accelerated proximal gradient: the reference solver, for every head with a prox."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from convexformer.architecture import Weights
from convexformer.problem import Fit, Problem
from convexformer.solvers.candidates import Candidates


class Watcher(Protocol):
    """What an iteration needs of whoever watches it: when to go on, when to show a point, and to whom."""

    def __iter__(self) -> Iterator[int]: ...

    @property
    def done(self) -> bool:
        """Whether to go on no further."""

    @property
    def late(self) -> bool:
        """Whether the time is up."""

    @property
    def due(self) -> bool:
        """Whether it is time for a gap check."""

    def check(self, Z: Any, fit: Fit) -> object:
        """Check the gap of the point ``Z``, whose loss is ``fit``."""


def fista(problem: Problem, start: Weights, monitor: Watcher, *, resident: bool | None = None) -> None:
    """FISTA (Beck and Teboulle 2009) with backtracking and adaptive restart (O'Donoghue and Candes 2015).

    An iteration costs one product with the operator and one with its adjoint: outputs are linear in the weights, so
    those of the momentum point are combined from the last two. A ``resident`` iteration (the default on a GPU) takes
    every decision where the tensors are: step length, momentum and restarts are scalars on the device, and a step that
    went too far is refused there, so that the host reads nothing between gap checks. On a CPU a refused step is tried
    again at once, which saves its gradient.
    """
    A, penalty, beta = problem.operator, problem.penalty, problem.beta
    Z, F = start.Z, A.apply(start.Z)
    resident = Z.is_cuda if resident is None else resident
    choose = torch.where if resident else _choose
    at_W = problem.fit(F, start.intercept)
    monitor.check(Z, at_W)
    W, FW = Z, F  # the momentum point and its outputs
    t, L = at_W.value.new_ones(()), None
    candidates = Candidates(problem)
    for _ in monitor:
        G = A.adjoint(at_W.V)
        L = _first_curvature(problem, G) if L is None else L
        while True:
            Z_next = penalty.prox(W - G / L, beta / L)
            F_next = A.apply(Z_next)
            fit_next = problem.fit(F_next, at_W.intercept, follow=resident)
            allowed = 0.5 * L * (Z_next - W).double().square().sum()
            excess = _bregman(at_W, FW, fit_next, F_next)
            taken = (excess <= allowed * (1 + 1e-9)) | ~L.isfinite()
            if resident or taken:
                break
            L = 2 * L
        # where the curvature is lower than thought: longer steps, checked again at the next one
        L = torch.where(taken, torch.where(excess < 0.4 * allowed, 0.9 * L, L), 2 * L)
        uphill = ((W - Z_next) * (Z_next - Z)).sum() > 0  # the momentum: start anew
        t_next = torch.where(uphill, 1.0, (1 + (1 + 4 * t * t).sqrt()) / 2)
        push = torch.where(uphill, 0.0, (t - 1) / t_next)
        W, FW = choose(taken, Z_next + push * (Z_next - Z), W), choose(taken, F_next + push * (F_next - F), FW)
        Z, F, t = choose(taken, Z_next, Z), choose(taken, F_next, F), torch.where(taken, t_next, t)
        still = not resident and not push  # then both points are the same
        at_W = fit_next if still else problem.fit(FW, fit_next.intercept, follow=resident)
        if monitor.due:
            at_Z = problem.fit(F, fit_next.intercept)
            monitor.check(Z, at_Z)
            # conjugate gradients read a number a step, so a resident iteration goes without
            if not resident and (found := candidates.better(Z, F, at_Z, L, monitor)) is not None:
                Z, F, at_W = found
                W, FW, t = Z, F, torch.ones_like(t)
                monitor.check(Z, at_W)


def _choose(taken: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """:func:`torch.where` without a copy, where asking costs nothing."""
    return new if taken else old


def _first_curvature(problem: Problem, G: Tensor) -> Tensor:
    """Return the curvature bound along the first gradient; backtracking raises it where it is too low."""
    norm = torch.linalg.vector_norm(G.double())
    AG = problem.operator.apply(G / norm)
    found = problem.loss.curvature * (problem.w[:, None] * AG.double().square()).sum()
    return torch.where(norm > 0, found.clamp_min(1e-12), 1.0)


def _bregman(at_W: Fit, FW: Tensor, at_Z: Fit, FZ: Tensor) -> Tensor:
    """Return the Bregman distance of the loss from ``W`` to ``Z``.

    Where the difference of values drowns in rounding, half the symmetric distance ``<grad(Z) - grad(W), Z - W>`` stands
    in: it involves no cancellation, and for small steps the two agree.
    """
    step = (FZ - FW).double()
    distance = at_Z.value - at_W.value - (at_W.V * step).sum()
    noise = 100 * torch.finfo(FZ.dtype).eps * (at_Z.value.abs() + at_W.value.abs())
    return torch.where(distance > noise, distance, 0.5 * ((at_Z.V - at_W.V) * step).sum())

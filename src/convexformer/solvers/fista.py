"""Accelerated proximal gradient: the reference solver, for every head with a prox."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from convexformer.architecture import Weights
from convexformer.problem import Fit, Problem
from convexformer.solvers.candidates import Candidates
from convexformer.solvers.recorded import Recorded, select

MANY_OUTPUTS = 64  # from which on an exact intercept costs more than the rest of an iteration


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


class _State(NamedTuple):
    """The last point ``Z`` and the momentum point ``W`` with their outputs; momentum, curvature and intercept."""

    Z: Tensor
    F: Tensor
    W: Tensor
    FW: Tensor
    t: Tensor
    L: Tensor
    b: Tensor | None


def fista(problem: Problem, start: Weights, monitor: Watcher, *, resident: bool | None = None) -> None:
    """FISTA (Beck and Teboulle 2009) with backtracking and adaptive restart (O'Donoghue and Candes 2015).

    An iteration costs one product with the operator and one with its adjoint: outputs are linear in the weights, so
    those of the momentum point are combined from the last two. A ``resident`` iteration (the default on a GPU) takes
    every decision where the tensors are: step length, momentum and restarts are scalars on the device, and a step that
    went too far is refused there, so that the host reads nothing between gap checks, and an iteration can be recorded.
    On a CPU a refused step is tried again at once, which saves its gradient.
    """
    Z, F = start.Z, problem.operator.apply(start.Z)
    resident = Z.is_cuda if resident is None else resident
    fit = problem.fit(F, start.intercept)
    monitor.check(Z, fit)
    first = _State(Z, F, Z, F, fit.value.new_ones(()), _first_curvature(problem, fit), fit.intercept)
    advance = partial(_advance, problem, resident=resident)
    iteration = Recorded(problem, advance, first, record=resident and problem.penalty.resident)
    candidates = Candidates(problem)
    for _ in monitor:
        iteration()
        if monitor.due:
            at = iteration.state
            fit = problem.fit(at.F, at.b)
            monitor.check(at.Z.clone() if iteration.record else at.Z, fit)
            # conjugate gradients read a number a step, so a resident iteration goes without
            if not resident and (found := candidates.better(at.Z, at.F, fit, at.L, monitor)) is not None:
                Z, F, fit = found
                iteration.set(_State(Z, F, Z, F, torch.ones_like(at.t), at.L, fit.intercept))
                monitor.check(Z, fit)


def _advance(problem: Problem, at: _State, *, resident: bool) -> _State:
    A, penalty, beta = problem.operator, problem.penalty, problem.beta
    Z, F, W, FW, t, L, b = at
    follow = resident or problem.layout.n_outputs > MANY_OUTPUTS
    at_W = problem.fit(FW, b, follow=follow)
    G = A.adjoint(at_W.V)
    while True:
        Z_next = penalty.prox(W - G / L, beta / L)
        F_next = A.apply(Z_next)
        fit_next = problem.fit(F_next, at_W.intercept, follow=follow)
        step = Z_next - W
        allowed = 0.5 * L * _dot(step, step)
        excess = _bregman(at_W, FW, fit_next, F_next, lazy=not resident)
        taken = (excess <= allowed * (1 + 1e-9)) | ~L.isfinite()
        if resident or taken:
            break
        L = 2 * L
    # where the curvature is lower than thought: longer steps, checked again at the next one
    L = torch.where(taken, torch.where(excess < 0.4 * allowed, 0.9 * L, L), 2 * L)
    uphill = _dot(step, Z_next - Z) < 0  # the momentum points there: start anew
    t_next = torch.where(uphill, 1.0, (1 + (1 + 4 * t * t).sqrt()) / 2)
    push = torch.where(uphill, 0.0, (t - 1) / t_next)
    W, FW = (torch.lerp(old, new, (1 + push).to(old.dtype)) for old, new in ((Z, Z_next), (F, F_next)))
    found = _State(Z_next, F_next, W, FW, t_next, L, fit_next.intercept)
    return select(taken, found, at._replace(L=L)) if resident else found


def _first_curvature(problem: Problem, fit: Fit) -> Tensor:
    """Return the curvature bound along the first gradient; backtracking raises it where it is too low."""
    G = problem.operator.adjoint(fit.V)
    norm = torch.linalg.vector_norm(G.double())
    AG = problem.operator.apply(G / norm)
    found = problem.loss.curvature * (problem.w[:, None] * AG.double().square()).sum()
    return torch.where(norm > 0, found.clamp_min(1e-12), 1.0)


def _bregman(at_W: Fit, FW: Tensor, at_Z: Fit, FZ: Tensor, *, lazy: bool) -> Tensor:
    """Return the Bregman distance of the loss from ``W`` to ``Z``.

    Where the difference of values drowns in rounding, half the symmetric distance ``<grad(Z) - grad(W), Z - W>`` stands
    in: it involves no cancellation, and for small steps the two agree. ``lazy``: the host asks which of them is needed.
    """
    step = FZ - FW
    distance = at_Z.value - at_W.value - _dot(at_W.V, step)
    noise = 100 * torch.finfo(FZ.dtype).eps * (at_Z.value.abs() + at_W.value.abs())
    if lazy and distance > noise:
        return distance
    return torch.where(distance > noise, distance, 0.5 * _dot(at_Z.V - at_W.V, step))


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """``<a, b>`` in float64."""
    return torch.dot(a.double().flatten(), b.double().flatten())

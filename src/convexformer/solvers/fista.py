"""Accelerated proximal gradient: the reference solver, for every head with a prox."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from convexformer.architecture import Weights
from convexformer.problem import Fit, Problem


class Watcher(Protocol):
    """What an iteration needs of whoever watches it: when to go on, and to be shown each point."""

    def __iter__(self) -> Iterator[int]: ...

    def see(self, Z: Any, fit: Fit) -> None:
        """Look at the point ``Z``, whose loss is ``fit``."""


def fista(problem: Problem, start: Weights, monitor: Watcher) -> None:
    """FISTA (Beck and Teboulle 2009) with backtracking and adaptive restart (O'Donoghue and Candes 2015).

    An iteration costs one product with the operator and one with its adjoint: outputs are linear in the weights, so
    those of the momentum point are combined from the last two.
    """
    A, penalty, beta = problem.operator, problem.penalty, problem.beta
    Z, F = start.Z, A.apply(start.Z)
    fit = problem.fit(F, start.intercept)
    monitor.see(Z, fit)
    W, FW, at_W = Z, F, fit  # the momentum point, its outputs and its loss
    t, L = 1.0, 0.0
    for _ in monitor:
        G = A.adjoint(at_W.V)
        if L == 0.0:
            L = _first_curvature(problem, G)
        while True:
            Z_next = penalty.prox(W - G / L, beta / L)
            F_next = A.apply(Z_next)
            fit_next = problem.fit(F_next, at_W.intercept)
            allowed = 0.5 * L * float((Z_next - W).square().sum())
            excess = _bregman(at_W, FW, fit_next, F_next)
            if excess <= allowed * (1 + 1e-9) or not math.isfinite(L):
                break
            L *= 2
        if excess < 0.4 * allowed:
            L *= 0.9  # the curvature here is lower: longer steps, checked again at the next one
        t_next = (1 + math.sqrt(1 + 4 * t**2)) / 2
        if float(((W - Z_next) * (Z_next - Z)).sum()) > 0:
            t, t_next = 1.0, 1.0  # restart: the momentum points uphill
        push = (t - 1) / t_next
        if push > 0:
            W, FW = Z_next + push * (Z_next - Z), F_next + push * (F_next - F)
            at_W = problem.fit(FW, fit_next.intercept)
        else:
            W, FW, at_W = Z_next, F_next, fit_next
        Z, F, t = Z_next, F_next, t_next
        monitor.see(Z, fit_next)


def _first_curvature(problem: Problem, G: Tensor) -> float:
    """Return the curvature bound along the first gradient; backtracking raises it where it is too low."""
    norm = float(torch.linalg.vector_norm(G))
    if norm == 0.0:
        return 1.0
    AG = problem.operator.apply(G / norm)
    return max(problem.loss.curvature * float((problem.w[:, None] * AG.square()).sum()), 1e-12)


def _bregman(at_W: Fit, FW: Tensor, at_Z: Fit, FZ: Tensor) -> float:
    """Return the Bregman distance of the loss from ``W`` to ``Z``.

    Where the difference of values drowns in rounding, half the symmetric distance ``<grad(Z) - grad(W), Z - W>`` stands
    in: it involves no cancellation, and for small steps the two agree.
    """
    step = (FZ - FW).double()
    distance = at_Z.value - at_W.value - float((at_W.V * step).sum())
    noise = 100 * torch.finfo(FZ.dtype).eps * (abs(at_Z.value) + abs(at_W.value))
    return distance if distance > noise else 0.5 * float(((at_Z.V - at_W.V) * step).sum())

"""Accelerated proximal gradient: the reference solver, for every head with a prox."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, TypeAlias, cast, final

import torch
from torch import Tensor

from convexformer.gauges import Proximal
from convexformer.objective import Evaluation, Objective
from convexformer.solvers.base import Solver, Watcher
from convexformer.solvers.cuda_graph import CudaGraphLoop, select
from convexformer.solvers.fista.newton_polish import NewtonPolish, PolishOptions
from convexformer.solvers.monitor import Monitor, TimeUp
from convexformer.weights import Weights


@final
@dataclass(frozen=True)
class FistaOptions:
    """Constants of FISTA."""

    many_outputs: int = 64
    """Outputs from which an exact intercept costs more than the rest of an iteration (benchmarks/heads.py)."""
    longer_below: float = 0.4
    """A step whose Bregman distance is below this fraction of the bound shows a lower curvature (benchmarks/heads.py)."""
    longer_by: float = 0.9
    """The curvature estimate is then multiplied by this."""
    polish: PolishOptions = field(default_factory=PolishOptions)


@final
class Fista(Solver):
    """Accelerated proximal gradient on dense weights; the reference solver."""

    name = "fista"
    works_on = "any penalty with a prox, on dense weights"

    def __init__(self, options: FistaOptions = FistaOptions()) -> None:
        self.options = options

    def requires(self, objective: Objective) -> str | None:
        """A prox."""
        if not objective.penalty.proximal:
            return f"needs a penalty with a prox; {objective.penalty!r} has none"
        return None

    def prepare(self, objective: Objective) -> Objective:
        """The squared loss needs no more rows than features."""
        return objective.compressed()

    def solve(self, objective: Objective, start: Weights, monitor: Monitor) -> None:
        """Iterate until the monitor says to stop."""
        fista(objective, start, monitor, options=self.options)


Scalar: TypeAlias = Tensor | float
"""A number on the device where iterations are free of host syncs, else one of Python, which is faster."""


class _State(NamedTuple):
    """The last point ``Z`` and the momentum point ``W`` with outputs and (about) intercepts; momentum and curvature."""

    Z: Tensor
    F: Tensor
    W: Tensor
    FW: Tensor
    t: Scalar
    L: Scalar
    b: Tensor | None
    ahead: Tensor | None


def fista(
    objective: Objective,
    start: Weights,
    monitor: Watcher,
    *,
    sync_free: bool | None = None,
    options: FistaOptions = FistaOptions(),
) -> None:
    """FISTA (Beck and Teboulle 2009) with backtracking and adaptive restart (O'Donoghue and Candes 2015).

    An iteration costs one product with the operator and one with its adjoint: outputs are linear in the weights, so
    those of the momentum point are combined from the last two. A ``sync_free`` iteration (the default on a GPU) takes
    every decision on the device: step length, momentum and restarts are scalars there, a step that went too far is refused
    there, and there is no host sync between gap checks, so that an iteration can be captured as a CUDA graph. On a CPU a
    refused step is tried again at once, which saves its gradient.
    """
    Z = start.dense()
    F = objective.apply(Z)
    sync_free = Z.is_cuda if sync_free is None else sync_free
    at_Z = objective.evaluate(F, start.intercept)
    monitor.check(Z, at_Z)
    t: Scalar = at_Z.value.new_ones(())
    L: Scalar = _first_curvature(objective, at_Z)
    t, L = (t, L) if sync_free else (float(t), float(L))
    first = _State(Z, F, Z, F, t, L, at_Z.intercept, at_Z.intercept)
    advance = partial(_advance, objective, options, sync_free=sync_free)
    iteration = CudaGraphLoop(objective, advance, first, record=sync_free and objective.penalty.sync_free)
    polish = NewtonPolish(objective, options.polish)
    try:
        for _ in monitor:
            iteration()
            if monitor.due:
                at = iteration.state
                at_Z = objective.evaluate(at.F, at.b)
                monitor.check(at.Z.clone() if iteration.record else at.Z, at_Z)
                # conjugate gradients sync with the host at every step, so sync-free iterations go without
                if not sync_free and (found := polish.try_step(at.Z, at.F, at_Z, at.L, monitor)) is not None:
                    Z, F, at_Z = found
                    iteration.set(_State(Z, F, Z, F, 1.0, at.L, at_Z.intercept, at_Z.intercept))
                    monitor.check(Z, at_Z)
    except TimeUp:
        monitor.hold(iteration.state.Z, iteration.state.F, iteration.state.b)
        raise


def _advance(objective: Objective, options: FistaOptions, at: _State, *, sync_free: bool) -> _State:
    """Take one step."""
    prox, beta = cast(Proximal, objective.penalty).prox, objective.beta  # asked for by ``requires``
    Z, F, W, FW, t, L, b, ahead = at
    few = objective.n_outputs <= objective.loss.nearly_exact_until
    inexact = sync_free or few or objective.n_outputs > options.many_outputs
    at_W = objective.evaluate(FW, ahead, inexact_intercept=inexact)
    G = objective.adjoint(at_W.V)
    while True:
        Z_next = prox(W - G / L, beta / L)
        F_next = objective.apply(Z_next)
        at_next = objective.evaluate(F_next, at_W.intercept, inexact_intercept=inexact)
        step = Z_next - W
        allowed = 0.5 * L * _dot(step, step, sync_free)
        excess = _bregman(objective, at_W, FW, at_next, F_next, sync_free)
        taken = (excess <= allowed * (1 + 1e-9)) | (abs(L) == math.inf) | (L != L)  # or not finite
        if sync_free or taken:
            break
        L = 2 * L
    # a lower curvature allows longer steps; the next one is checked again
    longer = _where(excess < options.longer_below * allowed, options.longer_by * L, L)
    L = _where(taken, longer, 2 * L)
    uphill = _dot(step, Z_next - Z, sync_free) < 0  # the momentum points uphill: restart
    t_next = _where(uphill, 1.0, (1 + (1 + 4 * t * t) ** 0.5) / 2)
    push = 1 + _where(uphill, 0.0, (t - 1) / t_next)
    W, FW = _combined(Z, Z_next, push), _combined(F, F_next, push)
    ahead = None if b is None or at_next.intercept is None else _combined(b, at_next.intercept, push)
    found = _State(Z_next, F_next, W, FW, t_next, L, at_next.intercept, ahead)
    return select(taken, found, at._replace(L=L)) if isinstance(taken, Tensor) else found


def _first_curvature(objective: Objective, at: Evaluation) -> Tensor:
    """Return the curvature bound along the first gradient; backtracking raises it where it is too low."""
    G = objective.adjoint(at.V)
    norm = torch.linalg.vector_norm(G.double())
    AG = objective.apply(G / norm)
    found = objective.loss.curvature * objective.rows.weighted(objective.sample_weight, AG.double().square()).sum()
    return torch.where(norm > 0, found.clamp_min(1e-12), 1.0)


def _bregman(
    objective: Objective, at_W: Evaluation, FW: Tensor, at_Z: Evaluation, FZ: Tensor, sync_free: bool
) -> Scalar:
    """Return the Bregman distance of the loss from ``W`` to ``Z``.

    Where the difference of values drowns in rounding, half the symmetric distance ``<grad(Z) - grad(W), Z - W>`` stands
    in: it involves no cancellation, and for small steps the two agree. On the host only the one that is needed is computed.
    """
    step, rows = (FZ - FW).double(), objective.rows
    there, here, along = at_Z.value, at_W.value, rows.dot(at_W.V.double(), step)
    eps = 100 * torch.finfo(FZ.dtype).eps
    if not sync_free:
        value, last = float(there), float(here)
        distance = value - last - float(along)
        small = not distance > eps * (abs(value) + abs(last))
        return 0.5 * float(rows.dot((at_Z.V - at_W.V).double(), step)) if small else distance
    symmetric = 0.5 * rows.dot((at_Z.V - at_W.V).double(), step)
    found = there - here - along
    return torch.where(found > eps * (there.abs() + here.abs()), found, symmetric)


def _combined(old: Tensor, new: Tensor, push: Scalar) -> Tensor:
    """``old + push * (new - old)``."""
    return torch.lerp(old, new, push.to(old.dtype) if isinstance(push, Tensor) else push)


def _where(condition: Tensor | bool, a: Scalar, b: Scalar) -> Scalar:
    """``a`` where the condition holds, else ``b``."""
    return torch.where(condition, a, b) if isinstance(condition, Tensor) else a if condition else b


def _dot(a: Tensor, b: Tensor, sync_free: bool) -> Scalar:
    """``<a, b>`` in float64."""
    found = torch.dot(a.double().flatten(), b.double().flatten())
    return found if sync_free else float(found)

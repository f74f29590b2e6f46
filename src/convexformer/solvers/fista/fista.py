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
    longer_below: float = 0.25
    """A step whose Bregman distance is below this fraction of the bound shows a lower curvature (benchmarks/real)."""
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
    """The last point ``Z``, and the momentum point ``W`` with what is known of the loss there; momentum and curvature."""

    Z: Tensor
    F: Tensor
    W: Tensor
    FW: Tensor
    value: Tensor
    """The loss at ``W``."""
    V: Tensor
    """Its gradient in the outputs."""
    b: Tensor | None
    """(About) the intercept there."""
    t: Scalar
    L: Scalar

    @classmethod
    def at_rest(cls, Z: Tensor, F: Tensor, at: Evaluation, t: Scalar, L: Scalar) -> _State:
        """No momentum: ``W = Z``."""
        return cls(Z, F, Z, F, at.value, at.V, at.intercept, t, L)


def fista(
    objective: Objective,
    start: Weights,
    monitor: Watcher,
    *,
    sync_free: bool | None = None,
    options: FistaOptions = FistaOptions(),
) -> None:
    """FISTA (Beck and Teboulle 2009) with backtracking and adaptive restart (O'Donoghue and Candes 2015).

    An iteration costs one product with the operator, one with its adjoint and one evaluation of the loss: outputs are linear
    in the weights, so those of the momentum point are combined from the last two, and the step length is judged by the loss
    at momentum points, where its gradient is needed anyway. A ``sync_free`` iteration (the default on a GPU) takes
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
    first = _State.at_rest(Z, F, at_Z, t, L)
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
                    iteration.set(_State.at_rest(Z, F, at_Z, 1.0, at.L))
                    monitor.check(Z, at_Z)
    except TimeUp:
        monitor.hold(iteration.state.Z, iteration.state.F, iteration.state.b)
        raise


def _advance(objective: Objective, options: FistaOptions, at: _State, *, sync_free: bool) -> _State:
    """Take one step."""
    prox, beta = cast(Proximal, objective.penalty).prox, objective.beta  # asked for by ``requires``
    Z, F, W, t, L = at.Z, at.F, at.W, at.t, at.L
    few = objective.n_outputs <= objective.loss.nearly_exact_until
    inexact = sync_free or few or objective.n_outputs > options.many_outputs
    G = objective.adjoint(at.V)
    while True:
        Z_next = prox(W - G / L, beta / L)
        F_next = objective.apply(Z_next)
        uphill = _dot(Z_next - W, Z_next - Z, sync_free) < 0  # the momentum points uphill: restart
        t_next = _where(uphill, 1.0, (1 + (1 + 4 * t * t) ** 0.5) / 2)
        push = 1 + _where(uphill, 0.0, (t - 1) / t_next)
        W_next, FW_next = _combined(Z, Z_next, push), _combined(F, F_next, push)
        ahead = objective.evaluate(FW_next, at.b, inexact_intercept=inexact)
        step = W_next - W
        allowed = 0.5 * L * _dot(step, step, sync_free)
        excess = _bregman(objective, at, FW_next, ahead, sync_free)
        taken = (excess <= allowed * (1 + 1e-9)) | (abs(L) == math.inf) | (L != L)  # or not finite
        if sync_free or taken:
            break
        L = 2 * L
    # a lower curvature allows longer steps; the next one is checked again
    longer = _where(excess < options.longer_below * allowed, options.longer_by * L, L)
    L = _where(taken, longer, 2 * L)
    found = _State(Z_next, F_next, W_next, FW_next, ahead.value, ahead.V, ahead.intercept, t_next, L)
    return select(taken, found, at._replace(L=L)) if isinstance(taken, Tensor) else found


def _first_curvature(objective: Objective, at: Evaluation) -> Tensor:
    """Return the curvature of the loss at the start along its gradient; backtracking raises it where it is too low.

    Along the gradient the intercept follows. No less than a hundredth of the loss's bound counts: at outputs where a loss
    is flat it says nothing of the next ones.
    """
    rows, w = objective.rows, objective.sample_weight
    G = objective.adjoint(at.V)
    norm = torch.linalg.vector_norm(G.double())
    AG = objective.apply(G / norm).double()
    bound = objective.loss.curvature * rows.weighted(w, AG.square()).sum()
    moved = AG - rows.weighted(w, AG) / rows.sum(w) if objective.intercept else AG
    own = rows.dot(w[:, None] * objective.loss.hessian_product(at.outputs.double(), objective.targets, moved), moved)
    return torch.where(norm > 0, own.clamp(0.01 * bound, bound).clamp_min(1e-12), 1.0)


def _bregman(objective: Objective, at: _State, F_next: Tensor, ahead: Evaluation, sync_free: bool) -> Scalar:
    """Return the Bregman distance of the loss from one momentum point to the next.

    Where the difference of values drowns in rounding, half the symmetric distance ``<grad(next) - grad(W), next - W>``
    stands in: it involves no cancellation, and for small steps the two agree. On the host only the one that is needed is
    computed.
    """
    step, rows = (F_next - at.FW).double(), objective.rows
    along = rows.dot(at.V.double(), step)
    eps = 100 * torch.finfo(F_next.dtype).eps
    if not sync_free:
        value, last = float(ahead.value), float(at.value)
        distance = value - last - float(along)
        small = not distance > eps * (abs(value) + abs(last))
        return 0.5 * float(rows.dot((ahead.V - at.V).double(), step)) if small else distance
    symmetric = 0.5 * rows.dot((ahead.V - at.V).double(), step)
    found = ahead.value - at.value - along
    return torch.where(found > eps * (ahead.value.abs() + at.value.abs()), found, symmetric)


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

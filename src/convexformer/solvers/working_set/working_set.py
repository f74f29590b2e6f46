"""Working sets: solve on the few slices of tokens that matter, then let the full gradient say which others do.

For gauges that are sums over token slices, ``g(Z) = sum_k g_k(Z_k)``: a slice whose part of the dual matrix has polar
below beta stays at zero. Each round takes the slices in use and those with the largest polars, solves on them, and
checks all in float64; the round's gap is that of the whole objective, so no token is discarded for good.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import final

import numpy as np
import torch
from torch import Tensor

from convexformer.certificates import DualPoint, dual_value
from convexformer.gauges import Proximal, Sliced
from convexformer.jit import Kernels
from convexformer.losses.hessian import DiagonalHessian, SoftmaxHessian
from convexformer.objective import Evaluation, Objective
from convexformer.solvers.base import Solver
from convexformer.solvers.monitor import Monitor
from convexformer.solvers.working_set import compiled, warm_up
from convexformer.solvers.working_set.accelerated import AcceleratedStep
from convexformer.solvers.working_set.options import WorkingSetOptions
from convexformer.solvers.working_set.prox_newton import ProxNewtonDescent
from convexformer.solvers.working_set.squared import SquaredDescent
from convexformer.solvers.working_set.step import StepContext, WorkingSetStep
from convexformer.threads import one_thread
from convexformer.weights import Weights

IDLE_SHARE = 1e-3  # a round in which the objective falls by less than this part of the gap gains nothing


@final
class WorkingSet(Solver):
    """Rounds on growing sets of token slices, for penalties that are sums over slices."""

    name = "working_set"
    works_on = "penalties that are sums over token slices, on the slices that matter"
    patience = 12  # rounds, each a solve on the working set

    def __init__(self, options: WorkingSetOptions = WorkingSetOptions()) -> None:  # noqa: B008  (frozen)
        self.options = options

    def requires(self, objective: Objective) -> str | None:
        """Slices of weights and of the penalty, a prox, and all samples in this process."""
        if not (isinstance(objective.penalty, Sliced) and isinstance(objective.penalty, Proximal)):
            return f"works on a penalty that is a sum over token slices; {objective.penalty!r} is not"
        if objective.operator.token_features() is None:
            return (
                "works on heads with weights of their own for each token position or each gate, such as 'attention' or a "
                "gated 'mlp'; this operator has none"
            )
        if not objective.rows.in_process:
            return "needs all samples in the memory of one process"
        return None

    def kernels(self, objective: Objective) -> Kernels:
        """Sweeps and Newton's products, where blocks are minimised exactly."""
        return warm_up.kernels(objective.loss.quadratic) if self._exact_blocks(objective) else {}

    def solve(self, objective: Objective, start: Weights, monitor: Monitor) -> None:
        """Iterate until the monitor says to stop; from zero along a ladder of betas."""
        Z = start.dense()
        at = objective.evaluate(objective.apply(Z), start.intercept)
        point = monitor.check(Z, at)
        step = self._step(objective, Z, at, monitor.tolerance)
        cold = not (objective.loss.quadratic or bool(Z.any()))  # a quadratic loss has no curvature to follow
        rungs = self._ladder(objective.beta, point.polar.value) if cold else []
        progress, last = _Progress(), np.zeros(0, np.int64)
        for _ in monitor:
            rung, gap, scale = self._rung(objective, rungs, Z, at, point)
            if progress.idle_rounds(rung.beta, gap, scale) >= self.options.idle_rounds:
                monitor.stall()
                break
            assert isinstance(point.M, Tensor)
            slices, complete = self._slices(rung, Z, point.M, last)
            own = self.options
            share, margin = (own.complete_share, own.complete_margin) if complete else (own.gap_share, own.gap_margin)
            wanted = 0.5 * self.options.rung_gap if rungs else margin * monitor.tolerance
            goal, last = max(share * gap, wanted) * scale, slices
            context = StepContext(at, point, gap, rung.beta)
            with one_thread() if step.single_threaded else nullcontext():
                Z = step.round(slices, context, goal, lambda: monitor.late)
            monitor.hold(Z, None, at.intercept, -math.inf)  # rounds do not raise the objective
            at = objective.evaluate(objective.apply(Z), at.intercept)
            point = monitor.check(Z, at)

    def _ladder(self, beta: float, critical: float) -> list[float]:
        """Return larger betas to solve at on the way from zero, in rising order: they are taken from the end."""
        rungs: list[float] = []
        while (above := beta * self.options.rung ** (len(rungs) + 1)) < 0.5 * critical:
            rungs.append(above)
        return rungs

    def _rung(
        self, objective: Objective, rungs: list[float], Z: Tensor, at: Evaluation, point: DualPoint
    ) -> tuple[Objective, float, float]:
        """Return the objective of the round, the relative gap there and the primal value; rungs done with are dropped."""
        while True:
            rung = objective.at(rungs[-1]) if rungs else objective
            assert isinstance(point.M, Tensor)
            limit, _ = rung.penalty.max_dual_scale(point.M, rung.beta, quick=True)
            primal = float(at.value) + rung.beta * float(rung.penalty.value(Z))
            gap = (primal - dual_value(rung, at, limit, point.M)[0]) / max(abs(primal), 1e-300)
            if not rungs or gap > self.options.rung_gap:
                return rung, gap, abs(primal)
            rungs.pop()

    def _step(self, objective: Objective, Z: Tensor, at: Evaluation, tolerance: float) -> WorkingSetStep:
        """Exact blocks or FISTA."""
        if not self._exact_blocks(objective):
            return AcceleratedStep(objective, Z, self.options)
        kind = SquaredDescent if objective.loss.quadratic else ProxNewtonDescent
        return kind(objective, Z, at, self.options, tolerance)

    def _exact_blocks(self, objective: Objective) -> bool:
        """Tell whether groups are columns, narrow enough for their spectra, the Hessian is known, and numba is there."""
        penalty, loss = objective.penalty, objective.loss
        assert isinstance(penalty, Sliced)
        narrow = objective.weight_shape[-2] <= self.options.widest_token
        if not (penalty.column_groups and compiled.available and narrow) or objective.like.is_cuda:
            return False
        first = objective.targets[:1]
        return loss.quadratic or isinstance(
            loss.hessian(torch.zeros_like(first), first), (DiagonalHessian, SoftmaxHessian)
        )

    def _slices(self, objective: Objective, Z: Tensor, M: Tensor, last: np.ndarray) -> tuple[np.ndarray, bool]:
        """Return the slices in use and as many others, of largest polar and near ``beta`` at least, in order.

        Also tell whether the ``last`` ones were enough: no other slice has a polar above beta.
        """
        assert isinstance(objective.penalty, Sliced)
        polars = objective.penalty.slice_polars(M)  # ([g,] s)
        used = Z.flatten(-2).any(-1).flatten()
        size = max(self.options.fewest_slices, used.numel() // self.options.first_part, 2 * int(used.sum()))
        near = used | (polars.flatten() > self.options.near * objective.beta)
        scores = torch.where(used, torch.inf, polars.flatten())
        slices = scores.topk(min(size, max(int(near.sum()), 1))).indices.sort().values.cpu().numpy()
        wanting = (polars.flatten() > objective.beta).nonzero()[:, 0].cpu().numpy()
        return slices, bool(np.isin(wanting, last).all())


@final
class _Progress:
    """Counts rounds that gain nothing: the gap stays, and the objective falls by next to nothing of it."""

    def __init__(self) -> None:
        self._beta, self._gap, self._primal, self._idle = 0.0, math.inf, math.inf, 0

    def idle_rounds(self, beta: float, gap: float, primal: float) -> int:
        """Look at the relative gap and the objective before a round; return how many rounds have gained nothing."""
        fell = primal < self._primal - IDLE_SHARE * gap * primal
        self._idle = 0 if beta != self._beta or gap < 0.99 * self._gap or fell else self._idle + 1
        best = (math.inf, math.inf) if beta != self._beta else (self._gap, self._primal)
        self._beta, self._gap, self._primal = beta, min(gap, best[0]), min(primal, best[1])
        return self._idle

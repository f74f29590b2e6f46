"""Working sets: solve on the few slices of tokens that matter, then let the full gradient say which others do.

For gauges that are sums over token slices, ``g(Z) = sum_k g_k(Z_k)``: a slice whose part of the dual matrix has polar
below beta stays at zero. Each round takes the slices in use and those with the largest polars, solves on them, and
checks all in float64; the round's gap is that of the whole objective, so no token is discarded for good.
"""

from __future__ import annotations

from typing import final

import numpy as np
import torch
from torch import Tensor

from convexformer.gauges import Proximal, Sliced
from convexformer.losses.hessian import DiagonalHessian, SoftmaxHessian
from convexformer.objective import Evaluation, Objective
from convexformer.solvers.base import Solver
from convexformer.solvers.monitor import Monitor
from convexformer.solvers.working_set import compiled
from convexformer.solvers.working_set.accelerated import AcceleratedStep
from convexformer.solvers.working_set.block_descent import ProxNewtonDescent, SquaredDescent
from convexformer.solvers.working_set.options import WorkingSetOptions
from convexformer.solvers.working_set.step import StepContext, WorkingSetStep
from convexformer.weights import Weights


@final
class WorkingSet(Solver):
    """Rounds on growing sets of token slices, for penalties that are sums over slices."""

    name = "working_set"
    works_on = "penalties that are sums over token slices, on the slices that matter"

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

    def solve(self, objective: Objective, start: Weights, monitor: Monitor) -> None:
        """Iterate until the monitor says to stop."""
        Z = start.dense()
        at = objective.evaluate(objective.apply(Z), start.intercept)
        point = monitor.check(Z, at)
        step = self._step(objective, Z, at)
        for _ in monitor:
            record = monitor.history[-1]
            assert isinstance(point.M, Tensor)
            slices = self._slices(objective, Z, point.M)
            goal = max(
                self.options.gap_share * (record.primal - record.dual), 0.3 * monitor.tolerance * abs(record.primal)
            )
            context = StepContext(at, point, record.relative_gap)
            Z = step.round(slices, context, goal, lambda: monitor.late)
            at = objective.evaluate(objective.apply(Z), at.intercept)
            point = monitor.check(Z, at)

    def _step(self, objective: Objective, Z: Tensor, at: Evaluation) -> WorkingSetStep:
        """Exact blocks where groups are columns, narrow enough for their spectra, and numba is there; else FISTA."""
        penalty, loss = objective.penalty, objective.loss
        assert isinstance(penalty, Sliced)
        hessian = loss.hessian(at.outputs[:1], objective.targets[:1])
        known = loss.quadratic or isinstance(hessian, (DiagonalHessian, SoftmaxHessian))
        narrow = objective.weight_shape[-2] <= self.options.widest_token
        if not (penalty.column_groups and compiled.available and known and narrow) or objective.like.is_cuda:
            return AcceleratedStep(objective, Z, self.options)
        kind = SquaredDescent if loss.quadratic else ProxNewtonDescent
        return kind(objective, Z, at, self.options)

    def _slices(self, objective: Objective, Z: Tensor, M: Tensor) -> np.ndarray:
        """Return the slices in use and as many others, of largest polar and near ``beta`` at least, in order."""
        assert isinstance(objective.penalty, Sliced)
        polars = objective.penalty.slice_polars(M)  # ([g,] s)
        used = Z.flatten(-2).any(-1).flatten()
        size = max(self.options.fewest_slices, used.numel() // self.options.first_part, 2 * int(used.sum()))
        near = used | (polars.flatten() > self.options.near * objective.beta)
        scores = torch.where(used, torch.inf, polars.flatten())
        return scores.topk(min(size, max(int(near.sum()), 1))).indices.sort().values.cpu().numpy()

"""The staircase: few factors, a certificate, and more factors along the directions that the certificate finds.

``min_{U, V} F(A(sum_j U_j V_j^T)) + beta/2 (|U|^2 + |V|^2)`` (Burer and Monteiro) has the optimum of the nuclear-norm
program once there are enough terms. It may have bad stationary points before; the dual matrix ``M = -A^T V`` tells: where
its largest singular value exceeds beta, its top pairs are directions of descent, and they are appended.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import final

import torch
from torch import Tensor

from convexformer.gauges import Factored, Proximal
from convexformer.gauges.spectral import top_pairs
from convexformer.objective import Objective
from convexformer.operators import BilinearOperator, ImplicitMatrix, LowRank
from convexformer.solvers.base import Solver
from convexformer.solvers.fista import fista
from convexformer.solvers.monitor import Monitor
from convexformer.solvers.staircase.bursts import Point, burst, factor_weight, line_minimum, point_at
from convexformer.solvers.staircase.options import StaircaseOptions
from convexformer.threads import tensor_cores
from convexformer.weights import Weights


@final
class Staircase(Solver):
    """Alternate bursts of L-BFGS on the factors with gap checks and growth; prune what has died.

    A cold start walks down a short ladder of betas first: rank grows as it is needed, from the strongest directions on.
    A burst ends when the local optimality gap ``beta g - <M, Z>`` is a fraction of the last duality gap, so that what is
    left is missing rank; then the top singular pairs of ``M`` above beta are appended. Where the rank turns out high and
    the matrix small, FISTA on dense weights finishes: its dual point lags less.
    """

    name = "staircase"
    works_on = "nuclear norms, on low-rank factors of the weights"
    uses_factors = True

    def __init__(self, options: StaircaseOptions = StaircaseOptions()) -> None:  # noqa: B008  (frozen)
        self.options = options

    def requires(self, objective: Objective) -> str | None:
        """A penalty that is the least half sum of squares of factors."""
        if not isinstance(objective.penalty, Factored):
            return f"works on factors of a nuclear norm; the penalty here is {objective.penalty!r}"
        return None

    def prepare(self, objective: Objective) -> Objective:
        """An operator on factors."""
        return objective.factored()

    def solve(self, objective: Objective, start: Weights, monitor: Monitor) -> None:
        """Iterate until the monitor says to stop."""
        Z = start.Z if isinstance(start.Z, LowRank) else LowRank.of(start.Z)
        point = point_at(objective, Z, objective.apply(Z), start.intercept)
        dual = monitor.check(Z, point.evaluation)
        steps, stuck = iter(monitor), 0
        if Z.n_terms == 0 and not monitor.done:
            point = self._cold_start(objective, point, dual.polar.value, monitor, steps)
            dual = monitor.check(point.Z, point.evaluation)
        while not monitor.done:
            if self._dense_pays(objective, point.Z, monitor):
                fista(objective, Weights(point.Z.dense(), point.evaluation.intercept), monitor)
                break
            point = self._grow(objective, point, dual.M) or point
            if point.Z.n_terms == 0:
                monitor.stall()
                break
            aim = max(self.options.aim * monitor.history[-1].relative_gap, 0.05 * monitor.tolerance)
            before = monitor.iteration
            point, ended = burst(objective, point, monitor, steps, aim, self.options.longest_burst, self.options)
            dual = monitor.check(point.Z, point.evaluation)
            stuck = stuck + 1 if monitor.iteration - before < self.options.shortest_burst else 0
            if ended:
                break
            if stuck == 3 and not monitor.done:  # bursts end at once: rounding hides every descent
                monitor.stall()

    def _dense_pays(self, objective: Objective, Z: LowRank, monitor: Monitor) -> bool:
        """Tell whether to hand over to FISTA: near the optimum, for high ranks, its gap follows the objective closely."""
        A, (rows, columns) = objective.operator, Z.shape[-2:]
        assert isinstance(A, BilinearOperator)
        # a step on dense weights must cost no more than one on the factors
        cheap = A.dense_pays(Z.n_terms) and not Z.U.is_cuda and isinstance(objective.penalty, Proximal)
        side = min(rows, columns)
        small = cheap and side >= self.options.dense_side and rows * columns <= self.options.dense_entries
        gap = monitor.history[-1].relative_gap
        return small and Z.n_terms > side / 8 and 10 * monitor.tolerance < gap < self.options.dense_gap

    def _cold_start(
        self, objective: Objective, point: Point, beta_max: float, monitor: Monitor, steps: Iterator[int]
    ) -> Point:
        """Walk down to the objective's beta in a lower precision, exact enough for a start and twice as fast.

        On a CPU in float32, on a GPU with TF32 products; what follows is in the objective's own precision.
        """
        if objective.like.is_cuda:
            with tensor_cores():
                point = self._descend(objective, point, beta_max, monitor, steps)
            return point_at(objective, point.Z, objective.apply(point.Z), point.evaluation.intercept)
        reach = self.options.float32_range
        if objective.like.dtype != torch.float64 or not 1 / reach < beta_max < reach:
            return self._descend(objective, point, beta_max, monitor, steps)
        coarse = objective.to(dtype=torch.float32)
        Z = point.Z.to(dtype=torch.float32)
        rough = point_at(coarse, Z, point.outputs.float(), point.evaluation.intercept)
        rough = self._descend(coarse, rough, beta_max, monitor, steps)
        rough = self._grow(coarse, rough, coarse.dual_matrix(rough.evaluation.V)) or rough
        if rough.Z.n_terms:
            goal, longest = self.options.coarse_gap, self.options.longest_burst
            rough, _ = burst(coarse, rough, monitor, steps, goal, longest, self.options)
        Z = rough.Z.to(dtype=torch.float64)
        return point_at(objective, Z, objective.apply(Z), rough.evaluation.intercept)

    def _descend(
        self, objective: Objective, point: Point, beta_max: float, monitor: Monitor, steps: Iterator[int]
    ) -> Point:
        """Walk down from ``beta_max`` by the factor ``ladder``, roughly, and end at the objective's own beta."""
        ratio = self.options.ladder
        beta = ratio * beta_max
        while beta > objective.beta / ratio**0.5:
            rung = objective.at(beta)
            point = point_at(rung, point.Z, point.outputs, point.evaluation.intercept)
            point = self._grow(rung, point, rung.dual_matrix(point.evaluation.V)) or point
            if point.Z.n_terms == 0:
                break
            point, ended = burst(rung, point, monitor, steps, 1e-2, self.options.shortest_burst, self.options)
            if ended:
                break
            beta *= ratio
        return point_at(objective, point.Z, point.outputs, point.evaluation.intercept)

    def _grow(self, objective: Objective, point: Point, M: Tensor | ImplicitMatrix) -> Point | None:
        """Append the top singular pairs of ``M`` above beta, scaled by the best common step; None when there is none."""
        assert isinstance(M, ImplicitMatrix)
        wanted = max(self.options.first_terms, point.Z.n_terms // 2)
        sigma, U, V, block = top_pairs(M, wanted, sweeps=2)
        beta, at = factor_weight(objective), point.evaluation
        above = sigma > beta * (1 + 1e-12)
        if not bool(above.any()):
            return None
        root = (sigma[above] - beta).clamp_min(0)[:, None].sqrt()
        root = root / root.max()
        new = LowRank(root * U[above].to(point.Z.U), root * V[above].to(point.Z.V), block[above], point.Z.shape)
        D, size, rest = objective.apply(new), float(root.square().sum()), float(point.value - at.value)
        slope = float((root[:, 0].square() * (sigma[above] - beta)).sum())
        squares = objective.rows.weighted(objective.sample_weight, D.double().square()).sum()
        curvature = objective.loss.curvature * float(squares)
        unit = slope / curvature if 0 < curvature < math.inf else 1.0  # the step for the largest curvature of the loss

        def value(t: float) -> float:
            there = objective.evaluate(point.outputs + t * unit * D, at.intercept)
            return float(there.value) + beta * t * unit * size + rest

        t = line_minimum(value, float(point.value))
        if t is None:
            return None
        t *= unit
        Z = point.Z.append(math.sqrt(t) * new.U, math.sqrt(t) * new.V, new.block)
        return point_at(objective, Z, point.outputs + t * D, at.intercept)

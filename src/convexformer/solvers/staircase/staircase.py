"""The staircase: few factors, a certificate, and more factors along the directions that the certificate finds.

``min_{U, V} F(A(sum_j U_j V_j^T)) + beta/2 (|U|^2 + |V|^2)`` (Burer and Monteiro) has the optimum of the nuclear-norm
program once there are enough terms. It may have bad stationary points before; the dual matrix ``M = -A^T V`` tells: where
its largest singular value exceeds beta, its top pairs are directions of descent, and they are appended.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import final

import torch

from convexformer.certificates import DualPoint, dual_point
from convexformer.gauges import Factored
from convexformer.objective import Objective
from convexformer.operators import LowRank
from convexformer.solvers.base import Solver, Workspace
from convexformer.solvers.monitor import Monitor
from convexformer.solvers.staircase.bursts import Point, burst, point_at
from convexformer.solvers.staircase.growth import grow
from convexformer.solvers.staircase.newton import newton_step
from convexformer.solvers.staircase.options import StaircaseOptions
from convexformer.threads import tensor_cores
from convexformer.weights import Weights

SINGLE: Workspace[Objective] = Workspace()


@final
class Staircase(Solver):
    """Alternate Newton steps on the factors with gap checks and growth; prune what has died.

    A cold start walks down a short ladder of betas first: rank grows as it is needed, from the strongest directions on.
    Newton's method brings the factors to a stationary point, so that what is left of the gap is missing rank; then the top
    singular pairs of ``M`` above beta are appended. On a GPU bursts of L-BFGS, which need no host sync, walk the ladder.
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
        """An operator on factors, of fewer rows where the loss allows it."""
        return objective.compressed().factored()

    def solve(self, objective: Objective, start: Weights, monitor: Monitor) -> None:
        """Iterate until the monitor says to stop."""
        options = self.options
        Z = start.Z if isinstance(start.Z, LowRank) else LowRank.of(start.Z)
        point = point_at(objective, Z, objective.apply(Z), start.intercept)
        dual = monitor.check(Z, point.evaluation)
        steps, stuck, ended = iter(monitor), 0, False
        products = self._products(objective, dual)
        if Z.n_terms == 0 and not monitor.done:
            point = self._cold_start(objective, products, point, dual, monitor, steps)
            dual = monitor.check(point.Z, point.evaluation)
        while not (monitor.done or ended):
            gap, before = monitor.history[-1].relative_gap, float(point.value)
            grown = grow(objective, point, dual.M, gap, options)
            point = point if grown is None else grown
            if point.Z.n_terms == 0:
                monitor.stall()
                break
            point, ended = self._settle(objective, products, point, gap, monitor, steps)
            dual = monitor.check(point.Z, point.evaluation)
            noise = options.noise * torch.finfo(point.Z.dtype).eps * abs(before)
            stuck = stuck + 1 if float(point.value) > before - noise else 0
            if stuck == 3 and not monitor.done and not ended:  # rounding hides every descent
                monitor.stall()

    def _settle(
        self,
        objective: Objective,
        products: Objective,
        point: Point,
        gap: float,
        monitor: Monitor,
        steps: Iterator[int],
    ) -> tuple[Point, bool]:
        """Take a few Newton steps, fewer where the factors are nearly stationary; tell whether iterations ran out."""
        for _ in range(self.options.newton_steps):
            if point.Z.n_terms == 0:
                break
            step = newton_step(objective, products, point, monitor, steps, self.options)
            still, point = step.point is point, step.point
            if step.ended:
                return point, True
            if still or step.decrement < self.options.settled * gap:
                break
        return point, False

    def _products(self, objective: Objective, dual: DualPoint) -> Objective:
        """The objective that Hessian products are taken with: in float32 where that is faster and in range."""
        reach, size = self.options.float32_range, dual.polar.value
        if objective.like.dtype != torch.float64 or not 1 / reach < size < reach:
            return objective
        if objective.operator.data_size < self.options.single_from:
            return objective
        single = SINGLE.get(
            objective.operator,
            lambda: objective.to(dtype=torch.float32),
            objective.targets,
            objective.sample_weight,
            objective.loss,
            objective.penalty,
            objective.intercept,
            objective.rows,
        )
        return single.at(objective.beta)

    def _cold_start(
        self,
        objective: Objective,
        products: Objective,
        point: Point,
        dual: DualPoint,
        monitor: Monitor,
        steps: Iterator[int],
    ) -> Point:
        """Walk down to the objective's beta in the precision of the products, exact enough for a start."""
        if objective.like.is_cuda:
            with tensor_cores():
                point = self._descend_by_bursts(objective, point, dual.polar.value, monitor, steps)
        else:
            dtype = products.like.dtype
            rough = point_at(products, point.Z.to(dtype=dtype), point.outputs.to(dtype), point.evaluation.intercept)
            point = self._descend(products, rough, dual.polar.value, monitor, steps)
        Z = point.Z.to(dtype=objective.like.dtype)
        return point_at(objective, Z, objective.apply(Z), point.evaluation.intercept)

    def _descend(
        self, objective: Objective, point: Point, beta_max: float, monitor: Monitor, steps: Iterator[int]
    ) -> Point:
        """Walk down from ``beta_max`` by the factor ``rung``, each time to a rough gap."""
        betas = [objective.beta / self.options.rung]
        while betas[-1] < 0.5 * beta_max:
            betas.append(betas[-1] / self.options.rung)
        for beta in reversed(betas[:-1]):
            rung = objective.at(beta)
            point = point_at(rung, point.Z, point.outputs, point.evaluation.intercept)
            for _ in range(self.options.rung_rounds):
                dual = dual_point(rung, point.evaluation, quick=True)
                gap = (float(point.value) - dual.value) / max(abs(float(point.value)), 1e-300)
                if gap <= self.options.rung_gap:
                    break
                grown = grow(rung, point, dual.M, gap, self.options)
                point = point if grown is None else grown
                point, ended = self._settle(rung, rung, point, gap, monitor, steps)
                if ended or point.Z.n_terms == 0:
                    return point
        return point

    def _descend_by_bursts(
        self, objective: Objective, point: Point, beta_max: float, monitor: Monitor, steps: Iterator[int]
    ) -> Point:
        """Walk down from ``beta_max`` by the factor ``ladder``, roughly, and end at the objective's own beta."""
        ratio = self.options.ladder
        beta = ratio * beta_max
        while beta > objective.beta / ratio**0.5:
            rung = objective.at(beta)
            point = point_at(rung, point.Z, point.outputs, point.evaluation.intercept)
            grown = grow(rung, point, rung.dual_matrix(point.evaluation.V), 1.0, self.options)
            point = point if grown is None else grown
            if point.Z.n_terms == 0:
                break
            point, ended = burst(rung, point, monitor, steps, 1e-2, self.options.shortest_burst, self.options)
            if ended:
                break
            beta *= ratio
        return point

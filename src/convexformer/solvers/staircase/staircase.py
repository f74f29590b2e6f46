"""The staircase: few factors, a certificate, and more factors along the directions that the certificate finds.

``min_{U, V} F(A(sum_j U_j V_j^T)) + beta/2 (|U|^2 + |V|^2)`` (Burer and Monteiro) has the optimum of the nuclear-norm
program once there are enough terms. It may have bad stationary points before; the dual matrix ``M = -A^T V`` tells: where
its largest singular value exceeds beta, its top pairs are directions of descent, and they are appended.
"""

from __future__ import annotations

from typing import final

import torch

from convexformer.certificates import DualPoint, dual_point
from convexformer.gauges import Factored, Proximal
from convexformer.objective import Objective
from convexformer.operators import BilinearOperator, LowRank
from convexformer.solvers.base import Solver
from convexformer.solvers.fista import fista
from convexformer.solvers.monitor import Monitor, TimeUp
from convexformer.solvers.staircase.bursts import Point, burst, point_at, tidy
from convexformer.solvers.staircase.frames import Frames, Products
from convexformer.solvers.staircase.growth import grow, prune
from convexformer.solvers.staircase.newton import Step, newton_step
from convexformer.solvers.staircase.options import StaircaseOptions
from convexformer.threads import tensor_cores
from convexformer.weights import Weights


@final
class Staircase(Solver):
    """Alternate steps on the factors with gap checks and growth; prune what has died.

    A cold start walks down a short ladder of betas first: rank grows as it is needed, from the strongest directions on.
    Steps bring the factors near a stationary point, so that what is left of the gap is missing rank; then the top
    singular pairs of ``M`` above beta are appended. They are Newton's; where a product costs much next to the vectors
    (operators that are bilinear by nature) or a host sync does (on a GPU), bursts of L-BFGS come first, as long as they
    make headway.
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
        _Walk(objective, monitor, self.options).run(start)


@final
class _Walk:
    """One solve."""

    def __init__(self, objective: Objective, monitor: Monitor, options: StaircaseOptions) -> None:
        self.objective, self.monitor, self.options = objective, monitor, options
        self.steps = iter(monitor)
        self.products: Products
        self.decrement, self.damping = 1.0, options.damping
        A = objective.operator
        assert isinstance(A, BilinearOperator)
        self.by_bursts = objective.like.is_cuda or not A.one_product
        self.longest = options.longest_burst_cuda if objective.like.is_cuda else options.longest_burst

    def run(self, start: Weights) -> None:
        """Check, grow, settle, and again."""
        objective, monitor, options = self.objective, self.monitor, self.options
        Z = start.Z.balanced() if isinstance(start.Z, LowRank) else LowRank.of(start.dense())
        point = point_at(objective, Z, objective.apply(Z), start.intercept)
        dual = monitor.check(Z, point.evaluation)
        self.products = Products.of(objective, _rough_dtype(objective, dual, options))
        if Z.n_terms == 0 and not monitor.done:
            point = self._cold_start(point, dual)
            dual = monitor.check(point.Z, point.evaluation)
        stuck, ended = 0, False
        while not (monitor.done or ended):
            gap, before = monitor.history[-1].relative_gap, float(point.value)
            if self.by_bursts and self._dense_pays(point.Z, gap):
                fista(objective, Weights(point.Z.dense(), point.evaluation.intercept), monitor)
                break
            frames = None if self.by_bursts else self._axes()
            grown = grow(objective, point, dual.M, gap, options, frames)
            point = point if grown is None else grown
            if point.Z.n_terms == 0:
                monitor.stall()
                break
            bursting = self.by_bursts
            point, ended = self._settle(point, dual, gap)
            dual = monitor.check(point.Z, point.evaluation)
            noise = options.noise * torch.finfo(point.Z.dtype).eps * abs(before)
            stuck = stuck + 1 if float(point.value) > before - noise and not bursting else 0
            if stuck == 3 and not monitor.done and not ended:  # rounding hides every descent
                monitor.stall()

    def _settle(self, point: Point, dual: DualPoint, gap: float) -> tuple[Point, bool]:
        """Bring the factors near a stationary point; tell whether iterations ran out."""
        if not self.by_bursts:
            return self._newton(self.objective, self.products, point, dual, gap)
        options, monitor = self.options, self.monitor
        before = monitor.iteration
        aim = max(options.aim * gap, 0.05 * monitor.tolerance)
        if aim >= options.single_aim and self.products.objective.like.dtype != point.Z.dtype:
            rough, ended = self._burst(self.products.objective, self._roughly(point), aim, self.longest)
            point = self._exactly(rough)
        else:
            point, ended = self._burst(self.objective, point, aim, self.longest)
        taken = monitor.iteration - before
        # a burst that used all its steps, or none, has met curvature that L-BFGS does not learn
        self.by_bursts = options.shortest_burst <= taken < self.longest
        return point if self.by_bursts else tidy(self.objective, point), ended

    def _burst(self, objective: Objective, point: Point, aim: float, longest: int) -> tuple[Point, bool]:
        """Take steps of L-BFGS without the terms that are dying, which cost as much as those that live."""
        point = prune(objective, tidy(objective, point), self.options)
        if point.Z.n_terms == 0:
            return point, False
        return burst(objective, point, self.steps, aim, longest, self.options)

    def _newton(
        self, objective: Objective, products: Products, point: Point, dual: DualPoint, gap: float
    ) -> tuple[Point, bool]:
        """Take a few Newton steps, fewer where the factors are nearly stationary; tell whether iterations ran out.

        ``[[beta, M], [M^T, beta]]`` has negative eigenvalues as far as ``M`` exceeds beta: far from a stationary point
        the cross terms are scaled by what makes ``M`` feasible, and conjugate gradients need not stop early.
        """
        polar = dual.polar.value
        feasible = min(1.0, objective.beta / polar) if polar > 0 else 1.0
        try:
            for _ in range(self.options.newton_steps):
                point = prune(objective, point, self.options)
                if point.Z.n_terms == 0:
                    break
                cross = feasible if self.decrement > self.options.whole_cross else 1.0
                damping = self.damping
                step = newton_step(objective, products, point, self.steps, self.options, cross, damping)
                self._damp(step)
                still, point, self.decrement = step.point is point, step.point, step.decrement
                if step.ended:
                    return point, True
                if still or step.decrement < self.options.settled * gap:
                    break
        except TimeUp:
            return point, True
        return point, False

    def _damp(self, step: Step) -> None:
        """Damp less after a whole step, more after a short one."""
        options = self.options
        if step.length >= 1:
            self.damping = max(self.damping / options.damp_by, options.least_damping)
        elif step.length < 0.5:
            self.damping = min(self.damping * options.damp_by, options.most_damping)

    def _axes(self) -> Frames:
        """The axes of the features in the solver's coordinates."""
        return self.products.frames if self.products.turn is None else self.products.turn

    # ------------------------------------------------------------------ the start

    def _cold_start(self, point: Point, dual: DualPoint) -> Point:
        """Walk down to the objective's beta in a lower precision, exact enough for a start and twice as fast.

        On a CPU in float32, on a GPU with TF32 products; what follows is in the objective's own precision.
        """
        if self.objective.like.is_cuda:
            with tensor_cores():
                point = self._descend_by_bursts(self.objective, point, dual)
            self.monitor.hold(point.Z, point.outputs, point.evaluation.intercept)
            return point_at(self.objective, point.Z, self.objective.apply(point.Z), point.evaluation.intercept)
        point = self._roughly(point)
        if self.by_bursts:
            return self._exactly(self._descend_by_bursts(self.products.objective, point, dual))
        return self._exactly(self._descend(self.products.inside(), point, dual.polar.value))

    def _roughly(self, point: Point) -> Point:
        """The same point for the objective of rough products."""
        rough = self.products.objective
        Z = self.products.enter(point.Z).to(dtype=rough.like.dtype)
        return point_at(rough, Z, point.outputs.to(Z.dtype), point.evaluation.intercept)

    def _exactly(self, point: Point) -> Point:
        """Undo :meth:`_roughly`, with outputs computed anew."""
        exact, b = self.objective, point.evaluation.intercept
        Z = self.products.leave(point.Z.to(dtype=exact.like.dtype))
        self.monitor.hold(Z, point.outputs.to(Z.dtype), b)
        return point_at(exact, Z, exact.apply(Z), b)

    def _descend(self, products: Products, point: Point, beta_max: float) -> Point:
        """Walk down from ``beta_max`` by the factor ``rung`` by Newton steps, each time to a rough gap."""
        objective = products.objective
        betas = [objective.beta / self.options.rung]
        while betas[-1] < 0.5 * beta_max:
            betas.append(betas[-1] / self.options.rung)
        for beta in reversed(betas[:-1]):
            rung = objective.at(beta)
            point = point_at(rung, point.Z, point.outputs, point.evaluation.intercept)
            try:
                for _ in range(self.options.rung_rounds):
                    dual = dual_point(rung, point.evaluation, quick=True)
                    gap = (float(point.value) - dual.value) / max(abs(float(point.value)), 1e-300)
                    if gap <= self.options.rung_gap:
                        break
                    grown = grow(rung, point, dual.M, gap, self.options, products.frames)
                    point = point if grown is None else grown
                    if point.Z.n_terms == 0:
                        break
                    point, ended = self._newton(rung, products.at(beta), point, dual, gap)
                    if ended:
                        return point
            except TimeUp:
                return point
        return point

    def _descend_by_bursts(self, objective: Objective, point: Point, dual: DualPoint) -> Point:
        """Walk down from ``beta_max`` by the factor ``ladder``, roughly, and end at the objective's own beta.

        In float32 on a CPU the last burst is there, longer than the others.
        """
        options, beta, stages = self.options, self.options.ladder * dual.polar.value, []
        while beta > objective.beta / options.ladder**0.5:
            stages.append((objective.at(beta), 1e-2, options.shortest_burst))
            beta *= options.ladder
        if not objective.like.is_cuda:
            stages.append((objective, options.coarse_gap, self.longest))
        try:
            for rung, aim, longest in stages:
                point = point_at(rung, point.Z, point.outputs, point.evaluation.intercept)
                M = dual.M if point.Z.n_terms == 0 else rung.dual_matrix(point.evaluation.V)  # its pairs are known
                grown = grow(rung, point, M, 1.0, options)
                point = point if grown is None else grown
                if point.Z.n_terms == 0:
                    continue
                point, ended = self._burst(rung, point, aim, longest)
                if ended:
                    break
        except TimeUp:
            pass
        return point_at(objective, point.Z, point.outputs, point.evaluation.intercept)

    # ------------------------------------------------------------------ decisions

    def _dense_pays(self, Z: LowRank, gap: float) -> bool:
        """Tell whether to hand over to FISTA: near the optimum, for high ranks, its gap follows the objective closely."""
        A, options = self.objective.operator, self.options
        assert isinstance(A, BilinearOperator)
        rows, columns = Z.shape[-2:]
        # a step on dense weights must cost no more than one on the factors
        cheap = A.dense_pays(Z.n_terms) and not Z.U.is_cuda and isinstance(self.objective.penalty, Proximal)
        side = min(rows, columns)
        small = cheap and side >= options.dense_side and rows * columns <= options.dense_entries
        return small and _high_rank(Z) and 10 * self.monitor.tolerance < gap < options.dense_gap


def _high_rank(Z: LowRank) -> bool:
    """Tell whether there are many terms next to the short side: Newton steps on them gain little over first-order ones."""
    return Z.n_terms > min(Z.shape[-2:]) / 8


def _rough_dtype(objective: Objective, dual: DualPoint, options: StaircaseOptions) -> torch.dtype:
    """Return the precision of rough products: float32 where that is faster and in range."""
    own, reach, size = objective.like.dtype, options.float32_range, dual.polar.value
    if own != torch.float64 or not 1 / reach < size < reach:
        return own
    return own if objective.operator.data_size < options.single_from else torch.float32

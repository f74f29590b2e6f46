"""Solve position by position: outputs that depend on slices of their own, with a penalty that is a sum over slices.

``min_Z sum_r [F_r(A_r Z_r) + beta g(Z_r)]`` is a problem for each r, of a kind that other solvers know. The parts are solved
in turn, each by the solver that suits it, and the gap of the whole is checked after every round; the whole has one scale of
its dual point, so a round may have to be repeated to a smaller gap.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import final

from torch import Tensor

from convexformer.gauges import Gauge, Sliced
from convexformer.objective import Objective
from convexformer.operators import LowRank, Separable
from convexformer.solvers.base import Solver
from convexformer.solvers.monitor import Monitor, TimeUp
from convexformer.weights import Weights


@final
@dataclass(frozen=True)
class ByPositionOptions:
    """Tolerances of the parts."""

    first: float = 0.5
    """Of the tolerance of the whole, in the first round."""
    later: float = 0.2
    """Of the tolerance of the round before."""


@final
class ByPosition(Solver):
    """One independent problem for each output position, each with the solver that suits it."""

    name = "by_position"
    works_on = "outputs per token with weights of their own for each of them, one position after another"
    patience = 8  # rounds, each a solve of all parts

    def __init__(
        self,
        choose: Callable[[Objective], Solver],
        options: ByPositionOptions = ByPositionOptions(),
    ) -> None:
        self.choose, self.options = choose, options

    def requires(self, objective: Objective) -> str | None:
        """Positions that share nothing: neither weights nor an intercept."""
        if not isinstance(objective.operator, Separable):
            return "works on outputs that depend on slices of weights of their own, one for each token position"
        if not (isinstance(objective.penalty, Gauge) and isinstance(objective.penalty, Sliced)):
            return f"works on a penalty that is a sum over slices; {objective.penalty!r} is not"
        if objective.intercept:
            return "works without an intercept, which all positions would share"
        if not objective.rows.in_process:
            return "needs all samples in the memory of one process"
        return None

    def solve(self, objective: Objective, start: Weights, monitor: Monitor) -> None:
        """Iterate over rounds until the monitor says to stop."""
        Z = start.dense().clone()
        monitor.check(Z.clone(), objective.evaluate(objective.apply(Z)))
        parts, tolerance = list(parts_of(objective)), self.options.first * monitor.tolerance
        try:
            self._rounds(objective, Z, parts, tolerance, monitor)
        except TimeUp:
            monitor.hold(Z, None, None, -math.inf)  # no part is worse than it was when all were checked
            raise

    def _rounds(
        self, objective: Objective, Z: Tensor, parts: list[tuple[int, Objective]], tolerance: float, monitor: Monitor
    ) -> None:
        """Solve all parts, in ``Z``, to smaller and smaller gaps."""
        for _ in monitor:
            for r, part in parts:
                self._solve_part(r, part, Z, tolerance, monitor)
            monitor.check(Z.clone(), objective.evaluate(objective.apply(Z)))
            tolerance *= self.options.later

    def _solve_part(self, r: int, part: Objective, Z: Tensor, tolerance: float, monitor: Monitor) -> None:
        """Solve the problem of one position, from ``Z_r: (s, d, c)`` and into it."""
        solver = self.choose(part)
        suited = solver.prepare(part)
        watch = Monitor(part, tolerance, monitor.max_iter, monitor.clock)
        watch.watch(suited, part, solver.name, patience=solver.patience)
        start = LowRank.of(Z[r]) if solver.uses_factors else Z[r].clone()
        watch.hold(start, None, None)
        try:
            solver.solve(suited, Weights(start), watch)
        except TimeUp:
            Z[r] = watch.last_point().dense()
            raise
        Z[r] = watch.best.dense()


def parts_of(objective: Objective) -> Iterator[tuple[int, Objective]]:
    """Yield the positions that have outputs, and the objective of each."""
    assert isinstance(objective.operator, Separable)
    for r, (operator, rows) in enumerate(objective.operator.positions()):
        if len(rows):
            targets, weights = objective.targets[rows], objective.sample_weight[rows]
            yield (
                r,
                replace(objective, operator=operator, targets=targets, sample_weight=weights, offset=0.0, derived=None),
            )

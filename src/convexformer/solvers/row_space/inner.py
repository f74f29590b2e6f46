"""The small program on fixed row spaces: FISTA, watched by its own gap."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import final

from torch import Tensor

from convexformer.certificates import dual_point
from convexformer.objective import Evaluation, Objective
from convexformer.solvers.fista import fista
from convexformer.solvers.monitor import CHECK_EVERY, TimeUp
from convexformer.weights import Operand, Weights


@final
class _Watch:
    """Ends at a relative gap, and keeps the point with the lowest objective."""

    late = False  # the guard of the objective raises where the time is up

    def __init__(self, objective: Objective, tolerance: float, longest: int) -> None:
        self.objective, self.tolerance, self.longest = objective, tolerance, longest
        self.iteration, self.done = 0, False
        self.best: tuple[Tensor, Evaluation, float] | None = None

    def __iter__(self) -> Iterator[int]:
        while not self.done and self.iteration < self.longest:
            self.iteration += 1
            yield self.iteration

    @property
    def due(self) -> bool:
        """Whether it is time for a gap check."""
        return self.iteration % CHECK_EVERY == 0 or self.iteration == self.longest

    def hold(self, Z: Operand, outputs: Tensor | None, intercept: Tensor | None) -> None:
        """Only checked points count."""

    def check(self, Z: Operand, at: Evaluation) -> object:
        """Check the gap."""
        assert isinstance(Z, Tensor)
        primal = float(at.value) + self.objective.beta * float(self.objective.penalty.value(Z))
        if self.best is None or primal < self.best[2]:
            self.best = (Z, at, primal)
        dual = dual_point(self.objective, at, quick=True)
        self.done |= (primal - dual.value) <= self.tolerance * max(abs(primal), 1e-300)
        return dual


def solve_inner(
    objective: Objective, Y: Tensor, intercept: Tensor | None, tolerance: float, longest: int
) -> tuple[Tensor, Evaluation, float, bool]:
    """Minimise over ``Y: (B, r, q)``; return the best point, its loss and objective, and whether the time was up."""
    watch, late = _Watch(objective, tolerance, longest), False
    try:
        fista(objective, Weights(Y, intercept), watch)
    except TimeUp:
        late = True
        if watch.best is None:
            raise
    assert watch.best is not None
    Y, at, primal = watch.best
    return Y, at, primal if math.isfinite(primal) else math.inf, late

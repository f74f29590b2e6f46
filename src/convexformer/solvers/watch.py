"""Watching an inner solve: to an absolute gap, without history, callbacks or certificates."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import final

from torch import Tensor

from convexformer.certificates import dual_point
from convexformer.objective import Evaluation, Objective
from convexformer.solvers.monitor import CHECK_EVERY
from convexformer.weights import Operand


@final
class GapWatch:
    """Stops an inner solve at an absolute gap; keeps the point of least gap."""

    def __init__(self, objective: Objective, tolerance: float, late: Callable[[], bool], max_iter: int) -> None:
        self.objective, self.tolerance, self._late, self.max_iter = objective, tolerance, late, max_iter
        self.iteration, self.least, self.done = 0, float("inf"), False
        self.best: Operand | None = None

    def __iter__(self) -> Iterator[int]:
        while not self.done and self.iteration < self.max_iter:
            self.iteration += 1
            yield self.iteration

    @property
    def late(self) -> bool:
        """Whether the time is up."""
        return self._late()

    @property
    def due(self) -> bool:
        """Whether it is time for a gap check."""
        return self.iteration % CHECK_EVERY == 0

    def hold(self, Z: Operand, outputs: Tensor | None, intercept: Tensor | None) -> None:
        """Keep the point at hand where none has been checked."""
        self.best = Z if self.best is None else self.best

    def check(self, Z: Operand, at: Evaluation) -> None:
        """Look at the gap."""
        objective = self.objective
        primal = float(at.value) + objective.beta * float(objective.penalty.value(Z))
        gap = primal - dual_point(objective, at, quick=True).value
        if gap < self.least or self.best is None:
            self.best, self.least = Z, gap
        self.done = self.iteration > 0 and (gap <= self.tolerance or self.late)

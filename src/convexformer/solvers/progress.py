"""A progress bar on the scale that matters: the logarithm of the duality gap."""

from __future__ import annotations

import math
from types import TracebackType
from typing import final

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from convexformer.solution import Record


@final
class GapBar:
    """Shows the relative gap falling from its first value to the tolerance."""

    def __init__(self, title: str, tolerance: float) -> None:
        self.tolerance = tolerance
        self._first: float | None = None
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("gap {task.fields[gap]:.1e} of {task.fields[goal]:.0e}, iteration {task.fields[iteration]}"),
            TimeElapsedColumn(),
            transient=True,
        )
        self._task = self._bar.add_task(title, total=1.0, gap=math.inf, goal=tolerance, iteration=0)

    def __enter__(self) -> GapBar:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def show(self, record: Record) -> None:
        """Draw one record."""
        gap = max(record.relative_gap, 1e-16)
        if self._first is None and math.isfinite(gap):
            self._first = max(gap, 2 * self.tolerance)
        done = 0.0
        if self._first is not None and math.isfinite(gap):
            done = math.log(self._first / gap) / math.log(self._first / self.tolerance)
        self._bar.update(
            self._task,
            completed=min(max(done, 0.0), 1.0),
            gap=record.relative_gap,
            iteration=record.iteration,
        )

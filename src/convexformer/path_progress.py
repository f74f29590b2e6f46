"""Progress over many solves: how many are done, and where the gap of the one under way is."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import final

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from convexformer.solution import Record


@final
class StepBar:
    """Counts steps: betas of a path, folds of a cross-validation."""

    def __init__(self, bar: Progress, task: TaskID) -> None:
        self._bar, self._task = bar, task

    def show(self, record: Record) -> None:
        """Show the gap of the solve under way."""
        if math.isfinite(record.relative_gap):
            self._bar.update(self._task, gap=f"gap {record.relative_gap:.1e}")

    def advance(self, steps: int = 1) -> None:
        """Count finished steps."""
        self._bar.advance(self._task, steps)


@contextmanager
def step_bar(title: str, total: int, shown: bool = True) -> Iterator[StepBar | None]:
    """Draw a bar for ``total`` steps; None when it is not to be shown."""
    if not shown:
        yield None
        return
    gap = TextColumn("{task.fields[gap]}")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), gap, TimeElapsedColumn())
    with Progress(*columns, transient=True) as bar:
        yield StepBar(bar, bar.add_task(title, total=total, gap=""))

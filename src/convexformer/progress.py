"""Progress on the terminal: the gap of one solve, the steps of a longer task, or a spinner."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, final

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

if TYPE_CHECKING:
    from convexformer.solvers.status import Record


@final
class GapBar:
    """Shows the relative duality gap of one solve, on a log scale from its first value to the tolerance."""

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


@final
class StepBar:
    """Counts the steps of a longer task: betas of a path, folds of a cross-validation, iterations of training."""

    def __init__(self, bar: Progress, task: TaskID) -> None:
        self._bar, self._task = bar, task

    def show(self, record: Record) -> None:
        """Show the gap of the solve that is running."""
        if math.isfinite(record.relative_gap):
            self._bar.update(self._task, note=f"gap {record.relative_gap:.1e}")

    def advance(self, steps: int = 1) -> None:
        """Count finished steps."""
        self._bar.advance(self._task, steps)

    def move_to(self, step: int, note: str = "") -> None:
        """Set how many steps are finished, and a note beside them."""
        self._bar.update(self._task, completed=step, note=note)


@contextmanager
def step_bar(title: str, total: int, shown: bool = True) -> Iterator[StepBar | None]:
    """Draw a bar of ``total`` steps while the context lasts; None when it is not shown."""
    if not shown:
        yield None
        return
    note = TextColumn("{task.fields[note]}")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), note, TimeElapsedColumn())
    with Progress(*columns, transient=True) as bar:
        yield StepBar(bar, bar.add_task(title, total=total, note=""))


@contextmanager
def spinner(title: str, console: Console) -> Iterator[Callable[[str], None]]:
    """Draw a spinner for a task of unknown length; yield a function that changes its text."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(title, total=None)

        def say(text: str) -> None:
            bar.update(task, description=text)

        yield say

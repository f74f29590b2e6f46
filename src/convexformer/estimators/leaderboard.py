"""A table of heads and probes: how well each does, how long it took, and what is proved about it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, final


@final
@dataclass(frozen=True)
class Entry:
    """One row."""

    name: str
    score: float
    """Mean over folds."""
    spread: float
    """Standard deviation over folds; NaN where there was one split."""
    seconds: float
    """All fits of all folds and hyperparameters, wall clock."""
    gap: float | None
    """The largest certified relative gap of the fits; None where nothing is certified."""
    reads: str
    """What the model reads of the tokens."""
    setting: str
    """The hyperparameters chosen."""
    samples: int | None = None
    """How many samples it was tried on, where it left a race before all of them."""


@final
class Leaderboard:
    """Entries, best first, those that saw fewer samples after the others; ``frame`` is a pandas frame of them."""

    def __init__(self, entries: Iterable[Entry]) -> None:
        self.entries = tuple(sorted(entries, key=_rank))

    @property
    def frame(self) -> Any:
        """The entries as a pandas frame."""
        import pandas  # type: ignore[import-untyped]

        return pandas.DataFrame([asdict(entry) for entry in self.entries])

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, index: int) -> Entry:
        return self.entries[index]

    def __repr__(self) -> str:
        head = ("head", "score", "spread", "seconds", "gap", "setting", "reads")
        rows = [
            (e.name, f"{e.score:.4f}", _spread(e), f"{e.seconds:.1f}", _gap(e.gap), e.setting, e.reads)
            for e in self.entries
        ]
        widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in (head, *rows)
        ]
        return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def _rank(entry: Entry) -> tuple[float, float]:
    return -(math.inf if entry.samples is None else entry.samples), -entry.score


def _spread(entry: Entry) -> str:
    return f"{entry.spread:.4f}" if entry.samples is None else f"(N={entry.samples})"


def _gap(gap: float | None) -> str:
    return "none" if gap is None else f"{gap:.1e}"

"""A table of heads and probes: how well each does, how long it took, and what is proved about it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from typing import Any, final

from convexformer.html import table

COLUMNS = ("head", "score", "spread", "seconds", "gap", "setting", "reads")


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
    """Entries, best first, those that saw fewer samples after the others; ``frame`` is a pandas frame of them.

    Parameters
    ----------
    entries : iterable of Entry
        In any order.
    """

    def __init__(self, entries: Iterable[Entry]) -> None:
        self.entries = tuple(sorted(entries, key=_rank))

    @property
    def frame(self) -> Any:
        """The entries as a pandas frame."""
        import pandas  # type: ignore[import-untyped]

        return pandas.DataFrame([asdict(entry) for entry in self.entries])

    def records(self) -> list[dict[str, Any]]:
        """Return the entries as plain numbers and text, for a JSON file."""
        return [asdict(entry) | {"spread": _no_nan(entry.spread)} for entry in self.entries]

    @classmethod
    def of_records(cls, records: Any) -> Leaderboard:
        """Undo :meth:`records`; raise ValueError for anything else."""
        kinds: dict[str, Callable[[Any], Any]] = {
            "gap": lambda value: None if value is None else float(value),
            "spread": lambda value: math.nan if value is None else float(value),
            "samples": lambda value: None if value is None else int(value),
            "name": str,
            "reads": str,
            "setting": str,
        }
        names = [field.name for field in fields(Entry)]
        try:
            tables = ({"samples": None, **record} for record in records)  # files from before races have no samples
            return cls(Entry(**{name: kinds.get(name, float)(table[name]) for name in names}) for table in tables)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"these are no records of a leaderboard ({type(error).__name__}: {error}); expected a list of objects with "
                f"{', '.join(names)}."
            ) from error

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, index: int) -> Entry:
        return self.entries[index]

    def _cells(self) -> list[tuple[str, ...]]:
        return [
            (e.name, f"{e.score:.4f}", _spread(e), f"{e.seconds:.1f}", _gap(e.gap), e.setting, e.reads)
            for e in self.entries
        ]

    def _repr_html_(self) -> str:
        return table(self._cells(), COLUMNS)

    def __repr__(self) -> str:
        head, rows = COLUMNS, self._cells()
        widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in (head, *rows)
        ]
        return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def _no_nan(value: float) -> float | None:
    return None if math.isnan(value) else value


def _rank(entry: Entry) -> tuple[float, float]:
    return -(math.inf if entry.samples is None else entry.samples), -entry.score


def _spread(entry: Entry) -> str:
    return f"{entry.spread:.4f}" if entry.samples is None else f"(N={entry.samples})"


def _gap(gap: float | None) -> str:
    return "none" if gap is None else f"{gap:.1e}"

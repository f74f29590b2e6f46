"""What a page is made of: sections of paragraphs, tables, figures and samples; plain data that the templates print.

Text is plain text throughout: the templates escape it. Numbers of a chart live in its specification, those of a table are
formatted already.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias, final


@final
@dataclass(frozen=True)
class Table:
    """A table; columns whose index is in ``numbers`` are aligned as numbers, row ``strong`` is emphasised."""

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    numbers: frozenset[int] = frozenset()
    strong: int | None = None

    kind: ClassVar[str] = "table"


@final
@dataclass(frozen=True)
class Figure:
    """A chart with its description in words and the table of its numbers, for readers who do not see the chart."""

    id: str
    title: str
    description: str
    spec: dict[str, Any]
    table: Table
    follows_slider: bool = False
    """Whether the chart has the parameter ``at``, the position of the slider."""

    kind: ClassVar[str] = "figure"


@final
@dataclass(frozen=True)
class Facts:
    """Names and values."""

    pairs: Sequence[tuple[str, str]]

    kind: ClassVar[str] = "facts"


@final
@dataclass(frozen=True)
class Slider:
    """A slider over the betas of a path: ``steps[k]`` are the facts shown at position ``k``, in the order of ``names``."""

    label: str
    names: Sequence[str]
    steps: Sequence[Sequence[str]]
    at: int

    kind: ClassVar[str] = "slider"


@final
@dataclass(frozen=True)
class Word:
    """A word of a text, and what it did for the prediction: from -1, against it, to 1, for it."""

    text: str
    weight: float


@final
@dataclass(frozen=True)
class Sample:
    """One sample of the test data, as a card."""

    name: str
    truth: str
    predicted: str
    detail: str
    text: str = ""
    words: Sequence[Word] = ()
    picture: str = ""
    """A data URI."""
    cells: Sequence[Sequence[float]] = ()
    """What the tokens of a picture did for the prediction, by row and column of their grid, from -1 to 1."""


@final
@dataclass(frozen=True)
class Samples:
    """Cards of samples."""

    cards: Sequence[Sample]

    kind: ClassVar[str] = "samples"


@final
@dataclass(frozen=True)
class Note:
    """A remark: what was left out, and why."""

    text: str

    kind: ClassVar[str] = "note"


Block: TypeAlias = Table | Figure | Facts | Slider | Samples | Note


@final
@dataclass(frozen=True)
class Section:
    """A section of the page."""

    id: str
    title: str
    lead: str
    blocks: Sequence[Block]


@final
@dataclass(frozen=True)
class Omission:
    """A section that does not apply, and the reason."""

    title: str
    reason: str

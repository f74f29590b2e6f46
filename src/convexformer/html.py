"""Small HTML tables for notebooks; everything that is shown is escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

MAX_ROWS = 20  # of a table; longer ones show the first of them and say how many there are


def table(rows: Iterable[Sequence[object]], header: Sequence[object] = (), caption: str = "") -> str:
    """Return a table; cells and captions are plain text."""
    rows = list(rows)
    parts = ["<table>"]
    if caption:
        parts.append(f"<caption>{escape(caption)}</caption>")
    if header:
        parts.append("<thead>" + _row(header, "th") + "</thead>")
    parts.append("<tbody>" + "".join(_row(row, "td") for row in rows[:MAX_ROWS]) + "</tbody></table>")
    if len(rows) > MAX_ROWS:
        parts.append(f"<p>{MAX_ROWS} of {len(rows)} rows</p>")
    return "".join(parts)


def _row(cells: Sequence[object], tag: str) -> str:
    return "<tr>" + "".join(f"<{tag}>{escape(str(cell))}</{tag}>" for cell in cells) + "</tr>"

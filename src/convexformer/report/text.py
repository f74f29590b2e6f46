"""Numbers and user strings as they are printed."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

DASH, MINUS, TIMES = "\N{EN DASH}", "\N{MINUS SIGN}", "\N{MULTIPLICATION SIGN}"
# marks that reorder the text around them; the page isolates right-to-left words without them
REORDERING = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
LONGEST = 600  # characters of a text that are shown


def clean(value: Any, longest: int = LONGEST) -> str:
    """Return a user's string fit for a page: valid Unicode without control and reordering marks, of limited length.

    Nothing is escaped here; the templates do that.
    """
    if isinstance(value, np.generic):
        value = value.item()
    text = str(value).encode("utf-8", "replace").decode("utf-8")
    shown = (c if c.isprintable() or ord(c) >= 0xA0 else " " for c in text if c not in REORDERING)
    text = "".join(shown).strip()
    return text if len(text) <= longest else text[: longest - 1] + "…"


def number(value: float | None, digits: int = 4) -> str:
    """Return a number with so many significant digits; a dash for None and NaN."""
    if value is None or math.isnan(value):
        return DASH
    if math.isinf(value):
        return "∞" if value > 0 else f"{MINUS}∞"
    if value == 0:
        return "0"
    if not 1e-3 <= abs(value) < 1e6:
        return f"{value:.{max(digits - 3, 1)}e}".replace("-", MINUS)
    return f"{value:.{digits}g}".replace("-", MINUS) if abs(value) < 10**digits else f"{value:,.0f}".replace("-", MINUS)


def shape(sizes: Iterable[int]) -> str:
    """Return the sizes of an array."""
    return f" {TIMES} ".join(map(str, sizes))


def percent(value: float | None) -> str:
    """Return a share as a percentage."""
    return DASH if value is None or math.isnan(value) else f"{100 * value:.1f}%"


def seconds(value: float) -> str:
    """Return a duration."""
    if value < 0.1:
        return f"{1000 * value:.0f} ms"
    return f"{value:.1f} s" if value < 120 else f"{value / 60:.1f} min"


def count(n: int, noun: str, plural: str | None = None) -> str:
    """Return a number with its noun."""
    return f"{n:,} {noun if n == 1 else plural or noun + 's'}"


def sentence(text: str) -> str:
    """Return the text with a capital letter."""
    return text[:1].upper() + text[1:]


def finite(value: Any) -> float | None:
    """Return a float for JSON, which has no infinity and no NaN: None for those."""
    number = float(value)
    return number if math.isfinite(number) else None

"""Tables of named factories, errors that suggest the nearest name, and the warnings that users may filter."""

from __future__ import annotations

import difflib
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import Generic, TypeVar, final

T = TypeVar("T")
PACKAGE = str(Path(__file__).parent)  # warnings are attributed to the first frame outside this folder


class ZeroSolutionWarning(UserWarning):
    """``beta`` is above ``beta_max``, so ``Z = 0`` is optimal."""


class MissingMaskWarning(UserWarning):
    """A model fitted with a mask gets an array without one: padding in it would count as tokens."""


class ClassTokenWarning(UserWarning):
    """A head that mixes tokens by position gets one token more than a square image has patches."""


class GridEndWarning(UserWarning):
    """A search chose the smallest beta of its grid: a smaller one may be better."""


def warn(message: str, category: type[Warning]) -> None:
    """Warn with the location of the user's code: the innermost frame outside this package."""
    frame: FrameType | None = sys._getframe(1)
    level = 2
    while frame is not None and frame.f_code.co_filename.startswith(PACKAGE):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)


def unknown(kind: str, given: object, known: Iterable[str]) -> str:
    """Return the sentence for an unknown name: what was given, the nearest name, and all of them."""
    names = sorted(known)
    near = difflib.get_close_matches(str(given), names, n=1, cutoff=0.4)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return f"unknown {kind} {given!r}.{hint} Known: {', '.join(names)}."


def one_of(kind: str, given: str, known: Iterable[str]) -> str:
    """Return ``given`` if it is one of ``known``; otherwise raise with a suggestion."""
    names = list(known)
    if given not in names:
        raise ValueError(unknown(kind, given, names))
    return given


@final
class Registry(Generic[T]):
    """A table of named factories; each module registers what it defines."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[str, Callable[..., T]] = {}

    def register(self, name: str, factory: Callable[..., T]) -> None:
        """Add ``factory`` under ``name``; raise if the name is taken."""
        if name in self._entries:
            raise ValueError(f"{self.kind} {name!r} is registered already")
        self._entries[name] = factory

    def __getitem__(self, name: str) -> Callable[..., T]:
        if name not in self._entries:
            raise ValueError(unknown(self.kind, name, self._entries))
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

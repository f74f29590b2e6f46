"""numba's compiler where it is installed; else a stand-in, so that modules of compiled loops can be imported."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

try:
    from numba import njit
except ImportError:  # pragma: no cover  (callers ask ``available`` first)

    def njit(*args: Any, **options: Any) -> Any:  # type: ignore[no-redef]
        """Return the function itself."""
        return args[0] if args else lambda function: function

    available = False
else:
    available = True

_UNCOMPILED: ContextVar[bool] = ContextVar("uncompiled", default=False)


@contextmanager
def uncompiled() -> Iterator[None]:
    """Do without compiled loops inside: where there are few calls, compiling for the first one takes longer than all."""
    token = _UNCOMPILED.set(True)
    try:
        yield
    finally:
        _UNCOMPILED.reset(token)


def wanted() -> bool:
    """Tell whether compiled loops are to be used here."""
    return available and not _UNCOMPILED.get()


__all__ = ["available", "njit", "uncompiled", "wanted"]

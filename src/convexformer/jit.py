"""numba's compiler where it is installed; else a stand-in, so that modules of compiled loops can be imported."""

from __future__ import annotations

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

__all__ = ["available", "njit"]

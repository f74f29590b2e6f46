"""numba's compiler where it is installed, and compilation that a time limit can leave.

The first use of a compiled loop on a machine takes seconds, in which nothing can be stopped. So a solve has its loops
compiled in a thread and waits for that no longer than it has time; plain code serves until they are ready.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

try:
    import numba
except ImportError:  # pragma: no cover  (callers ask ``available`` first)
    available = False
else:
    available = True

__all__ = ["available", "compile_in_time", "interpreted", "njit", "ready"]

Kernels = Mapping[str, Callable[[], None]]
"""What compiles, by the name of what it compiles."""

POLL = 0.02  # seconds between two looks at the clock

_threads: dict[str, threading.Thread] = {}
_ready: set[str] = set()
_local = threading.local()


def njit(**options: Any) -> Callable[[Any], Any]:
    """``numba.njit``, or nothing where numba is missing.

    Without a cache where there is no folder to keep one in: a read-only installation whose user has no home.
    """

    def compiled(function: Any) -> Any:
        if not available:  # pragma: no cover
            return function
        try:
            return numba.njit(**options)(function)
        except RuntimeError as error:
            if "cannot cache" not in str(error):
                raise
            return numba.njit(**{**options, "cache": False})(function)

    return compiled


def ready(name: str) -> bool:
    """Tell whether the loops of that name are compiled, and wanted (:func:`interpreted`)."""
    return name in _ready and not getattr(_local, "interpreted", False)


@contextmanager
def interpreted() -> Iterator[None]:
    """Use and compile no loops here: for numbers that must not depend on what has been compiled before, or few calls."""
    before, _local.interpreted = getattr(_local, "interpreted", False), True
    try:
        yield
    finally:
        _local.interpreted = before


def compile_in_time(kernels: Kernels, late: Callable[[], bool] = lambda: False) -> bool:
    """Compile in threads what is not ready yet; return False where the time is up before that is done.

    A thread that is left goes on, and a process that ends waits for it: what it compiles is kept on disk.
    """
    for name, function in kernels.items():
        if name in _ready or not available or getattr(_local, "interpreted", False):
            continue
        thread = _threads.get(name)
        if thread is None or not thread.is_alive():
            thread = _threads[name] = threading.Thread(target=_compile, args=(name, function), name=f"compiling {name}")
            thread.start()
        while thread.is_alive() and not late():
            thread.join(POLL)
        if name not in _ready and late():
            return False
    return True


def _compile(name: str, function: Callable[[], None]) -> None:
    function()
    _ready.add(name)

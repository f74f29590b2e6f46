"""The clock of a call: it starts with the call, so that set-up, compilation and certificates count as well."""

from __future__ import annotations

import math
import time
from typing import final

SHORTEST = 1e-6
"""What :meth:`Clock.left` returns once the time is up: the next step then returns where it starts, certified."""


@final
class Clock:
    """Seconds since a call began, and whether its ``max_time`` is up; None is for ever."""

    def __init__(self, max_time: float | None = None) -> None:
        self.max_time = math.inf if max_time is None else float(max_time)
        self._started = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Seconds since the call began."""
        return time.perf_counter() - self._started

    @property
    def late(self) -> bool:
        """Whether the time is up."""
        return self.max_time < math.inf and self.seconds >= self.max_time

    def left(self, limit: float | None = None) -> float | None:
        """Return the seconds left, at most ``limit`` of them and never zero; None where neither sets a limit."""
        left = min(self.max_time - self.seconds, math.inf if limit is None else limit)
        return None if math.isinf(left) else max(left, SHORTEST)

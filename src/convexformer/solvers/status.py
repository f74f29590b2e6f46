"""How a solve went: its status, with what to do about it, and its history."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class Status(Enum):
    """How a solve ended, and what to do about it."""

    CONVERGED = "the relative duality gap is below the tolerance"
    MAX_ITER = "stopped at max_iter; raise it, raise the tolerance, or increase beta"
    MAX_TIME = "stopped at max_time; the certificate says how far from optimal this point is"
    INTERRUPTED = "interrupted; this is the best point so far, pass it as warm_start to continue"
    STALLED = (
        "no further progress in this precision; raise the tolerance (or, in float32, solve with dtype=torch.float64)"
    )

    def __str__(self) -> str:
        return self.value


class Record(NamedTuple):
    """One line of a history."""

    iteration: int
    seconds: float
    primal: float
    dual: float
    relative_gap: float
    solver: str = ""
    """Which solver was at work; one that stalls hands over to another. Empty in files of earlier versions."""

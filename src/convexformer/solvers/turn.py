"""How long a solver may go on where another one could take over: as long as its own pace promises an end."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from convexformer.solvers.status import Record


@final
@dataclass(frozen=True)
class Turn:
    """A measured term of the choice of a solver: what its own gaps say of the iterations that are still to come.

    First-order methods close the gap at a rate that depends on the spectrum of the features and on the support, which
    nobody knows before; the gaps of the first iterations tell. No constant depends on the speed of the machine.
    """

    first: int
    """Iterations before the first judgement."""
    recent: int
    """The pace is that of the last half of the iterations, and of so many at least: a gap falls unevenly, after steps of
    another kind above all."""
    worth: float
    """The solver goes on where the gap, at this pace, is closed within so many times the iterations so far."""

    def __str__(self) -> str:
        return (
            f"if from {self.first} iterations on its pace promises no end within {self.worth:g} times as many as so far"
        )

    def over(self, records: Sequence[Record], begin: int, tolerance: float) -> bool:
        """Judge by the gap checks ``records`` of one solver, which began at iteration ``begin``."""
        taken = records[-1].iteration - begin if records else 0
        if taken < self.first:
            return False
        return self.remaining(records, begin, tolerance) > self.worth * taken

    def remaining(self, records: Sequence[Record], begin: int, tolerance: float) -> float:
        """Return the iterations until the gap meets the tolerance, if its logarithm goes on falling as it did."""
        now = records[-1].iteration
        gap = min(record.relative_gap for record in records)
        since = now - max(self.recent, (now - begin) / 2)
        before = [record for record in records if record.iteration <= since] or records[:1]
        then = min(record.relative_gap for record in before)
        fallen = math.log(then / gap) if 0 < gap < then < math.inf else 0.0
        if not gap > tolerance:
            return 0.0
        if fallen == 0.0:
            return math.inf
        return math.log(gap / tolerance) * max(now - before[-1].iteration, 1) / fallen

"""What a round on a working set is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import numpy as np
from torch import Tensor

from convexformer.certificates import DualPoint
from convexformer.objective import Evaluation


@final
@dataclass(frozen=True)
class StepContext:
    """Where a round starts: loss, dual point and relative gap of the whole objective at the last weights."""

    evaluation: Evaluation
    point: DualPoint
    gap: float
    beta: float
    """The beta of the round: that of the objective, or a larger one on the way there."""


class WorkingSetStep(ABC):
    """A solver on working sets that keeps its weights from round to round."""

    single_threaded = False
    """Whether rounds are so many small products that threads wait for each other longer than they work."""

    @abstractmethod
    def round(self, slices: np.ndarray, at: StepContext, tolerance: float, late: Callable[[], bool]) -> Tensor:
        """Minimise over some slices to an absolute gap of ``tolerance`` on them; return all weights.

        ``slices`` numbers the leading axes of the weights ``([g,] s, d, c)``; ``late`` tells when the time is up.
        """

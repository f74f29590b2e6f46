"""What a round on a working set is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import numpy as np
from torch import Tensor

from convexformer.certificates import DualPoint
from convexformer.problem import Fit, Problem


@final
@dataclass(frozen=True)
class Place:
    """Where a round starts: the loss, the dual point and the relative gap of the whole problem at the last weights."""

    fit: Fit
    point: DualPoint
    gap: float


class Rounds(ABC):
    """A solver on working sets that remembers its weights from round to round."""

    @abstractmethod
    def __init__(self, problem: Problem, Z: Tensor, fit: Fit) -> None: ...

    @abstractmethod
    def round(self, slices: np.ndarray, at: Place, tolerance: float, late: Callable[[], bool]) -> Tensor:
        """Minimise over some slices to an absolute gap of ``tolerance`` on them; return all weights.

        ``slices`` numbers the leading axes of the weights ``([g,] s, d, c)``; ``late`` tells when the time is up.
        """

"""The ridge of the Linear baseline. Not a gauge; its conjugate gives certificates all the same."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import final

from torch import Tensor

from convexformer.gauges.base import DualMatrix, Penalty, Polar, WeightsLike, as_tensor


@final
class Ridge(Penalty):
    """``g(Z) = 1/2 ||Z||_F^2``; ``(beta g)*(M) = ||M||_F^2 / (2 beta)`` is finite everywhere."""

    sparse = False

    def value(self, Z: WeightsLike) -> Tensor:
        """Half the squared norm."""
        return 0.5 * as_tensor(Z).square().sum()

    def prox(self, Z: Tensor, step: float | Tensor) -> Tensor:
        """``Z / (1 + step)``."""
        return Z / (1 + step)

    def max_dual_scale(self, M: DualMatrix, beta: float, *, quick: bool = False) -> tuple[float, Polar]:
        """No limit: the conjugate is finite everywhere."""
        return math.inf, Polar(0.0)

    def conjugate(self, M: DualMatrix, beta: float) -> float:
        """``||M||^2 / (2 beta)``."""
        return float(as_tensor(M).square().sum()) / (2 * beta)

    def critical_beta(self, M: DualMatrix, curvature: Callable[[], float]) -> Polar:
        """Return the curvature of the loss: the beta that halves the weight of the strongest direction.

        With a ridge ``Z = 0`` is never optimal; this value is the unit of ``beta_ratio``.
        """
        return Polar(curvature())

    def __repr__(self) -> str:
        return "Ridge()"

"""The ridge of the Linear baseline. Not a gauge, yet it certifies as well as one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

from torch import Tensor

from convexformer.gauges.base import Penalty, Polar


@final
class Ridge(Penalty):
    """``g(Z) = 1/2 ||Z||_F^2``; ``(beta g)*(M) = ||M||_F^2 / (2 beta)`` is finite everywhere."""

    sparse = False

    def value(self, Z: Tensor) -> Tensor:
        """Half the squared norm."""
        return 0.5 * Z.square().sum()

    def prox(self, Z: Tensor, step: float | Tensor) -> Tensor:
        """``Z / (1 + step)``."""
        return Z / (1 + step)

    def scale_limit(self, M: Any, beta: float, *, quick: bool = False) -> tuple[float, Polar]:
        """One: the conjugate is finite everywhere, but at the optimum the gradient itself is the dual point.

        A loss that chooses its own scale knows nothing of ``||M||^2 / (2 beta)``, and would choose one too long.
        """
        return 1.0, Polar(0.0)

    def conjugate(self, M: Any, beta: float) -> float:
        """``||M||^2 / (2 beta)``."""
        return float(M.square().sum()) / (2 * beta)

    def zero_beta(self, M: Any, curvature: Callable[[], float]) -> Polar:
        """Return the curvature of the loss: the beta that halves the weight of the strongest direction.

        With a ridge ``Z = 0`` is never optimal; this is the scale that ``beta_ratio`` counts in.
        """
        return Polar(curvature())

    def __repr__(self) -> str:
        return "Ridge()"

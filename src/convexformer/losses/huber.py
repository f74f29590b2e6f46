"""Huber loss: quadratic near the target, linear beyond ``delta``."""

from __future__ import annotations

import math
from typing import final

import torch
from torch import Tensor

from convexformer.losses.base import LOSSES, imbalance
from convexformer.losses.encoding import real_targets
from convexformer.losses.separable import QuadraticConjugateLoss
from convexformer.rows import LOCAL, Rows


@final
class Huber(QuadraticConjugateLoss):
    """``1/2 r^2`` for ``|r| <= delta``, else ``delta |r| - delta^2/2``, ``r = f - y``, summed over outputs.

    ``L*(u, y) = 1/2 u^2 + u y`` on ``|u| <= delta``.

    Parameters
    ----------
    delta : float
        Residuals beyond it count linearly.
    """

    name = "huber"
    curvature = 1.0

    def __init__(self, delta: float = 1.0) -> None:
        if not (math.isfinite(delta) and delta > 0):
            raise ValueError(f"delta={delta} was given; expected a positive number.")
        self.delta = float(delta)

    def config(self) -> dict[str, float]:
        """Return ``delta``."""
        return {"delta": self.delta}

    def encode(self, Y: Tensor) -> Tensor:
        """Real targets ``(R,)`` or ``(R, c)``."""
        return real_targets(Y, self.name)

    def value(self, F: Tensor, Y: Tensor) -> Tensor:
        """Quadratic near the target, linear beyond."""
        r = (F - Y).abs()
        near = r.clamp_max(self.delta)
        return (0.5 * near.square() + self.delta * (r - near)).sum(1)

    def gradient(self, F: Tensor, Y: Tensor) -> Tensor:
        """The residual, clipped at ``delta``."""
        return (F - Y).clamp(-self.delta, self.delta)

    def second_derivative(self, F: Tensor, Y: Tensor) -> Tensor:
        """One near the target, zero beyond."""
        return ((F - Y).abs() <= self.delta).to(F.dtype)

    def domain(self, U: Tensor, Y: Tensor) -> Tensor:
        """``|u| <= delta``."""
        return U.abs() <= self.delta * (1 + max(1e-12, 8 * torch.finfo(U.dtype).eps))

    def scale_range(self, U: Tensor, rows: Rows = LOCAL) -> tuple[float, float]:
        """``|t| <= delta / max |u|``, with an upper bound on ``max |u|``; 1 is legal for every point of the domain."""
        reach = max(1.0, self.delta / max(float(rows.bound(U)), 1e-300))
        return -reach, reach

    def balance(self, U: Tensor, Y: Tensor, w: Tensor, rows: Rows = LOCAL) -> Tensor:
        """Mix with a constant, ``(1 - a) u - a delta sign(r)``, column by column, where ``r = sum_i w_i u_i``.

        The sum vanishes for ``a = |r| / (|r| + delta sum_i w_i)``, and ``|u| <= delta`` is kept. Twice: the second time for
        what rounding left.
        """
        most = self.delta * rows.sum(w)
        for _ in range(2):
            r = imbalance(U, w, rows)
            if r is None:
                break
            U = (most * U - self.delta * r) / (r.abs() + most)
        return U


LOSSES.register("huber", Huber)

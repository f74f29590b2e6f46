"""Huber loss: quadratic near the target, linear beyond ``delta``."""

from __future__ import annotations

import math
from typing import final

import torch
from torch import Tensor

from convexformer.losses.base import LOSSES, QuadraticConjugateLoss, real_targets


@final
class Huber(QuadraticConjugateLoss):
    """``1/2 r^2`` for ``|r| <= delta``, else ``delta |r| - delta^2/2``, ``r = f - y``, summed over outputs.

    ``L*(u, y) = 1/2 u^2 + u y`` on ``|u| <= delta``.
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

    def curvatures(self, F: Tensor, Y: Tensor) -> Tensor:
        """One near the target, zero beyond."""
        return ((F - Y).abs() <= self.delta).to(F.dtype)

    def domain(self, U: Tensor, Y: Tensor) -> Tensor:
        """``|u| <= delta``."""
        return U.abs() <= self.delta * (1 + max(1e-12, 8 * torch.finfo(U.dtype).eps))

    def scale_range(self, U: Tensor) -> tuple[float, float]:
        """Any scale that keeps the largest entry within ``delta``."""
        reach = self.delta / max(float(U.abs().max()), 1e-300)
        return -reach, reach


LOSSES.register("huber", Huber)

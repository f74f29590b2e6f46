"""Squared loss ``1/2 ||f - y||^2``."""

from __future__ import annotations

import math
from typing import final

import torch
from torch import Tensor

from convexformer.losses.base import LOSSES, QuadraticConjugateLoss, real_targets


@final
class Squared(QuadraticConjugateLoss):
    """``L(f, y) = 1/2 ||f - y||^2``, ``L*(u, y) = 1/2 ||u||^2 + <u, y>``. Mind the 1/2: it is ours everywhere."""

    name = "squared"
    curvature = 1.0

    def encode(self, Y: Tensor) -> Tensor:
        """Real targets ``(R,)`` or ``(R, c)``."""
        return real_targets(Y, self.name)

    def value(self, F: Tensor, Y: Tensor) -> Tensor:
        """``1/2 ||f - y||^2``."""
        return 0.5 * (F - Y).square().sum(1)

    def gradient(self, F: Tensor, Y: Tensor) -> Tensor:
        """``f - y``."""
        return F - Y

    def value_and_gradient(self, F: Tensor, Y: Tensor) -> tuple[Tensor, Tensor]:
        """Half the squared norm of the gradient, and the gradient."""
        U = F - Y
        return 0.5 * torch.linalg.vecdot(U, U), U

    def curvatures(self, F: Tensor, Y: Tensor) -> Tensor:
        """One everywhere."""
        return torch.ones_like(F)

    def domain(self, U: Tensor, Y: Tensor) -> Tensor:
        """Everywhere."""
        return torch.ones_like(U, dtype=torch.bool)

    def scale_range(self, U: Tensor) -> tuple[float, float]:
        """Any scale."""
        return -math.inf, math.inf

    def best_intercept(self, F: Tensor, Y: Tensor, w: Tensor, start: Tensor) -> Tensor:
        """Return the weighted mean of ``y - f``."""
        return (w[:, None] * (Y - F)).sum(0) / w.sum()

    def follow_intercept(self, F: Tensor, Y: Tensor, w: Tensor, start: Tensor) -> Tensor:
        """Return the same: it needs no start."""
        return self.best_intercept(F, Y, w, start)


LOSSES.register("squared", Squared)

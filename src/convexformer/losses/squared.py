"""Squared loss ``1/2 ||f - y||^2``."""

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
class Squared(QuadraticConjugateLoss):
    """``L(f, y) = 1/2 ||f - y||^2``, ``L*(u, y) = 1/2 ||u||^2 + <u, y>``. Mind the 1/2: it is ours everywhere."""

    name = "squared"
    curvature = 1.0
    quadratic = True

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

    def second_derivative(self, F: Tensor, Y: Tensor) -> Tensor:
        """One everywhere."""
        return torch.ones_like(F)

    def domain(self, U: Tensor, Y: Tensor) -> Tensor:
        """Everywhere."""
        return torch.ones_like(U, dtype=torch.bool)

    def scale_range(self, U: Tensor, rows: Rows = LOCAL) -> tuple[float, float]:
        """Any scale."""
        return -math.inf, math.inf

    def best_intercept(self, F: Tensor, Y: Tensor, w: Tensor, start: Tensor, rows: Rows = LOCAL) -> Tensor:
        """Return the weighted mean of ``y - f``; ``start`` where that is not finite, without a host sync."""
        b = rows.weighted(w, Y - F) / rows.sum(w)
        return torch.where(torch.isfinite(b).all(), b, start)

    def inexact_intercept(self, F: Tensor, Y: Tensor, w: Tensor, start: Tensor, rows: Rows = LOCAL) -> Tensor:
        """Return the exact one, which costs less than a step."""
        return self.best_intercept(F, Y, w, start, rows)

    def balance(self, U: Tensor, Y: Tensor, w: Tensor, rows: Rows = LOCAL) -> Tensor:
        """Subtract the weighted mean, twice: the second time what rounding left of it."""
        r, total = imbalance(U, w, rows), rows.sum(w)
        if r is None:
            return U
        U = U - r / total
        return U - rows.weighted(w, U) / total


LOSSES.register("squared", Squared)

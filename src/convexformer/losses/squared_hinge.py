"""Squared hinge loss for two classes."""

from __future__ import annotations

import math
from typing import final

import torch
from torch import Tensor

from convexformer.losses.base import LOSSES, imbalance
from convexformer.losses.encoding import signs
from convexformer.losses.separable import QuadraticConjugateLoss
from convexformer.rows import LOCAL, Rows


@final
class SquaredHinge(QuadraticConjugateLoss):
    """``L(f, y) = 1/2 max(0, 1 - y f)^2`` for ``y`` in {-1, +1}; ``L*(u, y) = 1/2 u^2 + u y`` on ``y u <= 0``."""

    name = "squared_hinge"
    curvature = 1.0

    def encode(self, Y: Tensor) -> Tensor:
        """Labels -1 and +1, one output."""
        return signs(Y, self.name)

    def value(self, F: Tensor, Y: Tensor) -> Tensor:
        """``1/2 max(0, 1 - y f)^2``."""
        return 0.5 * (1 - Y * F).clamp_min(0).square().sum(1)

    def gradient(self, F: Tensor, Y: Tensor) -> Tensor:
        """``-y max(0, 1 - y f)``."""
        return -Y * (1 - Y * F).clamp_min(0)

    def second_derivative(self, F: Tensor, Y: Tensor) -> Tensor:
        """One inside the margin, zero beyond."""
        return (Y * F < 1).to(F.dtype)

    def domain(self, U: Tensor, Y: Tensor) -> Tensor:
        """``y u <= 0``."""
        return Y * U <= 1e-12

    def scale_range(self, U: Tensor, rows: Rows = LOCAL) -> tuple[float, float]:
        """Only nonnegative scales keep the sign."""
        return 0.0, math.inf

    def balance(self, U: Tensor, Y: Tensor, w: Tensor, rows: Rows = LOCAL) -> Tensor:
        """Shift one class: with ``r = sum_i w_i u_i``, ``u - r / sum_{y_i = sign(r)} w_i`` where ``y_i = sign(r)``.

        That moves ``u`` away from zero on its own side, so the domain is kept. Without weight on that class the other one
        has to be zero.
        """
        r = imbalance(U, w, rows)
        if r is None:
            return U
        shifted = torch.eq(Y, r.sign()).to(U.dtype)
        mass = rows.weighted(w, shifted)
        return torch.where(mass > 0, U - shifted * (r / mass), torch.where(r == 0, U, 0.0))


LOSSES.register("squared_hinge", SquaredHinge)

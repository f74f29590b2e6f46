"""Losses that are sums over outputs: diagonal Hessians, and one root a column for the intercept."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from convexformer.losses.base import Loss
from convexformer.losses.hessian import DiagonalHessian
from convexformer.losses.intercept import increasing_roots
from convexformer.rows import LOCAL, Rows


class SeparableLoss(Loss):
    """``L(f, y) = sum_l l(f_l, y_l)``: the intercept is one root a column."""

    separable = True

    @abstractmethod
    def second_derivative(self, F: Tensor, Y: Tensor) -> Tensor:
        """``(R, c)`` the second derivatives ``l''``, one of the one-sided ones at a kink of the gradient."""

    def hessian(self, F: Tensor, Y: Tensor) -> DiagonalHessian:
        """``diag(l'')``."""
        return DiagonalHessian(self.second_derivative(F, Y))

    def intercept_step(self, F: Tensor, Y: Tensor, w: Tensor, slope: Tensor, rows: Rows = LOCAL) -> Tensor:
        """``-h / h'``, column by column, with ``h'`` at least eps times its largest possible value."""
        floor = torch.finfo(F.dtype).eps * self.curvature * rows.sum(w)
        return -slope / torch.maximum(rows.weighted(w, self.second_derivative(F, Y)), floor)

    def best_intercept(self, F: Tensor, Y: Tensor, w: Tensor, start: Tensor, rows: Rows = LOCAL) -> Tensor:
        """Find the root of each column's derivative ``h(b) = sum_i w_i l'(f_i + b, y_i)``, which increases."""

        def slope(b: Tensor) -> tuple[Tensor, Tensor]:
            U = self.gradient(F + b, Y)
            return rows.weighted(w, U), rows.weighted(w, U.abs())

        def bend(b: Tensor) -> tuple[Tensor, Callable[[], Tensor]]:
            X = F + b
            H = self.second_derivative(X, Y)
            derivative = rows.weighted(w, H)
            return derivative, lambda: rows.weighted(w, H * X.abs()) + derivative * b.abs()  # X is rounded, and so is b

        if not bool(torch.isfinite(rows.total(F.sum()))):
            return start
        return increasing_roots(slope, bend, start, lambda: rows.bound(F) + rows.bound(Y))


class QuadraticConjugateLoss(SeparableLoss):
    """Losses with ``L*(u, y) = 1/2 u^2 + u y`` on their domain: the best dual scale has a closed form."""

    @abstractmethod
    def scale_range(self, U: Tensor, rows: Rows = LOCAL) -> tuple[float, float]:
        """Return scales ``t`` that keep ``t U`` in the domain, 1 among them."""

    @abstractmethod
    def domain(self, U: Tensor, Y: Tensor) -> Tensor:
        """``(R, c)`` True where the conjugate is finite."""

    def conjugate(self, U: Tensor, Y: Tensor) -> Tensor:
        """``1/2 u^2 + u y`` inside the domain."""
        inside = 0.5 * U.square() + U * Y
        return torch.where(self.domain(U, Y), inside, math.inf).sum(1)

    def dual_scale(self, U: Tensor, Y: Tensor, w: Tensor, limit: float, rows: Rows = LOCAL) -> float:
        """Maximise ``-F*(t V) = -(t^2/2 sum w u^2 + t sum w u y)`` over the legal ``t``."""
        V = w[:, None] * U
        square = float(rows.dot(V, U))
        if square == 0.0:
            return 0.0
        low, high = self.scale_range(U, rows)
        best = -float(rows.dot(V, Y)) / square
        return max(max(-limit, low), min(best, limit, high))

"""The inner problem: ridge regression with one kernel, by L-BFGS in the outputs with a Cholesky metric."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from convexformer.objective import Objective

RETRIES = 8  # larger and larger diagonals for a Cholesky factor that rounding has made indefinite
HALVINGS = 12


@final
@dataclass(frozen=True)
class Ridge:
    """A point of ``min_alpha F(K alpha + b) + 1/2 tr(alpha^T K alpha)``, in float64 or, for folds, in float32."""

    alpha: Tensor
    """``(N, c)``."""
    b: Tensor
    """``(c,)``, zero where there is no intercept."""
    outputs: Tensor
    """``K alpha + b``."""


@final
class Metric:
    """``(D^-1 + K)^-1``, one Cholesky factor for all outputs.

    ``D_i`` is the Rayleigh quotient of the Hessian of row ``i``'s loss along its own gradient: a number for the curvature
    that matters.
    """

    def __init__(self, objective: Objective, K: Tensor, outputs: Tensor) -> None:
        loss, w = objective.loss, objective.sample_weight
        U = loss.gradient(outputs, objective.targets)
        HU = loss.hessian_product(outputs, objective.targets, U)
        curvature = w * (U * HU).sum(1) / U.square().sum(1).clamp_min(1e-12)
        largest = loss.curvature * float(w.max())
        mean = float(objective.rows.sum(curvature)) / len(w)
        floor = max(1e-6 * largest, min(0.05 * mean, largest))
        inverse = 1 / curvature.clamp(floor, largest)
        trace = float(K.diagonal().sum())
        for attempt in range(RETRIES):
            M = K.clone()
            M.diagonal().add_(inverse.to(K))
            self.L, failed = torch.linalg.cholesky_ex(M)
            if not bool(failed):
                break
            inverse = inverse + 1e-6 * 10**attempt * trace  # a larger diagonal is a valid metric, too
        self.inverse = inverse[:, None]
        self.intercept = objective.intercept
        if self.intercept:
            self.u = self._solve(torch.ones_like(self.inverse))
            self.total = objective.rows.sum(self.u)

    def _solve(self, R: Tensor) -> Tensor:
        # two triangular solves: cholesky_solve copies the factor first, which takes longer than both
        half = torch.linalg.solve_triangular(self.L, R.to(self.L), upper=False)
        return torch.linalg.solve_triangular(self.L.mT, half, upper=True).to(R.dtype)

    def solve(self, R: Tensor) -> tuple[Tensor, Tensor]:
        """Solve ``(D^-1 + K) A + 1 b^T = R`` with ``1^T A = 0``; ``b = 0`` where there is no intercept."""
        A = self._solve(R)
        if not self.intercept:
            return A, A.new_zeros(A.shape[1])
        b = A.sum(0) / self.total.to(A)
        return A - self.u.to(A) * b, b


def descend(objective: Objective, metric: Metric, at: Ridge, *, steps: int, memory: int, tolerance: float) -> Ridge:
    """Minimise from ``at`` until the predicted decrease is below ``tolerance`` times the value.

    The gradient in the outputs is ``V + alpha``. ``K`` times a step comes out of the metric's own solve, so an iteration
    costs one pair of triangular solves, and a line search costs nothing but losses. Works in the dtype of ``at``.
    """
    loss, rows, like = objective.loss, objective.rows, at.outputs
    w, Y, inverse = objective.sample_weight.to(like), objective.targets.to(like), metric.inverse.to(like)
    pairs: list[tuple[Tensor, Tensor, Tensor, Tensor, float]] = []

    def dot(a: Tensor, b: Tensor) -> float:
        return float(rows.dot(a, b))

    alpha, b, f = at.alpha, at.b, at.outputs
    values, U = loss.value_and_gradient(f, Y)
    quadratic = dot(alpha, f - b)
    value = float(rows.dot(w, values)) + 0.5 * quadratic
    gradient = w[:, None] * U + alpha
    for _ in range(steps):
        objective.begin_product()
        q, shares = gradient.clone(), []
        for df, _, _, y, rho in reversed(pairs):
            shares.append(rho * dot(df, q))
            q -= shares[-1] * y
        R = q * inverse
        da, db = metric.solve(R)
        df = R - da * inverse  # K da + db
        for (sf, sa, sb, y, rho), share in zip(pairs, reversed(shares), strict=True):
            k = share - rho * dot(y, df)
            df, da, db = df + k * sf, da + k * sa, db + k * sb
        slope = -dot(gradient, df)
        if -slope < tolerance * abs(value):
            break
        linear, square, t = dot(alpha, df - db), dot(da, df - db), 1.0
        for _ in range(HALVINGS):
            trial = f - t * df
            rest = quadratic - 2 * t * linear + t * t * square
            found = float(rows.dot(w, loss.value(trial, Y))) + 0.5 * rest
            if found <= value + 1e-4 * t * slope:
                break
            t /= 2
        else:
            break
        alpha, b, f, quadratic, value = alpha - t * da, b - t * db, trial, rest, found
        after = w[:, None] * loss.gradient(f, Y) + alpha
        y = after - gradient
        gradient = after
        curvature = -t * dot(df, y)
        if curvature > 0:
            pairs = [*pairs, (-t * df, -t * da, -t * db, y, 1 / curvature)][-memory:]
    return Ridge(alpha, b, f)

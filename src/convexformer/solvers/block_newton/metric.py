"""The inner problem: ridge regression with one kernel, by L-BFGS in the outputs with a Cholesky metric."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from scipy.linalg import lapack
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

    ``D_i`` is a number for the curvature of row ``i``'s loss that matters: the mean Rayleigh quotient of its Hessian along
    its own gradient, one of the steepest directions, and along the gradient with its outputs turned by one.
    """

    def __init__(self, objective: Objective, K: Tensor, outputs: Tensor) -> None:
        loss, w = objective.loss, objective.sample_weight
        U = loss.gradient(outputs, objective.targets)
        turned = U.roll(1, 1)
        along = [(d * loss.hessian_product(outputs, objective.targets, d)).sum(1) for d in (U, turned)]
        curvature = w * (along[0] + along[1]) / (2 * U.square().sum(1)).clamp_min(1e-12)
        largest = loss.curvature * float(w.max())
        mean = float(objective.rows.sum(curvature)) / len(w)
        floor = max(1e-6 * largest, min(0.05 * mean, largest))
        inverse = 1 / curvature.clamp(floor, largest)
        trace = float(K.diagonal().sum())
        for attempt in range(RETRIES):
            M = K.clone()
            M.diagonal().add_(inverse.to(K))
            self.L, found = _factor(M)
            if found:
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


def _factor(M: Tensor) -> tuple[Tensor, bool]:
    """Return the lower Cholesky factor of ``M``, with anything above its diagonal, and whether there is one.

    On a CPU in place of ``M``, by the LAPACK that scipy brings: half again as fast as torch's on some processors.
    """
    if M.device.type != "cpu":
        L, failed = torch.linalg.cholesky_ex(M)
        return L, not bool(failed)
    factor = lapack.spotrf if M.dtype == torch.float32 else lapack.dpotrf
    L, failed = factor(M.numpy().T, lower=1, clean=0, overwrite_a=1)
    return torch.from_numpy(L), failed == 0


@final
class _Pairs:
    """The last steps of L-BFGS, one a row, and all inner products between steps and changes of the gradient.

    A direction is then five products with few rows instead of some eighty operations on vectors.
    """

    def __init__(self, memory: int, like: Tensor) -> None:
        c, n = like.shape
        self.df, self.da, self.y = like.new_empty((3, memory, c * n))
        self.db = like.new_empty((memory, c))
        self.inner = np.zeros((memory, memory))  # <y_i, df_j>
        self.order: list[int] = []  # from the oldest to the newest

    def add(self, t: float, df: Tensor, da: Tensor, db: Tensor, y: Tensor) -> None:
        """Remember the step ``-t (df, da, db)``, in place of the oldest where there are many."""
        full = len(self.order) == len(self.db)
        k = self.order.pop(0) if full else len(self.order)
        self.order.append(k)
        n = len(self.order)
        for rows, step in ((self.df, df.flatten()), (self.da, da.flatten()), (self.db, db)):
            torch.mul(step, -t, out=rows[k])
        self.y[k] = y.flatten()
        self.inner[k, :n] = (self.df[:n] @ self.y[k]).tolist()
        self.inner[:n, k] = (self.y[:n] @ self.df[k]).tolist()

    def before(self, gradient: Tensor) -> tuple[np.ndarray, Tensor]:
        """Return how much of each change to take off a gradient, and what is left of it."""
        n, shares = len(self.order), np.zeros(len(self.db))
        if n == 0:
            return shares, gradient
        along = (self.df[:n] @ gradient.flatten()).tolist()
        for k in reversed(self.order):
            shares[k] = (along[k] - shares @ self.inner[:, k]) / self.inner[k, k]
        off = torch.from_numpy(shares[:n]).to(gradient) @ self.y[:n]
        return shares, gradient - off.view_as(gradient)

    def after(self, shares: np.ndarray, df: Tensor, da: Tensor, db: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the direction from what the metric has made of that rest."""
        n, own = len(self.order), np.zeros(len(self.db))
        if n == 0:
            return df, da, db
        along = (self.y[:n] @ df.flatten()).tolist()
        for k in self.order:
            own[k] = shares[k] - (along[k] + self.inner[k] @ own) / self.inner[k, k]
        x = torch.from_numpy(own[:n]).to(df)
        return df + (x @ self.df[:n]).view_as(df), da + (x @ self.da[:n]).view_as(da), db + x @ self.db[:n]


def descend(objective: Objective, metric: Metric, at: Ridge, *, steps: int, memory: int, tolerance: float) -> Ridge:
    """Minimise from ``at`` until the predicted decrease is below ``tolerance`` times the value.

    The gradient in the outputs is ``V + alpha``. ``K`` times a step comes out of the metric's own solve, so an iteration
    costs one pair of triangular solves, and a line search costs nothing but losses. Works in the dtype of ``at``, and on
    ``(c, N)``: classes are few, and sums over them then run along the samples.
    """
    loss, like = objective.loss, at.outputs
    w, inverse = objective.sample_weight.to(like), metric.inverse[:, 0].to(like)
    Y = objective.targets.to(like).T.contiguous().T

    def look(f: Tensor) -> tuple[float, Tensor]:
        values, U = loss.value_and_gradient(f.T, Y)
        return float(w @ values), w * U.T.contiguous()

    alpha, b, f = at.alpha.T.contiguous(), at.b, at.outputs.T.contiguous()
    pairs = _Pairs(memory, f)
    quadratic = _dot(alpha, f - b[:, None])
    value, V = look(f)
    value += 0.5 * quadratic
    gradient = V + alpha
    for _ in range(steps):
        objective.begin_product()
        shares, q = pairs.before(gradient)
        R = q * inverse
        da, db = metric.solve(R.T)
        da = da.T.contiguous()
        df, da, db = pairs.after(shares, R - da * inverse, da, db)  # df is K da + db
        slope = -_dot(gradient, df)
        if -slope < tolerance * abs(value):
            break
        image, t = df - db[:, None], 1.0
        linear, square = _dot(alpha, image), _dot(da, image)
        for _ in range(HALVINGS):
            trial = f - t * df
            rest = quadratic - 2 * t * linear + t * t * square
            found, V = look(trial)
            found += 0.5 * rest
            if found <= value + 1e-4 * t * slope:
                break
            t /= 2
        else:
            break
        alpha, b, f, quadratic, value = alpha - t * da, b - t * db, trial, rest, found
        before, gradient = gradient, V + alpha
        change = gradient - before
        if -_dot(df, change) > 0:
            pairs.add(t, df, da, db, change)
    return Ridge(alpha.T, b, f.T)


def _dot(a: Tensor, b: Tensor) -> float:
    return float(torch.dot(a.flatten(), b.flatten()))

"""What a loss is: value, gradient, conjugate, dual scaling, and the exact intercept.

A loss acts on outputs ``F: (R, c)`` and encoded targets ``Y: (R, c)``, row by row; ``R`` counts samples, or
real tokens when targets are per token. Weights and sums over rows belong to the problem:
``F(f) = sum_i w_i L(f_i, y_i)``, so a dual point is ``V = w * U`` with ``U`` a row-wise subgradient and
``F*(t V) = sum_i w_i L*(t u_i, y_i)``.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor

from convexformer.registry import Registry

FOLLOW_STEPS = 2  # of Newton, for an intercept within an iteration


class Loss(ABC):
    """A convex loss ``L(f, y)`` with everything that a certificate needs."""

    name: ClassVar[str]
    curvature: ClassVar[float]
    """Lipschitz constant of the gradient, in the l2 norm of one row of outputs."""
    separable: ClassVar[bool] = False
    """Whether the loss is a sum over outputs."""

    @abstractmethod
    def encode(self, Y: Tensor) -> Tensor:
        """Validate targets and return them as float64 ``(R, c)``."""

    @abstractmethod
    def value(self, F: Tensor, Y: Tensor) -> Tensor:
        """``(R,)`` the loss of each row."""

    @abstractmethod
    def gradient(self, F: Tensor, Y: Tensor) -> Tensor:
        """``(R, c)`` the gradient of each row's loss in its outputs."""

    def value_and_gradient(self, F: Tensor, Y: Tensor) -> tuple[Tensor, Tensor]:
        """Return both, where one helps to find the other."""
        return self.value(F, Y), self.gradient(F, Y)

    @abstractmethod
    def curvatures(self, F: Tensor, Y: Tensor) -> Tensor:
        """``(R, c)`` what makes up each row's Hessian: ``h`` for ``diag(h)``; ``q`` for ``diag(q) - q q^T`` of a softmax."""

    @abstractmethod
    def conjugate(self, U: Tensor, Y: Tensor) -> Tensor:
        """``(R,)`` the conjugate ``L*(u, y) = sup_f <u, f> - L(f, y)``; infinite outside its domain."""

    @abstractmethod
    def best_intercept(self, F: Tensor, Y: Tensor, w: Tensor, start: Tensor) -> Tensor:
        """``(c,)`` the exact minimiser over ``b`` of ``sum_i w_i L(f_i + b, y_i)``.

        At the minimiser the dual variables sum to zero over samples, which is what the dual of an
        unpenalised intercept asks for.
        """

    def intercept_step(self, F: Tensor, Y: Tensor, w: Tensor, slope: Tensor) -> Tensor:
        """``(c,)`` a step, best Newton's, for an intercept at outputs ``F`` with this ``slope: (c,)``."""
        return -slope / (self.curvature * w.sum())

    def follow_intercept(self, F: Tensor, Y: Tensor, w: Tensor, start: Tensor) -> Tensor:
        """Take a few Newton steps from the best intercept of outputs nearby, without a word to the host.

        For iterations on a device. A step that does not make the slope smaller is refused and shortened; what is left
        of the slope vanishes as the outputs settle, and gap checks find the exact minimiser.
        """

        def slope_at(b: Tensor) -> tuple[Tensor, Tensor]:
            slope = (w[:, None] * self.gradient(F + b, Y)).sum(0)
            size = slope.abs()
            return slope, size if self.separable else size.amax()

        b = start
        slope, size = slope_at(b)
        length = torch.ones_like(size)
        for _ in range(FOLLOW_STEPS):
            trial = b + length * self.intercept_step(F + b, Y, w, slope)
            slope_there, size_there = slope_at(trial)
            better = size_there < size
            b, slope = torch.where(better, trial, b), torch.where(better, slope_there, slope)
            size, length = torch.where(better, size_there, size), torch.where(better, 1.0, length / 4)
        return b

    def dual_scale(self, U: Tensor, Y: Tensor, w: Tensor, limit: float) -> float:
        """Return the scale ``t`` with ``|t| <= limit`` for which ``t V`` is a good dual point.

        ``min(1, limit)`` is always legal: the domain of a conjugate is convex and contains zero.
        """
        return min(1.0, limit)

    def check_intercept(self, Y: Tensor, w: Tensor) -> None:  # noqa: B027  (most losses always have a minimiser)
        """Raise when the best intercept is at infinity."""

    def config(self) -> dict[str, float]:
        """Return the parameters needed to build this loss again."""
        return {}

    def __repr__(self) -> str:
        inside = ", ".join(f"{key}={value}" for key, value in self.config().items())
        return f"{type(self).__name__}({inside})"


class SeparableLoss(Loss):
    """A loss that is a sum over outputs; the intercept is then one root a column."""

    separable = True
    differences: ClassVar[bool] = True
    """Whether the gradient is a difference of outputs and targets, and rounds as they do."""

    @abstractmethod
    def curvatures(self, F: Tensor, Y: Tensor) -> Tensor:
        """``(R, c)`` the second derivatives, where they exist."""

    def intercept_step(self, F: Tensor, Y: Tensor, w: Tensor, slope: Tensor) -> Tensor:
        """``-h / h'``, column by column."""
        return -slope / (w[:, None] * self.curvatures(F, Y)).sum(0).clamp_min(1e-300)

    def best_intercept(self, F: Tensor, Y: Tensor, w: Tensor, start: Tensor) -> Tensor:
        """Find the root of each column's derivative by Newton steps kept inside a bracket."""
        W = w[:, None]
        # the difference of outputs and targets is no more exact than they are
        reach = self.curvature * (W * torch.maximum(F.abs(), Y.abs())).sum(0)
        reach, total = (
            (reach, self.curvature * w.sum()) if self.differences else (torch.zeros_like(reach), w.new_zeros(()))
        )

        def slope(b: Tensor) -> tuple[Tensor, Tensor]:
            G = W * self.gradient(F + b, Y)
            return G.sum(0), G.abs().sum(0) + reach + total * b.abs()

        eps = torch.finfo(F.dtype).eps
        b = start.clone()
        h, size = slope(b)
        for _ in range(10):  # near the root, as in an iteration, Newton alone gets there
            if bool((h.abs() <= 4 * eps * size).all()):
                return b
            trial = b + self.intercept_step(F + b, Y, w, h)
            h_trial, size = slope(trial)
            if not bool((h_trial.abs() <= 0.5 * h.abs()).all()):
                break
            b, h = trial, h_trial
        h, size = slope(b)
        low, high = _bracket(lambda b: slope(b)[0], b)
        for _ in range(200):
            settled = (h.abs() <= 4 * eps * size) | (high - low <= 2 * eps * b.abs())
            if bool(settled.all()):
                break
            low, high = torch.where(h < 0, b, low), torch.where(h >= 0, b, high)
            newton = b + self.intercept_step(F + b, Y, w, h)
            inside = (newton > low) & (newton < high)
            b = torch.where(settled, b, torch.where(inside, newton, (low + high) / 2))
            h, size = slope(b)
        return b


class QuadraticConjugateLoss(SeparableLoss):
    """Losses with ``L*(u, y) = 1/2 u^2 + u y`` on their domain: the best dual scale has a closed form."""

    @abstractmethod
    def scale_range(self, U: Tensor) -> tuple[float, float]:
        """Return the scales ``t`` that keep ``t U`` in the domain."""

    @abstractmethod
    def domain(self, U: Tensor, Y: Tensor) -> Tensor:
        """``(R, c)`` True where the conjugate is finite."""

    def conjugate(self, U: Tensor, Y: Tensor) -> Tensor:
        """``1/2 u^2 + u y`` inside the domain."""
        inside = 0.5 * U.square() + U * Y
        return torch.where(self.domain(U, Y), inside, math.inf).sum(1)

    def dual_scale(self, U: Tensor, Y: Tensor, w: Tensor, limit: float) -> float:
        """Maximise ``-F*(t V) = -(t^2/2 sum w u^2 + t sum w u y)`` over the legal ``t``."""
        square = float((w[:, None] * U.square()).sum())
        if square == 0.0:
            return 0.0
        low, high = self.scale_range(U)
        best = -float((w[:, None] * U * Y).sum()) / square
        return max(max(-limit, low), min(best, limit, high))


def _bracket(slope: Callable[[Tensor], Tensor], b: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``low <= root <= high`` for each column of an increasing ``slope``."""
    low, high = b.clone(), b.clone()
    step = 1.0
    for _ in range(1100):
        below, above = slope(low) > 0, slope(high) < 0
        if not bool((below | above).any()):
            break
        low, high = torch.where(below, low - step, low), torch.where(above, high + step, high)
        step *= 2
    return low, high


def real_targets(Y: Tensor, loss: str) -> Tensor:
    """Return real targets ``(R,)`` or ``(R, c)`` as float64 ``(R, c)``."""
    if Y.ndim not in (1, 2):
        raise ValueError(f"Y has shape {tuple(Y.shape)}; the {loss} loss expects (N,) or (N, c).")
    if Y.is_complex():
        raise ValueError("Y holds complex numbers; expected real targets. Complex data is not supported.")
    return (Y[:, None] if Y.ndim == 1 else Y).to(torch.float64)


def signs(Y: Tensor, loss: str) -> Tensor:
    """Return labels -1/+1 as float64 ``(R, 1)``, both of them present."""
    flat = Y[:, 0] if Y.ndim == 2 and Y.shape[1] == 1 else Y
    if flat.ndim != 1:
        raise ValueError(
            f"Y has shape {tuple(Y.shape)}; the {loss} loss expects one label -1 or +1 a sample, (N,). "
            "For several classes use loss='cross_entropy'."
        )
    values = flat.to(torch.float64)
    found = values.unique().tolist()
    if not set(found) <= {-1.0, 1.0}:
        raise ValueError(
            f"Y holds {[round(v, 6) for v in found[:5]]}; the {loss} loss expects labels -1 and +1. "
            "Convert 0/1 labels by 2 * Y - 1."
        )
    if len(found) < 2:
        raise ValueError(f"Y holds one class only ({found[0]:+.0f}); a classifier needs samples of both classes.")
    return values[:, None]


LOSSES: Registry[Loss] = Registry("loss")

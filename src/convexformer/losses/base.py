"""What a loss is: value, gradient, Hessian, conjugate, dual points, and the exact intercept.

A loss acts on outputs ``F: (R, c)`` and encoded targets ``Y: (R, c)``, row by row; ``R`` counts samples, or
real tokens when targets are per token. Weights and sums over rows belong to the objective:
``F(f) = sum_i w_i L(f_i, y_i)``, so a dual point is ``V = w * U`` with ``U`` a row-wise subgradient and
``F*(t V) = sum_i w_i L*(t u_i, y_i)``. Every sum over rows is taken by a :class:`~convexformer.rows.Rows`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar, TypeAlias

import numpy as np
import torch
from torch import Tensor

from convexformer.jit import Kernels
from convexformer.losses.hessian import Hessian
from convexformer.losses.intercept import MANY_OUTPUTS, trust_region_newton
from convexformer.registry import Registry
from convexformer.rows import LOCAL, Rows

Evaluated: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""Value of the weighted sum, intercept ``(c,)``, outputs with it, gradients of the rows and of the sum, each ``(R, c)``."""

BALANCE_STEPS = 30  # of Newton's method, with a fixed Hessian
INEXACT_STEPS = 2  # Newton steps of an inexact intercept


class Loss(ABC):
    """A convex loss ``L(f, y)``, differentiable in ``f``, with everything that a solver and a certificate need.

    A subclass needs ``name``, ``curvature``, :meth:`encode`, :meth:`value`, :meth:`gradient` and :meth:`conjugate`. The
    other methods work for any such loss; override them where the loss knows better.
    """

    name: ClassVar[str]
    curvature: ClassVar[float]
    """Lipschitz constant of the gradient, in the l2 norm of one row of outputs."""
    separable: ClassVar[bool] = False
    """Whether the loss is a sum over outputs."""
    quadratic: ClassVar[bool] = False
    """Whether the loss is ``1/2 ||f - y||^2``."""
    class_labels: ClassVar[bool] = False
    """Whether integer targets are the labels of classes, one output each."""
    kernels: ClassVar[Kernels] = {}
    """Loops that a solve has compiled before it begins (:func:`convexformer.jit.compile_in_time`)."""

    @property
    def nearly_exact_until(self) -> int:
        """Outputs up to which :meth:`inexact_intercept` in one process on a CPU is right to eight digits, and cheaper."""
        return 0

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
    def conjugate(self, U: Tensor, Y: Tensor) -> Tensor:
        """``(R,)`` the conjugate ``L*(u, y) = sup_f <u, f> - L(f, y)``; infinite outside its domain."""

    # ------------------------------------------------------------------ second derivatives

    def hessian(self, F: Tensor, Y: Tensor) -> Hessian | None:
        """Return the Hessians of all rows in a form that solvers exploit; None if the loss has neither."""
        return None

    def hessian_product(self, F: Tensor, Y: Tensor, D: Tensor) -> Tensor:
        """``(R, c)`` each row's Hessian at ``F`` times that row of ``D``.

        Without :meth:`hessian`, central differences ``(grad L(f + t d) - grad L(f - t d)) / 2t`` with
        ``t |d| = eps^(1/3) max(1, |f|)`` in each row, which balances rounding and truncation.
        """
        known = self.hessian(F, Y)
        if known is not None:
            return known.product(D)
        length = D.norm(dim=1, keepdim=True)
        t = torch.finfo(F.dtype).eps ** (1 / 3) * F.norm(dim=1, keepdim=True).clamp_min(1)
        step = t * D / length.clamp_min(torch.finfo(F.dtype).tiny)
        return (self.gradient(F + step, Y) - self.gradient(F - step, Y)) * (length / (2 * t))

    # ------------------------------------------------------------------ the intercept

    def best_intercept(self, F: Tensor, Y: Tensor, w: Tensor, start: Tensor, rows: Rows = LOCAL) -> Tensor:
        """``(c,)`` the exact minimiser over ``b`` of ``sum_i w_i L(f_i + b, y_i)``; ``start`` if outputs are not finite.

        At the minimiser the dual variables sum to zero over samples, which is what the dual of an
        unpenalised intercept asks for. For any smooth convex loss: Newton's method in ``c`` variables, in a trust region.
        """
        if not bool(torch.isfinite(rows.total(F.sum()))):
            return start

        def value(b: Tensor) -> Tensor:
            return rows.dot(w, self.value(F + b, Y))

        def slope(b: Tensor) -> tuple[Tensor, Tensor]:
            U = self.gradient(F + b, Y)
            return rows.weighted(w, U), rows.weighted(w, U.abs()).sum()

        def hessian(b: Tensor) -> Tensor | Callable[[Tensor], Tensor]:
            X = F + b

            def product(d: Tensor) -> Tensor:
                return rows.weighted(w, self.hessian_product(X, Y, d.expand_as(F)))

            if len(b) > MANY_OUTPUTS:
                return product
            return torch.stack([product(e) for e in torch.eye(len(b), dtype=b.dtype, device=b.device)])

        return trust_region_newton(value, slope, hessian, start, lambda: rows.bound(F) + rows.bound(Y))

    def intercept_step(self, F: Tensor, Y: Tensor, w: Tensor, slope: Tensor, rows: Rows = LOCAL) -> Tensor:
        """``(c,)`` a step, best Newton's, for an intercept at outputs ``F`` with this ``slope: (c,)``."""
        return -slope / (self.curvature * rows.sum(w))

    def inexact_intercept(self, F: Tensor, Y: Tensor, w: Tensor, start: Tensor, rows: Rows = LOCAL) -> Tensor:
        """Take a few Newton steps from the best intercept of outputs nearby, without a host sync.

        For iterations on a device. A step that does not make the slope smaller is refused and shortened; what is left
        of the slope vanishes as the outputs settle, and gap checks find the exact minimiser.
        """

        def slope_at(b: Tensor) -> tuple[Tensor, Tensor]:
            slope = rows.weighted(w, self.gradient(F + b, Y))
            size = slope.abs()
            return slope, size if self.separable else size.amax()

        b = start
        slope, size = slope_at(b)
        length = torch.ones_like(size)
        for _ in range(INEXACT_STEPS):
            trial = b + length * self.intercept_step(F + b, Y, w, slope, rows)
            slope_there, size_there = slope_at(trial)
            better = size_there < size
            b, slope = torch.where(better, trial, b), torch.where(better, slope_there, slope)
            size, length = torch.where(better, size_there, size), torch.where(better, 1.0, length / 4)
        return b

    def evaluate_nearly(self, F: Tensor, Y: Tensor, w: Tensor, start: Tensor, rows: Rows = LOCAL) -> Evaluated | None:
        """Return :meth:`inexact_intercept` and all that belongs to it from one compiled call, where there is one.

        That is the value of the weighted sum, the intercept, outputs with it, and the gradients of the rows and of the sum.
        """
        return None

    def evaluate_exactly(self, F: Tensor, Y: Tensor, w: Tensor, start: Tensor, rows: Rows = LOCAL) -> Evaluated | None:
        """The same with :meth:`best_intercept` and balanced gradients."""
        return None

    def check_intercept(self, Y: Tensor, w: Tensor, rows: Rows = LOCAL) -> None:  # noqa: B027  (most losses have a minimiser)
        """Raise when the best intercept is at infinity."""

    # ------------------------------------------------------------------ dual points

    def dual_scale(self, U: Tensor, Y: Tensor, w: Tensor, limit: float, rows: Rows = LOCAL) -> float:
        """Return the scale ``t`` with ``|t| <= limit`` for which ``t V`` is a good dual point.

        ``min(1, limit)`` is always legal: the domain of a conjugate is convex and contains zero.
        """
        return min(1.0, limit)

    def balance(self, U: Tensor, Y: Tensor, w: Tensor, rows: Rows = LOCAL) -> Tensor:
        """``(R, c)`` a point of the conjugate's domain near ``U`` with ``sum_i w_i u_i = 0`` up to rounding.

        That is what the dual of an unpenalised intercept asks for. ``U`` is any point of the domain; the farther from zero
        its sum ``r``, the looser the result is as a dual point; if the sum is rounding already the result is ``U``. For a
        domain of which nothing is known: ``(1 - a) u_i + a grad L(b, y_i)``, a mixture with the dual point of constant
        outputs ``b`` whose own sum is ``-(1 - a) r / a``; Newton's method finds ``b`` for a small ``a``, and ``a = 1`` with
        the best constant always serves.
        """
        r = imbalance(U, w, rows, 64.0)
        if r is None:
            return U
        F, zero = torch.zeros_like(U), U.new_zeros(U.shape[1])
        best = self.best_intercept(F, Y, w, zero, rows)
        unit = torch.eye(len(zero), dtype=U.dtype, device=U.device)
        H = torch.stack([rows.weighted(w, self.hessian_product(F + best, Y, e.expand_as(F))) for e in unit])
        inverse = torch.linalg.pinv(0.5 * (H + H.T), hermitian=True)
        reach = rows.weighted(w, self.gradient(F + best, Y).abs()).sum()
        for share in (1e-2, 0.1, 0.5):  # how far the constant's sum is moved, as a fraction of its moduli
            a = float((r.abs().sum() / (r.abs().sum() + share * reach)).clamp_max(1.0))
            b = best
            for _ in range(BALANCE_STEPS):
                C = self.gradient(F + b, Y)
                left = (1 - a) * r + a * rows.weighted(w, C)
                found = (1 - a) * U + a * C
                if imbalance(found, w, rows, 64.0) is None:
                    return found
                b = b - inverse @ (left / a)
        return self.gradient(F + best, Y)

    # ------------------------------------------------------------------ files

    def config(self) -> dict[str, float]:
        """Return the parameters needed to build this loss again."""
        return {}

    def __repr__(self) -> str:
        inside = ", ".join(f"{key}={value}" for key, value in self.config().items())
        return f"{type(self).__name__}({inside})"


def imbalance(U: Tensor, w: Tensor, rows: Rows, slack: float = 4.0) -> Tensor | None:
    """Return ``r = sum_i w_i u_i``, shape ``(c,)``; None if it is at most ``slack * eps`` times the sum of the moduli."""
    if rows.in_process and not U.is_cuda:  # the same in NumPy, whose calls cost less than the work of small problems
        weights, gradients = w.numpy(), U.detach().numpy()
        sums = weights @ gradients
        noise = slack * float(np.finfo(sums.dtype).eps * (weights @ np.abs(gradients)).sum())
        return None if float(np.abs(sums).max()) <= noise else torch.from_numpy(sums)
    r = rows.weighted(w, U)
    noise = slack * float(torch.finfo(U.dtype).eps * rows.weighted(w, U.abs()).sum())
    return None if float(r.abs().max()) <= noise else r


LOSSES: Registry[Loss] = Registry("loss")

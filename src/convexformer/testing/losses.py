"""The contract of a loss."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from convexformer.data.tokens import as_tensor
from convexformer.losses import Loss, QuadraticConjugateLoss
from convexformer.testing.tools import at_most, equal, normals, require, same_shape


def check_loss(loss: Loss, Y: Any, seed: int = 0) -> None:
    """Gradient, Hessian products, Fenchel-Young, dual scaling, exact intercept and balanced dual points of a loss.

    ``Y`` holds targets as a user gives them, every class among them; a dozen rows are plenty.
    """
    encoded = loss.encode(as_tensor(Y, "Y"))
    draw = normals(seed, encoded)
    R, c = encoded.shape
    w = 0.1 + draw((R,)).abs()
    for scale in (0.1, 1.0, 20.0):
        F, G, D = (scale * draw((R, c)) for _ in range(3))
        value, U, U2 = loss.value(F, encoded), loss.gradient(F, encoded), loss.gradient(G, encoded)
        same_shape("value", value, (R,))
        same_shape("gradient", U, (R, c))
        same_shape("conjugate", loss.conjugate(U, encoded), (R,))
        size = 1 + float(value.abs().max()) + float((U * F).abs().max())
        h = 1e-6 / scale
        slope = (loss.value(F + h * D, encoded) - loss.value(F - h * D, encoded)) / (2 * h)
        equal("finite differences of value and <gradient, D>", slope, (U * D).sum(1), 1e-5 * size)
        rise, run = (U - U2).norm(dim=1), (F - G).norm(dim=1)
        at_most("|gradient(F) - gradient(G)| against curvature |F - G|", rise, loss.curvature * run, 1e-9 * size)
        _check_hessian(loss, F, D, encoded, h, size)
        equality = value + loss.conjugate(U, encoded)
        equal("L(f) + L*(u) and <u, f> at u = gradient(f)", equality, (U * F).sum(1), 1e-9 * size)
        for V in (0 * U, U2, 0.3 * U2, 0.6 * U + 0.4 * U2):
            other = loss.conjugate(V, encoded)
            require(bool(torch.isfinite(other).all()), "the conjugate is infinite between two gradients, or at zero")
            at_most("<u, f> against L(f) + L*(u)", (V * F).sum(1), value + other, 1e-9 * size)
        _check_dual_scale(loss, U, encoded, w)
        for start in (torch.zeros_like(F[0]), scale * draw((c,))):
            b = loss.best_intercept(F, encoded, w, start)
            left = (w[:, None] * loss.gradient(F + b, encoded)).sum(0)
            equal("sum_i w_i gradient_i at the best intercept, and zero,", left, 0 * left, 1e-9 * float(w.sum()))
            for point in (loss.gradient(F + b, encoded), U, 0.3 * U2):
                _check_balance(loss, point, encoded, w)


def _check_hessian(loss: Loss, F: Tensor, D: Tensor, Y: Tensor, h: float, size: float) -> None:
    """Finite differences of the gradient and ``hessian_product``, away from kinks; ``<D, H D> >= 0``, and the diagonal."""
    product = loss.hessian_product(F, Y, D)
    same_shape("hessian_product", product, tuple(F.shape))
    change = (loss.gradient(F + h * D, Y) - loss.gradient(F - h * D, Y)) / (2 * h)
    jump = loss.hessian_product(F + h * D, Y, D) - loss.hessian_product(F - h * D, Y, D)
    smooth = jump.abs().amax(1) < 1e-4 * size
    require(bool(smooth.float().mean() > 0.5), "hessian_product jumps nearly everywhere")
    equal("finite differences of gradient and hessian_product", change[smooth], product[smooth], 1e-4 * size)
    at_most("zero against <D, hessian_product(D)>", torch.zeros(len(F)), (D * product).sum(1), 1e-6 * size)
    if (known := loss.hessian(F, Y)) is not None:
        unit = torch.eye(F.shape[1], dtype=F.dtype, device=F.device)
        diagonal = torch.stack([known.product(e.expand_as(F))[:, k] for k, e in enumerate(unit)], 1)
        equal("diagonal of the Hessian and its products with unit vectors", known.diagonal(), diagonal, 1e-9)


def _check_balance(loss: Loss, U: Tensor, Y: Tensor, w: Tensor) -> None:
    """A balanced dual point sums to zero and is in the domain; balancing it again leaves it unchanged."""
    found = loss.balance(U, Y, w)
    require(bool(torch.isfinite(loss.conjugate(found, Y)).all()), "balance leaves the domain of the conjugate")
    left, size = (w[:, None] * found).sum(0), float((w[:, None] * U).abs().sum()) + float(w.sum())
    equal("sum_i w_i u_i of a balanced dual point, and zero,", left, 0 * left, 1e-12 * size)
    again = loss.balance(found, Y, w)
    equal("a balanced dual point and itself balanced again", again, found, 1e-9)


def _check_dual_scale(loss: Loss, U: Tensor, Y: Tensor, w: Tensor) -> None:
    """``dual_scale`` is feasible, no worse than the unscaled point, and optimal on a grid where it has a closed form."""

    def dual(t: float) -> float:
        return -float((w * loss.conjugate(t * U, Y)).sum())

    for limit in (0.0, 0.3, 1.0, 3.0, math.inf):
        t = loss.dual_scale(U, Y, w, limit)
        at_most("|dual_scale| against its limit", abs(t), limit, 0.0)
        got, reach = dual(t), min(limit, 3.0)
        require(math.isfinite(got), f"dual_scale {t} with limit {limit} leaves the domain of the conjugate")
        tried: Iterable[float] = (min(1.0, limit),)
        if isinstance(loss, QuadraticConjugateLoss):
            tried = torch.linspace(-reach, reach, 61, dtype=torch.float64).tolist()
        best = max(dual(s) for s in tried)
        at_most(f"dual value of a grid against that of dual_scale (limit {limit})", best, got, 1e-9 * (1 + abs(got)))

"""Approximate optimality along a flow: the conditions C1 to C3 of appendix A.5, and alignment (definition 5.1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from torch import Tensor

from convexformer.margin.data import Sequences

DIRECTION_SUPPORT = (
    0.02  # entries or singular values of the direction above this fraction of the largest count as nonzero
)


@final
@dataclass(frozen=True)
class Residuals:
    """Series of residuals; all tend to zero where the theory holds. NaN while the direction does not separate.

    ``stationarity`` (C1): the distance of ``A^T lam`` to the subdifferential of the norm, at the direction with its entries
    or singular values below 2% of the largest set to zero; ``dropped`` is how far that moves it (the paper's epsilon').
    ``feasibility`` (C2): by how much a margin of the direction is below one (zero by definition once it separates).
    ``complementarity`` (C3): the largest ``lam_il (margin_il - 1)``.
    """

    stationarity: np.ndarray
    dropped: np.ndarray
    feasibility: np.ndarray
    complementarity: np.ndarray


def approximate_kkt(norm: str, data: Sequences, direction: Tensor, multipliers: Tensor) -> Residuals:
    """Residuals of ``direction: (..., d, d)`` with ``multipliers: (..., n, L-1)`` for the SVM of that norm.

    The Frobenius SVM is taken in its smooth form ``1/2 ||W||_F^2``, as the multipliers of the combined flow are.
    """
    operator = data.operator()
    margins = operator.apply(direction)
    M = operator.adjoint(multipliers)
    if norm == "frobenius":
        distance = torch.linalg.vector_norm(direction - M, dim=(-2, -1))
        dropped = torch.zeros_like(distance)
    elif norm == "diagonal":
        b, m = (torch.diagonal(part, dim1=-2, dim2=-1) for part in (direction, M))
        on = b.abs() > DIRECTION_SUPPORT * b.abs().amax(-1, keepdim=True)
        distance = torch.linalg.vector_norm(torch.where(on, b.sign(), m.clamp(-1, 1)) - m, dim=-1)
        dropped = torch.linalg.vector_norm(torch.where(on, torch.zeros_like(b), b), dim=-1)
    else:
        distance, dropped = _nuclear_distance(direction, M)
    slack = (multipliers * (margins - 1)).flatten(-2).amax(-1)
    short = (1 - margins).flatten(-2).amax(-1).clamp_min(0)
    return Residuals(*(series.numpy() for series in (distance, dropped, short, slack)))


def _nuclear_distance(W: Tensor, M: Tensor) -> tuple[Tensor, Tensor]:
    """``||M - I||_F`` for the nearest ``I = U V^T + E``, ``E`` orthogonal to ``W`` on both sides and at most one."""
    bad = ~torch.isfinite(W).flatten(-2).all(-1) | ~torch.isfinite(M).flatten(-2).all(-1)
    W, M = (torch.where(bad[..., None, None], torch.zeros_like(part), part) for part in (W, M))
    U, sizes, Vh = torch.linalg.svd(W)
    on = (sizes > DIRECTION_SUPPORT * sizes[..., :1]).to(W.dtype)
    turned = U.mT @ M @ Vh.mT  # in the basis of W the subdifferential is diag(1 on the support) + E
    outside = turned * (1 - on)[..., :, None] * (1 - on)[..., None, :]
    left, values, right = torch.linalg.svd(outside)
    nearest = (left * values.clamp_max(1)[..., None, :]) @ right + torch.diag_embed(on)
    distance = torch.linalg.vector_norm(turned - nearest, dim=(-2, -1))
    dropped = torch.linalg.vector_norm(sizes * (1 - on), dim=-1)
    return tuple(torch.where(bad, torch.full_like(part, torch.nan), part) for part in (distance, dropped))  # type: ignore[return-value]


def misalignment(data: Sequences, K: Tensor, Q: Tensor) -> Tensor:
    """How far keys and queries ``(..., d, d_e)`` are from ``K = U_K D_K V^T, Q = U_Q D_Q V^T`` (definition 5.1).

    There each optimal token ``x`` is a left singular vector of K, each query ``z`` one of Q, and ``Q^T z`` runs along
    ``K^T x``. Returned is the largest sine, over sequences, of the angles between ``K K^T x`` and ``x``, ``Q Q^T z`` and
    ``z``, ``K Q^T z`` and ``x``; zero when aligned. A factor of zero is aligned with everything.
    """
    rows = torch.arange(data.shape[0])
    x, z = data.X[rows, data.optimal].mT, data.z.mT  # (d, n)
    pairs = ((K @ (K.mT @ x), x), (Q @ (Q.mT @ z), z), (K @ (Q.mT @ z), x))
    return torch.stack([_sine(a, b) for a, b in pairs]).amax((0, -1))


def _sine(a: Tensor, b: Tensor) -> Tensor:
    """Sines of the angles between the columns of ``a: (..., d, n)`` and ``b: (d, n)``; zero for a zero column of ``a``."""
    size = a.norm(dim=-2)
    unit = a / size.clamp_min(torch.finfo(a.dtype).tiny)[..., None, :]
    other = b / b.norm(dim=-2)
    return (unit - (unit * other).sum(-2, keepdim=True) * other).norm(dim=-2)

"""The polar of a ReLU layer from below, by ascent over directions, and from above without any cells.

``g(u) = |T^T relu(rows u)|`` on the unit sphere, ``rows: (H, p)``, ``T: (H, q)``; the norm is l2, or the maximum norm.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

FLOAT64_TINY = torch.finfo(torch.float64).tiny


def responses(rows: Tensor, T: Tensor, U: Tensor) -> Tensor:
    """``(m, q)`` the vectors ``T^T relu(rows u_j)``."""
    return (rows @ U.T).clamp_min(0).T @ T


def output_directions(R: Tensor, outer: str) -> tuple[Tensor, Tensor]:
    """Values ``(m,)`` and the best unit output weights ``(m, q)`` for responses ``R: (m, q)``."""
    if outer == "l2":
        values = R.norm(dim=1)
        return values, R / values.clamp_min(FLOAT64_TINY)[:, None]
    values, column = R.abs().max(dim=1)
    sign = torch.sign(R.gather(1, column[:, None]))
    return values, torch.zeros_like(R).scatter_(1, column[:, None], sign)


def ascend(
    rows: Tensor, T: Tensor, U: Tensor, outer: str, steps: int, guard: Callable[[], None] | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Climb from unit directions ``U: (m, p)``, all at once; return values ``(m,)``, directions and output weights.

    The step is that of the power method, ``u <- rows^T D T v`` normalised, damped where it would lower the value: within
    a cell ``g`` is convex, across cells it is not. ``guard`` is called before every step and may raise.
    """
    share = U.new_ones(len(U))
    U = U / U.norm(dim=1, keepdim=True).clamp_min(FLOAT64_TINY)
    values, V = output_directions(responses(rows, T, U), outer)
    for _ in range(steps):
        if guard is not None:
            guard()
        gate = (rows @ U.T > 0).to(U.dtype)
        G = (gate * (T @ V.T)).T @ rows
        aim = G / G.norm(dim=1, keepdim=True).clamp_min(FLOAT64_TINY)
        trial = U + share[:, None] * (aim - U)
        trial = trial / trial.norm(dim=1, keepdim=True).clamp_min(FLOAT64_TINY)
        new, W = output_directions(responses(rows, T, trial), outer)
        better = new > values
        U = torch.where(better[:, None], trial, U)
        V = torch.where(better[:, None], W, V)
        values = torch.where(better, new, values)
        share = torch.where(better, (2 * share).clamp_max(1.0), share / 4)
        if bool((share < 1e-6).all()):
            break
    return values, U, V


def bound_without_cells(rows: Tensor, T: Tensor, outer: str) -> float:
    """Return an upper bound on the largest ``|T^T relu(rows u)|`` over unit ``u``, for any number of rows.

    For every positive diagonal ``S``, ``|T^T relu(rows u)| <= sigma_max(S^-1 T) |S relu(rows u)| <= sigma_max(S^-1 T)
    sigma_max(S rows)``; and since ``relu(a) = (a + |a|)/2``, half of it may be replaced by half of ``sigma_max(rows^T T)``.
    A few powers of ``|T_h| / |rows_h|`` are tried as ``S``; with a maximum norm each column of ``T`` is bounded by itself.
    """
    if outer == "l1":
        return max((_bound(rows, column[:, None]) for column in T.T), default=0.0)
    return _bound(rows, T)


def _bound(rows: Tensor, T: Tensor) -> float:
    sizes, targets = rows.norm(dim=1), T.norm(dim=1)
    used = (sizes > 0) & (targets > 0)
    if not bool(used.any()):
        return 0.0
    rows, T, ratio = rows[used], T[used], targets[used] / sizes[used]
    crossed = _top(rows.T @ T)
    best = torch.inf
    for power in (0.0, 0.25, 0.5, 0.75):
        S = ratio.pow(power)[:, None]
        best = min(best, _top(T / S) * _top(S * rows))
    return min(best, 0.5 * (crossed + best))


def _top(A: Tensor) -> float:
    """``sigma_max`` by the Gram matrix of the short side, rounded up."""
    gram = A.T @ A if A.shape[0] >= A.shape[1] else A @ A.T
    return float(torch.linalg.eigvalsh(gram)[-1].clamp_min(0).sqrt()) * (1 + 1e-12)

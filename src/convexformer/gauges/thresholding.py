"""The derivative of singular-value thresholding."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def thresholding_derivative(Y: Tensor, step: float) -> Callable[[Tensor], Tensor]:
    """Return ``D -> P'(Y) D`` for ``P(U diag(s) V^T) = U diag(f) V^T``, ``f = (s - step)_+``, slice by slice.

    In the singular bases ``D`` becomes ``C``, and ``P'`` multiplies its symmetric part by ``(f_i - f_j) / (s_i - s_j)`` and
    its skew part by ``(f_i + f_j) / (s_i + s_j)`` (Lewis and Sendov 2001); beyond the short side ``s_j = 0``.
    Only rows and columns of the r values above ``step`` are not zero, so that a product costs ``O(p q r)``.
    """
    if Y.shape[-2] < Y.shape[-1]:
        across = thresholding_derivative(Y.mT, step)
        return lambda D: across(D.mT).mT
    U, s, Vh = torch.linalg.svd(Y, full_matrices=False)
    tiny = torch.finfo(Y.dtype).tiny
    f = (s - step).clamp_min(0)
    on = (f > 0).to(Y.dtype)
    r = int(on.sum(-1).max())
    Ur, Vrh = U[..., :r], Vh[..., :r, :]
    sr, fr, on_r = (x[..., :r, None] for x in (s, f, on))
    s, f, on = (x[..., None, :] for x in (s, f, on))
    even = torch.where(on > 0, on_r, fr / torch.where(on > 0, 1.0, sr - s).clamp_min(tiny))
    odd = on_r * (fr + f) / (sr + s).clamp_min(tiny)
    own, swapped = (even + odd) / 2, (even - odd) / 2  # (r, q): what C_ij and C_ji give to entry ij
    beyond = (fr / sr.clamp_min(tiny)).mT
    low = (1 - on).mT  # rows of values below the step; the others are in the first r rows already

    def product(D: Tensor) -> Tensor:
        DV = D @ Vrh.mT
        rows, columns = (Ur.mT @ D) @ Vh.mT, U.mT @ DV  # (r, q) and (q, r) of C
        top = own * rows + swapped * columns.mT
        rest = low * (own.mT * columns + swapped.mT * rows.mT)
        return Ur @ (top @ Vh) + (U @ (rest - beyond * columns) + beyond * DV) @ Vrh

    return product

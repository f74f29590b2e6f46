"""The l1 norm: one group per entry."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from convexformer.gauges.base import DualMatrix, Norm, Polar, WeightsLike, as_tensor


@final
class L1Norm(Norm):
    """``g(Z) = sum |Z_j|`` over every entry; its atoms are the signed unit vectors, its polar the largest entry.

    On the diagonal ``b`` of ``W = diag(b)`` it is the nuclear norm of ``W`` (Sheen et al. 2024, the l1-SVM of section 4).
    """

    def value(self, Z: WeightsLike) -> Tensor:
        """Sum of absolute values."""
        return as_tensor(Z).abs().sum()

    def prox(self, Z: Tensor, step: float | Tensor) -> Tensor:
        """Soft threshold."""
        return torch.sign(Z) * (Z.abs() - step).clamp_min(0)

    def polar(self, M: DualMatrix) -> Polar:
        """``max |M_j|``: exact."""
        return Polar(float(as_tensor(M).abs().max()))

    def atom(self, M: Tensor) -> Tensor:
        """Return the signed unit vector of the largest entry."""
        flat = M.flatten()
        out = torch.zeros_like(flat)
        best = int(flat.abs().argmax())
        out[best] = 1.0 if float(flat[best]) >= 0 else -1.0
        return out.view_as(M)

    def __repr__(self) -> str:
        return "L1Norm()"

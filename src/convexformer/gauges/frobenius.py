"""The Frobenius norm: one group that holds every weight."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from convexformer.gauges.base import DualMatrix, HilbertBlock, Norm, Polar, WeightsLike, as_tensor
from convexformer.gauges.spectral import shrinkage, unit_of


@final
class FrobeniusNorm(Norm):
    """``g(Z) = ||Z||_F``; its atoms are all matrices of Frobenius norm one, and it is its own polar.

    The norm that training the combined attention matrix ``W`` minimises under margin constraints (Tarzanagh et al.
    2023, "Transformers as support vector machines"; the comparison of Sheen et al. 2024, section 4.2).
    """

    def value(self, Z: WeightsLike) -> Tensor:
        """``||Z||_F``."""
        Z = as_tensor(Z)
        unit = unit_of(Z)
        return unit * torch.linalg.vector_norm(Z / unit)

    def prox(self, Z: Tensor, step: float | Tensor) -> Tensor:
        """Shrink the norm by ``step``."""
        return Z * shrinkage(self.value(Z), step)

    def polar(self, M: DualMatrix) -> Polar:
        """``||M||_F``: exact."""
        return Polar(float(self.value(as_tensor(M))))

    def atom(self, M: Tensor) -> Tensor:
        """``M / ||M||_F``."""
        return M / self.value(M).clamp_min(torch.finfo(M.dtype).tiny)

    def hilbert_blocks(self) -> list[HilbertBlock]:
        """One norm."""
        return [HilbertBlock(1.0, squared=False)]

    def __repr__(self) -> str:
        return "FrobeniusNorm()"

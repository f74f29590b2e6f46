"""Group norms over tokens."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from convexformer.gauges.base import DualMatrix, Norm, Polar, WeightsLike, as_tensor
from convexformer.gauges.spectral import shrinkage, unit_of
from convexformer.registry import one_of


@final
class GroupNorm(Norm):
    """Sum of l2 norms of the groups of ``Z: (..., d, c)``.

    ``groups="class_token"``: one group per token and class, ``g(Z) = sum_k sum_l ||Z[k, :, l]||_2``, the gauge of
    convex attention with an l1 output layer (Ergen et al. 2022, theorem 2; theorem 1 when c = 1, theorem 3 with a
    leading gate axis). Its atoms are ``e_k (x) w (x) +-e_l`` with ``||w||_2 <= 1``: one token, one class, one direction.

    ``groups="token"``: one group per token, all classes together, ``g(Z) = sum_k ||Z[k]||_F``.
    """

    def __init__(self, groups: str = "class_token") -> None:
        self.groups = one_of("groups", groups, ("class_token", "token"))
        self.column_groups = self.groups == "class_token"
        self._axes = (-2,) if groups == "class_token" else (-2, -1)

    def norms(self, Z: Tensor) -> Tensor:
        """Return the l2 norm of each group, with the summed axes kept as size one."""
        return torch.linalg.vector_norm(Z, dim=self._axes, keepdim=True)

    def value(self, Z: WeightsLike) -> Tensor:
        """Sum of the group norms."""
        Z = as_tensor(Z)
        unit = unit_of(Z)
        return unit * self.norms(Z / unit).sum()

    def prox(self, Z: Tensor, step: float | Tensor) -> Tensor:
        """Shrink each group's norm by ``step``."""
        return Z * shrinkage(self.norms(Z), step)

    def slice_polars(self, M: Tensor) -> Tensor:
        """Return the largest group norm in each slice."""
        return self.norms(M).amax((-2, -1))

    def polar(self, M: DualMatrix) -> Polar:
        """Return the largest group norm: exact, so it may certify."""
        M = as_tensor(M)
        unit = unit_of(M)
        return Polar(float(unit * self.norms(M / unit).max()))

    def atom(self, M: Tensor) -> Tensor:
        """Return the normalised group of largest norm."""
        norms = self.norms(M)
        best = torch.zeros_like(norms).flatten()
        best[norms.argmax()] = 1.0
        return M * best.view_as(norms) / norms.max().clamp_min(torch.finfo(M.dtype).tiny)

    def __repr__(self) -> str:
        return f"GroupNorm({self.groups!r})"

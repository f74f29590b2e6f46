"""A pooled bilinear operator on weights whose columns lie in a known subspace for each block: linear, and small."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from convexformer.operators.base import Operator, times


@final
class RowSpaceOperator(Operator):
    """``A(Z)`` for ``Z_b = P_b^T Y_b`` with fixed ``P_b: (r, p)``: ``f_i = sum_{b,j} phi_i[b, j]^T Y_b[j]``.

    ``features: (N, B, r, l)`` are what terms with the rows of ``P`` leave behind before they meet their outputs;
    ``Y: (B, r, l c)``. For orthonormal rows ``Y_b`` has the singular values of ``Z_b``.
    """

    def __init__(self, features: Tensor, n_outputs: int) -> None:
        N, B, r, width = features.shape
        self.features = features.flatten(1)
        self.inner_shape = (B, r, width)
        self.weight_shape = (B, r, width * n_outputs)
        self.output_shape = (N, n_outputs)

    @property
    def like(self) -> Tensor:
        """The features."""
        return self.features

    def apply(self, Z: Tensor) -> Tensor:
        """One product."""
        return times(self.features, Z.reshape(self.features.shape[1], -1))

    def adjoint(self, V: Tensor) -> Tensor:
        """One product."""
        return (V.T @ self.features).T.reshape(self.weight_shape)

    def to(self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> RowSpaceOperator:
        """Move the features."""
        moved = self.features.to(device=device, dtype=dtype)
        return RowSpaceOperator(moved.view(-1, *self.inner_shape), self.output_shape[1])

"""Several operators whose outputs add up; their weights lie side by side in one vector."""

from __future__ import annotations

import math
from typing import final

import torch
from torch import Tensor

from convexformer.operators.base import Operator


@final
class SumOperator(Operator):
    """``A Z = sum_k A_k Z_k`` with ``Z`` the flattened ``Z_k`` one after the other."""

    def __init__(self, parts: list[Operator]) -> None:
        self.parts = parts
        self.sizes = [math.prod(part.weight_shape) for part in parts]
        self.weight_shape = (sum(self.sizes),)
        self.output_shape = parts[0].output_shape

    @property
    def like(self) -> Tensor:
        """A tensor of the first part."""
        return self.parts[0].like

    def apply(self, Z: Tensor) -> Tensor:
        """Add the outputs."""
        pieces = Z.split(self.sizes)
        return sum(part.apply(piece.view(part.weight_shape)) for part, piece in zip(self.parts, pieces, strict=True))  # type: ignore[return-value]

    def adjoint(self, V: Tensor) -> Tensor:
        """Put the adjoints side by side."""
        return torch.cat([part.adjoint(V).flatten() for part in self.parts])

    def to(self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> SumOperator:
        """Move every part."""
        return SumOperator([part.to(device=device, dtype=dtype) for part in self.parts])

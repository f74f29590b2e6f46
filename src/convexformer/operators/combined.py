"""Several operators whose outputs add up; their weights lie side by side in one vector."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, final

import torch
from torch import Tensor

from convexformer.operators.base import Operator
from convexformer.operators.kernel import RepresenterDual, StackedDual
from convexformer.rows import LOCAL, Rows

if TYPE_CHECKING:
    from convexformer.operators.base import DualMatrix


LOOKED_AT = 1 << 12  # weights from which parts that are zero are looked for on a CPU; a look would sync a GPU


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

    @property
    def data_size(self) -> int:
        """That of all parts."""
        return sum(part.data_size for part in self.parts)

    def blocks(self) -> Sequence[Operator]:
        """The parts; of sums among them, theirs."""
        return [block for part in self.parts for block in part.blocks()]

    def apply(self, Z: Tensor) -> Tensor:
        """Add the outputs of the parts that are not zero."""
        pairs = list(zip(self.parts, Z.split(self.sizes), strict=True))
        if not Z.is_cuda and Z.numel() >= LOOKED_AT:
            pairs = [(part, piece) for part, piece in pairs if bool(piece.any())] or pairs[:1]
        return sum(part.apply(piece.view(part.weight_shape)) for part, piece in pairs)  # type: ignore[return-value]

    def adjoint(self, V: Tensor) -> Tensor:
        """Put the adjoints side by side."""
        return torch.cat([part.adjoint(V).flatten() for part in self.parts])

    def statistics(self) -> tuple[Tensor, ...] | None:
        """Those of all parts, one after the other."""
        found = [part.statistics() for part in self.parts]
        return None if any(own is None for own in found) else tuple(x for own in found if own is not None for x in own)

    def of_statistics(self, parts: tuple[Tensor, ...]) -> SumOperator:
        """Give each part its own."""
        left, made = list(parts), []
        for part in self.parts:
            count = len(part.statistics() or ())
            made.append(part.of_statistics(tuple(left[:count])))
            left = left[count:]
        return SumOperator(made)

    def dual_matrix(self, V: Tensor, rows: Rows = LOCAL) -> DualMatrix:
        """Put the dual matrices side by side; a tensor where all are."""
        found: list[Tensor | RepresenterDual] = []
        for part in self.parts:
            own = part.dual_matrix(V, rows)
            if isinstance(own, StackedDual):
                own = own if any(isinstance(p, RepresenterDual) for p in own.parts) else own.dense()
            if isinstance(own, (RepresenterDual, StackedDual)):
                found.append(own)  # type: ignore[arg-type]
            else:
                found.append((own if isinstance(own, Tensor) else own.dense()).flatten())
        if all(isinstance(part, Tensor) for part in found):
            return torch.cat([part for part in found if isinstance(part, Tensor)])
        return StackedDual(found)

    def to(self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> SumOperator:
        """Move every part."""
        return SumOperator([part.to(device=device, dtype=dtype) for part in self.parts])

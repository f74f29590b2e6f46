"""A penalty times a number: what makes penalties of different scales comparable in a sum."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

from torch import Tensor

from convexformer.gauges.base import DualMatrix, HilbertBlock, Penalty, Polar, Proximal, WeightsLike


@final
class ScaledPenalty(Penalty):
    """``s g(Z)`` for a penalty ``g`` and ``s > 0``: the same as ``g`` at ``s beta``; its polar is ``1/s`` that of ``g``."""

    def __init__(self, part: Penalty, scale: float) -> None:
        self.part, self.scale = part, float(scale)
        self.sparse, self.indicator_conjugate = part.sparse, part.indicator_conjugate
        self.sync_free, self.of_data = part.sync_free, part.of_data

    @property
    def proximal(self) -> bool:
        """Whether the penalty inside has a prox."""
        return self.part.proximal

    def value(self, Z: WeightsLike) -> Tensor:
        """``s g(Z)``."""
        return self.scale * self.part.value(Z)

    def prox(self, Z: Tensor, step: float | Tensor) -> Tensor:
        """That of ``g`` with a step ``s`` times as long."""
        if not isinstance(self.part, Proximal):
            raise TypeError(f"{self.part!r} has no prox.")
        return self.part.prox(Z, self.scale * step)

    def prox_derivative(self, Z: Tensor, step: float) -> Callable[[Tensor], Tensor]:
        """That of ``g`` with a step ``s`` times as long."""
        return self.part.prox_derivative(Z, self.scale * step)

    def support(self, Z: Tensor) -> int:
        """That of ``g``."""
        return self.part.support(Z)

    def max_dual_scale(self, M: DualMatrix, beta: float, *, quick: bool = False) -> tuple[float, Polar]:
        """That of ``g`` at ``s beta``."""
        limit, polar = self.part.max_dual_scale(M, self.scale * beta, quick=quick)
        return limit, Polar(polar.value / self.scale, polar.kind, polar.confidence)

    def conjugate(self, M: DualMatrix, beta: float) -> float:
        """That of ``g`` at ``s beta``."""
        return self.part.conjugate(M, self.scale * beta)

    def critical_beta(self, M: DualMatrix, curvature: Callable[[], float]) -> Polar:
        """That of ``g`` over ``s``."""
        polar = self.part.critical_beta(M, curvature)
        return Polar(polar.value / self.scale, polar.kind, polar.confidence)

    def block_values(self, Z: WeightsLike) -> Tensor:
        """Those of ``g``, times ``s``."""
        return self.scale * self.part.block_values(Z)

    def hilbert_blocks(self) -> list[HilbertBlock] | None:
        """Those of ``g``, heavier."""
        inside = self.part.hilbert_blocks()
        return None if inside is None else [HilbertBlock(self.scale * b.weight, b.squared) for b in inside]

    def __repr__(self) -> str:
        return f"{self.scale:.4g} * {self.part!r}"

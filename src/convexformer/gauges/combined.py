"""Several penalties side by side, for heads whose outputs add up."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import final

import torch
from torch import Tensor

from convexformer.gauges.base import DualMatrix, Penalty, Polar, PolarKind, Proximal, WeightsLike, as_tensor

# kinds from the most to the least reliable: a sum has the worst kind of its parts
TRUST = (PolarKind.EXACT, PolarKind.UPPER, PolarKind.PROBABILISTIC, PolarKind.LOWER)


@final
class SumPenalty(Penalty):
    """``g(Z) = sum_k g_k(Z_k)`` for the flattened ``Z_k`` one after the other; polars combine by their maximum."""

    def __init__(self, parts: list[Penalty], shapes: list[tuple[int, ...]]) -> None:
        self.parts, self.shapes = parts, shapes
        self.sizes = [math.prod(shape) for shape in shapes]

    @property
    def sparse(self) -> bool:  # type: ignore[override]
        """True when every part is: only then is ``Z = 0`` optimal at some beta."""
        return all(part.sparse for part in self.parts)

    @property
    def sync_free(self) -> bool:  # type: ignore[override]
        """True when every part is."""
        return all(part.sync_free for part in self.parts)

    @property
    def indicator_conjugate(self) -> bool:  # type: ignore[override]
        """True when every part's is."""
        return all(part.indicator_conjugate for part in self.parts)

    def value(self, Z: WeightsLike) -> Tensor:
        """Add the values."""
        return torch.stack([part.value(piece) for part, piece in self._split(Z)]).sum()

    def prox(self, Z: Tensor, step: float | Tensor) -> Tensor:
        """Apply each prox to its part."""
        pieces = []
        for part, piece in self._split(Z):
            if not isinstance(part, Proximal):
                raise TypeError(f"{part!r} has no prox, so this sum has none.")
            pieces.append(part.prox(piece, step).flatten())
        return torch.cat(pieces)

    def prox_derivative(self, Z: Tensor, step: float) -> Callable[[Tensor], Tensor]:
        """Apply each derivative to its part."""
        products = [part.prox_derivative(piece, step) for part, piece in self._split(Z)]

        def product(D: Tensor) -> Tensor:
            pieces = zip(products, self._split(D), strict=True)
            return torch.cat([own(piece).flatten() for own, (_, piece) in pieces])

        return product

    def support(self, Z: Tensor) -> int:
        """Add the supports."""
        return sum(part.support(piece) for part, piece in self._split(Z))

    def max_dual_scale(self, M: DualMatrix, beta: float, *, quick: bool = False) -> tuple[float, Polar]:
        """Return the smallest limit and the largest polar, with the kind of the least trustworthy part."""
        found = [part.max_dual_scale(piece, beta, quick=quick) for part, piece in self._split(M)]
        polars = [polar for _, polar in found]
        kind = max((polar.kind for polar in polars), key=TRUST.index)
        confidence = 1 - sum(1 - polar.confidence for polar in polars)
        worst = Polar(max(polar.value for polar in polars), kind, confidence)
        return min(limit for limit, _ in found), worst

    def conjugate(self, M: DualMatrix, beta: float) -> float:
        """Add the conjugates."""
        return sum(part.conjugate(piece, beta) for part, piece in self._split(M))

    def critical_beta(self, M: DualMatrix, curvature: Callable[[], float]) -> Polar:
        """Return the largest of the parts' values."""
        return max(
            (part.critical_beta(piece, curvature) for part, piece in self._split(M)), key=lambda polar: polar.value
        )

    def _split(self, Z: WeightsLike | DualMatrix) -> list[tuple[Penalty, Tensor]]:
        pieces = as_tensor(Z).split(self.sizes)
        return [(part, piece.view(shape)) for part, piece, shape in zip(self.parts, pieces, self.shapes, strict=True)]

    def __repr__(self) -> str:
        return f"SumPenalty({self.parts})"

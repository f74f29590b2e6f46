"""All margins of an attention matrix at once, and the adjoint that the dual needs."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from convexformer.operators import Operator


@final
class MarginOperator(Operator):
    """``(A W)_il = p_il^T W z_i`` with ``p_il = x_i,opt - x_il``; ``p: (n, L-1, d)``, ``z: (n, d)``, ``W: (d, d)``.

    One row of ``A`` is the rank-one matrix ``p_il z_i^T``; the ``n (L-1) x d^2`` matrix is never formed.
    """

    def __init__(self, differences: Tensor, queries: Tensor) -> None:
        n, rest, d = differences.shape
        if tuple(queries.shape) != (n, d):
            raise ValueError(f"queries {tuple(queries.shape)} do not match differences {(n, rest, d)}.")
        self.differences = differences
        self.queries = queries
        self.weight_shape = (d, d)
        self.output_shape = (n, rest)

    @property
    def like(self) -> Tensor:
        """The differences."""
        return self.differences

    def apply(self, Z: Tensor) -> Tensor:
        """``(n, L-1)`` margins, or ``(..., n, L-1)`` for a batch of matrices: O(n d^2 + n L d) each."""
        return ((self.queries @ Z.mT)[..., None, :] @ self.differences.mT)[..., 0, :]

    def adjoint(self, V: Tensor) -> Tensor:
        """``sum_il V_il p_il z_i^T``, also for a batch ``(..., n, L-1)``."""
        return (V[..., None, :] @ self.differences)[..., 0, :].mT @ self.queries

    def to(self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> MarginOperator:
        """Move differences and queries."""
        return MarginOperator(
            self.differences.to(device=device, dtype=dtype), self.queries.to(device=device, dtype=dtype)
        )

    def gram(self, rows: Tensor) -> Tensor:
        """``A A^T`` restricted to flat ``rows``: ``(p_a . p_b) (z_i(a) . z_i(b))``, O(k^2 d)."""
        p, z = self._pairs(rows)
        return (p @ p.T) * (z @ z.T)

    def dense_rows(self, rows: Tensor) -> Tensor:
        """``(k, d^2)`` the rows ``vec(p z^T)`` themselves, for few of them or small ``d``."""
        p, z = self._pairs(rows)
        return (p[:, :, None] * z[:, None, :]).flatten(1)

    def row_norms(self) -> Tensor:
        """``(n, L-1)`` Frobenius norms ``||p_il|| ||z_i||`` of the rows."""
        return self.differences.norm(dim=2) * self.queries.norm(dim=1, keepdim=True)

    def _pairs(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        rest = self.output_shape[1]
        return self.differences.flatten(0, 1)[rows], self.queries[torch.div(rows, rest, rounding_mode="floor")]

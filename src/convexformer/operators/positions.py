"""An output for every token: weights of their own for each pair of token positions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import final

import torch
from torch import Tensor

from convexformer.operators.base import Operator
from convexformer.operators.dense import DenseOperator


@final
class PositionOperator(Operator):
    """``(A Z)[i, r] = sum_k Z[r, k]^T x_ik`` for tokens ``X: (N, s, d)`` and ``Z: (s, s, d, c)``.

    Attention with an output per token (Ergen et al. 2022, appendix A.7). Rows are the real tokens of all samples, sample by
    sample; masked tokens are zero in ``X`` and have no row. A product is one batched matrix product, O(N s^2 d c).
    """

    def __init__(self, X: Tensor, mask: Tensor | None, n_outputs: int) -> None:
        self.X, self.mask, self.n_outputs = X, mask, n_outputs
        N, s, d = X.shape
        self.weight_shape = (s, s, d, n_outputs)
        # indices rather than the mask: selecting by a mask syncs with the host
        self._real = None if mask is None else mask.flatten().nonzero()[:, 0]
        self.output_shape = (N * s if self._real is None else len(self._real), n_outputs)

    @property
    def like(self) -> Tensor:
        """The tokens."""
        return self.X

    @property
    def data_size(self) -> int:
        """The tokens, once for each position."""
        return self.X.numel() * self.X.shape[1]

    def apply(self, Z: Tensor) -> Tensor:
        """One product with the flattened tokens for each position."""
        N, s, d = self.X.shape
        grid = torch.matmul(self.X.reshape(N, s * d), Z.reshape(s, s * d, self.n_outputs)).movedim(0, 1)  # (N, s, c)
        rows = grid.reshape(N * s, self.n_outputs)
        return rows if self._real is None else rows.index_select(0, self._real)

    def adjoint(self, V: Tensor) -> Tensor:
        """The same products backwards; masked tokens get zeros."""
        N, s, d = self.X.shape
        grid = self._scatter(V).view(N, s, self.n_outputs)
        return torch.matmul(self.X.reshape(N, s * d).T, grid.movedim(1, 0)).reshape(self.weight_shape)

    def positions(self) -> Iterator[tuple[Operator, Tensor]]:
        """Yield, for each position r, the map from ``Z[r]`` to its outputs, and the rows that these are."""
        N, s, d = self.X.shape
        flat, rows = self.X.reshape(N, s * d), torch.arange(self.output_shape[0], device=self.X.device)
        where = self._scatter(rows[:, None], fill=-1).view(N, s)
        whole = DenseOperator(flat, (s, d), self.n_outputs)  # shared: solvers keep what they compute of it
        for r in range(s):
            own = where[:, r] >= 0
            part = whole if bool(own.all()) else DenseOperator(flat[own], (s, d), self.n_outputs)
            yield part, where[own, r]

    def compressed(self, Y: Tensor, w: Tensor) -> tuple[Operator, Tensor] | None:
        """The triangular factor of the weighted samples, where there are more of them than features and none is masked."""
        N, s, d = self.X.shape
        if self.mask is not None or 2 * s * d > N:
            return None
        weights = w.view(N, s)
        if not bool((weights == weights[:, :1]).all()):
            return None
        root = weights[:, :1].sqrt()
        Q, T = torch.linalg.qr(root * self.X.reshape(N, s * d))
        targets = Q.T @ (root * Y.reshape(N, s * self.n_outputs))
        return PositionOperator(T.reshape(-1, s, d), None, self.n_outputs), targets.reshape(-1, self.n_outputs)

    def to(self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> PositionOperator:
        """Move the tokens."""
        mask = None if self.mask is None else self.mask.to(device=device)
        return PositionOperator(self.X.to(device=device, dtype=dtype), mask, self.n_outputs)

    def _scatter(self, V: Tensor, fill: int = 0) -> Tensor:
        """``(N s, c)`` from rows of real tokens."""
        if self._real is None:
            return V.contiguous()
        return V.new_full((self.X.shape[0] * self.X.shape[1], V.shape[1]), fill).index_copy(0, self._real, V)

"""An output for every token: weights of their own for each pair of token positions."""

from __future__ import annotations

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
        self.output_shape = (N * s if mask is None else int(mask.sum()), n_outputs)

    @property
    def like(self) -> Tensor:
        """The tokens."""
        return self.X

    def apply(self, Z: Tensor) -> Tensor:
        """One product with the flattened tokens for each position."""
        N, s, d = self.X.shape
        grid = torch.matmul(self.X.reshape(N, s * d), Z.reshape(s, s * d, self.n_outputs)).movedim(0, 1)  # (N, s, c)
        return grid.reshape(N * s, self.n_outputs) if self.mask is None else grid[self.mask]

    def adjoint(self, V: Tensor) -> Tensor:
        """The same products backwards; masked tokens get zeros."""
        N, s, d = self.X.shape
        grid = V.reshape(N, s, self.n_outputs) if self.mask is None else self._scatter(V)
        return torch.matmul(self.X.reshape(N, s * d).T, grid.movedim(1, 0)).reshape(self.weight_shape)

    def positions(self) -> list[tuple[Operator, Tensor]]:
        """Return, for each position r, the map from ``Z[r]`` to its outputs, and the rows that these are."""
        N, s, d = self.X.shape
        flat, rows = self.X.reshape(N, s * d), torch.arange(self.output_shape[0], device=self.X.device)
        where = rows.view(N, s) if self.mask is None else self._scatter(rows[:, None], fill=-1)[..., 0]
        whole = DenseOperator(flat, (s, d), self.n_outputs)  # shared: solvers keep what they compute of it
        found: list[tuple[Operator, Tensor]] = []
        for r in range(s):
            own = where[:, r] >= 0
            part = whole if bool(own.all()) else DenseOperator(flat[own], (s, d), self.n_outputs)
            found.append((part, where[own, r]))
        return found

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
        """``(N, s, c)`` from rows of real tokens."""
        assert self.mask is not None
        grid = V.new_full((*self.mask.shape, V.shape[1]), fill)
        grid[self.mask] = V
        return grid

"""Gated self-attention: ``f_i = sum_g (D_g . (X_i W1 X_i^T)) X_i W2``."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import final

import torch
from torch import Tensor

from convexformer.operators.base import long_product
from convexformer.operators.bilinear import DENSE_WEIGHTS, kept_rows, row_grid
from convexformer.operators.budget import sample_chunks, worth_storing
from convexformer.operators.gated_matrix import GatedMatrixOperator
from convexformer.operators.gates import AttentionRule, Gates, all_gates
from convexformer.operators.moments import Axis, Moments
from convexformer.rows import LOCAL, Rows
from convexformer.threads import nearest_factors

TRIPLES_SHARE = 8
"""Sums of products of three channels are kept up to this fraction of the budget for what is stored: dense weights then meet
one product."""


@final
class GatedSelfAttentionOperator(GatedMatrixOperator):
    """``f_i = sum_g (D_g(X_i) . (X_i W1 X_i^T)) X_i W2`` with gates ``D_g(X) = 1{X H_g X^T >= 0}``, ``H: (B, d, d)``.

    ``Z_g[(k, a), (l, b)] = W1[a, k] W2[l, b]``. ``pool: (N, s)`` averages the output tokens (rows ``1/length``, float64);
    None keeps them. Pooled, the output is ``sum_t (e_t^T W1 x_t) x_t W2`` with the gated tokens ``e = D^T diag(pool) X``,
    of the size of the tokens for each gate: pairs of tokens meet only there, and they are kept where the memory budget
    has room.
    Operations of a product with one vector: ``2 N s d^2`` a gate, ``2 N s^2 d`` for its gated tokens; without pooling
    ``2 N s (s + d) (d + c)``. Of a formed block, pooled: ``N d^3 (s + c)``.
    """

    def __init__(
        self,
        X: Tensor,
        gates: Gates,
        n_outputs: int,
        pool: Tensor | None = None,
        keep: Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(X, gates, n_outputs, dtype)
        self.pool, self.keep, self.pooled = pool, keep, pool is not None
        self.weight_shape = (gates.n_gates, self.d**2, self.d * n_outputs)
        self.kept = None if keep is None else keep.flatten().nonzero()[:, 0]  # places, known before any iteration
        rows = self.N if self.pooled else self.N * self.s if self.kept is None else len(self.kept)
        self.output_shape = (rows, n_outputs)
        self._stored: dict[int, Tensor] = {}

    def to(
        self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> GatedSelfAttentionOperator:
        """Move tokens and gates; wider numbers are made chunk by chunk."""
        X, kind = self._moved(device, dtype)
        pool, keep = (None if own is None else own.to(device=device) for own in (self.pool, self.keep))
        return GatedSelfAttentionOperator(X, self.gates.to(device), self.c, pool, keep, kind)

    # ------------------------------------------------------------------ factors

    def _forward(self, U: Tensor, b: int) -> Tensor:
        """``sum_t (e_t^T W1_j x_t) x_t``, shape ``(N, m, l)``."""
        m, parts = len(U), []
        for part in self._parts(m):
            X = self._tokens(part)
            scores = self._left(U, X).mul_(self._gated_tokens(b, part)[:, :, None]).sum(3)  # (n, t, m)
            parts.append(scores.mT @ X)
        return torch.cat(parts)

    def _outputs(self, U: Tensor, V: Tensor, b: int, forward: Tensor | None) -> Tensor:
        """``(N, r, c)``."""
        m = len(U)
        if forward is not None:
            return (forward.flatten(1) @ V.reshape(m * self.d, self.c))[:, None]
        out = U.new_empty((self.N, self.s, self.c))
        for part in self._parts(m):
            values = self._values(V, self._tokens(part))  # (n, m, t, c)
            out[part] = self._scores(U, b, part).flatten(2) @ values.flatten(1, 2)
        return out

    def matvec(self, D: Tensor, V: Tensor, b: int) -> Tensor:
        """``W1``-gradients ``sum_i X^T (D . (R W2^T X^T)) X``, stored as vec_F."""
        m = len(V)
        out = V.new_zeros((self.d, m * self.d))  # (k, m*a)
        for part in self._parts(m):
            X = self._tokens(part)
            if self.pooled:
                weight = X @ (D[part] @ V.reshape(m * self.d, self.c).T).view(-1, m, self.d).mT  # (n, t, m)
                S = weight[..., None] * self._gated_tokens(b, part)[:, :, None]  # (n, t, m, a)
            else:
                scores = self._grid(D)[part] @ self._values(V, X).flatten(1, 2).mT  # (n, o, m*t)
                scores = scores.unflatten(2, (m, self.s)).mul_(self._gate(b, part)[:, :, None])
                S = (scores.permute(0, 3, 2, 1).flatten(1, 2) @ X).view(-1, self.s, m, self.d)
            out += long_product(X.flatten(0, 1), S.flatten(0, 1).flatten(1))
        return out.view(self.d, m, self.d).transpose(0, 1).reshape(m, -1)

    def sketch(self, D: Tensor, b: int, left: Tensor, right: Tensor) -> Tensor | None:
        """For ``W1_j = right_j left_j^T`` a token costs ``2 d`` operations: ``sum_t (e_t . right_j) (left_j . x_t) x_t``."""
        if not self.pooled:
            return None
        k = len(left)
        out = left.new_zeros((k * self.d, self.c))
        for part in sample_chunks(self.N, self.s * (2 * k + 2 * self.d) + k * self.d, self.like):
            X = self._tokens(part)
            scores = (X @ left.T).mul_(self._gated_tokens(b, part) @ right.T)  # (n, t, k)
            out.addmm_((scores.mT @ X).flatten(1).T, D[part])
        return out.view(k, -1)

    def _backward(self, D: Tensor, U: Tensor, b: int, forward: Tensor | None) -> Tensor:
        """``W2``-gradients ``sum_i X^T (D . (X W1 X^T))^T R``."""
        m = len(U)
        if forward is not None:
            return long_product(forward.flatten(1), D).view(m, -1)
        out = U.new_zeros((self.d, m * self.c))
        for part in self._parts(m):
            Q = self._scores(U, b, part).permute(0, 3, 2, 1).flatten(1, 2) @ self._grid(D)[part]  # (n, t*m, c)
            out.addmm_(self._tokens(part).flatten(0, 1).T, Q.view(-1, m * self.c))
        return out.view(self.d, m, self.c).transpose(0, 1).reshape(m, -1)

    def _left(self, U: Tensor, X: Tensor) -> Tensor:
        """``W1_j x_t``, shape ``(n, t, m, a)``; ``U_j`` is ``W1_j^T`` row by row."""
        m = len(U)
        wide = U.view(m, self.d, self.d).transpose(0, 1).reshape(self.d, m * self.d)  # (k, m*a)
        return (X.flatten(0, 1) @ wide).view(len(X), self.s, m, self.d)

    def _values(self, V: Tensor, X: Tensor) -> Tensor:
        """``x_t W2_j``, shape ``(n, m, t, c)``."""
        m = len(V)
        wide = V.view(m, self.d, self.c).transpose(0, 1).reshape(self.d, m * self.c)
        return (X.flatten(0, 1) @ wide).view(len(X), self.s, m, self.c).transpose(1, 2)

    def _scores(self, U: Tensor, b: int, part: slice) -> Tensor:
        """``D . (X W1_j X^T)``, shape ``(n, o, m, t)``."""
        X = self._tokens(part)
        left = self._left(U, X).permute(0, 3, 2, 1).flatten(2)  # (n, a, m*t)
        return (X @ left).unflatten(2, (len(U), self.s)).mul_(self._gate(b, part)[:, :, None])

    def _gated_tokens(self, b: int, part: slice) -> Tensor:
        """``D^T diag(pool) X``, shape ``(n, t, a)``: pairs of tokens, once for all terms of a gate."""
        assert self.pool is not None
        if b in self._stored:
            return self._stored[b][part]
        if worth_storing(self.n_blocks * self.X.numel(), self.like):
            stored = self.like.new_empty(self.X.shape)
            for chunk in sample_chunks(self.N, 3 * self.s * (self.s + self.d), self.like):
                stored[chunk] = self._gated_tokens_of(b, chunk)
            self._stored[b] = stored
            return self._stored[b][part]
        return self._gated_tokens_of(b, part)

    def _gated_tokens_of(self, b: int, part: slice) -> Tensor:
        assert self.pool is not None
        return self._gate(b, part).mT @ (self.pool[part][..., None].to(self.like) * self._tokens(part))

    # ------------------------------------------------------------------ dense weights

    def apply_dense(self, Z: Tensor) -> Tensor:
        """Through the products ``X[t, k] X[t, l]``, ``k <= l``: O(N s d^3 c / 2) a gate, O(N d^3 (s + c)) by triples."""
        Z = Z.reshape(-1, *self.weight_shape[-2:])
        if (features := self._features) is not None:
            wide = torch.cat([self._folded(block).transpose(0, 1).flatten(0, 1) for block in Z])
            return (wide.T.contiguous() @ features.T).T  # for few outputs far faster than features @ wide
        out = Z.new_zeros((self.N, 1 if self._by_triples else self.s, self.c))
        for b in range(self.n_blocks):
            wide = self._folded(Z[b])  # (kl, a, c)
            triples: Tensor | None = None
            for part, P in self._pair_chunks():
                if self._by_triples:
                    triples = self._triples(b, part, P, triples)
                    out[part, 0] += triples[: len(P)].flatten(1) @ wide.transpose(0, 1).flatten(0, 1)
                else:
                    Y = self._gate(b, part) @ (P @ wide.flatten(1))  # (n, o, a*c)
                    out[part] += (self._tokens(part)[..., None, :] @ Y.unflatten(2, (self.d, self.c)))[:, :, 0]
        if self._by_triples:
            return out[:, 0]
        return self._rows(out) if self.pool is None else (self.pool[:, None].to(out) @ out)[:, 0]

    def _sums(self, V: Tensor, blocks: range) -> Tensor:
        """``M_g[(k, a), (l, c)] = sum_{i,t} X_i[t, k] X_i[t, l] sum_o D_g[o, t] X_i[o, a] R_i[o, c]``, at the same cost.

        For ``k <= l``: ``(g, c, a*kl)`` by triples, else ``(g, kl, a*c)``. The products ``P`` are the same for all gates.
        """
        pairs = len(self._triangle[0])
        if (features := self._features) is not None:
            return (V.T @ features).view(self.c, self.n_blocks, -1).transpose(0, 1)[blocks.start : blocks.stop]
        by_triples, R = self._by_triples, nearest_factors(V)
        shape = (self.c, self.d * pairs) if by_triples else (pairs, self.d * self.c)
        half = V.new_zeros((len(blocks), *shape))
        triples: Tensor | None = None
        for part, P in self._pair_chunks():
            rows = None if by_triples else self._tokens(part)[..., None] * self._token_rows(V, part)[:, :, None]
            for own, b in zip(half, blocks, strict=True):
                if rows is None:
                    triples = self._triples(b, part, P, triples)
                    own.addmm_(R[part].T, triples[: len(P)].flatten(1))
                else:
                    Q = self._gate(b, part).mT @ rows.flatten(2)  # (n, t, a*c)
                    own.addmm_(P.flatten(0, 1).T, Q.flatten(0, 1))
        return half

    def _block_of(self, sums: Tensor) -> Tensor:
        """Both halves, ``k <= l`` and ``k >= l``."""
        d, c = self.d, self.c
        half = sums.reshape(c, d, -1).permute(2, 1, 0) if self._by_triples else sums.view(-1, d, c)  # (kl, a, c)
        out, start = sums.new_empty((d, d, d, c)), 0  # (k, a, l, c)
        for k in range(d):
            own = half[start : start + d - k]  # (l, a, c)
            out[k, :, k:] = own.transpose(0, 1)
            out[k:, :, k] = own
            start += d - k
        return out.view(self.weight_shape[1:])

    @property
    def forming_work(self) -> float:
        """Of all blocks."""
        return self.N * self.n_blocks * self._block_operations

    @property
    def block_cost(self) -> float:
        """The operations of a block over those of a product with one vector."""
        return self._block_operations / self._vector_operations

    def moments(self, w: Tensor, rows: Rows = LOCAL, *, centred: bool = False) -> Moments | None:
        """Those of the tokens, as if every gate were open."""
        X = self.X.flatten(0, 1)
        shared = Axis(self.d, rows.total((X.T @ X).to(self.like))[None])
        return Moments((shared, shared), (shared, Axis(self.c)))

    def dense_pays(self, m: int) -> bool:
        """Compare the operations of both ways."""
        return self.size <= DENSE_WEIGHTS and m * self._vector_operations > self.n_blocks * self._block_operations

    @property
    def _vector_operations(self) -> float:
        """Multiplications a sample of a product with one vector."""
        s, d, c = self.s, self.d, self.c
        return s * d * (d + 2) if self.pooled else s * (s + d) * (d + c)

    @property
    def _block_operations(self) -> float:
        """Multiplications a sample of forming one block."""
        s, d, c = self.s, self.d, self.c
        if not self._by_triples:
            return s * d * c * (d * d / 2 + s)
        return d**3 * (c if self._keeps_triples else s + c) / 2

    @property
    def _by_triples(self) -> bool:
        """Pooled outputs are linear in ``sum_t e_t[a] X[t, k] X[t, l]``; worth forming for many tokens."""
        return self.pooled and ((self.c > 1 and self.s >= 16) or self._keeps_triples)

    @property
    def _keeps_triples(self) -> bool:
        """Whether those sums are few enough to be kept."""
        numbers = self.N * self.n_blocks * self.d**2 * (self.d + 1) // 2
        return self.pooled and not self.like.is_cuda and worth_storing(TRIPLES_SHARE * numbers, self.like)

    @cached_property
    def _features(self) -> Tensor | None:
        """``(N, g a kl)`` the sums of all gates, where they are few: ``A`` is then one product."""
        if not self._keeps_triples:
            return None
        out = self.like.new_empty((self.N, self.n_blocks, self.d * len(self._triangle[0])))
        triples: Tensor | None = None
        for part, P in self._pair_chunks():
            for b in range(self.n_blocks):
                triples = self._triples(b, part, P, triples)
                out[part, b] = triples[: len(P)].flatten(1)
        return out.flatten(1)

    def _triples(self, b: int, part: slice, P: Tensor, buffer: Tensor | None) -> Tensor:
        """``(n, a, kl)``, written into the buffer: fresh memory of this size costs as much as the product."""
        if buffer is None:
            buffer = P.new_empty((len(P), self.d, P.shape[2]))
        torch.bmm(nearest_factors(self._gated_tokens(b, part)).mT, P, out=buffer[: len(P)])
        return buffer

    def _folded(self, Z: Tensor) -> Tensor:
        """``(kl, a, c)``: the two entries of ``Z: (p, q)`` that meet the same product ``X[t, k] X[t, l]``, added."""
        row, col = self._triangle
        blocks = Z.reshape(self.d, self.d, self.d, self.c).transpose(1, 2)  # (k, l, a, c)
        return blocks[row, col] + (row != col).to(Z.dtype)[:, None, None] * blocks[col, row]

    @cached_property
    def _triangle(self) -> tuple[Tensor, Tensor]:
        """The pairs ``k <= l`` of channels."""
        row, col = torch.triu_indices(self.d, self.d, device=self.X.device)
        return row, col

    def _pair_chunks(self) -> Iterator[tuple[slice, Tensor]]:
        """Chunks of samples with ``X[t, k] X[t, l]``, shape ``(n, t, kl)``, all in the same memory."""
        buffer: Tensor | None = None
        for part in self._wide_parts():
            X = self._tokens(part)
            if buffer is None:
                buffer = X.new_empty((len(X), self.s, len(self._triangle[0])))
            P, start = buffer[: len(X)], 0
            for k in range(self.d):
                stop = start + self.d - k
                torch.mul(X[:, :, k : k + 1], X[:, :, k:], out=P[:, :, start:stop])
                start = stop
            yield part, nearest_factors(P, in_place=True)

    def _wide_parts(self) -> list[slice]:
        pairs = len(self._triangle[0])
        each = (self.s + self.d) * pairs if self._by_triples else self.s * (pairs + 3 * self.d * self.c)
        return sample_chunks(self.N, each, self.like, buffered=True)

    # ------------------------------------------------------------------ pieces

    def _rows(self, grid: Tensor) -> Tensor:
        """Only the output rows that exist."""
        return grid[:, 0] if self.pooled else kept_rows(grid, self.kept)

    def _parts(self, m: int) -> list[slice]:
        pairs = 0 if self.pooled else 2 * self.s
        gates = 2 * self.s if not self._stored else 0
        return sample_chunks(self.N, self.s * ((m + 2) * (self.d + self.c + pairs) + gates), self.like)

    def _grid(self, D: Tensor) -> Tensor:
        """Rows back to ``(N, s, c)``."""
        return row_grid(D, self.kept, self.N, self.s)

    def _token_rows(self, D: Tensor, part: slice) -> Tensor:
        """The same for some samples; pooled rows spread over their tokens."""
        if self.pool is not None:
            return self.pool[part][..., None].to(D) * D[part][:, None]
        return self._grid(D)[part]


def attention_gates(X: Tensor, H: Tensor) -> Tensor:
    """``(N, B, s, s)`` bool, ``1{X H X^T >= 0}`` decided in float64; ``H: (B, d, d)``."""
    return all_gates(X, AttentionRule(H))

"""Self-attention: ``f_i = (D . (X W1 X^T)) X W2``, through Gram matrices where there is no gate."""

from __future__ import annotations

from functools import cached_property
from typing import final

import torch
from torch import Tensor

from convexformer.operators.bilinear import BilinearOperator, kept_rows, row_grid, sample_chunks
from convexformer.operators.lowrank import LowRank
from convexformer.operators.moments import Axis, Moments
from convexformer.rows import LOCAL, Rows

DENSE_WEIGHTS = 1 << 24  # Z is formed inside an iteration if it has at most this many entries


@final
class SelfAttentionOperator(BilinearOperator):
    """Linear self-attention ``f_i = L_i W1 G_i W2`` with ``L: (N, r, a)`` and Gram matrices ``G: (N, k, k)``.

    ``L`` holds the tokens (r = s), or the mean token when the output is pooled (r = 1): then the tokens themselves are
    read once, and the number of tokens leaves the cost. ``Z[(k, a), (l, b)] = W1[a, k] W2[l, b]``: rows are vec_F(W1),
    columns vec_C(W2). ``keep: (N, r)`` marks the output rows that exist.
    """

    def __init__(self, L: Tensor, G: Tensor, n_outputs: int, keep: Tensor | None = None) -> None:
        self.L, self.G, self.keep = L, G, keep
        self._memo: tuple[Tensor, list[Tensor]] | None = None
        self.N, self.r, self.a = L.shape
        self.k, self.c = G.shape[1], n_outputs
        self.weight_shape = (self.k * self.a, self.k * self.c)
        self.kept = None if keep is None else keep.flatten().nonzero()[:, 0]  # places, known before any iteration
        rows = self.N * self.r if self.kept is None else len(self.kept)
        self.output_shape = (rows, n_outputs)

    @property
    def like(self) -> Tensor:
        """The tokens."""
        return self.L

    def to(
        self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> SelfAttentionOperator:
        """Move tokens and Gram matrices."""
        keep = None if self.keep is None else self.keep.to(device=device)
        L, G = (part.to(device=device, dtype=dtype) for part in (self.L, self.G))
        return SelfAttentionOperator(L, G, self.c, keep)

    # ------------------------------------------------------------------ factors

    def apply_factors(self, Z: LowRank) -> Tensor:
        """Contract in the cheaper order: rows first (few rows, as when pooled), outputs first, or through a dense ``Z``."""
        m = Z.n_terms
        U, V = Z.U.view(m, self.k, self.a), Z.V.view(m, self.k, self.c)
        if self.r < self.c:
            mixed = [self._rows_first(U, part) for part in self._parts(m)]
            self._memo = (Z.U, mixed)  # the gradient in V at this point starts with the same products
            out = torch.cat([T @ V.reshape(m * self.k, self.c) for T in mixed])
        else:
            out = torch.cat([self.L[part] @ self._outputs_first(U, V, part) for part in self._parts(m)])
        return kept_rows(out, self.kept)

    def matvec(self, D: Tensor, V: Tensor, b: int = 0) -> Tensor:
        """``sum_i G_i V_j S_i^T`` with ``S_i = L_i^T D_i``."""
        m, R = V.shape[0], self._grid(D)
        V = V.view(m, self.k, self.c)
        out = V.new_zeros((m * self.k, self.a))
        for part in self._parts(m):
            if self.r < self.c:
                Y = R[part] @ V.reshape(m * self.k, self.c).T  # (n, r, m*k)
                Y = self._times_gram(Y, part)
                out += Y.flatten(0, 1).T @ self.L[part].flatten(0, 1)
            else:
                S = self.L[part].mT @ R[part]  # (n, a, c)
                P = self.G[part] @ V.transpose(0, 1).reshape(self.k, m * self.c)  # (n, k, m*c)
                P = P.view(-1, self.k, m, self.c).permute(2, 1, 0, 3).reshape(m * self.k, -1)
                out += P @ S.transpose(1, 2).reshape(-1, self.a)
        return out.view(m, self.k * self.a)

    def rmatvec(self, D: Tensor, U: Tensor, b: int = 0) -> Tensor:
        """``sum_i G_i U_j S_i`` with ``S_i = L_i^T D_i``."""
        m, R = U.shape[0], self._grid(D)
        known = self._memo[1] if self._memo is not None and self._memo[0] is U else None
        U = U.view(m, self.k, self.a)
        out = U.new_zeros((m * self.k, self.c))
        for number, part in enumerate(self._parts(m)):
            if self.r < self.c:
                T = self._rows_first(U, part) if known is None else known[number]
                out += T.flatten(0, 1).T @ R[part].flatten(0, 1)
            else:
                S = self.L[part].mT @ R[part]  # (n, a, c)
                T = (U.reshape(m * self.k, self.a) @ S).view(-1, m, self.k, self.c)
                out += torch.einsum("nlk,nmkc->mlc", self.G[part], T).reshape(m * self.k, self.c)
        return out.view(m, self.k * self.c)

    # ------------------------------------------------------------------ dense weights

    def apply_dense(self, Z: Tensor) -> Tensor:
        """``L_i sum_{k<=l} G_i[k, l] (Z^(k,l) + Z^(l,k))``: O(N k^2 a c / 2), since Gram matrices are symmetric."""
        blocks = Z.view(self.k, self.a, self.k, self.c).transpose(1, 2)  # (k, l, a, c)
        row, col = self._triangle
        wide = blocks[row, col] + (row != col).to(Z.dtype)[:, None, None] * blocks[col, row]
        wide = wide.flatten(1)
        parts = sample_chunks(self.N, self.a * self.c)
        out = torch.cat([self.L[part] @ (self._half[part] @ wide).view(-1, self.a, self.c) for part in parts])
        return kept_rows(out, self.kept)

    def adjoint(self, V: Tensor) -> Tensor:
        """``sum_i G_i (x) (L_i^T V_i)``: O(N k^2 a c / 2)."""
        R, (row, col) = self._grid(V), self._triangle
        half = V.new_zeros((len(row), self.a * self.c))
        for part in sample_chunks(self.N, self.a * self.c):
            half.addmm_(self._half[part].T, (self.L[part].mT @ R[part]).flatten(1))
        out = V.new_empty((self.k, self.k, self.a, self.c))
        out[row, col] = out[col, row] = half.view(-1, self.a, self.c)
        return out.transpose(1, 2).reshape(self.weight_shape)

    @cached_property
    def _triangle(self) -> tuple[Tensor, Tensor]:
        """Row and column of the upper triangle of a Gram matrix."""
        row, col = torch.triu_indices(self.k, self.k, device=self.G.device)
        return row, col

    @cached_property
    def _half(self) -> Tensor:
        """``(N, k(k+1)/2)`` the upper triangles."""
        row, col = self._triangle
        return self.G[:, row, col]

    def moments(self, w: Tensor, rows: Rows = LOCAL, *, centred: bool = False) -> Moments | None:
        """Those of the output rows ``L_i`` and of the Gram matrices, each weighted by the size of the other."""
        weight = self._grid(w.to(self.L)[:, None])  # (N, r, 1)
        left = self.L * weight.sqrt()
        own = rows.total(torch.einsum("nra,n,nrb->ab", left, self.G.square().sum((1, 2)), left))
        gram = self.G * left.square().sum((1, 2)).sqrt()[:, None, None]
        keys = rows.total(gram.flatten(0, 1).T @ gram.flatten(0, 1))
        shared = Axis(self.k, keys[None])
        return Moments((shared, Axis(self.a, own[None])), (shared, Axis(self.c)))

    # ------------------------------------------------------------------ pieces

    def dense_pays(self, m: int) -> bool:
        """Compare the operations of both ways."""
        # one large product runs several times faster than many small ones of as many operations
        return self.size <= DENSE_WEIGHTS and 8 * m * min(2 * self.c, 3 * self.r) > self.a * self.c

    def _rows_first(self, U: Tensor, part: slice) -> Tensor:
        """``L_i U_j^T G_i``, shape ``(n, r, m*k)``."""
        m = U.shape[0]
        T = self.L[part] @ U.permute(2, 0, 1).reshape(self.a, m * self.k)
        return self._times_gram(T, part)

    def _times_gram(self, T: Tensor, part: slice) -> Tensor:
        """``(n, r, m*k)`` times ``G_i`` on the last axis."""
        n = T.shape[0]
        return (T.reshape(n, -1, self.k) @ self.G[part]).view(n, self.r, -1)

    def _outputs_first(self, U: Tensor, V: Tensor, part: slice) -> Tensor:
        """``sum_j U_j^T G_i V_j``, shape ``(n, a, c)``."""
        m = U.shape[0]
        P = self.G[part] @ V.transpose(0, 1).reshape(self.k, m * self.c)  # (n, k, m*c)
        return U.transpose(0, 1).reshape(self.k * m, self.a).T @ P.view(-1, self.k * m, self.c)

    def _parts(self, m: int) -> list[slice]:
        return sample_chunks(self.N, m * self.k * min(self.r, self.c))

    def _grid(self, D: Tensor) -> Tensor:
        """Rows back to ``(N, r, c)``."""
        return row_grid(D, self.kept, self.N, self.r)


@final
class GatedSelfAttentionOperator(BilinearOperator):
    """``f_i = sum_g (D_g(X_i) . (X_i W1 X_i^T)) X_i W2`` with gates ``D_g(X) = 1{X H_g X^T >= 0}``, ``H: (B, d, d)``.

    ``pool: (N, s)`` averages the output tokens (rows ``1/length``), None keeps them. Gates are decided in float64, one part
    of the samples at a time, and kept as booleans.
    """

    def __init__(
        self, X: Tensor, gates: Tensor, n_outputs: int, pool: Tensor | None = None, keep: Tensor | None = None
    ) -> None:
        self.X, self.gates, self.pool, self.keep = X, gates, pool, keep
        self.N, self.s, self.d = X.shape
        self.c = n_outputs
        self.weight_shape = (gates.shape[1], self.d**2, self.d * n_outputs)
        self.kept = None if keep is None else keep.flatten().nonzero()[:, 0]
        rows = self.N if pool is not None else self.N * self.s if self.kept is None else len(self.kept)
        self.output_shape = (rows, n_outputs)

    @property
    def like(self) -> Tensor:
        """The tokens."""
        return self.X

    def to(
        self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> GatedSelfAttentionOperator:
        """Move tokens and gates."""
        X = self.X.to(device=device, dtype=dtype)
        pool = None if self.pool is None else self.pool.to(device=device, dtype=dtype)
        keep = None if self.keep is None else self.keep.to(device=device)
        return GatedSelfAttentionOperator(X, self.gates.to(device=device), self.c, pool, keep)

    def apply_factors(self, Z: LowRank) -> Tensor:
        """Gate by gate, a part of the samples at a time."""
        out = self.X.new_zeros((self.N, 1 if self.pool is not None else self.s, self.c))
        for b, own in Z.spans():
            U, V = Z.U[own], Z.V[own]
            for part in self._parts(len(U)):
                S = self._scores(U, b, part)  # (n, m, o, t)
                XV = torch.einsum("ntd,mdc->nmtc", self.X[part], V.view(-1, self.d, self.c))
                out[part] += torch.einsum("nmot,nmtc->noc", S, XV)
        if self.pool is not None:
            return out[:, 0]
        return kept_rows(out, self.kept)

    def matvec(self, D: Tensor, V: Tensor, b: int) -> Tensor:
        """``W1``-gradients ``sum_i X^T (D . (R W2^T X^T)) X``, stored as vec_F."""
        m = V.shape[0]
        V = V.view(m, self.d, self.c)
        out = V.new_zeros((m, self.d, self.d))
        R = self._grid(D)
        for part in self._parts(m):
            X = self.X[part]
            S = torch.einsum("noc,nmtc->nmot", R[part], torch.einsum("ntd,mdc->nmtc", X, V))
            S = S * self._gate(b, part)[:, None]
            out += torch.einsum("nmoa,noA->maA", torch.einsum("nmot,ntk->nmok", S, X), X)  # (m, k, a)
        return out.reshape(m, -1)

    def rmatvec(self, D: Tensor, U: Tensor, b: int) -> Tensor:
        """``W2``-gradients ``sum_i X^T (D . (X W1 X^T))^T R``."""
        m = U.shape[0]
        out = U.new_zeros((m, self.d, self.c))
        R = self._grid(D)
        for part in self._parts(m):
            S = self._raw_scores(U, b, part)
            out += torch.einsum("ntd,nmtc->mdc", self.X[part], torch.einsum("nmot,noc->nmtc", S, R[part]))
        return out.reshape(m, -1)

    # ------------------------------------------------------------------ dense weights

    def apply_dense(self, Z: Tensor) -> Tensor:
        """Through the products ``X[t, k] X[t, l]``, ``k <= l``: O(N s d^3 c / 2) a gate, O(N d^3 (s + c) / 2) by triples."""
        wide = self._folded(Z)  # (B, kl, a, c)
        out = self.X.new_zeros((self.N, 1 if self._by_triples else self.s, self.c))
        for part in self._wide_parts():
            P = self._pairs(part)
            for b in range(self.n_blocks):
                if self._by_triples:
                    out[part, 0] += self._triples(b, part, P) @ wide[b].transpose(0, 1).flatten(0, 1)
                else:
                    Y = self._gate(b, part) @ (P @ wide[b].flatten(1))  # (n, o, a*c)
                    out[part] += torch.einsum("noa,noac->noc", self.X[part], Y.unflatten(2, (self.d, self.c)))
        if self._by_triples:
            return out[:, 0]
        return kept_rows(out, self.kept) if self.pool is None else torch.einsum("no,noc->nc", self.pool, out)

    def adjoint(self, V: Tensor) -> Tensor:
        """``M_g[(k, a), (l, c)] = sum_{i,t} X_i[t, k] X_i[t, l] sum_o D_g[o, t] X_i[o, a] R_i[o, c]``, at the same cost."""
        row, col = self._triangle
        half = V.new_zeros((self.n_blocks, len(row), self.d, self.c))  # (B, kl, a, c)
        for part in self._wide_parts():
            P, R = self._pairs(part), None if self._by_triples else self._grid(V)[part]
            for b in range(self.n_blocks):
                if R is None:
                    M = V[part].T @ self._triples(b, part, P)  # (c, a*kl)
                    half[b] += M.unflatten(1, (self.d, -1)).permute(2, 1, 0)
                else:
                    Q = self._gate(b, part).mT @ (self.X[part][..., None] * R[:, :, None]).flatten(2)  # (n, t, a*c)
                    half[b] += (P.flatten(0, 1).T @ Q.flatten(0, 1)).view(half.shape[1:])
        out = V.new_empty((self.n_blocks, self.d, self.d, self.d, self.c))  # (B, k, l, a, c)
        out[:, row, col] = out[:, col, row] = half
        return out.transpose(2, 3).reshape(self.weight_shape)

    def moments(self, w: Tensor, rows: Rows = LOCAL, *, centred: bool = False) -> Moments | None:
        """Those of the tokens, as if every gate were open."""
        X = self.X.flatten(0, 1)
        shared = Axis(self.d, rows.total(X.T @ X)[None])
        return Moments((shared, shared), (shared, Axis(self.c)))

    def dense_pays(self, m: int) -> bool:
        """Compare the operations of both ways."""
        s, d, c = self.s, self.d, self.c
        dense = d**3 * (s + c) / 2 if self._by_triples else s * d * c * (d * d / 2 + s)
        return self.size <= DENSE_WEIGHTS and m * s * (s + d) * (d + c) > self.n_blocks * dense

    @property
    def _by_triples(self) -> bool:
        """Pooled outputs are linear in ``sum_{o,t} D[o, t] X[o, a] X[t, k] X[t, l]``; worth forming for many tokens."""
        return self.pool is not None and self.c > 1 and self.s >= 16

    def _triples(self, b: int, part: slice, P: Tensor) -> Tensor:
        """``(n, a*kl)``."""
        assert self.pool is not None
        rows = self._gate(b, part).mT @ (self.pool[part][:, :, None] * self.X[part])  # (n, t, a)
        return (rows.mT @ P).flatten(1)

    def _folded(self, Z: Tensor) -> Tensor:
        """``(B, kl, a, c)``: the two entries of ``Z`` that meet the same product ``X[t, k] X[t, l]``, added."""
        row, col = self._triangle
        blocks = Z.reshape(-1, self.d, self.d, self.d, self.c).transpose(2, 3)  # (B, k, l, a, c)
        return blocks[:, row, col] + (row != col).to(Z.dtype)[:, None, None] * blocks[:, col, row]

    @cached_property
    def _triangle(self) -> tuple[Tensor, Tensor]:
        """The pairs ``k <= l`` of channels."""
        row, col = torch.triu_indices(self.d, self.d, device=self.X.device)
        return row, col

    def _pairs(self, part: slice) -> Tensor:
        """``X[t, k] X[t, l]``, shape ``(n, t, kl)``."""
        row, col = self._triangle
        return self.X[part][:, :, row] * self.X[part][:, :, col]

    def _wide_parts(self) -> list[slice]:
        pairs = len(self._triangle[0])
        each = (self.s + self.d) * pairs if self._by_triples else self.s * (pairs + self.d * self.c)
        return sample_chunks(self.N, each)

    # ------------------------------------------------------------------ pieces

    def _raw_scores(self, U: Tensor, b: int, part: slice) -> Tensor:
        """``D . (X W1_j X^T)``, shape ``(n, m, o, t)``; ``U_j`` is ``W1_j^T`` row by row."""
        X = self.X[part]
        W1 = U.view(-1, self.d, self.d).mT
        S = torch.einsum("noa,mak,ntk->nmot", X, W1, X)
        return S * self._gate(b, part)[:, None]

    def _scores(self, U: Tensor, b: int, part: slice) -> Tensor:
        """The same, averaged over output tokens when pooled."""
        S = self._raw_scores(U, b, part)
        if self.pool is None:
            return S
        return torch.einsum("nmot,no->nmt", S, self.pool[part])[:, :, None]

    def _gate(self, b: int, part: slice) -> Tensor:
        return self.gates[part, b].to(self.X.dtype)

    def _parts(self, m: int) -> list[slice]:
        return sample_chunks(self.N, m * self.s * (self.s + self.d + self.c))

    def _grid(self, D: Tensor) -> Tensor:
        """Rows back to ``(N, s, c)``; pooled rows spread over their tokens."""
        if self.pool is not None:
            return self.pool[:, :, None] * D[:, None]
        return row_grid(D, self.kept, self.N, self.s)


def attention_gates(X: Tensor, H: Tensor) -> Tensor:
    """``(N, B, s, s)`` bool, ``1{X H X^T >= 0}`` decided in float64; ``H: (B, d, d)``."""
    H = H.to(X.device, torch.float64)
    N, s, d = X.shape
    parts = []
    for part in sample_chunks(N, H.shape[0] * s * (s + d)):
        x = X[part].to(torch.float64)
        parts.append(torch.einsum("noa,bak,ntk->nbot", x, H, x) >= 0)
    return torch.cat(parts)


def exact_gram(x: Tensor) -> Tensor:
    """``(n, d, d)`` bool: which entries of ``x^T x`` float64 computes without any rounding, for ``x: (n, s, d)``.

    With ``u_k`` the largest power of two that divides all numbers of channel k, products are integers times ``u_k u_l``.
    Sums of integers below 2^53 are exact in any order; 2^52 leaves room for the rounding of the bound itself.
    """
    mantissa, exponent = torch.frexp(x)
    whole = (mantissa * 2.0**53).long()
    lowest = (whole & -whole).double() * torch.pow(2.0, exponent.double() - 53)
    unit = torch.where(x == 0, torch.inf, lowest).amin(1)  # (n, d); infinite where a channel is zero: no products
    size = x.abs().mT @ x.abs()
    return size < 2.0**52 * (unit[:, :, None] * unit[:, None, :])

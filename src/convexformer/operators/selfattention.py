"""Self-attention: ``f_i = (D . (X W1 X^T)) X W2``, through Gram matrices where there is no gate."""

from __future__ import annotations

from functools import cached_property
from typing import final

import torch
from torch import Tensor

from convexformer.operators.base import long_product
from convexformer.operators.bilinear import DENSE_WEIGHTS, BilinearOperator, kept_rows, row_grid
from convexformer.operators.budget import sample_chunks, worth_storing
from convexformer.operators.last_products import LastProducts
from convexformer.operators.lowrank import LowRank
from convexformer.operators.moments import Axis, Moments, Turns
from convexformer.rows import LOCAL, Rows

FEW_FEATURES = 1 << 18
"""Products of Gram matrices and pooled rows are kept up to this many: one small product costs less than several steps."""
MIXED_SHARE = 32
"""Products of output rows, terms and Gram matrices are kept for the gradient up to this fraction of the budget for what is
stored."""
HALF_SHARE = 16
"""Upper triangles of Gram matrices are kept up to this fraction of that budget; else gathered anew."""
SMALL_PRODUCTS = 2.5
"""How much longer an operation takes in many small products than in a large one (one core, 6 to 100 channels)."""


@final
class StreamedTokens:
    """Tokens ``(N, s, d)`` turned into another dtype chunk by chunk, so that no wider copy of them is held."""

    def __init__(self, X: Tensor, dtype: torch.dtype) -> None:
        self.X, self.dtype, self.shape = X, dtype, X.shape

    def __getitem__(self, part: slice) -> Tensor:
        return self.X[part].to(self.dtype)

    def to(self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """Hold them after all."""
        return self.X.to(device=device, dtype=self.dtype if dtype is None else dtype)


@final
class StreamedGrams:
    """Gram matrices ``X_i^T X_i``, ``(N, d, d)``, computed from the tokens whenever they are needed."""

    def __init__(self, tokens: StreamedTokens) -> None:
        self.tokens = tokens
        N, _, d = tokens.shape
        self.shape = (N, d, d)

    def __getitem__(self, part: slice) -> Tensor:
        x = self.tokens[part]
        return x.mT @ x

    def to(self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """Hold them after all."""
        parts = [self[part].to(device=device, dtype=dtype) for part in _token_chunks(self.tokens.X, self.tokens.dtype)]
        return torch.cat(parts)


@final
class SelfAttentionOperator(BilinearOperator):
    """Linear self-attention ``f_i = L_i W1 G_i W2`` with ``L: (N, r, a)`` and Gram matrices ``G: (N, k, k)``.

    ``L`` holds the tokens (r = s), or the mean token when the output is pooled (r = 1): then the tokens themselves are
    read once, and the number of tokens leaves the cost. ``Z[(k, a), (l, b)] = W1[a, k] W2[l, b]``: rows are vec_F(W1),
    columns vec_C(W2). ``keep: (N, r)`` marks the output rows that exist. Either may be streamed from the tokens.
    """

    def __init__(
        self,
        L: Tensor | StreamedTokens,
        G: Tensor | StreamedGrams,
        n_outputs: int,
        keep: Tensor | None = None,
        source: tuple[Tensor, Tensor | None] | None = None,
    ) -> None:
        self.L, self.G, self.keep, self.source = L, G, keep, source
        self._like = L if isinstance(L, Tensor) else L.X.new_empty(0, dtype=L.dtype)
        self._mixed: LastProducts[list[Tensor]] = LastProducts()
        self.N, self.r, self.a = L.shape
        self.k, self.c = G.shape[1], n_outputs
        self.weight_shape = (self.k * self.a, self.k * self.c)
        self.kept = None if keep is None else keep.flatten().nonzero()[:, 0]  # places, known before any iteration
        rows = self.N * self.r if self.kept is None else len(self.kept)
        self.output_shape = (rows, n_outputs)

    @classmethod
    def of_tokens(
        cls, X: Tensor, lengths: Tensor | None, n_outputs: int, keep: Tensor | None = None
    ) -> SelfAttentionOperator:
        """Return the operator on tokens ``X: (N, s, d)``, pooled by ``lengths: (N,)`` where given.

        Gram matrices are formed once, in the dtype of the tokens; :meth:`exact` comes back to the tokens for others.
        """
        L = X if lengths is None else (X.sum(1) / lengths.to(X)[:, None])[:, None]
        return cls(L, X.mT @ X, n_outputs, keep, (X, lengths))

    def exact(self) -> SelfAttentionOperator | None:
        """The same map from the tokens up in float64: Gram matrices computed anew for every chunk, nothing copied."""
        if self.source is None:
            return None
        X, lengths = self.source
        tokens = StreamedTokens(X, torch.float64)
        L: Tensor | StreamedTokens = tokens
        if lengths is not None:
            means = [tokens[part].sum(1) / lengths[part].double()[:, None] for part in _token_chunks(X, torch.float64)]
            L = torch.cat(means)[:, None]
        return SelfAttentionOperator(L, StreamedGrams(tokens), self.c, self.keep)

    @property
    def like(self) -> Tensor:
        """A tensor of the dtype of the products."""
        return self._like

    @property
    def data_size(self) -> int:
        """Rows and Gram matrices; those are read by one kernel, where launches weigh less."""
        return self.N * (self.r * self.a + self.k**2 // 16)

    def to(
        self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> SelfAttentionOperator:
        """Move tokens and Gram matrices."""
        keep = None if self.keep is None else self.keep.to(device=device)
        L, G = (part.to(device=device, dtype=dtype) for part in (self.L, self.G))
        source: tuple[Tensor, Tensor | None] | None = None  # narrower tokens are no source for an exact operator
        if self.source is not None and (dtype is None or dtype == self._like.dtype):
            X, lengths = self.source
            source = (X.to(device=device), None if lengths is None else lengths.to(device=device))
        return SelfAttentionOperator(L, G, self.c, keep, source)

    def statistics(self) -> tuple[Tensor, ...] | None:
        """The mean token and the Gram matrix of each sample, where the output is pooled."""
        if self.r != 1 or self.keep is not None or not (isinstance(self.L, Tensor) and isinstance(self.G, Tensor)):
            return None
        return self.L, self.G

    def of_statistics(self, parts: tuple[Tensor, ...]) -> SelfAttentionOperator:
        """The same weights on other samples."""
        L, G = parts
        return SelfAttentionOperator(L, G, self.c)

    # ------------------------------------------------------------------ factors

    def apply_factors(self, Z: LowRank) -> Tensor:
        """Contract in the cheaper order: rows first (few rows, as when pooled), outputs first, or through a dense ``Z``."""
        m = Z.n_terms
        U, V = Z.U.view(m, self.k, self.a), Z.V.view(m, self.k, self.c)
        if self.r < self.c:
            out = self._mixed_outputs(Z.U, V.reshape(m * self.k, self.c))
        else:
            out = torch.cat([self.L[part] @ self._outputs_first(U, V, part) for part in self._parts(m)])
        return kept_rows(out, self.kept)

    def _mixed_outputs(self, U: Tensor, wide: Tensor) -> Tensor:
        """``(N, r, c)`` outputs of terms ``U: (m, p)`` and ``wide: (m k, c)``; what depends on ``U`` alone may be known."""
        m = len(U)
        if (known := self._mixed.of(U)) is not None:
            return torch.cat([T @ wide for T in known])
        self._mixed.make_room()
        keep = worth_storing(MIXED_SHARE * self.N * self.r * m * self.k, self._like)
        mixed, outputs = [], []
        for part in self._parts(m):
            T = self._rows_first(U.view(m, self.k, self.a), part)
            outputs.append(T @ wide)
            if keep:
                mixed.append(T)
        if keep:
            self._mixed.keep(U, mixed)
        return torch.cat(outputs)

    def matvec(self, D: Tensor, V: Tensor, b: int = 0) -> Tensor:
        """``sum_i G_i V_j S_i^T`` with ``S_i = L_i^T D_i``."""
        m, R = V.shape[0], self._grid(D)
        V = V.view(m, self.k, self.c)
        out = V.new_zeros((m * self.k, self.a))
        for part in self._parts(m):
            if self.r < self.c:
                Y = R[part] @ V.reshape(m * self.k, self.c).T  # (n, r, m*k)
                Y = self._times_gram(Y, part)
                out += long_product(Y.flatten(0, 1), self.L[part].flatten(0, 1))
            else:
                S = self.L[part].mT @ R[part]  # (n, a, c)
                P = self.G[part] @ V.transpose(0, 1).reshape(self.k, m * self.c)  # (n, k, m*c)
                P = P.view(-1, self.k, m, self.c).permute(2, 1, 0, 3).reshape(m * self.k, -1)
                out += P @ S.transpose(1, 2).reshape(-1, self.a)
        return out.view(m, self.k * self.a)

    def rmatvec(self, D: Tensor, U: Tensor, b: int = 0) -> Tensor:
        """``sum_i G_i U_j S_i`` with ``S_i = L_i^T D_i``."""
        m, R = U.shape[0], self._grid(D)
        known = self._mixed.of(U)
        U = U.view(m, self.k, self.a)
        out = U.new_zeros((m * self.k, self.c))
        for number, part in enumerate(self._parts(m)):
            if self.r < self.c:
                T = self._rows_first(U, part) if known is None else known[number]
                out += long_product(T.flatten(0, 1), R[part].flatten(0, 1))
            else:
                S = self.L[part].mT @ R[part]  # (n, a, c)
                T = (U.reshape(m * self.k, self.a) @ S).view(-1, m, self.k, self.c)
                out += torch.einsum("nlk,nmkc->mlc", self.G[part], T).reshape(m * self.k, self.c)
        return out.view(m, self.k * self.c)

    # ------------------------------------------------------------------ dense weights

    @cached_property
    def _features(self) -> Tensor | None:
        """``(N, k a k)`` all ``G_i[k, l] L_i[a]``, where rows are pooled and that is little: ``A`` is then one product."""
        many = self.N * self.k**2 * self.a > FEW_FEATURES or self._like.is_cuda
        if many or self.r > 1 or self.kept is not None or not isinstance(self.G, Tensor):
            return None
        return (self.G[:, :, None, :] * self.L[:].view(self.N, 1, self.a, 1)).reshape(self.N, -1)

    def apply_dense(self, Z: Tensor) -> Tensor:
        """``L_i sum_{k<=l} G_i[k, l] (Z^(k,l) + Z^(l,k))``: O(N k^2 a c / 2), since Gram matrices are symmetric."""
        if self._features is not None:
            return self._features @ Z.reshape(-1, self.c)
        blocks = Z.view(self.k, self.a, self.k, self.c).transpose(1, 2)  # (k, l, a, c)
        row, col = self._triangle
        wide = blocks[row, col] + (row != col).to(Z.dtype)[:, None, None] * blocks[col, row]
        wide = wide.flatten(1)
        parts = self._wide_parts()
        out = torch.cat([self.L[part] @ (self._upper(part) @ wide).view(-1, self.a, self.c) for part in parts])
        return kept_rows(out, self.kept)

    def adjoint(self, V: Tensor) -> Tensor:
        """``sum_i G_i (x) (L_i^T V_i)``: O(N k^2 a c / 2)."""
        if self._features is not None:
            return (self._features.T @ V).view(self.weight_shape)
        R, (row, col) = self._grid(V), self._triangle
        half = V.new_zeros((len(row), self.a * self.c))
        for part in self._wide_parts():
            half.addmm_(self._upper(part).T, (self.L[part].mT @ R[part]).flatten(1))
        out = V.new_empty((self.k, self.k, self.a, self.c))
        out[row, col] = out[col, row] = half.view(-1, self.a, self.c)
        return out.transpose(1, 2).reshape(self.weight_shape)

    @cached_property
    def _triangle(self) -> tuple[Tensor, Tensor]:
        """Row and column of the upper triangle of a Gram matrix."""
        row, col = torch.triu_indices(self.k, self.k, device=self._like.device)
        return row, col

    @cached_property
    def _half(self) -> Tensor | None:
        """``(N, k(k+1)/2)`` the upper triangles, where that is little."""
        pairs = self.k * (self.k + 1) // 2
        if not isinstance(self.G, Tensor) or not worth_storing(HALF_SHARE * self.N * pairs, self._like):
            return None
        return self.G.flatten(1).index_select(1, self._places)

    @cached_property
    def _places(self) -> Tensor:
        """Where the upper triangle lies in a flattened Gram matrix."""
        row, col = self._triangle
        return row * self.k + col

    def _upper(self, part: slice) -> Tensor:
        """The upper triangles of some samples."""
        half = self._half
        return self.G[part].flatten(1).index_select(1, self._places) if half is None else half[part]

    def moments(self, w: Tensor, rows: Rows = LOCAL, *, centred: bool = False) -> Moments | None:
        """Those of the output rows ``L_i`` and of the Gram matrices, each weighted by the size of the other."""
        weight = self._grid(w.to(self._like)[:, None])  # (N, r, 1)
        own, keys = self._like.new_zeros((self.a, self.a)), self._like.new_zeros((self.k, self.k))
        for part in sample_chunks(self.N, 2 * self.k**2 + 2 * self.r * self.a + self._streamed, self._like):
            left, G = self.L[part] * weight[part].sqrt(), self.G[part]
            sized = (left * G.square().sum((1, 2)).sqrt()[:, None, None]).flatten(0, 1)
            gram = (G * left.square().sum((1, 2)).sqrt()[:, None, None]).flatten(0, 1)
            own.addmm_(sized.T, sized)
            keys.addmm_(gram.T, gram)
        shared = Axis(self.k, rows.total(keys)[None])
        return Moments((shared, Axis(self.a, rows.total(own)[None])), (shared, Axis(self.c)))

    def turned(self, rows: Turns, columns: Turns) -> SelfAttentionOperator | None:
        """Output rows and Gram matrices along other axes, where both are held; rows of ``Z`` are ``(k, a)``."""
        (keys, own), (keys_too, outputs) = rows, columns
        held = isinstance(self.L, Tensor) and isinstance(self.G, Tensor)
        if not held or outputs is not None or keys is not keys_too:
            return None
        L, G = self.L, self.G
        assert isinstance(L, Tensor)
        assert isinstance(G, Tensor)
        if own is not None:
            L = L @ own[0].to(L)
        if keys is not None:
            Q = keys[0].to(G)
            G = Q.T @ G @ Q
        return SelfAttentionOperator(L, G, self.c, self.keep)

    # ------------------------------------------------------------------ pieces

    @property
    def block_cost(self) -> float:
        """The operations of the dense adjoint over those of a product with one vector."""
        return self.a * self.c / (4 * min(self.c, self.r))

    def dense_pays(self, m: int) -> bool:
        """Compare the operations of both ways."""
        if self._features is not None:
            return True
        k, a, c = self.k, self.a, self.c
        term = self.r * k * (k + a + c) if self.r < c else k * c * (k + a)
        return self.size <= DENSE_WEIGHTS and SMALL_PRODUCTS * m * term > k * k * a * c / 2

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
        return sample_chunks(self.N, m * self.k * min(self.r, self.c) + self._streamed, self._like)

    def _wide_parts(self) -> list[slice]:
        gathered = 0 if self._half is not None else self.k * self.k
        return sample_chunks(self.N, self.a * self.c + gathered + self._streamed, self._like)

    @property
    def _streamed(self) -> int:
        """Numbers a sample that streaming makes."""
        return 0 if isinstance(self.G, Tensor) else self.k * (self.k + self.G.tokens.shape[1])

    def _grid(self, D: Tensor) -> Tensor:
        """Rows back to ``(N, r, c)``."""
        return row_grid(D, self.kept, self.N, self.r)


def _token_chunks(X: Tensor, dtype: torch.dtype) -> list[slice]:
    """Chunks of tokens turned into another dtype, with their Gram matrices."""
    N, s, d = X.shape
    return sample_chunks(N, d * (2 * s + d), X, dtype)


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

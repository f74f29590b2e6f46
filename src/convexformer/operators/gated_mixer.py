"""The gated MLP-Mixer: ``f_i = sum_g (D_g . (W1 X_i)) W2``."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from convexformer.operators.base import long_product
from convexformer.operators.bilinear import DENSE_WEIGHTS
from convexformer.operators.budget import sample_chunks
from convexformer.operators.gated_matrix import GatedMatrixOperator
from convexformer.operators.gates import Gates, MixerRule, all_gates
from convexformer.operators.moments import Moments, mixing_moments
from convexformer.rows import LOCAL, Rows
from convexformer.threads import nearest_factors


@final
class GatedMixerOperator(GatedMatrixOperator):
    """``f_i = sum_g (D_g(X_i) . (W1 X_i)) W2`` with gates ``D_g(X) = 1{H_g X >= 0}``, ``H: (B, s, s)``; pooled or not.

    ``Z_g[(t, o), (a, b)] = W1[o, t] W2[a, b]``. Everything is laid out with channels before tokens, ``(n, a, t)``: a product
    is then one large matrix product over samples and channels. Operations of a product with one vector: ``2 N s^2 d`` a gate
    (and ``2 N s d c`` without pooling); of a formed block: ``2 N s^2 d c``.
    """

    def __init__(self, X: Tensor, gates: Gates, n_outputs: int, pooled: bool, dtype: torch.dtype | None = None) -> None:
        super().__init__(X, gates, n_outputs, dtype)
        self.pooled = pooled
        self.weight_shape = (gates.n_gates, self.s**2, self.d * n_outputs)
        self.output_shape = (self.N if pooled else self.N * self.s, n_outputs)

    def to(self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> GatedMixerOperator:
        """Move tokens and gates; wider numbers are made chunk by chunk."""
        X, kind = self._moved(device, dtype)
        return GatedMixerOperator(X, self.gates.to(device), self.c, self.pooled, kind)

    # ------------------------------------------------------------------ factors

    def _forward(self, U: Tensor, b: int) -> Tensor:
        """``D . (W1_j X)``: pooled ``(N, m, a)``, its mean over tokens; else never kept."""
        m = len(U)
        return torch.cat([self._mixed(U, b, part).mean(3).mT for part in self._parts(m)])

    def _outputs(self, U: Tensor, V: Tensor, b: int, forward: Tensor | None) -> Tensor:
        """``(N, r, c)``."""
        m = len(U)
        if forward is not None:
            return (forward.flatten(1) @ V.reshape(m * self.d, self.c))[:, None]
        out = U.new_empty((self.N, self.s, self.c))
        wide = V.view(m, self.d, self.c).transpose(0, 1).reshape(self.d * m, self.c)
        for part in self._parts(m):
            out[part] = self._mixed(U, b, part).flatten(1, 2).mT @ wide  # (n, o, a*m) @ (a*m, c)
        return out

    def matvec(self, D: Tensor, V: Tensor, b: int) -> Tensor:
        """``W1``-gradients ``sum_i (D . (R W2^T)) X^T``, stored as vec_F."""
        m = V.shape[0]
        wide = V.view(m, self.d, self.c).transpose(0, 1).reshape(self.d * m, self.c)  # (a*m, c)
        out = V.new_zeros((self.s, m * self.s))
        for part in self._parts(m):
            S = (D[part] / self.s @ wide.T)[..., None] if self.pooled else wide @ self._grid(D)[part].mT  # (n, a*m, o)
            S = S.unflatten(1, (self.d, m)) * self._gate(b, part)[:, :, None]  # (n, a, m, o)
            out += long_product(self._channels(part), S.flatten(0, 1).flatten(1))
        return out.view(self.s, m, self.s).transpose(0, 1).reshape(m, -1)

    def _backward(self, D: Tensor, U: Tensor, b: int, forward: Tensor | None) -> Tensor:
        """``W2``-gradients ``sum_i (D . (W1 X))^T R``."""
        m = len(U)
        if forward is not None:
            return long_product(forward.flatten(1), D).view(m, -1)
        out = U.new_zeros((self.d * m, self.c))
        for part in self._parts(m):
            out += (self._mixed(U, b, part).flatten(1, 2) @ self._grid(D)[part]).sum(0)
        return out.view(self.d, m, self.c).transpose(0, 1).reshape(m, -1)

    def _mixed(self, U: Tensor, b: int, part: slice) -> Tensor:
        """``D . (W1_j X)``, shape ``(n, a, m, o)``."""
        m = len(U)
        mix = U.view(m, self.s, self.s).transpose(0, 1).reshape(self.s, m * self.s)  # (t, m*o)
        H = (self._channels(part) @ mix).view(-1, self.d, m, self.s)
        return H.mul_(self._gate(b, part)[:, :, None])

    # ------------------------------------------------------------------ dense weights

    def apply_dense(self, Z: Tensor) -> Tensor:
        """``sum_{g,a} D_g[o, a] (X[:, a]^T Z_g[:, o, a])``: channel by channel one product, O(N s^2 d c) a gate."""
        Z = Z.reshape(-1, self.s, self.s, self.d, self.c)
        out = Z.new_zeros((self.N, self.s, self.c))
        for b in range(self.n_blocks):
            wide = Z[b].permute(2, 0, 1, 3).reshape(self.d, self.s, self.s * self.c)  # (a, t, o*c)
            for part in self._wide_parts():
                H = (self._tokens(part).permute(2, 0, 1) @ wide).unflatten(2, (self.s, self.c))  # (a, n, o, c)
                out[part] += H.mul_(self._gate(b, part).transpose(0, 1)[..., None]).sum(0)
        return out.mean(1) if self.pooled else out.flatten(0, 1)

    def _sums(self, V: Tensor, blocks: range) -> Tensor:
        """``M_g[(t, o), (a, c)] = sum_i X_i[t, a] D_g[o, a] R_i[o, c]``, as ``(g, a, t, o*c)``, pooled ``(g, a, o, t*c)``.

        Pooled, ``R`` has no ``o``: the products ``X R`` are the same for all gates, and a channel is one product of those
        with the gates, which are zeros and ones.
        """
        out = V.new_zeros((len(blocks), self.d, self.s, self.s * self.c))
        return self._pooled_sums(V, blocks, out) if self.pooled else self._token_sums(V, blocks, out)

    def _token_sums(self, V: Tensor, blocks: range, out: Tensor) -> Tensor:
        parts = self._wide_parts()
        buffer = V.new_empty((self.d, parts[0].stop, self.s, self.c))  # fresh memory of this size costs time
        for own, b in zip(out, blocks, strict=True):
            for part in parts:
                R = self._grid(V)[part]  # (n, o, c)
                gated = buffer[:, : len(R)]
                torch.mul(self._gate(b, part).transpose(0, 1)[..., None], R, out=gated)  # (a, n, o, c)
                own.baddbmm_(self._tokens(part).permute(2, 1, 0), gated.flatten(2))
        return out

    def _pooled_sums(self, V: Tensor, blocks: range, out: Tensor) -> Tensor:
        each = self.s * (len(blocks) * self.d + 2 * self.c)
        parts = sample_chunks(self.N, each, self.like, buffered=True)
        buffer = V.new_empty((self.d, parts[0].stop, len(blocks), self.s))
        for part in parts:
            X, R = self._tokens(part), V[part] / self.s
            gates = buffer[:, : len(R)]  # (a, n, g, o)
            for j, b in enumerate(blocks):
                gates[:, :, j] = self.gates.take(part, b).transpose(0, 1)
            for a in range(self.d):
                products = nearest_factors(X[:, :, a, None] * R[:, None], in_place=True).flatten(1)  # (n, t*c)
                sums = (gates[a].flatten(1).T @ products).view(len(blocks), self.s, -1)
                out[:, a] += sums
        return out

    def _block_of(self, sums: Tensor) -> Tensor:
        """Back to rows ``(t, o)`` and columns ``(a, c)``."""
        first, second = (2, 1) if self.pooled else (1, 2)
        wide = sums.view(self.d, self.s, self.s, self.c).permute(first, second, 0, 3)  # (t, o, a, c)
        return wide.reshape(self.s**2, self.d * self.c)

    @property
    def forming_work(self) -> float:
        """Of all blocks."""
        return float(self.N * self.n_blocks * self.s**2 * self.d * self.c)

    @property
    def block_cost(self) -> float:
        """``c`` products with one vector, which share a pass over the tokens."""
        return float(self.c)

    def moments(self, w: Tensor, rows: Rows = LOCAL, *, centred: bool = False) -> Moments | None:
        """Those of positions and of channels."""
        return mixing_moments(self.X, self.c, rows, self.like)

    def dense_pays(self, m: int) -> bool:
        """Compare the operations of both ways."""
        return self.size <= DENSE_WEIGHTS and 2 * m * (self.s + self.c) > self.n_blocks * self.s * self.c

    # ------------------------------------------------------------------ pieces

    def _channels(self, part: slice) -> Tensor:
        """``(n*a, t)``: channels as rows."""
        return self._tokens(part).mT.flatten(0, 1)

    def _grid(self, D: Tensor) -> Tensor:
        return D.view(self.N, self.s, self.c)

    def _parts(self, m: int) -> list[slice]:
        return sample_chunks(self.N, 2 * (m + 1) * self.s * self.d, self.like)

    def _wide_parts(self) -> list[slice]:
        return sample_chunks(self.N, self.d * self.s * (self.c + 3), self.like, buffered=True)


def mixer_gates(X: Tensor, H: Tensor) -> Tensor:
    """``(N, B, s, d)`` bool, ``1{H X >= 0}`` decided in float64; ``H: (B, s, s)``."""
    return all_gates(X, MixerRule(H)).mT

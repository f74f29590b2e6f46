"""The MLP-Mixer: ``f_i = (D . (W1 X)) W2``."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from convexformer.operators.bilinear import BilinearOperator, sample_chunks
from convexformer.operators.lowrank import LowRank
from convexformer.operators.moments import Axis, Moments
from convexformer.operators.selfattention import DENSE_WEIGHTS
from convexformer.rows import LOCAL, Rows


@final
class MixerOperator(BilinearOperator):
    """Linear mixer with token outputs, ``f_i = W1 X_i W2``; ``Z[(t, o), (a, b)] = W1[o, t] W2[a, b]``.

    Pooled linear output needs no operator of its own: it is linear in the flattened tokens, with the nuclear norm of an
    ``s x dc`` matrix.
    """

    def __init__(self, X: Tensor, n_outputs: int) -> None:
        self.X, self.c = X, n_outputs
        self.N, self.s, self.d = X.shape
        self.weight_shape = (self.s**2, self.d * n_outputs)
        self.output_shape = (self.N * self.s, n_outputs)

    @property
    def like(self) -> Tensor:
        """The tokens."""
        return self.X

    def to(self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> MixerOperator:
        """Move the tokens."""
        return MixerOperator(self.X.to(device=device, dtype=dtype), self.c)

    def apply_factors(self, Z: LowRank) -> Tensor:
        """``sum_j W1_j (X W2_j)``: O(N s c (s + d)) a term."""
        m = Z.n_terms
        U, V = Z.U.view(m, self.s, self.s), Z.V.view(m, self.d, self.c)
        mix = U.transpose(0, 1).reshape(self.s * m, self.s).T  # (o, t*m)
        wide = V.transpose(0, 1).reshape(self.d, m * self.c)
        out = [mix @ (self.X[part] @ wide).view(-1, self.s * m, self.c) for part in self._parts(m)]
        return torch.cat(out).flatten(0, 1)

    def matvec(self, D: Tensor, V: Tensor, b: int = 0) -> Tensor:
        """``sum_i (X_i V_j) R_i^T``, rows ``(t, o)``."""
        m, R = V.shape[0], D.view(self.N, self.s, self.c)
        wide = V.view(m, self.d, self.c).transpose(0, 1).reshape(self.d, m * self.c)
        out = V.new_zeros((self.s * m, self.s))
        for part in self._parts(m):
            P = (self.X[part] @ wide).view(-1, self.s * m, self.c)
            out += P.transpose(0, 1).flatten(1) @ R[part].transpose(1, 2).reshape(-1, self.s)
        return out.view(self.s, m, self.s).transpose(0, 1).reshape(m, -1)

    def rmatvec(self, D: Tensor, U: Tensor, b: int = 0) -> Tensor:
        """``sum_i X_i^T (W1_j^T R_i)``."""
        m, R = U.shape[0], D.view(self.N, self.s, self.c)
        mix = U.reshape(m * self.s, self.s)  # rows (j, t), columns o
        out = U.new_zeros((m, self.d, self.c))
        for part in self._parts(m):
            P = (mix @ R[part]).view(-1, m, self.s, self.c)
            out += torch.einsum("nta,nmtc->mac", self.X[part], P)
        return out.view(m, -1)

    def apply_dense(self, Z: Tensor) -> Tensor:
        """One product with flattened tokens: O(N s^2 d c)."""
        wide = Z.view(self.s, self.s, self.d, self.c).transpose(1, 2).reshape(self.s * self.d, self.s * self.c)
        return (self.X.flatten(1) @ wide).view(-1, self.c)

    def adjoint(self, V: Tensor) -> Tensor:
        """One product with flattened tokens: O(N s^2 d c)."""
        wide = self.X.flatten(1).T @ V.reshape(self.N, self.s * self.c)
        return wide.view(self.s, self.d, self.s, self.c).transpose(1, 2).reshape(self.weight_shape)

    def moments(self, w: Tensor, rows: Rows = LOCAL, *, centred: bool = False) -> Moments | None:
        """Those of positions and of channels."""
        return mixing_moments(self.X, self.c, rows)

    def dense_pays(self, m: int) -> bool:
        """Compare the operations of both ways."""
        return self.size <= DENSE_WEIGHTS and 4 * m * (self.s + self.d) > self.s * self.d

    def _parts(self, m: int) -> list[slice]:
        return sample_chunks(self.N, m * self.s * self.c)


@final
class GatedMixerOperator(BilinearOperator):
    """``f_i = sum_g (D_g(X_i) . (W1 X_i)) W2`` with gates ``D_g(X) = 1{H_g X >= 0}``, ``H: (B, s, s)``; pooled or not."""

    def __init__(self, X: Tensor, gates: Tensor, n_outputs: int, pooled: bool) -> None:
        self.X, self.gates, self.c, self.pooled = X, gates, n_outputs, pooled
        self.N, self.s, self.d = X.shape
        self.weight_shape = (gates.shape[1], self.s**2, self.d * n_outputs)
        self.output_shape = (self.N if pooled else self.N * self.s, n_outputs)

    @property
    def like(self) -> Tensor:
        """The tokens."""
        return self.X

    def to(self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> GatedMixerOperator:
        """Move tokens and gates."""
        X, gates = self.X.to(device=device, dtype=dtype), self.gates.to(device=device)
        return GatedMixerOperator(X, gates, self.c, self.pooled)

    def apply_factors(self, Z: LowRank) -> Tensor:
        """Gate by gate; pooled outputs average the mixed tokens first."""
        out = self.X.new_zeros((self.N, 1 if self.pooled else self.s, self.c))
        for b, own in Z.spans():
            U, V = Z.U[own], Z.V[own]
            for part in self._parts(len(U)):
                H = self._mixed(U, b, part)  # (n, m, o, a)
                if self.pooled:
                    H = H.mean(2, keepdim=True)
                out[part] += torch.einsum("nmoa,mac->noc", H, V.view(-1, self.d, self.c))
        return out.flatten(0, 1)

    def matvec(self, D: Tensor, V: Tensor, b: int) -> Tensor:
        """``W1``-gradients ``sum_i (D . (R W2^T)) X^T``, stored as vec_F."""
        m = V.shape[0]
        out = V.new_zeros((m, self.s, self.s))
        for part in self._parts(m):
            S = torch.einsum("noc,mac->nmoa", self._grid(D, part), V.view(m, self.d, self.c))
            S = S * self._gate(b, part)[:, None]
            out += torch.einsum("nta,nmoa->mto", self.X[part], S)
        return out.reshape(m, -1)

    def rmatvec(self, D: Tensor, U: Tensor, b: int) -> Tensor:
        """``W2``-gradients ``sum_i (D . (W1 X))^T R``."""
        m = U.shape[0]
        out = U.new_zeros((m, self.d, self.c))
        for part in self._parts(m):
            out += torch.einsum("nmoa,noc->mac", self._mixed(U, b, part), self._grid(D, part))
        return out.reshape(m, -1)

    def apply_dense(self, Z: Tensor) -> Tensor:
        """``sum_{g,a} D_g[o, a] (X[:, a]^T Z_g[:, o, a])``: channel by channel one product, O(N s^2 d c) a gate."""
        wide = Z.reshape(-1, self.s, self.s, self.d, self.c).permute(0, 3, 1, 2, 4).flatten(3)  # (B, a, t, o*c)
        out = self.X.new_zeros((self.N, self.s, self.c))
        for part in self._wide_parts():
            X = self.X[part].permute(2, 0, 1).contiguous()  # (a, n, t)
            for b in range(self.n_blocks):
                H = (X @ wide[b]).unflatten(2, (self.s, self.c))  # (a, n, o, c)
                out[part] += torch.einsum("anoc,noa->noc", H, self._gate(b, part))
        return out.mean(1) if self.pooled else out.flatten(0, 1)

    def adjoint(self, V: Tensor) -> Tensor:
        """``M_g[(t, o), (a, c)] = sum_i X_i[t, a] D_g[o, a] R_i[o, c]``: the same products, transposed."""
        out = V.new_zeros((self.n_blocks, self.d, self.s, self.s * self.c))  # (B, a, t, o*c)
        for part in self._wide_parts():
            X, R = self.X[part].permute(2, 0, 1).contiguous(), self._grid(V, part)  # (a, n, t), (n, o, c)
            for b in range(self.n_blocks):
                gate = self.gates[part, b].permute(2, 0, 1).contiguous().to(V.dtype)  # (a, n, o)
                out[b].baddbmm_(X.mT, (gate[..., None] * R).flatten(2))
        return out.unflatten(3, (self.s, self.c)).permute(0, 2, 3, 1, 4).reshape(self.weight_shape)

    def moments(self, w: Tensor, rows: Rows = LOCAL, *, centred: bool = False) -> Moments | None:
        """Those of positions and of channels."""
        return mixing_moments(self.X, self.c, rows)

    def dense_pays(self, m: int) -> bool:
        """Compare the operations of both ways."""
        return self.size <= DENSE_WEIGHTS and 2 * m * (self.s + self.c) > self.n_blocks * self.s * self.c

    def _mixed(self, U: Tensor, b: int, part: slice) -> Tensor:
        """``D . (W1_j X)``, shape ``(n, m, o, a)``."""
        H = torch.einsum("mto,nta->nmoa", U.view(-1, self.s, self.s), self.X[part])
        return H * self._gate(b, part)[:, None]

    def _gate(self, b: int, part: slice) -> Tensor:
        """``(n, o, a)``."""
        return self.gates[part, b].to(self.X.dtype)

    def _grid(self, D: Tensor, part: slice) -> Tensor:
        if self.pooled:
            return (D[part] / self.s)[:, None].expand(-1, self.s, -1)
        return D.view(self.N, self.s, self.c)[part]

    def _parts(self, m: int) -> list[slice]:
        return sample_chunks(self.N, 2 * m * self.s * self.d)

    def _wide_parts(self) -> list[slice]:
        return sample_chunks(self.N, 2 * self.d * self.s * self.c)


def mixing_moments(X: Tensor, c: int, rows: Rows) -> Moments:
    """Moments of the positions and of the channels of ``X: (N, s, d)``; the rows of ``Z`` unfold into ``(t, o)``."""
    _, s, d = X.shape
    tall, wide = X.transpose(0, 1).flatten(1), X.flatten(0, 1)  # (s, N d), (N s, d)
    positions, channels = rows.total(tall @ tall.T), rows.total(wide.T @ wide)
    return Moments((Axis(s, positions[None]), Axis(s)), (Axis(d, channels[None]), Axis(c)))


def mixer_gates(X: Tensor, H: Tensor) -> Tensor:
    """``(N, B, s, d)`` bool, ``1{H X >= 0}`` decided in float64; ``H: (B, s, s)``."""
    H = H.to(X.device, torch.float64)
    N, s, d = X.shape
    parts = sample_chunks(N, H.shape[0] * s * d)
    return torch.cat([torch.einsum("bot,nta->nboa", H, X[part].to(torch.float64)) >= 0 for part in parts])

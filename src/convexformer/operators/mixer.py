"""The MLP-Mixer: ``f_i = (D . (W1 X)) W2``."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from convexformer.operators.bilinear import DENSE_WEIGHTS, BilinearOperator
from convexformer.operators.budget import sample_chunks
from convexformer.operators.lowrank import LowRank
from convexformer.operators.moments import Moments, mixing_moments
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
        return mixing_moments(self.X, self.c, rows, self.like)

    def dense_pays(self, m: int) -> bool:
        """Compare the operations of both ways."""
        return self.size <= DENSE_WEIGHTS and 4 * m * (self.s + self.d) > self.s * self.d

    def _parts(self, m: int) -> list[slice]:
        return sample_chunks(self.N, m * self.s * self.c, self.X)

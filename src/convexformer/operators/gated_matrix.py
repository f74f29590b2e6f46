"""What the gated matrix heads share: tokens and gates taken chunk by chunk, products gate by gate."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import nullcontext

import torch
from torch import Tensor

from convexformer.operators.base import Operator
from convexformer.operators.bilinear import BilinearOperator
from convexformer.operators.budget import budget_on
from convexformer.operators.gates import Gates
from convexformer.operators.last_products import LastProducts
from convexformer.operators.lowrank import LowRank
from convexformer.threads import tensor_cores


class GatedMatrixOperator(BilinearOperator):
    """``A Z = sum_g A_g(Z_g)``, one nuclear norm a gate; self-attention and the mixer.

    The tokens are kept as they came and turned into ``dtype`` chunk by chunk: the float64 form of a float32 operator, which
    certificates use, holds no second copy of them. A term ``u v^T`` of gate g acts through an intermediate that depends on
    ``u`` alone; pooled, it is small, and kept for the gradient in ``v`` at the same point.
    """

    pooled: bool
    by_tensor_cores = False
    """Whether blocks are formed with TF32 products on a GPU, three digits: see :meth:`rough`."""

    def __init__(self, X: Tensor, gates: Gates, n_outputs: int, dtype: torch.dtype | None = None) -> None:
        self.X, self.gates, self.c = X, gates, n_outputs
        self.N, self.s, self.d = X.shape
        self._like = X.new_empty(0, dtype=dtype)
        self._forwarded: LastProducts[list[Tensor | None]] = LastProducts()

    def exact(self) -> Operator:
        """The same operator with wider products: gates were decided in float64, tokens are what they are."""
        return self.to(dtype=torch.float64)

    @property
    def like(self) -> Tensor:
        """An empty tensor: products may be wider than the tokens."""
        return self._like

    @property
    def data_size(self) -> int:
        """The tokens, once for each gate."""
        return self.X.numel() * self.n_blocks

    @abstractmethod
    def _forward(self, U: Tensor, b: int) -> Tensor:
        """The intermediate of terms ``U: (m, p)`` of gate b when pooled, ``(N, m, d)``."""

    @abstractmethod
    def _outputs(self, U: Tensor, V: Tensor, b: int, forward: Tensor | None) -> Tensor:
        """``(N, r, c)`` outputs of terms of gate b, from the intermediate where pooled."""

    @abstractmethod
    def _backward(self, D: Tensor, U: Tensor, b: int, forward: Tensor | None) -> Tensor:
        """``M_b^T U_j``, from the intermediate where pooled."""

    def _rows(self, grid: Tensor) -> Tensor:
        """``(N, r, c)`` to the rows of the outputs."""
        return grid.flatten(0, 1)

    def apply_factors(self, Z: LowRank) -> Tensor:
        """Gate by gate, a chunk of the samples at a time."""
        spans = Z.spans()
        forward = self._forwarded.of(Z.U)
        if forward is None:
            self._forwarded.make_room()
            forward = [self._forward(Z.U[own], b) if self.pooled else None for b, own in spans]
            self._forwarded.keep(Z.U, forward)
        parts = zip(spans, forward, strict=True)
        out = sum(self._outputs(Z.U[own], Z.V[own], b, known) for (b, own), known in parts)
        assert isinstance(out, Tensor)
        return self._rows(out)

    def rmatvec(self, D: Tensor, U: Tensor, b: int) -> Tensor:
        """``M_b^T U_j`` for rows ``U: (k, p)``."""
        return self._backward(D, U, b, self._forward(U, b) if self.pooled else None)

    def row_features(self, U: Tensor, b: int) -> Tensor | None:
        """The intermediate, where pooled."""
        return self._forward(U, b) if self.pooled else None

    @property
    def has_row_features(self) -> bool:
        """Pooled operators have them."""
        return self.pooled

    def factor_gradients(self, D: Tensor, Z: LowRank) -> tuple[Tensor, Tensor]:
        """Gate by gate; the gradient in ``V`` uses what the outputs at the same ``U`` left behind."""
        forwarded = None if self.dense_pays(Z.n_terms) else self._forwarded.of(Z.U)
        if forwarded is None:
            return super().factor_gradients(D, Z)
        known = zip(Z.spans(), forwarded, strict=True)
        GV = torch.cat([self._backward(D, Z.U[own], b, forward) for (b, own), forward in known])
        return torch.cat([self.matvec(D, Z.V[own], b) for b, own in Z.spans()]), GV

    @abstractmethod
    def _sums(self, V: Tensor, blocks: range) -> Tensor:
        """``A^T V`` of some gates in whatever layout one pass over the data gives, a gate first."""

    @abstractmethod
    def _block_of(self, sums: Tensor) -> Tensor:
        """One gate of :meth:`_sums` as ``M_b: (p, q)``."""

    def _formed(self, V: Tensor, blocks: range) -> Iterator[Tensor]:
        """The blocks of some gates, from one pass over the data."""
        with tensor_cores() if self.by_tensor_cores else nullcontext():
            sums = self._sums(V, blocks)
        return (self._block_of(own) for own in sums)

    def adjoint_block(self, V: Tensor, b: int) -> Tensor:
        """``M_b``."""
        return next(self._formed(V, range(b, b + 1)))

    def adjoint_blocks(self, V: Tensor) -> Iterator[Tensor]:
        """As many gates at a time as the memory budget allows: what does not depend on the gate is computed once."""
        p, q = self.weight_shape[-2:]
        step = max(1, budget_on(V.device).stored // (2 * V.dtype.itemsize * p * q))
        for start in range(0, self.n_blocks, step):
            yield from self._formed(V, range(start, min(start + step, self.n_blocks)))

    def to_rough(self) -> GatedMatrixOperator:
        """Return the operator in float32, which on a GPU forms blocks with TF32 products; itself where it is that."""
        if self.by_tensor_cores or (self._like.dtype == torch.float32 and not self._like.is_cuda):
            return self
        moved = self.to(dtype=torch.float32)
        assert isinstance(moved, GatedMatrixOperator)
        moved.by_tensor_cores = True
        return moved

    def _tokens(self, part: slice) -> Tensor:
        """``(n, s, d)`` in the dtype of the products."""
        return self.X[part].to(self._like.dtype)

    def _gate(self, b: int, part: slice) -> Tensor:
        """Gate b of some samples as zeros and ones."""
        return self.gates.take(part, b).to(self._like.dtype)

    def _moved(self, device: torch.device | str | None, dtype: torch.dtype | None) -> tuple[Tensor, torch.dtype]:
        """Tokens on a device, never wider than they came, and the dtype of products."""
        kind = self._like.dtype if dtype is None else dtype
        narrower = kind.itemsize < self.X.dtype.itemsize
        return self.X.to(device=device, dtype=kind if narrower else None), kind

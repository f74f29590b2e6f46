"""Operators whose weights are matrices met only through their factors: self-attention and the mixer."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator
from typing import final

import torch
from torch import Tensor

from convexformer.operators.base import Operator, TokenFeatures
from convexformer.operators.implicit import ImplicitMatrix
from convexformer.operators.kernel import RepresenterDual, StackedDual
from convexformer.operators.lowrank import LowRank
from convexformer.operators.moments import Moments, Turns
from convexformer.operators.relu import ReLUDual
from convexformer.operators.row_space import RowSpaceOperator
from convexformer.rows import LOCAL, Rows

NORM_PROBES = 8  # random vectors that estimate a Frobenius norm
GATHERED = 1 << 20  # blocks are gathered for one batched product if they have at most this many entries
DENSE_WEIGHTS = 1 << 24  # Z is formed inside an iteration if it has at most this many entries


class BilinearOperator(Operator):
    """``A Z`` for ``Z: (p, q)`` or ``(B, p, q)``, known through ``A(u v^T)`` in block b and ``M = A^T V`` times a vector.

    A concrete operator writes :meth:`apply_factors`, :meth:`matvec` and :meth:`rmatvec`; dense weights come for free (and
    may be overridden where one product is faster).
    """

    _dense_adjoint: tuple[Tensor, Tensor] | None = None
    _leading: dict[int, Tensor] | None = None
    _rough: BilinearOperator | None = None
    leading_of: Tensor | None = None
    """The ``D`` that :attr:`leading` was found for."""
    last_estimate: tuple[Tensor, float, float, tuple[Tensor, Tensor, Tensor, Tensor]] | None = None
    """Of the polar of ``scale A^T D``: ``D``, the scale, the value and its triples."""

    @abstractmethod
    def apply_factors(self, Z: LowRank) -> Tensor:
        """``A Z``, shape ``(R, c)``, without forming ``Z``."""

    @abstractmethod
    def matvec(self, D: Tensor, V: Tensor, b: int) -> Tensor:
        """``M_b V_j`` for rows ``V: (k, q)``, shape ``(k, p)``, where ``M = A^T D``."""

    @abstractmethod
    def rmatvec(self, D: Tensor, U: Tensor, b: int) -> Tensor:
        """``M_b^T U_j`` for rows ``U: (k, p)``, shape ``(k, q)``, where ``M = A^T D``."""

    def dense_pays(self, m: int) -> bool:
        """Tell whether ``m`` terms cost more one by one than through dense matrices; never where those are large."""
        return False

    def row_features(self, U: Tensor, b: int) -> Tensor | None:
        """``(N, m, l)`` with ``(A Z)_i = sum_j phi_ij^T V_j`` for ``Z_b = U^T V``, ``V_j`` read as ``(l, c)``; None where
        that does not depend on ``U`` alone.
        """
        return None

    def sketch(self, D: Tensor, b: int, left: Tensor, right: Tensor) -> Tensor | None:
        """``M_b^T U_j`` for rows ``U_j`` that factor into ``left: (k, p_1)`` and ``right: (k, p_2)``, ``p = p_1 p_2``; None
        where that is no cheaper than :meth:`rmatvec`. A start for estimates.
        """
        return None

    @property
    def has_row_features(self) -> bool:
        """Whether :meth:`row_features` has an answer."""
        return False

    def on_row_features(self, features: Tensor) -> Operator:
        """Return the map from ``V`` to outputs where ``U`` is fixed, from features ``(N, B, m, l)`` of all blocks."""
        return RowSpaceOperator(features, self.output_shape[1])

    @property
    def one_product(self) -> bool:
        """Whether ``A`` is one product of a dense matrix with dense weights: then evaluations cost more than products do."""
        return False

    @property
    def block_cost(self) -> float:
        """What forming one block of ``A^T D`` costs, in products with one vector."""
        return float(min(self.weight_shape[-2:]))

    @property
    def forming_work(self) -> float:
        """Multiplications that forming all blocks of ``A^T D`` takes; zero where nobody has counted them."""
        return 0.0

    @property
    def rough(self) -> BilinearOperator:
        """The same operator in float32, made once: for estimates, and for matrices that are verified in float64."""
        if self._rough is None:
            self._rough = self.to_rough()
        return self._rough

    def to_rough(self) -> BilinearOperator:
        """Return the operator in float32; itself where it is that already."""
        moved = self if self.like.dtype == torch.float32 else self.to(dtype=torch.float32)
        assert isinstance(moved, BilinearOperator)
        return moved

    @property
    def leading(self) -> dict[int, Tensor]:
        """Vectors ``(k, n)`` on the short side of each block along which ``A^T D`` was largest when last looked at.

        Dual matrices change little between gap checks: an estimate of the next one starts from these. Estimates are lower
        bounds from any start, so nothing else depends on them.
        """
        if self._leading is None:
            self._leading = {}
        return self._leading

    @property
    def n_blocks(self) -> int:
        """B, the number of gates; 1 for a linear head."""
        return math.prod(self.weight_shape[:-2])

    @property
    def size(self) -> int:
        """How many numbers a dense ``Z`` would hold."""
        p, q = self.weight_shape[-2:]
        return self.n_blocks * p * q

    def dense_adjoint(self, D: Tensor) -> Tensor:
        """``A^T D`` as one tensor, cached for the same ``D``: a gradient and a gap check ask for it in turn."""
        if self._dense_adjoint is None or self._dense_adjoint[0] is not D:
            self._dense_adjoint = (D, self.adjoint(D))
        return self._dense_adjoint[1]

    def factor_gradients(self, D: Tensor, Z: LowRank) -> tuple[Tensor, Tensor]:
        """``M V_j`` and ``M^T U_j`` for each term in its block, ``M = A^T D``: the gradients in the factors."""
        if self.dense_pays(Z.n_terms):
            return block_products(self.dense_adjoint(D), Z)
        if self.n_blocks == 1:
            return self.matvec(D, Z.V, 0), self.rmatvec(D, Z.U, 0)
        parts = [(self.matvec(D, Z.V[own], b), self.rmatvec(D, Z.U[own], b)) for b, own in Z.spans()]
        return torch.cat([GU for GU, _ in parts]), torch.cat([GV for _, GV in parts])

    def apply(self, Z: Tensor | LowRank) -> Tensor:
        """``A Z`` for dense or low-rank weights."""
        if not isinstance(Z, LowRank):
            return self.apply_dense(Z)
        if Z.n_terms == 0:
            return Z.U.new_zeros(self.output_shape)
        return self.apply_dense(Z.dense(limit=math.inf)) if self.dense_pays(Z.n_terms) else self.apply_factors(Z)

    def apply_dense(self, Z: Tensor) -> Tensor:
        """``A Z`` for dense weights: one term for each row (or column) of each block."""
        slices = Z.reshape(-1, *Z.shape[-2:])
        B, p, q = slices.shape
        k = min(p, q)
        unit = torch.eye(k, dtype=Z.dtype, device=Z.device).repeat(B, 1)
        block = torch.arange(B, device=Z.device).repeat_interleave(k)
        U, V = (unit, slices.flatten(0, 1)) if p <= q else (slices.mT.flatten(0, 1), unit)
        return self.apply_factors(LowRank(U, V, block, self.weight_shape, counts=(k,) * B))

    def adjoint(self, V: Tensor) -> Tensor:
        """``M = A^T V`` as one tensor."""
        out = V.new_empty((self.n_blocks, *self.weight_shape[-2:]))
        for b, block in enumerate(self.adjoint_blocks(V)):
            out[b] = block
        return out.view(self.weight_shape)

    def adjoint_blocks(self, V: Tensor) -> Iterator[Tensor]:
        """``M_0, M_1, ...``, one after another; operators whose blocks share work form several at a time."""
        return (self.adjoint_block(V, b) for b in range(self.n_blocks))

    def adjoint_block(self, V: Tensor, b: int) -> Tensor:
        """``M_b``, shape ``(p, q)``: products with the unit vectors of its short side."""
        p, q = self.weight_shape[-2:]
        unit = torch.eye(min(p, q), dtype=V.dtype, device=V.device)
        return self.rmatvec(V, unit, b) if p <= q else self.matvec(V, unit, b).mT

    def dual_matrix(self, V: Tensor, rows: Rows = LOCAL) -> Tensor | ImplicitMatrix:
        """``-A^T V`` as a linear map; formed only when asked to."""
        return ImplicitMatrix(self, V, -1.0, rows)


@final
class FactoredView(BilinearOperator):
    """Any operator on stacks of matrices, seen through factors: ``Z`` is small enough to be formed at every evaluation.

    Worth it where thresholding singular values would cost more than the products, as on a GPU.
    """

    def __init__(self, inner: Operator) -> None:
        self.inner = inner
        self.weight_shape, self.output_shape = inner.weight_shape, inner.output_shape

    @property
    def like(self) -> Tensor:
        """A tensor of the inner operator."""
        return self.inner.like

    def to(self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> FactoredView:
        """Move the inner operator."""
        return FactoredView(self.inner.to(device=device, dtype=dtype))

    def apply_factors(self, Z: LowRank) -> Tensor:
        """Form ``Z`` and apply."""
        return self.inner.apply(Z.dense(limit=math.inf))  # the operator itself works on tensors of this size

    def apply_dense(self, Z: Tensor) -> Tensor:
        """Apply."""
        return self.inner.apply(Z)

    def adjoint(self, V: Tensor) -> Tensor:
        """Apply the adjoint."""
        return self.inner.adjoint(V)

    def matvec(self, D: Tensor, V: Tensor, b: int) -> Tensor:
        """``M_b V_j`` with ``M`` formed once for each ``D``."""
        return V @ self._matrix(D)[b].T

    def rmatvec(self, D: Tensor, U: Tensor, b: int) -> Tensor:
        """``M_b^T U_j``."""
        return U @ self._matrix(D)[b]

    def moments(self, w: Tensor, rows: Rows = LOCAL, *, centred: bool = False) -> Moments | None:
        """Those of the inner operator."""
        return self.inner.moments(w, rows, centred=centred)

    def turned(self, rows: Turns, columns: Turns) -> FactoredView | None:
        """The inner operator along other axes."""
        inner = self.inner.turned(rows, columns)
        return None if inner is None else FactoredView(inner)

    @property
    def one_product(self) -> bool:
        """Yes, or nearly so."""
        return True

    def dense_pays(self, m: int) -> bool:
        """Always: that is its point."""
        return True

    def token_features(self) -> TokenFeatures | None:
        """Those of the inner operator."""
        return self.inner.token_features()

    def restricted(self, tokens: Tensor) -> FactoredView:
        """The inner operator on some of the tokens."""
        return FactoredView(self.inner.restricted(tokens))

    def adjoint_block(self, V: Tensor, b: int) -> Tensor:
        """One block of the adjoint, which is formed once for each ``V``."""
        return self._matrix(V)[b]

    @property
    def block_cost(self) -> float:
        """Products with vectors go through the block as it is."""
        return 0.0

    def _matrix(self, D: Tensor) -> Tensor:
        return self.dense_adjoint(D).reshape(-1, *self.weight_shape[-2:])


def block_products(M: Tensor, Z: LowRank) -> tuple[Tensor, Tensor]:
    """``M V_j`` and ``M^T U_j`` for each term in its block of a dense ``M: (..., p, q)``."""
    M = M.reshape(-1, *M.shape[-2:])
    if len(M) == 1:
        return Z.V @ M[0].T, Z.U @ M[0]
    if Z.n_terms * M[0].numel() <= GATHERED:
        M = M[Z.block]  # (m, p, q)
        return (M @ Z.V[:, :, None])[:, :, 0], (Z.U[:, None] @ M)[:, 0]
    pairs = [(Z.V[own] @ M[b].T, Z.U[own] @ M[b]) for b, own in Z.spans()]
    return torch.cat([GU for GU, _ in pairs]), torch.cat([GV for _, GV in pairs])


def frobenius_norm(M: Tensor | ImplicitMatrix | RepresenterDual | StackedDual | ReLUDual) -> float:
    """Return the Frobenius norm; for an implicit matrix roughly, from products with a few random vectors."""
    if isinstance(M, Tensor):
        return float(torch.linalg.vector_norm(M.double()))
    if isinstance(M, (RepresenterDual, StackedDual, ReLUDual)):
        return M.norm()
    B, _, q = M.shape
    probes = torch.randn((NORM_PROBES, q), generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(M.like)
    return math.sqrt(sum(float(M.matvec(probes, b).double().square().sum()) for b in range(B)) / NORM_PROBES)


def kept_rows(grid: Tensor, kept: Tensor | None) -> Tensor:
    """``(N, r, c)`` to the rows ``(R, c)`` that exist; ``kept: (R,)`` says which, None means all."""
    rows = grid.flatten(0, 1)
    return rows if kept is None else rows.index_select(0, kept)


def row_grid(D: Tensor, kept: Tensor | None, N: int, r: int) -> Tensor:
    """Rows back to ``(N, r, c)``, zero where there is none."""
    if kept is not None:
        D = D.new_zeros((N * r, D.shape[1])).index_copy(0, kept, D)
    return D.view(N, r, D.shape[1])

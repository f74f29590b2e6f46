"""Dual matrices of bilinear operators, known through products with vectors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, final

import torch
from torch import Tensor

from convexformer.operators.budget import budget_on
from convexformer.rows import LOCAL, Rows

if TYPE_CHECKING:
    from convexformer.operators.bilinear import BilinearOperator

SAME, SIMILAR = 1e-12, 1e-2
"""Shares by which dual points may differ that have an estimate in common, or that one may begin an estimate of the other."""


@final
class ImplicitMatrix:
    """``M = scale * A^T D``, block by block, through products with vectors, summed over all ``rows``."""

    def __init__(self, operator: BilinearOperator, D: Tensor, scale: float = 1.0, rows: Rows = LOCAL) -> None:
        self.operator = operator
        self.D, self.scale, self.rows = D, scale, rows
        self._dense: Tensor | None = None
        self._spectrum: tuple[Tensor, Tensor] | None = None
        self._rough: ImplicitMatrix | None = None
        self.pairs: tuple[Tensor, Tensor, Tensor, Tensor] | None = None
        self.guard: Callable[[], None] | None = None
        """Called before every product; it raises where a solve's time is up."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """``(B, p, q)``."""
        p, q = self.operator.weight_shape[-2:]
        return self.operator.n_blocks, p, q

    @property
    def like(self) -> Tensor:
        """A tensor of its device and dtype."""
        return self.D

    def __rmul__(self, scale: float) -> ImplicitMatrix:
        """``scale * M``."""
        return self._guarded(ImplicitMatrix(self.operator, self.D, scale * self.scale, self.rows))

    def matvec(self, V: Tensor, b: int) -> Tensor:
        """``M_b V_j``, rows ``(k, q) -> (k, p)``."""
        self._begin_product()
        return self.scale * self.rows.total(self.operator.matvec(self.D, V, b))

    def rmatvec(self, U: Tensor, b: int) -> Tensor:
        """``M_b^T U_j``, rows ``(k, p) -> (k, q)``."""
        self._begin_product()
        return self.scale * self.rows.total(self.operator.rmatvec(self.D, U, b))

    def sketch(self, b: int, count: int) -> Tensor | None:
        """``(count, q)`` random combinations of the rows of ``M_b``, where there are cheap ones."""
        side = math.isqrt(self.shape[1])
        if side * side != self.shape[1]:
            return None
        generator = torch.Generator().manual_seed(b)
        left, right = (torch.randn((count, side), generator=generator, dtype=torch.float64).to(self.like) for _ in "ab")
        self._begin_product()
        found = self.operator.sketch(self.D, b, left, right)
        return None if found is None else self.scale * self.rows.total(found)

    def block(self, b: int) -> Tensor:
        """``M_b`` as one tensor ``(p, q)``, formed anew unless all of ``M`` is at hand."""
        if self._dense is not None:
            return self._dense[b]
        if self.shape[0] == 1:
            return self.dense()[0]
        self._begin_product()
        return self.scale * self.rows.total(self.operator.adjoint_block(self.D, b))

    def blocks(self) -> Iterator[Tensor]:
        """All blocks, one after another."""
        if self._dense is not None or self.shape[0] == 1:
            yield from self.dense()
            return
        self._begin_product()
        for block in self.operator.adjoint_blocks(self.D):
            yield self.scale * self.rows.total(block)
            self._begin_product()

    def rough(self) -> ImplicitMatrix:
        """About the same matrix in float32."""
        if self._rough is None:
            unit = self.D.abs().amax()
            unit = torch.where((unit > 0) & unit.isfinite(), unit, 1.0)
            D = (self.D / unit).to(torch.float32)
            self._rough = self._guarded(ImplicitMatrix(self.operator.rough, D, self.scale * float(unit), self.rows))
        return self._rough

    @property
    def forming_work(self) -> float:
        """Multiplications that forming all blocks takes."""
        return 0.0 if self._dense is not None else self.operator.forming_work

    @property
    def formable(self) -> bool:
        """Whether one block in float64 fits the memory budget."""
        _, p, q = self.shape
        return 8 * p * q <= budget_on(self.D.device).formed

    @property
    def block_cost(self) -> float:
        """What forming one block costs, in products with one vector."""
        return 0.0 if self._dense is not None else self.operator.block_cost

    @property
    def leading(self) -> dict[int, Tensor]:
        """Vectors on the short side of each block to start an estimate from."""
        return self.operator.leading

    def recall(self) -> float | None:
        """Return what the last estimate for the same matrix came to, and take over its triples; None for another one."""
        last = self.operator.last_estimate
        if last is None or last[1] != self.scale or not _close(last[0], self.D, SAME):
            return None
        self.pairs = last[3]
        return last[2]

    def remember(self, value: float) -> None:
        """Keep an estimate with its triples: a largest beta and the first gap check of a solve ask for the same one."""
        assert self.pairs is not None
        self.operator.last_estimate = (self.D, self.scale, value, self.pairs)

    @property
    def surveyed(self) -> bool:
        """Whether :attr:`leading` belongs to about this matrix, up to its scale."""
        last = self.operator.leading_of
        return last is not None and _close(last / last.abs().amax(), self.D / self.D.abs().amax(), SIMILAR)

    def note_leading(self) -> None:
        """Say that :attr:`leading` belongs to this matrix."""
        self.operator.leading_of = self.D

    def gram_spectrum(self) -> tuple[Tensor, Tensor]:
        """Singular values ``(B, n)``, rising, and vectors ``(B, n, n)`` of the short side, by Gram matrices, found once."""
        if self._spectrum is None:
            M = self.dense()
            unit = M.abs().amax()
            unit = torch.where(unit > 0, unit, 1.0)  # squares neither overflow nor vanish
            M = M / unit
            squares, vectors = torch.linalg.eigh(M.mT @ M if M.shape[-2] >= M.shape[-1] else M @ M.mT)
            self._spectrum = (unit * squares.clamp_min(0).sqrt(), vectors)
        return self._spectrum

    def dense(self) -> Tensor:
        """``(B, p, q)``, formed once."""
        if self._dense is None:
            self._begin_product()
            self._dense = self.scale * self.rows.total(self.operator.dense_adjoint(self.D)).reshape(self.shape)
        return self._dense

    def _begin_product(self) -> None:
        if self.guard is not None:
            self.guard()

    def _guarded(self, other: ImplicitMatrix) -> ImplicitMatrix:
        other.guard = self.guard
        return other


def _close(a: Tensor, b: Tensor, tolerance: float) -> bool:
    """Tell whether two tensors differ by little, next to the larger entries."""
    return a.shape == b.shape and bool((a - b.to(a)).norm() <= tolerance * b.norm())

"""Weights as a sum of few outer products, so that a large ``Z`` is never formed."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import final

import torch
from torch import Tensor

DENSE_LIMIT = 1 << 26  # numbers: 512 MiB in float64


@final
@dataclass(frozen=True)
class LowRank:
    """``Z_b = sum_{j : block_j = b} U_j V_j^T`` for ``b`` in ``0..B-1``; ``U: (m, p)``, ``V: (m, q)``, ``block: (m,)``.

    ``shape`` is that of the dense tensor: ``(p, q)``, or ``(B, p, q)`` for gated heads. Terms are sorted by block, and their
    number in each block is kept on the host: products with one block are then slices, without a host sync.
    """

    U: Tensor
    V: Tensor
    block: Tensor
    shape: tuple[int, ...]
    counts: tuple[int, ...] = field(default=(), repr=False)
    """The number of terms of each block; found when not given."""

    def __post_init__(self) -> None:
        if self.counts:
            return
        counts = (self.n_terms,)
        if self.n_blocks > 1:
            block, order = self.block.sort(stable=True)
            for name, tensor in (("U", self.U[order]), ("V", self.V[order]), ("block", block)):
                object.__setattr__(self, name, tensor)
            counts = tuple(block.bincount(minlength=self.n_blocks).tolist())
        object.__setattr__(self, "counts", counts)

    @classmethod
    def zeros(cls, shape: tuple[int, ...], like: Tensor) -> LowRank:
        """No terms at all."""
        p, q = shape[-2:]
        empty = torch.zeros(0, dtype=torch.int64, device=like.device)
        return cls(like.new_zeros((0, p)), like.new_zeros((0, q)), empty, tuple(shape))

    @classmethod
    def of(cls, Z: Tensor, tolerance: float = 1e-13) -> LowRank:
        """Return the balanced decomposition of a dense tensor, by the SVD of each block."""
        slices = Z.reshape(-1, *Z.shape[-2:])
        L, sigma, Rh = torch.linalg.svd(slices, full_matrices=False)
        top = float(sigma.max()) if sigma.numel() else 0.0
        block, rank = (sigma > tolerance * top).nonzero(as_tuple=True)
        root = sigma[block, rank].sqrt()[:, None]
        return cls(root * L[block, :, rank], root * Rh[block, rank], block, tuple(Z.shape))

    @property
    def n_terms(self) -> int:
        """m, the number of outer products."""
        return self.U.shape[0]

    @property
    def n_blocks(self) -> int:
        """B, the number of blocks."""
        return math.prod(self.shape[:-2])

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the factors."""
        return self.U.dtype

    @property
    def device(self) -> torch.device:
        """The device of the factors."""
        return self.U.device

    def to(self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> LowRank:
        """Move to another device or dtype."""
        U, V = (factor.to(device=device, dtype=dtype) for factor in (self.U, self.V))
        return LowRank(U, V, self.block.to(device=device), self.shape, self.counts)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.U.nbytes + self.V.nbytes + self.block.nbytes

    def operand(self) -> LowRank:
        """Return the factors: operators and penalties that know them take them as they are."""
        return self

    def tensors(self) -> dict[str, Tensor]:
        """Return all numbers by name, for a file."""
        return {"U": self.U, "V": self.V, "block": self.block}

    def with_factors(self, U: Tensor, V: Tensor) -> LowRank:
        """Return other factors in the same blocks."""
        return LowRank(U, V, self.block, self.shape, self.counts)

    def spans(self) -> list[tuple[int, slice]]:
        """Return the blocks that have terms, each with the place of its terms."""
        ends = list(itertools.accumulate(self.counts))
        return [(b, slice(end - n, end)) for b, (n, end) in enumerate(zip(self.counts, ends, strict=True)) if n]

    def dense(self, limit: float = DENSE_LIMIT) -> Tensor:
        """Return ``Z`` as one tensor, where it has at most ``limit`` numbers."""
        p, q = self.shape[-2:]
        if self.n_blocks * p * q > limit:
            raise ValueError(
                f"Z of shape {self.shape} has {self.n_blocks * p * q:,} numbers, too many to form. Use its factors "
                "(weights.Z.U, weights.Z.V) or the network."
            )
        if self.n_blocks == 1:
            return (self.U.T @ self.V).reshape(self.shape)
        Z = self.U.new_zeros((self.n_blocks, p, q))
        if self.n_terms:
            stack = Stack(self)
            Z[stack.numbers] = stack.put(self.U).mT @ stack.put(self.V)
        return Z.reshape(self.shape)

    def singular_values(self) -> Tensor:
        """All nonzero singular values of all blocks."""
        values = [torch.linalg.svdvals(_cores(self.U[own], self.V[own])[2]) for _, own in self.spans()]
        return torch.cat(values) if values else self.U.new_zeros(0)

    def balanced(self, tolerance: float = 1e-13) -> LowRank:
        """Return the same ``Z`` with orthogonal, balanced factors; terms that carry nothing are dropped.

        ``1/2 (|U|^2 + |V|^2)`` is then the nuclear norm.
        """
        if self.n_terms == 0:
            return self
        stack = Stack(self)
        Qu, Qv, core = _cores(stack.put(self.U), stack.put(self.V))
        L, sigma, Rh = torch.linalg.svd(core, full_matrices=False)  # (B', k), falling
        root = sigma.sqrt()[..., None]
        U, V = root * (Qu @ L).mT, root * (Rh @ Qv.mT)
        rank = torch.arange(sigma.shape[1], device=self.device)
        keep = (sigma > tolerance * sigma.max()) & (rank < stack.counts[:, None])
        own, place = keep.nonzero(as_tuple=True)
        counts = [0] * self.n_blocks
        for b, n in zip(stack.blocks, keep.sum(1).tolist(), strict=True):
            counts[b] = n
        return LowRank(U[own, place], V[own, place], stack.numbers[own], self.shape, tuple(counts))

    def select(self, keep: Tensor) -> LowRank:
        """Return some of the terms."""
        return LowRank(self.U[keep], self.V[keep], self.block[keep], self.shape)

    def append(self, U: Tensor, V: Tensor, block: Tensor) -> LowRank:
        """Return these terms and more."""
        return LowRank(
            torch.cat([self.U, U.to(self.U)]),
            torch.cat([self.V, V.to(self.V)]),
            torch.cat([self.block, block]),
            self.shape,
        )


def _cores(U: Tensor, V: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``U^T V = Qu core Qv^T`` with orthonormal ``Qu: (p, a)``, ``Qv: (q, b)`` and a small ``core``; stacks as well."""
    Qu, Ru = torch.linalg.qr(U.mT)
    Qv, Rv = torch.linalg.qr(V.mT)
    return Qu, Qv, Ru @ Rv.mT


@lru_cache(maxsize=64)
@torch.inference_mode(False)
def _layout(counts: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor, Tensor | None]:
    """The blocks that have terms, how many each, and the place of every term in a stack; None where that is its number.

    Kept, since an iteration on a GPU may neither wait for numbers from the host nor, when recorded, copy them.
    """
    blocks, terms = zip(*((b, n) for b, n in enumerate(counts) if n), strict=True) if any(counts) else ((), ())
    depth = max(terms, default=0)
    numbers = partial(torch.tensor, dtype=torch.int64, device=device)
    place = None
    if any(n < depth for n in terms):
        place = numbers([b * depth + k for b, n in enumerate(terms) for k in range(n)])
    return numbers(blocks), numbers(terms), place


@final
class Stack:
    """The terms of each block in use side by side: rows ``(m, n)`` as ``(B', r, n)``, zero where a block has fewer.

    Products of all blocks are then batched ones.
    """

    def __init__(self, Z: LowRank) -> None:
        self.depth = max(Z.counts, default=0)
        self.blocks = [b for b, n in enumerate(Z.counts) if n]
        self.numbers, self.counts, self._place = _layout(Z.counts, Z.device)

    def put(self, X: Tensor) -> Tensor:
        """``(m, n)`` to ``(B', r, n)``."""
        shape = (len(self.numbers), self.depth, X.shape[1])
        if self._place is None:
            return X.reshape(shape)
        return X.new_zeros((shape[0] * shape[1], shape[2])).index_copy(0, self._place, X).view(shape)

    def take(self, X: Tensor) -> Tensor:
        """``(B', r, n)`` to ``(m, n)``."""
        flat = X.reshape(-1, X.shape[2])
        return flat if self._place is None else flat.index_select(0, self._place)

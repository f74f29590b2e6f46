"""Solutions of a path, kept small: zero groups are left out, and weights are dense again when a solution is asked for."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, final, overload

import torch
from torch import Tensor

from convexformer.architecture import Weights
from convexformer.solution import Solution


@final
@dataclass(frozen=True)
class PackedTensor:
    """The nonzero groups of a tensor ``Z: (..., d, c)``, a group being the ``d`` numbers of one token and one output."""

    rows: Tensor
    """``(k, d)``, the groups that are not zero."""
    index: Tensor
    """``(k,)``, their places among all groups."""
    shape: tuple[int, ...]

    @classmethod
    def of(cls, Z: Tensor) -> PackedTensor:
        """Pack a tensor; unpacking gives the same numbers, bit by bit."""
        groups = Z.movedim(-2, -1).reshape(-1, Z.shape[-2])
        index = groups.ne(0).any(1).nonzero().squeeze(1)
        return cls(groups[index].contiguous(), index, tuple(Z.shape))

    def dense(self) -> Tensor:
        """Return the whole tensor."""
        *outer, d, c = self.shape
        groups = self.rows.new_zeros((math.prod(outer) * c, d))
        groups[self.index] = self.rows
        return groups.reshape(*outer, c, d).movedim(-1, -2).contiguous()

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.rows.nbytes + self.index.nbytes


@final
class StoredSolutions(Sequence[Solution]):
    """A read-only sequence of solutions; ``solutions[k]`` makes the weights of one dense, on demand."""

    def __init__(self, solutions: Iterable[Solution] = ()) -> None:
        self._kept: list[Solution] = []
        for solution in solutions:
            self.append(solution)

    def append(self, solution: Solution) -> None:
        """Keep one more; low-rank and mostly nonzero weights stay as they are."""
        Z: Any = solution.weights.Z
        if isinstance(Z, Tensor) and Z.ndim >= 2:
            packed = PackedTensor.of(Z)
            Z = packed if packed.nbytes < Z.nbytes else Z.clone()
        self._kept.append(replace(solution, weights=Weights(Z, solution.weights.intercept)))

    @property
    def nbytes(self) -> int:
        """Bytes of all weights as they are kept."""
        return sum(_nbytes(solution.weights.Z) for solution in self._kept)

    def __len__(self) -> int:
        return len(self._kept)

    @overload
    def __getitem__(self, index: int) -> Solution: ...

    @overload
    def __getitem__(self, index: slice) -> list[Solution]: ...

    def __getitem__(self, index: int | slice) -> Solution | list[Solution]:
        if isinstance(index, slice):
            return [_unpacked(solution) for solution in self._kept[index]]
        return _unpacked(self._kept[index])

    def __iter__(self) -> Iterator[Solution]:
        return map(_unpacked, self._kept)

    def __repr__(self) -> str:
        return f"StoredSolutions({len(self)} solutions, {self.nbytes:,} bytes of weights)"


def _unpacked(solution: Solution) -> Solution:
    Z = solution.weights.Z
    if not isinstance(Z, PackedTensor):
        return solution
    return replace(solution, weights=Weights(Z.dense(), solution.weights.intercept))


def _nbytes(Z: Any) -> int:
    parts = (Z,) if isinstance(Z, (Tensor, PackedTensor)) else (Z.U, Z.V, Z.block)
    return sum(part.nbytes for part in parts)


def active_tokens(norms: Tensor) -> Tensor:
    """``(n_betas,)`` how many tokens carry weight at each beta, from ``norms: (n_betas, s)``."""
    largest = norms.amax(1, keepdim=True).clamp_min(torch.finfo(norms.dtype).tiny)
    return (norms > 1e-9 * largest).sum(1)

"""Solutions of a path, kept small: without their zero groups, and dense again when a solution is asked for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import final, overload

import torch
from torch import Tensor

from convexformer.solution import Solution
from convexformer.weights import Dense, GroupSparse, Weights


@final
class StoredSolutions(Sequence[Solution]):
    """A read-only sequence of solutions; ``solutions[k]`` makes the weights of one dense, on demand."""

    def __init__(self, solutions: Iterable[Solution] = ()) -> None:
        self._kept: list[Solution] = []
        for solution in solutions:
            self.append(solution)

    def append(self, solution: Solution) -> None:
        """Keep one more: group-sparse where that is smaller than the tensor, low-rank factors as they are."""
        weights = solution.weights
        if isinstance(weights.form, Dense):
            weights = Weights(_smaller(weights.form), weights.intercept, weights.origin)
        self._kept.append(replace(solution, weights=weights))

    @property
    def nbytes(self) -> int:
        """Bytes of all weights as they are kept."""
        return sum(solution.weights.form.nbytes for solution in self._kept)

    def __len__(self) -> int:
        return len(self._kept)

    @overload
    def __getitem__(self, index: int) -> Solution: ...

    @overload
    def __getitem__(self, index: slice) -> list[Solution]: ...

    def __getitem__(self, index: int | slice) -> Solution | list[Solution]:
        if isinstance(index, slice):
            return [_restored(solution) for solution in self._kept[index]]
        return _restored(self._kept[index])

    def __iter__(self) -> Iterator[Solution]:
        return map(_restored, self._kept)

    def __repr__(self) -> str:
        return f"StoredSolutions({len(self)} solutions, {self.nbytes:,} bytes of weights)"


def active_tokens(norms: Tensor) -> Tensor:
    """``(n_betas,)`` how many tokens have nonzero weights at each beta, from ``norms: (n_betas, s)``."""
    largest = norms.amax(1, keepdim=True).clamp_min(torch.finfo(norms.dtype).tiny)
    return (norms > 1e-9 * largest).sum(1)


def _smaller(form: Dense) -> Dense | GroupSparse:
    if len(form.shape) >= 2:
        sparse = GroupSparse.of(form.tensor)
        if sparse.nbytes < form.nbytes:
            return sparse
    return Dense(form.tensor.clone())


def _restored(solution: Solution) -> Solution:
    weights = solution.weights
    if not isinstance(weights.form, GroupSparse):
        return solution
    return replace(solution, weights=Weights(weights.form.dense(), weights.intercept, weights.origin))

"""Splits and minibatches, one order for each seed; a batch depends on the iteration alone, so resuming needs no state."""

from __future__ import annotations

from typing import final

import numpy as np
import torch
from torch import Tensor

from convexformer.data import SymbolTask
from convexformer.deep.base import SequenceModel

Data = SymbolTask | tuple[SymbolTask, SymbolTask]


@final
class Split:
    """Train and test samples of every seed, ``X: (S, N, n)`` and ``y: (S, N)``, on the device of the model."""

    def __init__(self, train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor], task: str) -> None:
        self.train, self.test, self.task = train, test, task

    @classmethod
    def of(cls, data: Data, fraction: float, model: SequenceModel) -> Split:
        """Split a task, one split per seed; or take a given pair ``(train, test)`` for all seeds alike."""
        parts = data if isinstance(data, tuple) else (data,)
        if not parts or len(parts) > 2 or not all(isinstance(part, SymbolTask) for part in parts):
            raise TypeError(
                f"data is a {type(data).__name__}; expected a SymbolTask such as cf.data.modular_division(97), or a pair "
                "(train, test) of them."
            )
        for part in parts:
            _check(part, model)
        device, S = next(model.parameters()).device, len(model.seeds)
        if len(parts) == 2:
            sides = [(part.X.expand(S, -1, -1), part.y.expand(S, -1)) for part in parts]
        else:
            sides = [(parts[0].X[rows], parts[0].y[rows]) for rows in parts[0].splits(fraction, model.seeds)]
        train, test = ((X.to(device).contiguous(), y.to(device).contiguous()) for X, y in sides)
        return cls(train, test, parts[0].name)


@final
class Batches:
    """Shuffled epochs, one after the other, cut into batches; a batch may straddle two epochs."""

    def __init__(self, seeds: tuple[int, ...], n_samples: int, batch_size: int | None) -> None:
        self.seeds, self.n_samples = seeds, n_samples
        self.size = n_samples if batch_size is None else min(batch_size, n_samples)
        self.whole = self.size == n_samples
        self._epochs: dict[tuple[int, int], np.ndarray] = {}

    def rows(self, first: int, count: int) -> Tensor:
        """``(count, S, size)`` row numbers of ``count`` batches from iteration ``first`` on."""
        start, stop = first * self.size, (first + count) * self.size
        epochs = range(start // self.n_samples, -(-stop // self.n_samples))
        self._epochs = {key: order for key, order in self._epochs.items() if key[1] in epochs}
        stream = np.stack([np.concatenate([self._epoch(seed, epoch) for epoch in epochs]) for seed in self.seeds])
        shift = start - epochs[0] * self.n_samples
        picked = stream[:, shift : shift + count * self.size].reshape(len(self.seeds), count, self.size)
        return torch.from_numpy(np.ascontiguousarray(picked.swapaxes(0, 1)))

    def _epoch(self, seed: int, epoch: int) -> np.ndarray:
        if (seed, epoch) not in self._epochs:
            self._epochs[seed, epoch] = np.random.default_rng([seed, epoch]).permutation(self.n_samples)
        return self._epochs[seed, epoch]


def _check(task: SymbolTask, model: SequenceModel) -> None:
    expected = (model.n_symbols, model.n_classes, model.n_tokens)
    given = (task.n_symbols, task.n_classes, task.n_tokens)
    if given != expected:
        raise ValueError(
            f"the task {task.name!r} has {given[0]} symbols, {given[1]} classes and sequences of {given[2]}; the model was "
            f"built for {expected[0]}, {expected[1]} and {expected[2]}. Build it as "
            f"{type(model).__name__}({given[0]}, {given[1]}, {given[2]}, ...)."
        )

"""Checkpoints of a solve: the best point so far, in one safetensors file, with the fingerprint of its problem."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import final

from convexformer.data.files import read_checkpoint, write_checkpoint
from convexformer.objective import Objective
from convexformer.weights import Weights


@final
class Checkpoint:
    """Reads a file at the start of a solve and rewrites it as the solve goes on."""

    def __init__(
        self, path: str | os.PathLike[str], fingerprint: str, objective: Objective, every_seconds: float = 30.0
    ) -> None:
        self.path = Path(path)
        self.fingerprint = fingerprint
        self.every_seconds = every_seconds
        self._like = objective.like
        self._shape = objective.weight_shape
        self._last = time.perf_counter()
        self._first = 0

    def resume(self) -> tuple[Weights, int] | None:
        """Return the stored point and its iteration; None when there is no file yet."""
        found = read_checkpoint(self.path, self.fingerprint, "problem (other data, head, loss or beta)")
        if found is None:
            return None
        self._first, tensors = found
        weights = Weights.of_tensors(tensors, self._shape)
        return weights.to(device=self._like.device, dtype=self._like.dtype), self._first

    def keep(self, weights: Weights, iteration: int, *, now: bool = False) -> None:
        """Write the point if the last write is old enough (or ``now``); a crash never leaves half a file.

        ``iteration`` counts from the start of this solve; the file counts from that of the first.
        """
        if not now and time.perf_counter() - self._last < self.every_seconds:
            return
        tensors = {name: tensor.contiguous().cpu() for name, tensor in weights.tensors().items()}
        write_checkpoint(self.path, self.fingerprint, self._first + iteration, tensors)
        self._last = time.perf_counter()

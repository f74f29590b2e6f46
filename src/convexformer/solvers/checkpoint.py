"""Checkpoints: the best point so far, in one safetensors file, and a fingerprint of the problem it belongs to."""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path
from typing import final

import numpy as np
import torch

from convexformer.architecture import Head, Weights
from convexformer.data.files import read_checkpoint, write_checkpoint
from convexformer.problem import Problem


@final
class Checkpoint:
    """Reads a file at the start of a solve and rewrites it as the solve goes on."""

    def __init__(self, path: str | os.PathLike[str], problem: Problem, every_seconds: float = 30.0) -> None:
        self.path = Path(path)
        self.fingerprint = fingerprint(problem)
        self.every_seconds = every_seconds
        self._like = problem.operator.like
        self._shape = problem.operator.weight_shape
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


def fingerprint(problem: Problem) -> str:
    """Hash what defines the problem: head, loss, beta, sizes, targets, and sums over the tokens."""
    X = problem.tokens.X
    ramp = torch.linspace(1.0, 2.0, X.shape[0], dtype=X.dtype, device=X.device)
    facts = {
        "head": problem.head.name,
        "config": {key: _plain(value) for key, value in problem.head.config().items()},
        "loss": repr(problem.loss),
        "beta": problem.beta,
        "intercept": problem.intercept,
        "shape": [*X.shape, problem.layout.n_outputs],
        "tokens": _plain(torch.einsum("n,nsd->sd", ramp, X)),
        "mask": _plain(
            torch.ones(X.shape[:2], dtype=torch.bool) if problem.tokens.mask is None else problem.tokens.mask
        ),
        "targets": _plain(problem.Y),
        "weights": _plain(problem.w),
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _plain(value: object) -> object:
    """Tensors and arrays become the hash of their bytes, NumPy's numbers ordinary ones, heads name and options."""
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(np.ascontiguousarray(value))
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, torch.Tensor):
        return hashlib.sha256(value.detach().cpu().contiguous().numpy().tobytes()).hexdigest()
    if isinstance(value, Head):  # a part of a sum
        return [value.name, {key: _plain(item) for key, item in value.config().items()}]
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    return value

"""Class targets as users have them: labels, rows of probabilities, and labels of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

import numpy as np
from torch import Tensor

from convexformer.estimators.inputs import read_labels


@final
@dataclass(frozen=True)
class ClassTargets:
    """Labels ``(N,)`` or, per token, ``(N, s)``; or probabilities ``(N, c)`` or ``(N, s, c)`` (``soft``)."""

    values: np.ndarray
    soft: bool
    per_token: bool

    @property
    def hard(self) -> np.ndarray:
        """Labels, or the index of the most likely class."""
        return self.values.argmax(-1) if self.soft else self.values

    def real(self, mask: np.ndarray | None) -> np.ndarray:
        """Return the values that count: per token those of real tokens, in one row; else all."""
        if not self.per_token:
            return self.values
        keep = np.ones(self.values.shape[:2], dtype=bool) if mask is None else mask
        return self.values[keep]

    def classes(self, mask: np.ndarray | None) -> np.ndarray:
        """Return the sorted labels, or the indices of the probabilities."""
        return np.arange(self.values.shape[-1]) if self.soft else np.unique(self.real(mask))


def read_class_targets(y: Any, n_tokens: int, whose: str) -> ClassTargets:
    """Tell labels ``(N,)`` from soft labels ``(N, c)`` or ``(N, s, c)`` and labels of tokens ``(N, s)``."""
    values = y.detach().cpu().numpy() if isinstance(y, Tensor) else y
    if (
        isinstance(values, (list, tuple))
        and values
        and all(isinstance(v, (np.ndarray, Tensor)) and v.ndim for v in values)
    ):
        values = _padded([np.asarray(v) for v in values], n_tokens)
    array = np.asarray(values) if getattr(values, "ndim", 2) != 1 else values
    if array.ndim < 2 or (array.ndim == 2 and array.shape[1] == 1):
        return ClassTargets(read_labels(y), soft=False, per_token=False)
    per_token = array.ndim == 3 or array.shape[1] == n_tokens > 1
    if array.dtype.kind == "f" and array.ndim in (2, 3):
        if array.ndim == 3 and array.shape[1] != n_tokens:
            raise ValueError(f"y has shape {array.shape}; expected (N, s, c) with the s={n_tokens} tokens of X.")
        sums = np.nan_to_num(array.sum(-1), nan=1.0)  # masked tokens may hold anything
        if array.shape[-1] > 1 and (np.abs(sums - 1) <= 1e-3).all() and not (array < 0).any():
            return ClassTargets(array.astype(np.float64), soft=True, per_token=array.ndim == 3)
        raise ValueError(
            f"y has shape {array.shape} and {whose} reads it as probabilities, but a row sums to "
            f"{float(sums.ravel()[np.abs(sums - 1).argmax()]):.4g}. Pass labels (N,), rows that are nonnegative and sum to "
            "one, or real targets to TokenRegressor."
        )
    if array.ndim == 2 and array.dtype.kind in "iub" and _one_hot(array):
        question = " If they are labels of tokens, pass them as text, or one-hot (N, s, c) floats." if per_token else ""
        raise ValueError(
            f"y has shape {array.shape} and holds one-hot rows; {whose} takes labels (N,): pass y.argmax(1).{question}"
        )
    if array.ndim == 2 and per_token:
        return ClassTargets(array, soft=False, per_token=True)
    raise ValueError(
        f"y has shape {array.shape}; {whose} takes labels (N,), probabilities (N, c) as floats, or, per token, labels "
        f"(N, s) with the s={n_tokens} tokens of X."
    )


def _one_hot(array: np.ndarray) -> bool:
    return bool(((array == 0) | (array == 1)).all() and (array.sum(1) == 1).all())


def _padded(rows: list[np.ndarray], n_tokens: int) -> Any:
    """Put labels of ragged samples on a grid; what stands at missing tokens does not count."""
    if any(row.ndim != 1 or len(row) > n_tokens for row in rows) or len({len(row) for row in rows}) == 1:
        return rows
    full = np.empty((len(rows), n_tokens), dtype=np.result_type(*rows))
    for own, row in zip(full, rows, strict=True):
        own[:] = row[0]
        own[: len(row)] = row
    return full

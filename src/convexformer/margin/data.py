"""Sequences with a query, a label and a fixed prediction head: scores, optimal tokens, ties, margins.

Sheen et al. 2024, section 3.1: sequence ``i`` has tokens ``x_il``, a query ``z_i`` and a label ``y_i = +-1``; the model is
``v^T X_i^T softmax(X_i W z_i)``. The score of a token is ``y_i v^T x_il``; the optimal token has the highest.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import cached_property
from typing import Any, final

import torch
from torch import Tensor

from convexformer.data.tokens import as_tensor, check_finite, pick_device
from convexformer.margin.operator import MarginOperator
from convexformer.operators import DenseOperator

SAME_SCORE = 1e-12
"""Scores closer than this, relative to ``||v|| max ||x||``, count as equal: the rounding of ``y v^T x`` is below it."""


class TieWarning(UserWarning):
    """A sequence has more than one token of the highest score, so that assumption 1 fails."""


@final
@dataclass(frozen=True)
class Sequences:
    """Validated data in float64: ``X: (n, L, d)``, ``z: (n, d)``, ``y: (n,)`` of -1 and +1, ``v: (d,)``."""

    X: Tensor
    z: Tensor
    y: Tensor
    v: Tensor

    @classmethod
    def of(cls, X: Any, z: Any, y: Any, v: Any, *, device: torch.device | str | None = None) -> Sequences:
        """Validate the data and put it on ``device`` (by default where ``X`` is)."""
        tokens = check_tokens(X, device)
        n, L, d = tokens.shape
        if L < 2:
            raise ValueError(
                f"X has {L} token per sequence, shape {(n, L, d)}; expected at least 2: a margin separates the optimal "
                "token from the others."
            )
        queries = _real(z, "z", tokens, (n, d), "(n, d), one query per sequence")
        head = _real(v, "v", tokens, (d,), "(d,), the fixed prediction head")
        labels = _real(y, "y", tokens, (n,), "(n,), one label per sequence")
        if not bool((labels.abs() == 1).all()):
            values = sorted({float(value) for value in labels.unique()})[:5]
            raise ValueError(f"y holds the values {values}; expected -1 and +1. For labels 0 and 1 pass 2 * y - 1.")
        if not bool((head != 0).any()):
            raise ValueError(
                "v is zero, so every token has score zero; expected a prediction head that tells them apart."
            )
        return cls(tokens, queries, labels, head)

    @property
    def shape(self) -> tuple[int, int, int]:
        """``(n, L, d)``: sequences, tokens per sequence, size of a token."""
        n, L, d = self.X.shape
        return n, L, d

    @cached_property
    def scores(self) -> Tensor:
        """``(n, L)``: ``gamma_il = y_i v^T x_il`` (definition 3.1)."""
        return self.y[:, None] * (self.X @ self.v)

    @cached_property
    def optimal(self) -> Tensor:
        """``(n,)`` the token of highest score; the first of them where several tie."""
        top = self.scores.max(1, keepdim=True).values
        return ((top - self.scores) <= self._rounding).to(torch.int8).argmax(1)

    @cached_property
    def others(self) -> Tensor:
        """``(n, L-1)`` the remaining tokens, in order."""
        n, L, _ = self.shape
        index = torch.arange(L - 1, device=self.X.device).expand(n, -1)
        return index + (index >= self.optimal[:, None]).to(index.dtype)

    @cached_property
    def ties(self) -> dict[int, list[int]]:
        """For each sequence without a unique optimal token, the tokens that tie."""
        top = self.scores.max(1, keepdim=True).values
        best = (top - self.scores) <= self._rounding
        rows = (best.sum(1) > 1).nonzero().flatten().tolist()
        return {int(i): best[i].nonzero().flatten().tolist() for i in rows}

    @cached_property
    def optimal_scores(self) -> Tensor:
        """``(n,)``: ``gamma_i,opt``."""
        return self.scores.gather(1, self.optimal[:, None])[:, 0]

    @cached_property
    def score_gaps(self) -> Tensor:
        """``(n, L, L-1)``: ``gamma_ik - gamma_il`` for every ``k`` (the optimal token first) and every other ``l``.

        Scores that are equal up to rounding differ by exactly zero; the rounding error would dominate the pulls once all
        others have underflowed.
        """
        rest = self.scores.gather(1, self.others)
        ordered = torch.cat([self.optimal_scores[:, None], rest], 1)
        gaps = ordered[:, :, None] - rest[:, None, :]
        return torch.where(gaps.abs() <= self._rounding, torch.zeros_like(gaps), gaps)

    @cached_property
    def equal_rest(self) -> bool:
        """Whether the other tokens of each sequence have one score (assumption 2)."""
        return bool((self.score_gaps[:, 1:] == 0).all()) and not self.ties

    @cached_property
    def differences(self) -> Tensor:
        """``(n, L-1, d)``: ``x_i,opt - x_il``."""
        rows = torch.arange(self.shape[0], device=self.X.device)[:, None]
        return self.X[rows, self.optimal[:, None]] - self.X[rows, self.others]

    @property
    def infimum(self) -> float:
        """``L* = mean_i exp(-gamma_i,opt)``: the loss of an attention that always picks the optimal token."""
        return float(torch.exp(-self.optimal_scores).mean())

    def operator(self) -> MarginOperator:
        """``W -> (x_opt - x_l)^T W z``, all ``n (L-1)`` margins."""
        return MarginOperator(self.differences, self.z)

    def diagonal_operator(self) -> DenseOperator:
        """``b -> B b`` with ``B_il = z_i * (x_opt - x_l)``: the margins of ``W = diag(b)``, as ``(n (L-1), 1)``."""
        d = self.shape[2]
        return DenseOperator((self.differences * self.z[:, None, :]).reshape(-1, d), (d,), 1)

    def warn_of_ties(self, stacklevel: int = 3) -> None:
        """Warn when a sequence has several optimal tokens; the first of them is the one that counts."""
        if self.ties:
            first = next(iter(self.ties))
            warnings.warn(
                f"{len(self.ties)} sequences have several tokens of the highest score (sequence {first}: tokens "
                f"{self.ties[first]}); the first of them is taken as optimal. Assumption 1 asks for a unique one.",
                TieWarning,
                stacklevel=stacklevel,
            )

    @property
    def _rounding(self) -> float:
        return SAME_SCORE * float(self.v.norm() * self.X.norm(dim=2).max())


def check_tokens(X: Any, device: torch.device | str | None = None) -> Tensor:
    """Return tokens ``(n, L, d)`` in float64, or say what is wrong with them."""
    tokens = as_tensor(X, "X")
    if tokens.ndim != 3 or 0 in tokens.shape:
        raise ValueError(
            f"X has shape {tuple(tokens.shape)}; expected tokens (n, L, d) with at least one sequence, token and feature. "
            "For one sequence pass X[None]."
        )
    return _float64(tokens.to(pick_device(device, tokens)), "X")


def check_queries(z: Any, X: Tensor) -> Tensor:
    """Return queries ``(n, d)`` for the tokens ``X``."""
    n, _, d = X.shape
    return _real(z, "z", X, (n, d), "(n, d), one query per sequence")


def _real(values: Any, name: str, like: Tensor, shape: tuple[int, ...], meaning: str) -> Tensor:
    tensor = as_tensor(values, name)
    if tuple(tensor.shape) != shape:
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)}; expected {shape}: {meaning}. X has shape {tuple(like.shape)}."
        )
    return _float64(tensor.to(like.device), name)


def _float64(tensor: Tensor, name: str) -> Tensor:
    if tensor.is_complex():
        raise ValueError(f"{name} holds complex numbers; expected real ones.")
    tensor = tensor.to(torch.float64)
    check_finite(tensor, name)
    return tensor

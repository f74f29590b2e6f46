"""The three SVMs: which gauge, which margins, which solver."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from convexformer.gauges import FrobeniusNorm, Gauge, L1Norm, NuclearNorm
from convexformer.margin.data import Sequences
from convexformer.margin.diagonal import solve_diagonal
from convexformer.margin.frobenius import solve_frobenius
from convexformer.margin.nuclear import solve_nuclear, solve_nuclear_scaled
from convexformer.margin.progress import Answer, Limits
from convexformer.operators import Operator
from convexformer.registry import one_of


@final
@dataclass(frozen=True)
class MarginNorm:
    """One SVM: ``min g(weights)`` under margin constraints. ``diagonal`` weights are ``b: (d, 1)``, others ``W: (d, d)``.

    ``solve`` may stop early when it finds no separating weights; ``prove`` then decides whether there are any, on the same
    constraints, and ``solve_again`` solves data that barely separates, given the approximate value of the Frobenius SVM.
    """

    gauge: Gauge
    diagonal: bool
    solve: Callable[[Sequences, Limits], Answer]
    prove: Callable[[Sequences, Limits], Answer]
    solve_again: Callable[[Sequences, Limits, float], Answer] | None = None

    def operator(self, data: Sequences) -> Operator:
        """Return the margins of this SVM's weights."""
        return data.diagonal_operator() if self.diagonal else data.operator()

    def weights(self, W: Tensor) -> Tensor:
        """Return the weights that the gauge measures, of an attention matrix ``W: (d, d)``."""
        return torch.diagonal(W)[:, None] if self.diagonal else W

    def matrix(self, weights: Tensor) -> Tensor:
        """Return the attention matrix ``W: (d, d)`` of weights."""
        return torch.diag(weights[:, 0]) if self.diagonal else weights


def _diagonal(data: Sequences, limits: Limits) -> Answer:
    return solve_diagonal(data.diagonal_operator(), limits)


def _frobenius(data: Sequences, limits: Limits) -> Answer:
    return solve_frobenius(data.operator(), limits)


MARGIN_NORMS: dict[str, MarginNorm] = {
    "nuclear": MarginNorm(
        NuclearNorm(),
        False,
        lambda data, limits: solve_nuclear(data.operator(), limits),
        _frobenius,
        lambda data, limits, size: solve_nuclear_scaled(data.operator(), limits, size),
    ),
    "frobenius": MarginNorm(FrobeniusNorm(), False, _frobenius, _frobenius),
    "diagonal": MarginNorm(L1Norm(), True, _diagonal, _diagonal),
}


def norm_of(name: str) -> MarginNorm:
    """Return the SVM of that name; an unknown one suggests the nearest."""
    return MARGIN_NORMS[one_of("norm", name, MARGIN_NORMS)]

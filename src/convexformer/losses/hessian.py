"""Hessians of a loss in the outputs of each row, in the two forms that solvers exploit."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from convexformer.rows import LOCAL, Rows


class Hessian(ABC):
    """``R`` symmetric positive semidefinite matrices ``(c, c)``, one a row, never formed."""

    @abstractmethod
    def product(self, D: Tensor) -> Tensor:
        """``(R, c)`` the Hessian of each row times that row of ``D: (R, c)``."""

    @abstractmethod
    def diagonal(self) -> Tensor:
        """``(R, c)`` the diagonal of each row's Hessian."""

    @abstractmethod
    def root(self, D: Tensor) -> Tensor:
        """``(R, c)`` a factor ``B_i`` of each row's Hessian ``B_i B_i^T``, times that row of ``D: (R, c)``."""

    @abstractmethod
    def total(self, w: Tensor, rows: Rows = LOCAL) -> Tensor:
        """``(c, c)`` the sum of all Hessians, weighted by ``w: (R,)``: the curvature along an intercept."""


@final
@dataclass(frozen=True)
class DiagonalHessian(Hessian):
    """``diag(h_i)`` for row ``i``: a loss that is a sum over outputs."""

    h: Tensor
    """``(R, c)`` second derivatives."""

    def product(self, D: Tensor) -> Tensor:
        """``h * D``."""
        return self.h * D

    def diagonal(self) -> Tensor:
        """``h``."""
        return self.h

    def root(self, D: Tensor) -> Tensor:
        """``sqrt(h) * D``."""
        return self.h.sqrt() * D

    def total(self, w: Tensor, rows: Rows = LOCAL) -> Tensor:
        """A diagonal matrix."""
        return torch.diag(rows.weighted(w.to(self.h), self.h))


@final
@dataclass(frozen=True)
class SoftmaxHessian(Hessian):
    """``diag(q_i) - q_i q_i^T`` for row ``i``: a log-sum-exp of the outputs."""

    q: Tensor
    """``(R, c)`` rows of the simplex."""

    def product(self, D: Tensor) -> Tensor:
        """``q * (D - <q, D>)``."""
        return self.q * (D - (self.q * D).sum(1, keepdim=True))

    def diagonal(self) -> Tensor:
        """``q (1 - q)``."""
        return self.q * (1 - self.q)

    def root(self, D: Tensor) -> Tensor:
        """``sqrt(q) * D - q <sqrt(q), D>``."""
        root = self.q.sqrt()
        return root * D - self.q * (root * D).sum(1, keepdim=True)

    def total(self, w: Tensor, rows: Rows = LOCAL) -> Tensor:
        """``diag(sum_i w_i q_i) - sum_i w_i q_i q_i^T``."""
        w = w.to(self.q)
        return torch.diag(rows.weighted(w, self.q)) - rows.total(self.q.T @ (w[:, None] * self.q))

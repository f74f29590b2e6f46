"""Hessians of a loss in the outputs of each row, in the two forms that solvers exploit."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import final

from torch import Tensor


class Hessian(ABC):
    """``R`` symmetric positive semidefinite matrices ``(c, c)``, one a row, never formed."""

    @abstractmethod
    def product(self, D: Tensor) -> Tensor:
        """``(R, c)`` the Hessian of each row times that row of ``D: (R, c)``."""

    @abstractmethod
    def diagonal(self) -> Tensor:
        """``(R, c)`` the diagonal of each row's Hessian."""


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

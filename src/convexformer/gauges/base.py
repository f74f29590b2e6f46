"""What a gauge is: value, prox, polar and atom, and the conjugate that a certificate reads."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar, final

import torch
from torch import Tensor


class PolarKind(Enum):
    """How far a polar value may be trusted."""

    EXACT = "exact"
    UPPER = "upper bound"
    PROBABILISTIC = "upper bound with the stated probability"
    LOWER = "lower bound"

    @property
    def certifies(self) -> bool:
        """A lower bound never certifies: scaling by it can leave the dual feasible set."""
        return self is not PolarKind.LOWER


@final
@dataclass(frozen=True)
class Polar:
    """The value of a polar, what kind of value it is, and the probability with which it is a bound."""

    value: float
    kind: PolarKind = PolarKind.EXACT
    confidence: float = 1.0


class Penalty(ABC):
    """A convex penalty ``g(Z)`` with ``min_Z F(A Z) + beta g(Z)``: a gauge, or the ridge of the baseline."""

    sparse: ClassVar[bool] = True
    """Whether ``Z = 0`` is optimal at some finite beta."""
    resident: bool = True
    """Whether the prox takes every decision where its tensors are, and the host none."""
    column_groups: bool = False
    """Whether ``g(Z)`` is the sum of the l2 norms of the columns of all slices of ``Z: (..., d, c)``."""

    @abstractmethod
    def value(self, Z: Any) -> Tensor:
        """``g(Z)``, a scalar tensor; ``Z`` is a tensor, or low-rank weights where the penalty knows them."""

    @abstractmethod
    def prox(self, Z: Tensor, step: float | Tensor) -> Tensor:
        """``argmin_W 1/2 ||W - Z||^2 + step g(W)``; a step on a device is never read by the host."""

    def prox_derivative(self, Z: Tensor, step: float) -> Callable[[Tensor], Tensor]:
        """Return ``D -> P'(Z) D`` for ``P`` the prox: symmetric, with eigenvalues from 0 to 1; here by differences."""
        Z = Z.double()  # a difference in float32 would have no digits left
        size = 1e-6 * torch.linalg.vector_norm(Z)

        def product(D: Tensor) -> Tensor:
            h = size / torch.linalg.vector_norm(D.double()).clamp_min(torch.finfo(torch.float64).tiny)
            return ((self.prox(Z + h * D, step) - self.prox(Z - h * D, step)) / (2 * h)).to(D.dtype)

        return product

    def support(self, Z: Tensor) -> int:
        """Return how many numbers (singular values, for a nuclear norm) are not zero."""
        return int(Z.count_nonzero())

    @abstractmethod
    def scale_limit(self, M: Any, beta: float, *, quick: bool = False) -> tuple[float, Polar]:
        """Return the largest ``t`` for which ``(beta g)*(t M)`` is surely finite, with the polar behind it.

        ``quick`` allows an estimate, good for steering a solver but for no certificate (its kind says so).
        """

    @abstractmethod
    def conjugate(self, M: Any, beta: float) -> float:
        """``(beta g)*(M)``, given that ``M`` was scaled by :meth:`scale_limit`."""

    def slice_polars(self, M: Tensor) -> Tensor | None:
        """Return the polar of each slice of ``M: (..., d, c)``, shape ``(...,)``, where ``g`` is a sum over slices."""
        return None

    def factor_weight(self) -> float | None:
        """Return ``a`` when ``g(Z) = min a/2 (|U|^2 + |V|^2)`` over factors of each block of ``Z``; else None."""
        return None

    @abstractmethod
    def zero_beta(self, M: Any, curvature: Callable[[], float]) -> Polar:
        """Return the smallest ``beta`` at which ``Z = 0`` is optimal when ``M = -A^T grad F(0)``.

        ``curvature`` estimates the largest curvature of ``F(A Z)``; only the ridge needs it.
        """


class Gauge(Penalty):
    """The gauge of a symmetric set of atoms: ``g(Z) = inf{sum_j t_j : Z = sum_j t_j a_j, t_j >= 0}``."""

    @abstractmethod
    def polar(self, M: Any) -> Polar:
        """``max <M, a>`` over the atoms ``a``, with its kind."""

    def quick_polar(self, M: Any) -> Polar:
        """Return the polar, or an estimate of it where the polar itself costs much."""
        return self.polar(M)

    @abstractmethod
    def atom(self, M: Tensor) -> Tensor:
        """Return the atom most aligned with ``M``: ``<M, atom> = polar(M)``."""

    def scale_limit(self, M: Any, beta: float, *, quick: bool = False) -> tuple[float, Polar]:
        """``beta / polar(M)``: the conjugate of ``beta g`` is the indicator of ``polar <= beta``."""
        polar = self.quick_polar(M) if quick else self.polar(M)
        if not math.isfinite(polar.value):  # overflow proves nothing
            return 0.0, Polar(math.inf, PolarKind.LOWER)
        return (beta / polar.value if polar.value > 0 else math.inf), polar

    def conjugate(self, M: Any, beta: float) -> float:
        """Zero: a feasible point costs nothing."""
        return 0.0

    def zero_beta(self, M: Any, curvature: Callable[[], float]) -> Polar:
        """``polar(M)``; an estimate serves where the polar costs much, since nothing is certified by it."""
        return self.quick_polar(M)

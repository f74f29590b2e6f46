"""Penalties of a kernel head: norms in the kernel's Hilbert space, in the coefficients of training samples."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol, cast, final

import torch
from torch import Tensor

from convexformer.gauges.base import DualMatrix, Gauge, HilbertBlock, Penalty, Polar, WeightsLike, as_tensor

Product = Callable[[Tensor], Tensor]


class HilbertDual(Protocol):
    """A dual point that knows its norm in the Hilbert space."""

    def norm(self) -> float:
        """``sqrt(tr V^T K V)`` for coefficients ``V``."""


def _squared_norm(product: Product, Z: WeightsLike) -> Tensor:
    alpha = as_tensor(Z)
    if not alpha.is_cuda and not bool(alpha.any()):  # a block that is not used costs nothing
        return alpha.new_zeros(())
    return (alpha * product(alpha)).sum().abs()  # below zero by rounding alone: its size counts


def _norm(M: DualMatrix) -> float:
    if isinstance(M, Tensor):
        raise TypeError(
            "the norm of a dual point of a kernel head needs its coefficients: pass what the operator's dual_matrix returns."
        )
    return cast(HilbertDual, cast(Any, M)).norm()


@final
class RepresenterNorm(Gauge):
    """``g(alpha) = sqrt(tr alpha^T K alpha)``, the norm of ``Z = sum_i phi(x_i) alpha_i^T``; ``product(alpha) = K alpha``.

    Its polar at ``M = sum_i v_i phi(x_i)`` is ``sqrt(tr V^T K V)``.
    """

    of_data = True

    def __init__(self, product: Product) -> None:
        self.product = product

    def value(self, Z: WeightsLike) -> Tensor:
        """``sqrt(tr alpha^T K alpha)``."""
        return _squared_norm(self.product, Z).sqrt()

    def polar(self, M: DualMatrix) -> Polar:
        """``sqrt(tr V^T K V)``: exact."""
        return Polar(_norm(M))

    def hilbert_blocks(self) -> list[HilbertBlock]:
        """One norm."""
        return [HilbertBlock(1.0, squared=False)]

    def __repr__(self) -> str:
        return "RepresenterNorm()"


@final
class RepresenterRidge(Penalty):
    """``g(alpha) = 1/2 tr alpha^T K alpha``; ``(beta g)*(M) = tr V^T K V / (2 beta)``, finite everywhere."""

    sparse = False
    of_data = True

    def __init__(self, product: Product, n_samples: int) -> None:
        self.product, self.n_samples = product, n_samples

    def value(self, Z: WeightsLike) -> Tensor:
        """``1/2 tr alpha^T K alpha``."""
        return 0.5 * _squared_norm(self.product, Z)

    def max_dual_scale(self, M: DualMatrix, beta: float, *, quick: bool = False) -> tuple[float, Polar]:
        """No limit: the conjugate is finite everywhere."""
        return math.inf, Polar(0.0)

    def conjugate(self, M: DualMatrix, beta: float) -> float:
        """``tr V^T K V / (2 beta)``."""
        return _norm(M) ** 2 / (2 * beta)

    def critical_beta(self, M: DualMatrix, curvature: Callable[[], float]) -> Polar:
        """Return the curvature of the loss in the Hilbert space, the scale that ``beta_ratio`` counts in; see ``Ridge``.

        ``curvature`` is that in the coefficients, which has ``K^2`` where the Hilbert space has ``K``.
        """
        like = as_tensor(cast(Any, M))
        v = torch.randn((self.n_samples, 1), generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(like)
        top = 0.0
        for _ in range(30):
            v = self.product(v / torch.linalg.vector_norm(v).clamp_min(torch.finfo(v.dtype).tiny))
            top = float(torch.linalg.vector_norm(v))
        return Polar(curvature() / top if top > 0 else 0.0)

    def hilbert_blocks(self) -> list[HilbertBlock]:
        """One ridge."""
        return [HilbertBlock(1.0, squared=True)]

    def __repr__(self) -> str:
        return "RepresenterRidge()"

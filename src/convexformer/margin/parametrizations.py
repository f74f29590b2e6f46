"""The ways to train attention weights: separate keys and queries, their product, diagonals of both.

A parametrization holds a batch of ``R`` weights and advances them along the gradient flow in normalised time. Within a
step the pulls are frozen; the linear flow of the factors is then followed exactly (diagonal) or to second order
(separate), which preserves the invariants of the flow, ``K^T K - Q^T Q`` above all.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import ClassVar, final

import torch
from torch import Tensor

from convexformer.margin.data import Sequences

DEFAULT_STEP = 4e-3
"""Default relative step: the largest relative change of a factor in one step."""

ROOT2 = math.sqrt(2.0)
FIRST_MARGIN_STEP = 0.05  # largest change of a margin in one step from combined weights near zero


class Parametrization(ABC):
    """A batch of weights with its attention logits and its steps along the flow."""

    norm: ClassVar[str]
    """The SVM that the flow converges to, by the theory."""
    exponential: ClassVar[bool]
    """Whether the margin grows exponentially in normalised time (factors) or linearly (the product itself)."""

    @property
    @abstractmethod
    def batch(self) -> int:
        """R, the number of initialisations."""

    @abstractmethod
    def logits(self) -> Tensor:
        """``(R, n, L)`` attention logits minus that of the optimal token, which comes first."""

    @abstractmethod
    def advance(self, pulls: Tensor, relative: float) -> Tensor:
        """Take a step of relative size ``relative`` along ``pulls: (R, n, L)``; return its length in tau, ``(R,)``."""

    @abstractmethod
    def matrix(self) -> Tensor:
        """``W: (R, d, d)``."""

    @abstractmethod
    def factors(self) -> dict[str, Tensor]:
        """Return the trained weights by name."""


class MatrixParametrization(Parametrization):
    """Base of full matrices: logits ``-p_il^T W z_i`` and the pull ``G = sum c_il p_il z_i^T``."""

    def __init__(self, data: Sequences) -> None:
        zero = torch.zeros_like(data.differences[:, :1])
        self._p = torch.cat([zero, data.differences], 1)  # (n, L, d), the optimal token first
        self._minus_pT = -self._p.mT
        self._z = data.z
        self._row = float((self._p.norm(dim=2) * data.z.norm(dim=1, keepdim=True)).max())  # bounds ||G||_F

    def logits(self) -> Tensor:
        """``-(x_opt - x_l)^T W z``."""
        return ((self._z @ self.matrix().mT)[..., None, :] @ self._minus_pT)[..., 0, :]

    def _gradient(self, pulls: Tensor) -> Tensor:
        return (pulls[..., None, :] @ self._p)[..., 0, :].mT @ self._z  # (R, d, d)


@final
class Separate(MatrixParametrization):
    """Keys and queries: ``W = K Q^T``, ``K' = G Q``, ``Q' = G^T K``; ``K, Q: (R, d, d_e)``."""

    norm, exponential = "nuclear", True

    def __init__(self, data: Sequences, K: Tensor, Q: Tensor) -> None:
        super().__init__(data)
        self.K, self.Q = K, Q

    @property
    def batch(self) -> int:
        """R."""
        return self.K.shape[0]

    def matrix(self) -> Tensor:
        """``K Q^T``."""
        return self.K @ self.Q.mT

    def advance(self, pulls: Tensor, relative: float) -> Tensor:
        """``exp`` of the frozen linear flow to second order: ``K + eta G Q + eta^2/2 G G^T K``."""
        eta = relative / self._row
        G, K, Q = self._gradient(pulls), self.K, self.Q
        dK, dQ = G @ Q, G.mT @ K
        self.K = torch.baddbmm(K.add(dK, alpha=eta), G, dQ, alpha=0.5 * eta**2)
        self.Q = torch.baddbmm(Q.add(dQ, alpha=eta), G.mT, dK, alpha=0.5 * eta**2)
        return self.K.new_full((self.batch,), eta)

    def factors(self) -> dict[str, Tensor]:
        """``K`` and ``Q``."""
        return {"K": self.K, "Q": self.Q}


@final
class Combined(MatrixParametrization):
    """The product itself: ``W' = G``; ``W: (R, d, d)``. Steps grow with ``||W||_F``."""

    norm, exponential = "frobenius", False

    def __init__(self, data: Sequences, W: Tensor) -> None:
        super().__init__(data)
        self.W = W

    @property
    def batch(self) -> int:
        """R."""
        return self.W.shape[0]

    def matrix(self) -> Tensor:
        """``W``."""
        return self.W

    def advance(self, pulls: Tensor, relative: float) -> Tensor:
        """``W + eta G``."""
        size = torch.linalg.vector_norm(self.W, dim=(1, 2))
        eta = (relative / self._row) * size.clamp_min(FIRST_MARGIN_STEP / (self._row * DEFAULT_STEP))
        self.W = self.W + eta[:, None, None] * self._gradient(pulls)
        return eta

    def factors(self) -> dict[str, Tensor]:
        """``W``."""
        return {"W": self.W}


class DiagonalParametrization(Parametrization):
    """Base of diagonals: ``W = diag(b)``, logits ``-B_il^T b``, pull ``g = sum c_il B_il``, ``B_il = z_i * p_il``."""

    norm, exponential = "diagonal", True

    def __init__(self, data: Sequences) -> None:
        n, L, d = data.shape
        B = data.differences * data.z[:, None, :]
        self._B = torch.cat([torch.zeros_like(B[:, :1]), B], 1).reshape(n * L, d)
        self._minus_BT = -self._B.mT
        self._shape = (n, L)
        self._row = float(self._B.abs().max())

    @abstractmethod
    def diagonal(self) -> Tensor:
        """``b: (R, d)``."""

    def logits(self) -> Tensor:
        """``-B b``."""
        return (self.diagonal() @ self._minus_BT).view(-1, *self._shape)

    def matrix(self) -> Tensor:
        """``diag(b)``."""
        return torch.diag_embed(self.diagonal())

    def _gradient(self, pulls: Tensor) -> Tensor:
        return pulls.flatten(1) @ self._B  # (R, d)


@final
class Diagonal(DiagonalParametrization):
    """Diagonal keys and queries ``b = k * q``: ``k' = g q``, ``q' = g k``, a hyperbolic rotation; ``k, q: (R, d)``."""

    def __init__(self, data: Sequences, k: Tensor, q: Tensor) -> None:
        super().__init__(data)
        self.k, self.q = k, q

    @property
    def batch(self) -> int:
        """R."""
        return self.k.shape[0]

    def diagonal(self) -> Tensor:
        """``k * q``."""
        return self.k * self.q

    def advance(self, pulls: Tensor, relative: float) -> Tensor:
        """Rotate by the angle ``eta g``."""
        eta = relative / self._row
        angle = eta * self._gradient(pulls)
        c, s = torch.cosh(angle), torch.sinh(angle)
        self.k, self.q = c * self.k + s * self.q, c * self.q + s * self.k
        return self.k.new_full((self.batch,), eta)

    def factors(self) -> dict[str, Tensor]:
        """``k`` and ``q``, the diagonals of K and Q."""
        return {"k": self.k, "q": self.q}


@final
class Reparametrized(DiagonalParametrization):
    """Lemma 4.1: ``b = (p^2 - m^2)/2``, ``p' = g p``, ``m' = -g m`` (the paper's w+ and w-); ``p, m: (R, d)``."""

    def __init__(self, data: Sequences, plus: Tensor, minus: Tensor) -> None:
        super().__init__(data)
        self.plus, self.minus = plus, minus

    @property
    def batch(self) -> int:
        """R."""
        return self.plus.shape[0]

    def diagonal(self) -> Tensor:
        """``(p^2 - m^2) / 2``."""
        return 0.5 * (self.plus - self.minus) * (self.plus + self.minus)

    def advance(self, pulls: Tensor, relative: float) -> Tensor:
        """``p exp(eta g)``, ``m exp(-eta g)``."""
        eta = relative / self._row
        growth = torch.exp(eta * self._gradient(pulls))
        self.plus, self.minus = self.plus * growth, self.minus / growth
        return self.plus.new_full((self.batch,), eta)

    def factors(self) -> dict[str, Tensor]:
        """``plus`` and ``minus``."""
        return {"plus": self.plus, "minus": self.minus}

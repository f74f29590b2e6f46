"""Interfaces of penalties: value and conjugate, which certificates need, and optional capabilities for solvers.

A solver asks for a capability by type: :class:`Proximal` (FISTA), :class:`Sliced` (working sets), :class:`Factored`
(the staircase), :class:`FiniteAtoms` (Frank-Wolfe), :class:`NeuronOracle` (column generation). They are structural
protocols: a class has one by defining its methods.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Protocol, TypeAlias, final, runtime_checkable

import torch
from torch import Tensor

from convexformer.capability import Capability


class PolarKind(Enum):
    """How a computed polar value relates to the true one."""

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


class LinearMap(Protocol):
    """A stack of matrices ``M: (B, p, q)`` accessed through products with vectors."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """``(B, p, q)``."""

    @property
    def like(self) -> Tensor:
        """A tensor of its device and dtype."""

    def matvec(self, V: Tensor, b: int) -> Tensor:
        """``M_b V_j``, rows ``(k, q) -> (k, p)``."""

    def rmatvec(self, U: Tensor, b: int) -> Tensor:
        """``M_b^T U_j``, rows ``(k, p) -> (k, q)``."""

    def dense(self) -> Tensor:
        """``(B, p, q)`` as one tensor."""

    def block(self, b: int) -> Tensor:
        """``M_b`` as one tensor ``(p, q)``."""

    def blocks(self) -> Iterator[Tensor]:
        """All blocks, one after another."""

    def rough(self) -> LinearMap:
        """About the same matrices in float32."""

    @property
    def forming_work(self) -> float:
        """Multiplications that forming all blocks takes."""

    @property
    def formable(self) -> bool:
        """Whether one block may be formed in float64."""

    @property
    def block_cost(self) -> float:
        """What forming one block costs, in products with one vector."""

    @property
    def leading(self) -> dict[int, Tensor]:
        """Vectors ``(k, n)`` on the short side of each block to start estimates from; estimates leave theirs there."""

    pairs: tuple[Tensor, Tensor, Tensor, Tensor] | None
    """Singular triples that an estimate found: values, ``U: (k, p)``, ``V: (k, q)``, blocks."""

    def sketch(self, b: int, count: int) -> Tensor | None:
        """``(count, q)`` random combinations of the rows of ``M_b``, where there are cheap ones."""

    @property
    def surveyed(self) -> bool:
        """Whether :attr:`leading` belongs to about this matrix, up to its scale."""

    def note_leading(self) -> None:
        """Say that :attr:`leading` belongs to this matrix."""

    def recall(self) -> float | None:
        """Return what the last estimate for the same matrix came to, and take over its triples; None for another one."""

    def remember(self, value: float) -> None:
        """Keep an estimate, with its triples."""

    def gram_spectrum(self) -> tuple[Tensor, Tensor]:
        """Singular values ``(B, n)``, rising, and vectors ``(B, n, n)`` of the short side."""

    def __rmul__(self, scale: float) -> LinearMap:
        """``scale * M``."""


class FactoredWeights(Protocol):
    """Weights as a sum of outer products."""

    def singular_values(self) -> Tensor:
        """All nonzero singular values of all blocks."""

    def dense(self) -> Tensor:
        """``Z`` as one tensor."""


WeightsLike: TypeAlias = "Tensor | FactoredWeights"


class DenseDual(Protocol):
    """A dual matrix that is more than a tensor: it knows a norm of its own, or consists of several."""

    def dense(self) -> Tensor:
        """Return it as one tensor, in the coordinates of the weights."""

    def __rmul__(self, scale: float) -> DenseDual:
        """``scale * M``."""


DualMatrix: TypeAlias = "Tensor | LinearMap | DenseDual"
"""``M = -A^T V``: a tensor, a linear map where a tensor would be too large, or the points of a Hilbert space."""


def as_tensor(matrix: Tensor | LinearMap | FactoredWeights | DenseDual) -> Tensor:
    """Return the matrix as one tensor, for penalties that take tensors only."""
    return matrix if isinstance(matrix, Tensor) else matrix.dense()


@final
@dataclass(frozen=True)
class HilbertBlock:
    """What a penalty is on a block of weights: ``weight`` times a Hilbert norm, or times half its square."""

    weight: float
    squared: bool


class Penalty(ABC):
    """A convex penalty ``g(Z) >= 0``, ``g(0) = 0``, in ``min_Z F(A Z) + beta g(Z)``.

    A certificate needs the four abstract methods and nothing else.
    """

    sparse: bool = True
    """Whether ``Z = 0`` is optimal at some finite beta."""
    indicator_conjugate: bool = False
    """Whether ``(beta g)*`` is zero where it is finite, as for a gauge: a feasible dual point then has no penalty term."""
    sync_free: bool = True
    """Whether the prox works without a host sync."""
    of_data: bool = False
    """Whether it is made of the training data, and belongs to one operator."""

    @property
    def proximal(self) -> bool:
        """Whether there is a prox; a sum has one where all its parts have."""
        return isinstance(self, Proximal)

    def block_values(self, Z: WeightsLike) -> Tensor:
        """``(B,)`` what each part of a sum adds to ``g(Z)``; one number where it is no sum."""
        return self.value(Z).double().reshape(1)

    def hilbert_blocks(self) -> list[HilbertBlock] | None:
        """Return what the penalty is on each block of the operator, where all are Hilbert norms or ridges; else None.

        The norm is that in which the operator's ``represent`` is the adjoint.
        """
        return None

    @abstractmethod
    def value(self, Z: WeightsLike) -> Tensor:
        """``g(Z)``, a scalar tensor; ``Z`` is a tensor, or low-rank weights where the penalty takes them."""

    @abstractmethod
    def max_dual_scale(self, M: DualMatrix, beta: float, *, quick: bool = False) -> tuple[float, Polar]:
        """Return the largest ``t`` for which ``(beta g)*(t M)`` is certain to be finite, with the polar it comes from.

        ``quick`` allows an estimate, which may steer a solver but never certifies (see its kind).
        """

    @abstractmethod
    def conjugate(self, M: DualMatrix, beta: float) -> float:
        """``(beta g)*(M)``, for ``M`` in the domain that :meth:`max_dual_scale` describes."""

    @abstractmethod
    def critical_beta(self, M: DualMatrix, curvature: Callable[[], float]) -> Polar:
        """Return the smallest ``beta`` at which ``Z = 0`` is optimal when ``M = -A^T grad F(0)``.

        ``curvature`` estimates the largest curvature of ``F(A Z)``; only the ridge needs it.
        """

    def prox_derivative(self, Z: Tensor, step: float) -> Callable[[Tensor], Tensor]:
        """Return ``D -> P'(Z) D`` for ``P`` the prox: symmetric, eigenvalues in [0, 1]; by central differences."""
        assert isinstance(self, Proximal)
        prox, Z = self.prox, Z.double()  # differences in float32 would lose all digits
        size = 1e-6 * torch.linalg.vector_norm(Z)

        def product(D: Tensor) -> Tensor:
            h = size / torch.linalg.vector_norm(D.double()).clamp_min(torch.finfo(torch.float64).tiny)
            return ((prox(Z + h * D, step) - prox(Z - h * D, step)) / (2 * h)).to(D.dtype)

        return product

    def support(self, Z: Tensor) -> int:
        """Return the number of nonzero entries (singular values, for a nuclear norm)."""
        return int(Z.count_nonzero())


@runtime_checkable
class Proximal(Protocol, metaclass=Capability):
    """A penalty with a prox."""

    def prox(self, Z: Tensor, step: float | Tensor) -> Tensor:
        """``argmin_W 1/2 ||W - Z||^2 + step g(W)``; a step given as a tensor causes no host sync."""


@runtime_checkable
class Sliced(Protocol, metaclass=Capability):
    """A sum over the slices of ``Z: (..., d, c)``."""

    column_groups: bool
    """Whether ``g(Z)`` is the sum of the l2 norms of the columns of all slices."""

    def slice_polars(self, M: Tensor) -> Tensor:
        """``(...,)`` the polar of each slice of ``M: (..., d, c)``."""


@runtime_checkable
class Factored(Protocol, metaclass=Capability):
    """A penalty that is ``g(Z) = min a/2 (|U|^2 + |V|^2)`` over factors ``Z_b = U_b^T V_b`` of each block of ``Z``."""

    def factor_weight(self) -> float:
        """Return ``a``."""


@runtime_checkable
class Atomic(Protocol, metaclass=Capability):
    """A penalty with a linear minimisation oracle."""

    def atom(self, M: Tensor) -> Tensor:
        """Return the atom most aligned with ``M``: ``<M, atom> = polar(M)``."""


@runtime_checkable
class FiniteAtoms(Protocol, metaclass=Capability):
    """A gauge of finitely many atoms, up to their sign: an optimum is a combination of few of them."""

    def atoms(self, M: Tensor, most: int) -> list[Tensor]:
        """Return up to ``most`` atoms from different parts of ``Z``, the best aligned with ``M`` first."""


class NeuronsLike(Protocol):
    """Neurons ``(u_j, v_j)``: ``U: (m, p)``, ``V: (m, q)``, ``block: (m,)``."""

    @property
    def U(self) -> Tensor:
        """Inner weights."""

    @property
    def V(self) -> Tensor:
        """Output weights."""

    @property
    def block(self) -> Tensor:
        """The block of each neuron."""


@final
@dataclass(frozen=True)
class Candidate:
    """A neuron that a search found: its block, unit factors and ``<M, (u, v)>``."""

    value: float
    block: int
    u: Tensor
    v: Tensor


@runtime_checkable
class NeuronOracle(Protocol, metaclass=Capability):
    """A penalty on neurons: a norm of their output weights, and a search for those most aligned with a dual matrix."""

    outer: str
    """``"l2"``, or ``"l1"`` where each neuron may write one output."""

    @property
    def complete(self) -> bool:
        """Whether a search sees all cells, so that it may be trusted to find the best neurons."""

    def output_norms(self, V: Tensor) -> Tensor:
        """``(m,)`` the norms of output weights."""

    def spread(self, M: DualMatrix, count: int, seed: int) -> list[Candidate]:
        """Return ``count`` neurons of each block in random directions that have climbed a few steps only."""

    def search(self, M: DualMatrix, around: NeuronsLike | None, count: int) -> list[Candidate]:
        """Return different neurons with large ``<M, (u, v)>``, the best first; those ``around`` are starts."""


class Gauge(Penalty):
    """The gauge of a symmetric set of atoms: ``g(Z) = inf{sum_j t_j : Z = sum_j t_j a_j, t_j >= 0}``."""

    indicator_conjugate = True

    @abstractmethod
    def polar(self, M: DualMatrix) -> Polar:
        """``max <M, a>`` over the atoms ``a``, with its kind."""

    def quick_polar(self, M: DualMatrix) -> Polar:
        """Return the polar, or an estimate where the polar is expensive."""
        return self.polar(M)

    def max_dual_scale(self, M: DualMatrix, beta: float, *, quick: bool = False) -> tuple[float, Polar]:
        """``beta / polar(M)``: the conjugate of ``beta g`` is the indicator of ``polar <= beta``."""
        polar = self.quick_polar(M) if quick else self.polar(M)
        if not math.isfinite(polar.value):  # overflow: no bound is known
            return 0.0, Polar(math.inf, PolarKind.LOWER)
        return (beta / polar.value if polar.value > 0 else math.inf), polar

    def conjugate(self, M: DualMatrix, beta: float) -> float:
        """Zero: the conjugate is an indicator function, and ``M`` is feasible."""
        return 0.0

    def critical_beta(self, M: DualMatrix, curvature: Callable[[], float]) -> Polar:
        """``polar(M)``, or an estimate where that is expensive: nothing is certified with it."""
        return self.quick_polar(M)


class Norm(Gauge):
    """A gauge with a prox and a linear minimisation oracle: the base of every norm in this package."""

    @abstractmethod
    def prox(self, Z: Tensor, step: float | Tensor) -> Tensor:
        """``argmin_W 1/2 ||W - Z||^2 + step g(W)``; a step given as a tensor causes no host sync."""

    @abstractmethod
    def atom(self, M: Tensor) -> Tensor:
        """Return the atom most aligned with ``M``: ``<M, atom> = polar(M)``."""

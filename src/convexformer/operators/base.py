"""What an operator is: a linear map from weights to outputs, and its adjoint."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, final, runtime_checkable

import torch
from torch import Tensor

from convexformer.capability import Capability
from convexformer.operators.moments import Moments, Turns
from convexformer.rows import LOCAL, Rows

if TYPE_CHECKING:
    from typing import TypeAlias

    from convexformer.operators.bilinear import BilinearOperator, ImplicitMatrix
    from convexformer.operators.kernel import RepresenterDual, StackedDual
    from convexformer.operators.relu import ReLUDual

    DualMatrix: TypeAlias = Tensor | ImplicitMatrix | RepresenterDual | StackedDual | ReLUDual


SLABS, SLAB_ROWS = 16, 1024
"""Slabs of rows in which a product with few outputs is computed on a GPU, at most, and their least size."""
FEW_OUTPUTS = 1 << 20


@final
@dataclass(frozen=True)
class TokenFeatures:
    """What an operator on flattened tokens is made of: ``(A Z)_i = sum_{u,k} gates[i, u] features[i, k]^T Z[u, k]``."""

    features: Tensor
    """``(R, s, d)``, a view."""
    gates: Tensor | None
    """``(R, g)``, zeros and ones, or None for a single gate that is always open."""


@runtime_checkable
class RowGram(Protocol, metaclass=Capability):
    """An operator whose rows are features of samples, the same for every output: ``(A Z)_i = Z^T phi_i``."""

    def row_gram(self) -> Tensor:
        """``(R, R)`` inner products of the features of all rows."""

    def represent(self, alpha: Tensor) -> Tensor:
        """``Z = sum_i phi_i alpha_i^T`` in the operator's weights, for ``alpha: (R, c)``."""


@runtime_checkable
class Separable(Protocol, metaclass=Capability):
    """An operator each of whose rows depends on one slice ``Z[r]`` alone: as many independent maps as there are slices."""

    def positions(self) -> Iterator[tuple[Operator, Tensor]]:
        """Yield, for each slice, the map from it to its outputs, and the rows that these are."""


class Operator(ABC):
    """A linear map ``A`` from weights ``Z`` of ``weight_shape`` to outputs ``(R, c)``; never a formed matrix of both."""

    weight_shape: tuple[int, ...]
    output_shape: tuple[int, int]

    @abstractmethod
    def apply(self, Z: Tensor) -> Tensor:
        """``A Z``, shape ``(R, c)``, for the rows of this process."""

    @abstractmethod
    def adjoint(self, V: Tensor) -> Tensor:
        """``A^T V``, of ``weight_shape``, summed over the rows of this process; ``<V, A Z> = <A^T V, Z>``."""

    def dual_matrix(self, V: Tensor, rows: Rows = LOCAL) -> DualMatrix:
        """``-A^T V``, summed over all ``rows``: a tensor, or a linear map where a tensor would be too large."""
        return -rows.total(self.adjoint(V))

    def compressed(self, Y: Tensor, w: Tensor) -> tuple[Operator, Tensor] | None:
        """Return ``(A', Y')`` with ``sum_i w_i ||(A Z - Y)_i||^2 = ||A' Z - Y'||^2 + constant`` and fewer rows.

        None where nothing is gained. For the squared loss the number of samples then leaves the cost of an iteration.
        """
        return None

    def statistics(self) -> tuple[Tensor, ...] | None:
        """Return the tensors ``(R, ...)`` that this operator keeps of its samples, one row of outputs a row; None if not so.

        Operators of several batches whose statistics are put together, by :meth:`of_statistics`, make the operator of all.
        """
        return None

    def of_statistics(self, parts: tuple[Tensor, ...]) -> Operator:
        """Return the same map on the samples of these :meth:`statistics`."""
        raise TypeError(f"a {type(self).__name__} has no statistics.")

    def blocks(self) -> Sequence[Operator]:
        """Return the operators whose outputs add up to this one's; itself alone where it is no sum."""
        return (self,)

    def moments(self, w: Tensor, rows: Rows = LOCAL, *, centred: bool = False) -> Moments | None:
        """Return second moments of the features, weighted by ``w: (R,)``, for a solver to scale its steps; None if unknown.

        ``centred``: about the mean, which an intercept absorbs. They need not be exact.
        """
        return None

    def mean_norm(self, share: Tensor) -> float | None:
        """Bound ``|A^T (share 1^T)|`` from above, for shares ``(R,)`` of the samples, in all one; None if not cheaper.

        What rounding leaves of a mean that cancels is measured by it, so that a digit is enough.
        """
        return None

    def turned(self, rows: Turns, columns: Turns) -> Operator | None:
        """Return ``A'`` with ``A'(Q^T Z P) = A(Z)`` for orthogonal ``Q`` and ``P``, axis by axis as in :meth:`moments`.

        None where the features cannot be turned once and for all.
        """
        return None

    def token_features(self) -> TokenFeatures | None:
        """Return the parts of an operator whose weights ``([g,] s, d, c)`` come in one slice a token; else None."""
        return None

    def restricted(self, tokens: Tensor) -> Operator:
        """Return the operator on the slices of these tokens alone, where :meth:`token_features` has some."""
        raise TypeError(
            f"the weights of a {type(self).__name__} do not come in slices of tokens; it cannot be restricted."
        )

    def on_factors(self) -> BilinearOperator | None:
        """Return the same map on low-rank weights, where that is cheaper than forming them; else None."""
        return None

    @abstractmethod
    def to(self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Operator:
        """Return the same map on another device or in another dtype."""

    def exact(self) -> Operator | None:
        """Return the same map in float64, as if built from the data in float64, without a second copy of the data.

        None where it has to be built from the data anew. Certificates of float32 problems are computed with it.
        """
        return None

    @property
    @abstractmethod
    def like(self) -> Tensor:
        """A tensor of the operator's device and dtype."""

    @property
    def on_coefficients(self) -> bool:
        """Whether weights are coefficients of training samples, ``Z = sum_i phi(x_i) alpha_i^T``."""
        return False

    @property
    def data_size(self) -> int:
        """How many numbers of token data a product reads: what decides about threads and CUDA graphs."""
        return self.like.numel()

    def zeros(self) -> Tensor:
        """Weights of zero."""
        return self.like.new_zeros(self.weight_shape)

    def norm_squared(self, iterations: int = 30, w: Tensor | None = None, rows: Rows = LOCAL) -> float:
        """Estimate ``||A||^2``, or ``||sqrt(w) A||^2`` for weights ``w: (R,)``, from below, by power iteration."""
        generator = torch.Generator().manual_seed(0)
        Z = torch.randn(self.weight_shape, generator=generator, dtype=torch.float64).to(self.like)
        size = 0.0
        for _ in range(iterations):
            norm = float(torch.linalg.vector_norm(Z))
            if norm == 0 or not math.isfinite(norm):
                break
            outputs = self.apply(Z / norm)
            Z = rows.total(self.adjoint(outputs if w is None else w.to(outputs)[:, None] * outputs))
            size = float(torch.linalg.vector_norm(Z))
        return size


def gather_tokens(features: Tensor, axes: tuple[int, ...], tokens: Tensor) -> Tensor:
    """``(R, len(tokens) * d)``: the columns of some tokens of features ``(R, s * d)``."""
    return features.view(-1, *axes)[:, tokens].flatten(1)


def times(A: Tensor, B: Tensor) -> Tensor:
    """``A B`` for a large ``A`` and a ``B`` of few columns; on a CPU as ``(B^T A^T)^T``, several times faster there."""
    if A.is_cuda or B.shape[1] == 1:
        return A @ B
    return (B.T.contiguous() @ A.T).T


def long_product(A: Tensor, B: Tensor) -> Tensor:
    """``A^T B`` for long ``A: (n, p)`` and ``B: (n, q)``; on a GPU in slabs of rows, or few of its processors would work."""
    slabs = min(SLABS, len(A) // SLAB_ROWS)
    if not A.is_cuda or slabs < 2 or A.shape[1] * B.shape[1] > FEW_OUTPUTS:
        return A.T @ B
    return sum_of_slabs(A, B, slabs)


def sum_of_slabs(A: Tensor, B: Tensor, slabs: int) -> Tensor:
    """``A^T B`` as the sum of products of so many slabs of rows."""
    whole = len(A) - len(A) % slabs
    out = (A[:whole].unflatten(0, (slabs, -1)).mT @ B[:whole].unflatten(0, (slabs, -1))).sum(0)
    return out if whole == len(A) else out.addmm_(A[whole:].T, B[whole:])

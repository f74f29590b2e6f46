"""Sums over samples: every such sum in the library goes through :class:`Rows`.

Solvers, losses and certificates hold the rows of this process only, ``(R, ...)``, and get totals from ``Rows``. In one
process these are plain sums. A ``Rows`` that all-reduces runs the same code on many machines: each process holds some of
the rows, and all processes see the same totals, and so the same weights and the same branches.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, final

from torch import Tensor


class Rows(ABC):
    """Sums over the rows of all processes. A subclass must define :meth:`sum`."""

    in_process: ClassVar[bool] = False
    """Whether this process holds every row; solvers that access single samples require it."""

    @abstractmethod
    def sum(self, values: Tensor) -> Tensor:
        """Sum over the leading axis, ``(R, ...) -> (...)``, and over all processes."""

    def dot(self, a: Tensor, b: Tensor) -> Tensor:
        """``sum_i <a_i, b_i>``, a scalar."""
        return self.sum((a * b).flatten(1).sum(1) if a.ndim > 1 else a * b)

    def weighted(self, w: Tensor, values: Tensor) -> Tensor:
        """``sum_i w_i values_i`` for ``w: (R,)`` and ``values: (R, c)``, shape ``(c,)``."""
        return self.total(w @ values)

    def total(self, part: Tensor) -> Tensor:
        """Sum over processes what each has computed from its own rows; the identity in one process."""
        return self.sum(part[None])

    def bound(self, values: Tensor) -> Tensor:
        """Return an upper bound on the largest ``|value|`` of all rows; by default the l2 norm."""
        return self.sum(values.abs().square()).sum().sqrt()


@final
class LocalRows(Rows):
    """All rows are here, in one process."""

    in_process = True

    def sum(self, values: Tensor) -> Tensor:
        """Sum over the leading axis."""
        return values.sum(0)

    def dot(self, a: Tensor, b: Tensor) -> Tensor:
        """``<a, b>`` in one reduction."""
        return (a * b).sum()

    def total(self, part: Tensor) -> Tensor:
        """Return the part itself."""
        return part

    def bound(self, values: Tensor) -> Tensor:
        """Return the largest ``|value|`` itself."""
        return values.abs().amax()


LOCAL = LocalRows()  # the default of every objective and loss

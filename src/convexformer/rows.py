"""Where the samples are: every sum over samples in the library is a call of :class:`Rows`.

Solvers, losses and certificates hold the rows of this process only, ``(R, ...)``, and ask ``Rows`` for totals. In one
process that is a plain sum. A ``Rows`` that all-reduces makes the same code run on many machines: each process holds some
of the rows, and every process sees the same totals, weights and decisions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, final

from torch import Tensor


class Rows(ABC):
    """Sums over all rows there are. A subclass needs :meth:`sum` alone."""

    in_process: ClassVar[bool] = False
    """Whether this process holds every row. Solvers that touch samples one by one ask for it."""

    @abstractmethod
    def sum(self, values: Tensor) -> Tensor:
        """Sum over the leading axis, ``(R, ...) -> (...)``, over all rows there are."""

    def dot(self, a: Tensor, b: Tensor) -> Tensor:
        """``sum_i <a_i, b_i>``, a scalar."""
        return self.sum((a * b).flatten(1).sum(1) if a.ndim > 1 else a * b)

    def weighted(self, w: Tensor, values: Tensor) -> Tensor:
        """``sum_i w_i values_i`` for ``w: (R,)`` and ``values: (R, c)``, shape ``(c,)``."""
        return self.total(w @ values)

    def total(self, part: Tensor) -> Tensor:
        """Add up what each process found for its own rows; in one process that is all there is."""
        return self.sum(part[None])

    def bound(self, values: Tensor) -> Tensor:
        """Return an upper bound on the largest ``|value|`` of all rows: the l2 norm, unless a subclass knows better."""
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


LOCAL = LocalRows()

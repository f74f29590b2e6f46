"""The arrangement of one set of rows: its cells where they can be enumerated, and the bound on their number."""

from __future__ import annotations

from functools import cached_property
from math import comb
from typing import final

import numpy as np

from convexformer.arrangements.cells import Array, Cells, enumerate_cells

MAX_CELLS = 4096  # cells that are enumerated at most
MAX_PROGRAMS = 10_000  # linear programs, about, that an enumeration may take: some ten seconds


def cell_bound(n_rows: int, rank: int) -> int:
    """``2 sum_{k < rank} C(n_rows - 1, k)``: the largest number of cells of ``n_rows`` central hyperplanes of that rank.

    ``n_rows`` counts the rows of the hidden layer, ``n s^2`` for self-attention, ``n s d`` for the mixer, ``n s`` for the
    others: Sahiner et al. (2022) print ``n``, which is too small (108 cells at n = s = d = 2, where the printed bound
    is 1.71). Generic rows attain it; Kronecker products are not generic.
    """
    if n_rows < 1 or rank < 1:
        return 1
    return 2 * sum(comb(n_rows - 1, k) for k in range(rank))


@final
class Arrangement:
    """The hyperplanes ``rows u = 0`` of a hidden layer, ``rows: (H, p)``, and the cells between them."""

    def __init__(self, rows: Array, max_cells: int = MAX_CELLS) -> None:
        self.rows = rows
        self.max_cells = max_cells

    @cached_property
    def basis(self) -> Array:
        """``(rank, p)`` an orthonormal basis of the space of the rows; a neuron outside it only costs norm."""
        if not self.rows.size:
            return np.zeros((0, self.rows.shape[1]))
        squares, V = np.linalg.eigh(self.rows.T @ self.rows)
        if squares[0] > 1e-6 * squares[-1]:  # far from singular: no need for a decomposition of all rows
            return np.ascontiguousarray(V.T)
        _, sigma, Vh = np.linalg.svd(self.rows, full_matrices=False)
        return Vh[sigma > 1e-12 * max(sigma[0], np.finfo(float).tiny)]

    @property
    def rank(self) -> int:
        """The rank of the rows."""
        return len(self.basis)

    @property
    def planar(self) -> bool:
        """Whether the rows span a plane or less: cells are then arcs of a circle, however many there are."""
        return self.rank <= 2

    @property
    def bound(self) -> int:
        """The largest number of cells that rows of this number and rank can have."""
        return cell_bound(len(self.rows), self.rank)

    @cached_property
    def cells(self) -> Cells | None:
        """All cells, or None where there are too many to enumerate."""
        # the bound is attained by generic rows, so one far above the limit is not worth trying. An enumeration solves
        # about one program for each row and cell on the way
        programs = self.bound * len(self.rows) // max(1, self.rank)
        if self.bound > 2 * self.max_cells or programs > MAX_PROGRAMS:
            return None
        return enumerate_cells(self.rows, self.max_cells)

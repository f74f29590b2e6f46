"""Cells of a central arrangement: the sign patterns of ``rows u`` over all ``u``, enumerated or sampled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np
from scipy.optimize import linprog

Array = np.ndarray

WIDTH = 1e-11
"""A side of a hyperplane belongs to a cell if the cell has a point this far inside it, relative to its largest entry. One
pattern too many is harmless (its cone is thin or empty); the bound on a polar allows for one too few."""
PROBES = 4  # random points, times the limit on cells, that find most cells before any linear program is solved


@final
@dataclass(frozen=True)
class Cells:
    """Activation patterns ``1{rows u >= 0}`` of full-dimensional cells."""

    patterns: Array
    """``(P, H)`` booleans, all different."""
    points: Array
    """``(P, p)``, a point inside each cell."""
    complete: bool
    """Whether they are all cells there are."""

    def __len__(self) -> int:
        return len(self.patterns)


def enumerate_cells(rows: Array, limit: int, seed: int = 0) -> Cells | None:
    """Return all full-dimensional cells of ``{u : rows u = 0}``, ``rows: (H, p)``; None where there are more than ``limit``,
    or a linear program fails.

    Incremental: hyperplanes are added one by one, and a cell is split where a linear program (HiGHS) finds a point on the
    other side of the new one. Every cell carries a point inside it, so one program a cell and hyperplane suffices, and none
    where a random point lies on the other side already. The closures of these cells cover the whole space.
    """
    H, p = rows.shape
    lines, index, sign = _lines(rows)
    if len(lines) == 0:
        return Cells(np.ones((1, H), dtype=bool), np.zeros((1, p)), True)
    # a basis of the row space: directions outside it change no pattern
    _, sigma, Vh = np.linalg.svd(lines, full_matrices=False)
    basis = Vh[sigma > 1e-12 * sigma[0]]
    A = lines @ basis.T  # (L, r)
    probes = np.random.default_rng(seed).standard_normal((min(PROBES * limit, 4096), basis.shape[0]))
    sides = probes @ A.T >= 0
    members: list[Array] = [np.arange(len(probes))]  # the probes in each cell
    signs: list[tuple[bool, ...]] = [()]
    points: list[Array] = [probes[0]]
    for k in range(len(A)):
        next_members, next_signs, next_points = [], [], []
        for member, pattern, point in zip(members, signs, points, strict=True):
            on = sides[member, k]
            for side in (True, False):
                own = member[on == side]
                found: Array | None
                if len(own):
                    found = probes[own[0]]
                elif (float(A[k] @ point) >= 0) == side and abs(float(A[k] @ point)) > WIDTH * np.abs(point).max():
                    found = point
                else:
                    try:
                        found = _inside(A[: k + 1], (*pattern, side))
                    except ArithmeticError:  # whether that is a cell is not known, and so not all cells are
                        return None
                if found is not None:
                    next_members.append(own)
                    next_signs.append((*pattern, side))
                    next_points.append(found)
        members, signs, points = next_members, next_signs, next_points
        if len(signs) > limit:
            return None
    reduced = np.array(signs, dtype=bool)  # (P, L)
    return Cells(_whole(reduced, index, sign), np.array(points) @ basis, True)


def sample_cells(rows: Array, n: int, seed: int = 0) -> Cells:
    """Return the different patterns of ``n`` Gaussian directions: some of the cells, large ones more likely."""
    U = np.random.default_rng(seed).standard_normal((n, rows.shape[1]))
    patterns = U @ rows.T >= 0
    _, first = np.unique(np.packbits(patterns, axis=1), axis=0, return_index=True)
    first.sort()
    return Cells(patterns[first], U[first], False)


def _lines(rows: Array) -> tuple[Array, Array, Array]:
    """Return different lines ``(L, p)`` of unit length, and for each row the index of its line (-1: zero) and its sign."""
    norms = np.linalg.norm(rows, axis=1)
    index, sign = np.full(len(rows), -1), np.ones(len(rows))
    kept = np.flatnonzero(norms > 1e-14 * max(norms.max(initial=0.0), np.finfo(float).tiny))
    if len(kept) == 0:
        return np.zeros((0, rows.shape[1])), index, sign
    unit = rows[kept] / norms[kept, None]
    leading = unit[np.arange(len(unit)), np.argmax(np.abs(unit) > 1e-9, axis=1)]
    sign[kept] = np.where(leading < 0, -1.0, 1.0)
    unit = unit * sign[kept, None]
    _, first, inverse = np.unique(np.round(unit, 12), axis=0, return_index=True, return_inverse=True)
    order = np.argsort(first)  # lines in the order of their first rows
    rank = np.empty(len(first), dtype=int)
    rank[order] = np.arange(len(first))
    index[kept] = rank[inverse.ravel()]
    return unit[first[order]], index, sign


def _whole(reduced: Array, index: Array, sign: Array) -> Array:
    """``(P, H)`` patterns of all rows from those of the lines; a zero row counts as open."""
    signed = np.where(index >= 0, sign, 1.0)
    sides = np.where(index[None, :] >= 0, reduced[:, np.maximum(index, 0)], True)
    return np.where(signed[None, :] > 0, sides, ~sides)


def _inside(A: Array, pattern: tuple[bool, ...]) -> Array | None:
    """Return a point of the open cell ``(2 pattern - 1) A u > 0``, or None: ``max t : K u >= t, |u|_inf <= 1``."""
    K = np.where(np.array(pattern), 1.0, -1.0)[:, None] * A
    r = K.shape[1]
    found = linprog(
        np.r_[np.zeros(r), -1.0],
        A_ub=np.hstack([-K, np.ones((len(K), 1))]),
        b_ub=np.zeros(len(K)),
        bounds=[(-1, 1)] * r + [(0, 1)],
        method="highs",
        options={"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10},
    )
    if found.status != 0:  # zero is feasible and the box bounds it: anything but an optimum is trouble with rounding
        raise ArithmeticError(f"HiGHS could not tell whether a cell is empty: {found.message}")
    if -found.fun <= WIDTH:
        return None
    return np.asarray(found.x[:r])

"""The polar of a ReLU layer whose rows span a plane: all cells at once, exactly, for any number of rows and outputs."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

Array = np.ndarray


class PlanarMaxima(NamedTuple):
    """The maximum of each cell."""

    values: Array
    """``(P,)``."""
    angles: Array
    """``(P,)`` the directions that attain them."""


def planar_maxima(rows: Array, T: Array) -> PlanarMaxima:
    """``max |T^T relu(rows u)|_2`` over the unit vectors ``u`` of each cell, for ``rows: (H, 2)`` and ``T: (H, q)``.

    A row is open on a half circle, so the cells are the arcs between ``2 H`` events, and ``M_c = rows^T D_c T`` is a
    running sum over them. On an arc ``|M^T u|^2`` is ``m + r cos(2 angle - psi)``: its maximum is at ``psi / 2`` if
    that lies on the arc, else at an end. O(H log H + H q).
    """
    used = np.linalg.norm(rows, axis=1) > 0
    rows, T = rows[used], T[used]
    if len(rows) == 0:
        return PlanarMaxima(np.zeros(1), np.zeros(1))
    middle = np.arctan2(rows[:, 1], rows[:, 0])
    events = np.concatenate([middle - np.pi / 2, middle + np.pi / 2]) % (2 * np.pi)
    change = np.concatenate([np.ones(len(rows)), -np.ones(len(rows))])
    order = np.argsort(events, kind="stable")
    gaps = np.diff(np.r_[events[order], events[order[0]] + 2 * np.pi])
    # begin after the longest arc: there it is certain which rows are open, whose middle is within a quarter turn of its own
    longest = int(np.argmax(gaps))
    order, length = np.roll(order, -longest - 1), np.roll(gaps, -longest - 1)
    start = events[order[0]] + np.r_[0.0, np.cumsum(length[:-1])]
    which = np.r_[np.arange(len(rows)), np.arange(len(rows))][order]
    before = start[0] - 0.5 * length[-1]
    open_ = np.cos(middle - before) > 0
    moves = change[order][:, None, None] * (rows[which][:, :, None] * T[which][:, None, :])  # (2H, 2, q)
    M = (rows[open_].T @ T[open_])[None] + np.cumsum(moves, axis=0)
    G = np.einsum("paq,pbq->pab", M, M)
    mean, half, cross = 0.5 * (G[:, 0, 0] + G[:, 1, 1]), 0.5 * (G[:, 0, 0] - G[:, 1, 1]), G[:, 0, 1]

    def square(angle: Array) -> Array:
        return mean + half * np.cos(2 * angle) + cross * np.sin(2 * angle)

    ends = start + length
    best = np.where(square(start) >= square(ends), start, ends)
    offset = (0.5 * np.arctan2(cross, half) - start) % np.pi
    top = start + offset
    best = np.where(offset <= length, top, best)
    return PlanarMaxima(np.sqrt(np.maximum(square(best), 0.0)), best)

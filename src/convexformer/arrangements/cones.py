"""Projections on polyhedral cones ``{u : K u >= 0}`` by active sets, for few columns and possibly many rows."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from scipy.optimize import nnls

from convexformer.arrangements.cells import Array

FEW_ROWS = 256  # rows up to which SciPy's NNLS, which forms the Gram matrix of all of them, is faster
MANY_ROWS = 2048  # rows beyond which a split works on some of them at a time
ROWS_AT_ONCE = 64  # rows that it begins with, and adds
MAX_STEPS = 50  # times the number of columns: active-set steps before the current point is returned


class ConeProjection(NamedTuple):
    """The projection of a point on a cone, with the multipliers that prove it."""

    point: Array
    """``u = m + K^T multipliers``; for any ``multipliers >= 0`` its norm is at least that of the projection."""
    active: Array
    """Indices of the rows with a positive multiplier; they vanish at the projection."""
    multipliers: Array
    """Their multipliers."""


def project_on_cone(K: Array, m: Array) -> ConeProjection:
    """Project ``m: (p,)`` on ``{u : K u >= 0}``, ``K: (H, p)``: ``u = m + K^T lam``, ``lam`` solving NNLS (Moreau).

    The active set of Lawson and Hanson (1974) on ``min_{lam >= 0} |K^T lam + m|``: never more than p rows are active, so
    a step costs one product with ``K`` and a tiny solve, however many rows there are.
    """
    if len(K) <= FEW_ROWS:
        try:
            lam, _ = nnls(K.T, -m)
            active = np.flatnonzero(lam)
            found = ConeProjection(m + K[active].T @ lam[active], active, lam[active])
            if _optimal(K, m, found.point):  # SciPy 1.17 returns wrong multipliers for some cones of sparse rows
                return found
        except RuntimeError:  # too many iterations: rows that are nearly dependent
            pass
    return _active_set(K, m)


def _optimal(K: Array, m: Array, u: Array) -> bool:
    """Tell whether ``u = m + K^T lam`` is feasible and complementary, ``<u, K^T lam> = 0``."""
    scale = float(np.linalg.norm(m))
    feasible = (K @ u >= -1e-11 * scale * np.linalg.norm(K, axis=1)).all()
    return bool(feasible) and abs(float(u @ (u - m))) <= 1e-11 * scale**2


def _active_set(K: Array, m: Array) -> ConeProjection:
    scale = float(np.linalg.norm(m))
    active: list[int] = []
    lam = np.zeros(0)
    u = m.copy()
    if scale == 0.0:
        return ConeProjection(u, np.array(active, dtype=int), lam)
    sizes = np.linalg.norm(K, axis=1)
    tolerance = 1e-13 * scale * np.maximum(sizes, np.finfo(float).tiny)
    blocked: set[int] = set()
    for _ in range(MAX_STEPS * K.shape[1]):
        slack = (K @ u + tolerance) / np.maximum(sizes, np.finfo(float).tiny)
        slack[active] = 0.0
        if blocked:
            slack[list(blocked)] = 0.0
        worst = int(np.argmin(slack))
        if slack[worst] >= 0:
            break
        active.append(worst)
        lam = np.append(lam, 0.0)
        kept = len(active)
        while active:
            A = K[active]
            wanted = np.linalg.lstsq(A.T, -m, rcond=None)[0]
            if (wanted > 0).all():
                lam = wanted
                break
            low = wanted <= 0
            step = float(np.min(lam[low] / np.maximum(lam[low] - wanted[low], np.finfo(float).tiny)))
            lam = lam + step * (wanted - lam)
            stay = (lam > 1e-15 * max(lam.max(initial=0.0), np.finfo(float).tiny)) & ~(low & (lam <= 0))
            if stay.all():
                stay[int(np.argmin(lam))] = False
            active, lam = [k for k, s in zip(active, stay, strict=True) if s], lam[stay]
        if worst not in active and kept - 1 == len(active):  # no progress: a row dependent on the active ones
            blocked.add(worst)
        else:
            blocked.clear()
        u = m + K[active].T @ lam if active else m.copy()
    return ConeProjection(u, np.array(active, dtype=int), lam)


def least_distance(K: Array, lower: Array, centre: Array) -> Array:
    """``argmin |a - centre|`` subject to ``K a >= lower``, which must have a solution (Lawson and Hanson, chapter 23).

    With ``b = a - centre`` and ``r = lower - K centre`` it is the least ``|b|`` with ``K b >= r``: a projection of
    ``(0, 1)`` on the cone ``{(b, t) : K b >= r t}``, divided by its last entry.
    """
    r = lower - K @ centre
    if (r <= 0).all():
        return centre.copy()
    lifted = np.hstack([K, -r[:, None]])
    found = project_on_cone(lifted, np.r_[np.zeros(K.shape[1]), 1.0]).point
    if found[-1] <= 1e-14:
        raise ValueError("no point satisfies K a >= lower: the rows of K do not open a cone with interior.")
    return centre + found[:-1] / found[-1]


def split_in_cone(K: Array, u: Array, steps: int = 60, tolerance: float = 1e-10) -> tuple[Array, Array]:
    """Write ``u = a - b`` with ``K a >= 0`` and ``K b >= 0`` and the least ``|a| + |b|``: the cone decomposition.

    Mishkin, Sahiner and Pilanci (2022) turn a gated neuron into two ReLU neurons by it. ``|a| + |b|`` is minimised by
    reweighting: ``min |a|^2 / alpha + |b|^2 / gamma`` is a least-distance problem, with ``alpha = |a|``, ``gamma =
    |b|`` of the step before. Every step is feasible. The cone must have interior, as that of an activation pattern
    has.
    """
    return (_split_by_rows if len(K) > MANY_ROWS else _split)(K, u, steps, tolerance)


def _split(K: Array, u: Array, steps: int, tolerance: float) -> tuple[Array, Array]:
    sides = K @ u
    slack = 1e-14 * np.linalg.norm(u) * np.maximum(np.linalg.norm(K, axis=1), np.finfo(float).tiny)
    if (sides >= -slack).all():
        return u.copy(), np.zeros_like(u)
    if (sides <= slack).all():
        return np.zeros_like(u), -u
    lower = np.maximum(sides, 0.0)
    alpha = gamma = 1.0
    best = (u, np.zeros_like(u))
    value = np.inf
    for _ in range(steps):
        a = least_distance(K, lower, u * (alpha / (alpha + gamma)))
        b = a - u
        total = float(np.linalg.norm(a) + np.linalg.norm(b))
        gained = value - total
        if total < value:
            best, value = (a, b), total
        if gained <= tolerance * value:
            break
        floor = 1e-9 * total
        alpha, gamma = max(float(np.linalg.norm(a)), floor), max(float(np.linalg.norm(b)), floor)
    return best


def _split_by_rows(K: Array, u: Array, steps: int, tolerance: float) -> tuple[Array, Array]:
    """Split on some rows only, and add those that the result violates most until there are none."""
    sizes = np.maximum(np.linalg.norm(K, axis=1), np.finfo(float).tiny)
    chosen = np.argsort(np.abs(K @ u) / sizes)[:ROWS_AT_ONCE]
    while True:
        a, b = _split(K[chosen], u, steps, tolerance)
        slack = np.minimum(K @ a, K @ b) / sizes
        worst = np.argsort(slack)[:ROWS_AT_ONCE]
        worst = worst[slack[worst] < -1e-13 * (np.linalg.norm(a) + np.linalg.norm(b))]
        fresh = np.setdiff1d(worst, chosen)
        if len(fresh) == 0 or len(chosen) + len(fresh) > MANY_ROWS:
            break
        chosen = np.r_[chosen, fresh]
    return (a, b) if len(fresh) == 0 else _split(K, u, steps, tolerance)

"""Bounds on the polar of a cone-constrained nuclear norm: ``max |M^T u|_2`` subject to ``K u >= 0``, ``|u| <= 1``.

Convex maximisation, as hard as nonnegative PCA in general. For one column it is a projection. For a few columns a
branch and bound over the sphere of output directions is exact to a tolerance. Upper bounds for any number: ``sigma_max(M)``,
and a semidefinite relaxation through CVXPY. Each upper bound is one for whatever accuracy its solver reached.
"""

from __future__ import annotations

import heapq
import itertools
import warnings
from collections.abc import Sequence
from importlib.util import find_spec
from typing import NamedTuple

import numpy as np

from convexformer.arrangements import project_on_cone

Array = np.ndarray

NOISE = 1e-8  # a projection below this fraction of the point has lost its direction to rounding


class ConeProblem(NamedTuple):
    """``max |M^T u|`` over ``K u >= 0``, ``|u| <= 1``; ``K: (H, p)``, ``M: (p, q)``."""

    K: Array
    M: Array


class Bounds(NamedTuple):
    """What is known of a maximum: ``lower <= max <= upper``, and a direction that attains ``lower``."""

    lower: float
    upper: float
    u: Array
    where: int = 0
    """The index of the problem that ``u`` belongs to."""


def column_polar(problem: ConeProblem, v: Array) -> tuple[float, Array]:
    """``h(v) = max <M v, u>`` over the cone and the ball, ``|P(M v)|``, and its maximiser; never below the true value."""
    m = problem.M @ v
    u = project_on_cone(problem.K, m).point
    size = float(np.linalg.norm(u))
    if size <= NOISE * float(np.linalg.norm(m)):  # the projection is zero, up to rounding: no direction
        return size, np.zeros_like(u)
    return size, u / size


def projected_power(problem: ConeProblem, v: Array, steps: int = 20, tolerance: float = 1e-12) -> tuple[float, Array]:
    """Alternate ``u = P(M v)/|.|`` and ``v = M^T u/|.|``: values rise to a local maximum, a lower bound."""
    best, at = 0.0, np.zeros(len(problem.M))
    for _ in range(steps):
        size = float(np.linalg.norm(v))
        if size == 0.0:
            break
        _, u = column_polar(problem, v / size)
        v = problem.M.T @ u
        value = float(np.linalg.norm(v))
        if value <= best * (1 + tolerance) or not _inside(problem.K, u):
            break
        best, at = value, u
    return best, at


def branch_and_bound(
    problems: Sequence[ConeProblem], lower: float, tolerance: float, budget: int, start: Array | None = None
) -> Bounds:
    """Bound the largest maximum of several problems with ``q`` columns from both sides, to a relative ``tolerance``.

    The maximum is that of ``h(v) = max <M v, u>`` over the unit sphere of ``R^q``, and ``h`` is sublinear. On the
    simplicial cone of unit vectors ``w_1..w_q`` therefore ``h(v) <= sum_i lam_i h(w_i)`` for ``v = sum_i lam_i w_i``,
    which is ``<y, v>`` for the ``y`` with ``<w_i, y> = h(w_i)``: at most ``|y|``. Cones are bisected until all bounds
    meet the best value, which they do quadratically in their size. ``budget`` is the number of projections; a larger
    one, a tighter bound.
    """
    best, at, where = lower, start if start is not None else np.zeros(len(problems[0].M)), -1
    heap: list[tuple[float, int, int, Array, Array]] = []
    ticket = itertools.count()
    spent = 0

    def value(k: int, w: Array) -> float:
        nonlocal best, at, where, spent
        spent += 1
        size, u = column_polar(problems[k], w)
        attained = float(np.linalg.norm(problems[k].M.T @ u))
        if attained > best and _inside(problems[k].K, u):
            best, at, where = attained, u, k
        return size

    for k, problem in enumerate(problems):
        q = problem.M.shape[1]
        top = float(np.linalg.norm(problem.M, 2))
        if top <= best * (1 + tolerance):
            continue
        ends = np.vstack([np.eye(q), -np.eye(q)])
        values = np.array([value(k, w) for w in ends])
        for signs in itertools.product((0, 1), repeat=q):
            rows = [i + q * s for i, s in enumerate(signs)]
            heapq.heappush(
                heap, (-min(top, _simplex_bound(ends[rows], values[rows])), next(ticket), k, ends[rows], values[rows])
            )
    upper = best
    while heap:
        bound, _, k, W, h = heapq.heappop(heap)
        if -bound <= best * (1 + tolerance):
            break
        if spent >= budget:
            upper = -bound
            break
        products = W @ W.T + 2 * np.eye(len(W))
        i, j = np.unravel_index(int(np.argmin(products)), products.shape)
        middle = W[i] + W[j]
        middle /= np.linalg.norm(middle)
        size = value(k, middle)
        for end in (i, j):
            W2, h2 = W.copy(), h.copy()
            W2[end], h2[end] = middle, size
            child = min(-bound, _simplex_bound(W2, h2))
            if child > best * (1 + tolerance):
                heapq.heappush(heap, (-child, next(ticket), k, W2, h2))
    return Bounds(best, max(upper, best * (1 + tolerance)), at, where)


def sdp_bound(problem: ConeProblem) -> float:
    """``sqrt(max tr(M M^T U))`` over ``U >= 0`` (PSD), ``tr U <= 1``, ``K U K^T >= 0`` entrywise, from CVXPY's multipliers.

    For any symmetric ``L >= 0`` the value ``lambda_max(M M^T + K^T L K)`` bounds the maximum: it is taken at the solver's
    multipliers, so that its accuracy does not matter. Where the solver fails it is ``sigma_max(M)``.
    """
    import cvxpy as cp

    plain = float(np.linalg.norm(problem.M, 2))
    sizes = np.linalg.norm(problem.K, axis=1)
    K = problem.K[sizes > 0] / sizes[sizes > 0, None]  # the same cone; rows of one scale, or the solver fails
    if plain == 0.0 or len(K) == 0:
        return plain
    M = problem.M / plain
    Q = M @ M.T
    U = cp.Variable(Q.shape, PSD=True)
    cone = K @ U @ K.T >= 0
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that a solution may be inaccurate: see above
            cp.Problem(cp.Maximize(cp.trace(Q @ U)), [cone, cp.trace(U) <= 1]).solve(solver=cp.CLARABEL)
    except cp.SolverError:
        return plain
    if cone.dual_value is None or not np.isfinite(cone.dual_value).all():
        return plain
    L = np.maximum(0.5 * (cone.dual_value + cone.dual_value.T), 0)
    values = np.linalg.eigvalsh(Q + K.T @ L @ K)
    top = float(values[-1] + 1e-14 * np.abs(values).max())  # rounding: multipliers of a degenerate cone may be large
    return plain * min(1.0, float(np.sqrt(max(0.0, top))))


def has_sdp() -> bool:
    """Tell whether CVXPY is installed."""
    return find_spec("cvxpy") is not None


def _simplex_bound(W: Array, h: Array) -> float:
    """``max sum_i lam_i h_i`` over unit ``sum_i lam_i w_i`` with ``lam >= 0``, or a little more."""
    try:
        y, z = np.linalg.solve(W, np.stack([h, np.ones(len(h))], 1)).T
    except np.linalg.LinAlgError:
        return float("inf")
    return min(float(np.linalg.norm(y)), float(h.max() * np.linalg.norm(z)))


def _inside(K: Array, u: Array) -> bool:
    return bool((K @ u >= -1e-9 * np.maximum(np.linalg.norm(K, axis=1), 1e-300)).all())

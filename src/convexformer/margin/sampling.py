"""Data for each theorem, and for the counterexample."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from convexformer.gauges import NuclearNorm
from convexformer.margin.certificate import margin_certificate
from convexformer.margin.data import Sequences
from convexformer.margin.diagonal import solve_diagonal
from convexformer.margin.frobenius import solve_frobenius
from convexformer.margin.nuclear import ADMM_CONSTRAINTS, solve_nuclear
from convexformer.margin.progress import Answer, Limits
from convexformer.operators import DenseOperator
from convexformer.registry import one_of
from convexformer.threads import few_threads

SHAPES = {"diagonal": (3, 4, 10), "general": (3, 3, 4), "aligned": (3, 5, 6), "violates_a3": (2, 2, 3)}
"""Default ``(n, L, d)`` of each kind."""
MAX_DRAWS = 200  # draws before giving up
CLEAR_SLACK, CLEAR_SHARE, CLEAR_EXCESS = 0.3, 0.03, 0.05
"""With ``clear``: least dual slack, least share of the multipliers, least excess of the Frobenius solution."""


class Sample(NamedTuple):
    """``X: (n, L, d)``, ``z: (n, d)``, ``y: (n,)`` of -1 and +1, ``v: (d,)``; unpacks into the arguments of ``fit``."""

    X: np.ndarray
    z: np.ndarray
    y: np.ndarray
    v: np.ndarray


def sample_data(
    kind: str = "general",
    n: int | None = None,
    L: int | None = None,
    d: int | None = None,
    *,
    seed: int = 0,
    clear: bool = True,
) -> Sample:
    """Draw ``n`` sequences of ``L`` tokens of size ``d``.

    - ``"diagonal"``: assumptions 1 (with a diagonal matrix), 2 and 3, for theorem 4.1; needs about ``d >= n (L-1)``
    - ``"general"``: assumptions 1 to 3 with Gaussian tokens, outside every theorem; here nuclear and Frobenius differ
    - ``"aligned"``: assumptions 1 to 4, for theorem 5.1; ``L`` odd, ``d >= n + 2``
    - ``"violates_a3"``: two sequences of two tokens, separable, where the diagonal flow from zero ends at a wrong token

    ``clear`` draws until the limit shows within a finite horizon. The direction's error falls like a power of
    ``log(t)``, and where a weight or a support token is nearly undecided that power is nearly zero. For ``"diagonal"``
    every zero weight then has a dual slack of at least 0.3 and every support token at least 3% of the multipliers
    (about one draw in five); for ``"general"`` the Frobenius solution has a nuclear norm at least 5% above the optimum
    (about nine draws in ten; checked up to 1500 constraints).
    """
    one_of("kind", kind, SHAPES)
    given = [value for value in (n, L, d) if value is not None]
    if kind == "violates_a3":
        if given:
            raise ValueError("kind='violates_a3' is one fixed problem, (n, L, d) = (2, 2, 3); leave n, L and d out.")
        return _counterexample()
    n, L, d = sizes = tuple(
        default if value is None else value for value, default in zip((n, L, d), SHAPES[kind], strict=True)
    )
    if any(not isinstance(size, (int, np.integer)) or size < 1 for size in sizes) or L < 2:
        raise ValueError(f"(n, L, d) = {sizes} was given; expected positive whole numbers with L >= 2.")
    rng = np.random.default_rng(seed)
    if kind == "aligned":
        return _aligned(n, L, d, rng)
    accepts = _clear_diagonal if kind == "diagonal" else _clear_general
    separable = 0
    for _ in range(MAX_DRAWS):
        sample = _gaussian(n, L, d, rng, room=0.2 if kind == "diagonal" else 1.0)
        answer = _separates(sample, diagonal=kind == "diagonal")
        if answer is not None and (not clear or accepts(sample, answer)):
            return sample
        separable += answer is not None
    if separable:
        raise ValueError(
            f"{separable} of {MAX_DRAWS} draws of shape (n, L, d) = {sizes} separate, none clearly; pass clear=False."
        )
    need = "d >= n (L - 1)" if kind == "diagonal" else "d^2 well above n (L - 1)"
    raise ValueError(
        f"no separable data of shape (n, L, d) = {sizes} in {MAX_DRAWS} draws; {need} makes Gaussian data separable."
    )


def _score_gap(n: int, L: int, room: float) -> float:
    """``L ln n`` plus ``room``: with equal gaps assumption 3 holds at ``W = 0`` as soon as ``n exp(-gap/L) <= 1``."""
    return L * math.log(n) + room


def _gaussian(n: int, L: int, d: int, rng: np.random.Generator, room: float) -> Sample:
    """Noise orthogonal to a unit head, plus the head times the scores: equal for all but the optimal token."""
    v = rng.standard_normal(d)
    v /= np.linalg.norm(v)
    y = rng.choice([-1.0, 1.0], n)
    z = rng.standard_normal((n, d))
    X = rng.standard_normal((n, L, d))
    X -= (X @ v)[..., None] * v
    scores = np.full((n, L), -0.5)
    scores[np.arange(n), rng.integers(0, L, n)] += _score_gap(n, L, room)
    return Sample(X + (y[:, None] * scores)[..., None] * v, z, y, v)


def _aligned(n: int, L: int, d: int, rng: np.random.Generator) -> Sample:
    """Orthogonal optimal tokens along their queries; the others in pairs ``c x_opt +- delta``, delta orthogonal to v too."""
    if L % 2 == 0 or L < 3 or d < n + 2:
        raise ValueError(
            f"(n, L, d) = {(n, L, d)} was given; kind='aligned' needs L odd (pairs of tokens) and d >= n + 2."
        )
    U = np.linalg.qr(rng.standard_normal((d, d)))[0].T  # orthonormal rows
    y = rng.choice([-1.0, 1.0], n)
    length, c = 1 + rng.random(n), -0.2
    score = _score_gap(n, L, 1.0)
    # v needs a part outside the span of the optimal tokens: else the nuclear optimum is not unique
    v = (y * score / length) @ U[:n] + 3.0 * U[n]
    z = (rng.choice([-1.0, 1.0], n) * (0.5 + rng.random(n)))[:, None] * U[:n]
    X = np.empty((n, L, d))
    for i in range(n):
        x = length[i] * U[i]
        basis = np.linalg.qr(np.stack([U[i], v]).T)[0]
        tokens = [x]
        for _ in range((L - 1) // 2):
            delta = rng.standard_normal(d)
            delta -= basis @ (basis.T @ delta)
            tokens += [c * x + delta, c * x - delta]
        X[i] = np.stack(tokens)[rng.permutation(L)]
    return Sample(X, z, y, v)


def _counterexample() -> Sample:
    """``B_1 = (1, -0.05)``, ``B_2 = (-1, 0.1)``, scores (2, -2) and (2, 1.9): the first sequence pulls far harder.

    The l1-SVM is feasible, but both sequences want opposite signs of the first weight, and the second only gains 0.1.
    """
    X = np.zeros((2, 2, 3))
    X[0, 0, :2], X[1, 0, :2] = (1.0, -0.05), (-1.0, 0.1)
    X[:, :, 2] = ((2.0, -2.0), (2.0, 1.9))
    z = np.array([[1.0, 1.0, 0.0]] * 2)
    return Sample(X, z, np.ones(2), np.array([0.0, 0.0, 1.0]))


def _separates(sample: Sample, diagonal: bool) -> Answer | None:
    """Return the answer of the l1- or Frobenius SVM, or None if nothing separates."""
    data = Sequences.of(*sample)
    operator = data.diagonal_operator() if diagonal else data.operator()
    limits = Limits(1e-4, 2000)
    with few_threads(data.X):
        if isinstance(operator, DenseOperator):
            answer = solve_diagonal(operator, limits)
        else:
            answer = solve_frobenius(operator, limits)
    return answer if bool(operator.apply(answer.W).min() > 1e-9) else None


def _clear_diagonal(sample: Sample, answer: Answer) -> bool:
    """Strict complementarity with a margin: dual slacks ``1 - |B^T lam|_j`` of zero weights, shares of support tokens."""
    operator = Sequences.of(*sample).diagonal_operator()
    force, share = operator.adjoint(answer.multipliers).abs(), answer.multipliers / answer.multipliers.sum()
    zero = answer.W.abs() <= 1e-9 * answer.W.abs().max()
    slack = 1 - float((force / force.max())[zero].max()) if bool(zero.any()) else 1.0
    return slack >= CLEAR_SLACK and float(share[share > 1e-9].min()) >= CLEAR_SHARE


def _clear_general(sample: Sample, answer: Answer) -> bool:
    """The Frobenius solution is not also the nuclear one."""
    operator = Sequences.of(*sample).operator()
    if operator.output_shape[0] * operator.output_shape[1] > ADMM_CONSTRAINTS:
        return True
    gauge = NuclearNorm()
    own = margin_certificate(operator, gauge, answer.W, answer.multipliers).primal
    with few_threads(operator.differences):
        nuclear = solve_nuclear(operator, Limits(1e-3, 2000))
    best = margin_certificate(operator, gauge, nuclear.W, nuclear.multipliers).primal
    return own >= (1 + CLEAR_EXCESS) * best

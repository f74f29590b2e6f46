"""The end phase of the nuclear-norm SVM where its solution has a low rank: Newton steps on few factors.

On ill-conditioned data (one direction of the tokens a hundred times the others) L-BFGS takes thousands of iterations for
the last digits, at penalties that its line searches still bear. With the ``r`` singular pairs that carry the solution there
are only ``2 d r`` unknowns, and the augmented Lagrangian

    1/2 (|U|^2 + |V|^2) + sum (t^2 - lam^2) / (2 penalty),   t = (lam + penalty (1 - A U V^T))_+

is minimised by semismooth Newton steps with a dense Hessian, for penalties that grow by a factor each round.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from convexformer.margin.operator import MarginOperator
from convexformer.margin.progress import Progress

MAX_UNKNOWNS = 1000  # 2 d r at most: side of the Newton system
CARRYING_SHARE = 1e-2  # singular values below this share of the largest are left out at the start
PENALTY_GROWTH, MAX_PENALTY = 5.0, 1e6  # of the augmented Lagrangian, a round, and at most
MAX_ROUNDS, MAX_STEPS = 14, 40  # multiplier updates, and Newton steps in each
IDLE_ROUNDS = 3  # rounds without progress after which it gives up
DECREMENT = 1e-13  # Newton decrement, relative to the value, below which a round is solved


class Point(NamedTuple):
    """Factors of the weights, and the multipliers of the margin constraints."""

    U: Tensor
    V: Tensor
    lam: Tensor


def low_rank_point(W: Tensor, lam: Tensor) -> Point | None:
    """Return the factors that carry ``W``, or None where there are too many of them for a dense Newton system."""
    left, sizes, right = torch.linalg.svd(W)
    rank = int((sizes > CARRYING_SHARE * sizes[0]).sum())
    if rank == 0 or 2 * W.shape[0] * rank > MAX_UNKNOWNS:
        return None
    root = sizes[:rank].sqrt()
    return Point(left[:, :rank] * root, right[:rank].mT * root, lam)


def refine(operator: MarginOperator, point: Point, penalty: float, progress: Progress, spent: int) -> int:
    """Raise the penalty until the gap is certified or no longer falls; return the Newton steps taken.

    Every round shows its point to ``progress``, which keeps the best bounds; ``spent`` are the iterations before.
    """
    U, V, lam = point
    used, idle, best = 0, 0, progress.relative_gap
    for _ in range(MAX_ROUNDS):
        penalty = min(PENALTY_GROWTH * penalty, MAX_PENALTY)
        U, V, steps = _minimise(operator, Point(U, V, lam), penalty)
        used += steps
        lam = (lam + penalty * (1 - operator.apply(U @ V.mT))).clamp_min(0)
        if progress.see(U @ V.mT, lam, spent + used) or spent + used >= progress.limits.max_iter:
            break
        idle, best = (0, progress.relative_gap) if progress.relative_gap < 0.9 * best else (idle + 1, best)
        if idle == IDLE_ROUNDS:
            break
        grown = _with_missing_pair(operator, Point(U, V, lam))
        if grown is not None:
            if 2 * grown[0].numel() > MAX_UNKNOWNS:
                break
            U, V = grown
            penalty /= PENALTY_GROWTH**2  # the enlarged problem starts far from its minimum
    return used


def _minimise(operator: MarginOperator, point: Point, penalty: float) -> tuple[Tensor, Tensor, int]:
    """Newton steps with backtracking; return the factors and the number of steps."""
    U, V, lam = point

    def value(U: Tensor, V: Tensor) -> tuple[float, Tensor]:
        t = (lam + penalty * (1 - operator.apply(U @ V.mT))).clamp_min(0)
        return 0.5 * float(U.square().sum() + V.square().sum()) + float(t.square().sum()) / (2 * penalty), t

    now, t = value(U, V)
    for step in range(MAX_STEPS):
        M = operator.adjoint(t)
        gradient = torch.cat([(U - M @ V).flatten(), (V - M.mT @ U).flatten()])
        direction = _direction(_hessian(operator, U, V, M, t > 0, penalty), gradient)
        slope, length = float(direction @ gradient), 1.0
        if -slope <= DECREMENT * now:
            return U, V, step
        dU, dV = direction.view(2, *U.shape)
        while length > 1e-8:
            after, t_after = value(U + length * dU, V + length * dV)
            if after <= now + 1e-4 * length * slope:
                break
            length *= 0.5
        else:  # no descent left in this precision
            return U, V, step + 1
        U, V, now, t = U + length * dU, V + length * dV, after, t_after
    return U, V, MAX_STEPS


def _hessian(operator: MarginOperator, U: Tensor, V: Tensor, M: Tensor, binding: Tensor, penalty: float) -> Tensor:
    """``I + penalty E^T E - [[0, M], [M^T, 0]]`` for each column, ``E`` the Jacobian of the binding margins."""
    rows, others = binding.nonzero().T
    p, z = operator.differences[rows, others], operator.queries[rows]
    E = torch.cat([(p[:, :, None] * (z @ V)[:, None]).flatten(1), (z[:, :, None] * (p @ U)[:, None]).flatten(1)], 1)
    H = penalty * (E.mT @ E)
    H.diagonal().add_(1.0)
    d, r = U.shape
    blocks = H.view(2, d, r, 2, d, r)
    for column in range(r):
        blocks[0, :, column, 1, :, column] -= M
        blocks[1, :, column, 0, :, column] -= M.mT
    return H


def _direction(H: Tensor, gradient: Tensor) -> Tensor:
    """``-|H|^{-1} gradient``: Newton's where ``H`` is positive, downhill where it is not (saddles of the factors).

    Rotations of the factors change nothing, so that ``H`` has zero eigenvalues there; a small ridge keeps them still.
    """
    H.diagonal().add_(1e-8 + 1e-14 * float(H.diagonal().max()))
    factor, failed = torch.linalg.cholesky_ex(H)
    if not bool(failed):
        return -torch.cholesky_solve(gradient[:, None], factor)[:, 0]
    sizes, vectors = torch.linalg.eigh(H)
    return -(vectors @ ((vectors.mT @ gradient) / sizes.abs().clamp_min(1e-6)))


def _with_missing_pair(operator: MarginOperator, point: Point) -> tuple[Tensor, Tensor] | None:
    """Append the top singular pair of ``A^T lam`` where it exceeds one and the factors lack it: it descends."""
    U, V, lam = point
    left, sizes, right = torch.linalg.svd(operator.adjoint(lam))
    known = torch.linalg.qr(U).Q
    lacking = (left - known @ (known.mT @ left)).norm(dim=0) > 0.1
    violating = (lacking & (sizes > 1 + 1e-6)).nonzero().flatten()
    if len(violating) == 0:
        return None
    first, size = int(violating[0]), 1e-2 * float(U.norm())
    return torch.cat([U, size * left[:, first, None]], 1), torch.cat([V, size * right[first, :, None]], 1)

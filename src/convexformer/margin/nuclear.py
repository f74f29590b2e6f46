"""The nuclear-norm SVM.

    min ||W||_*   s.t.  p_il^T W z_i >= 1                                     (Sheen et al. 2024, W_*-SVM)

Small problems go to alternating directions, others to an augmented Lagrangian over factors ``W = U V^T``:

    ||W||_* = min_{U V^T = W} 1/2 (||U||_F^2 + ||V||_F^2),   U, V: (d, r)

Each round minimises the augmented Lagrangian over the factors by L-BFGS and updates the multipliers ``lam``. Spurious
minima exist only while ``r`` is too small; they show as ``sigma_max(A^T lam) > 1``, and that singular pair is appended to
the factors. L-BFGS runs in the coordinates of :mod:`~convexformer.margin.metric`, and where few singular pairs carry the
solution, :mod:`~convexformer.margin.low_rank` takes the end phase. At ``r = d`` every second-order critical point is
optimal, and the certificate decides in any case.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from scipy.optimize import minimize
from torch import Tensor

from convexformer.gauges import NuclearNorm
from convexformer.margin.admm import solve_admm
from convexformer.margin.low_rank import low_rank_point, refine
from convexformer.margin.metric import FactorMetric
from convexformer.margin.operator import MarginOperator
from convexformer.margin.progress import Answer, Limits, Progress
from convexformer.solvers.status import Status

ADMM_CONSTRAINTS, ADMM_WIDTH = 1500, 100  # ADMM is faster up to this many constraints and channels
ADMM_ITERATIONS = 400  # ADMM gives up after this many iterations
TUNED_VALUE = 10.0  # value of the Frobenius-norm SVM for which the penalties below were tuned
FIRST_PENALTY, LAST_PENALTY = 3.0, 30.0  # of the augmented Lagrangian; beyond the last one line searches fail
INNER_ITERATIONS = 300  # L-BFGS iterations between multiplier updates, at most
LBFGS_PAIRS = 10  # correction pairs that L-BFGS stores
REFINE_BELOW, REFINE_AGAIN = 0.2, 0.1  # gap below which low ranks are refined; and again, relative to the gap left
STALL_ROUNDS, MAX_ROUNDS = 15, 400  # rounds without progress, and in total, after which the solver stops


def solve_nuclear(operator: MarginOperator, limits: Limits) -> Answer:
    """Solve the nuclear-norm SVM to ``limits.tolerance``, for data that separates well.

    It stops early where it finds no separating matrix, so that the caller can look for a proof that there is none, and
    where it converges slowly; :func:`solve_nuclear_scaled` then takes over.
    """
    unit = _normalised(operator)
    constraints = operator.output_shape[0] * operator.output_shape[1]
    if constraints <= ADMM_CONSTRAINTS and operator.weight_shape[0] <= ADMM_WIDTH:
        first = Limits(limits.tolerance, min(limits.max_iter, ADMM_ITERATIONS), limits.max_time)
        return solve_admm(unit, NuclearNorm(), first)
    return solve_factorised(unit, limits, patience=10)


def solve_nuclear_scaled(operator: MarginOperator, limits: Limits, frobenius: float) -> Answer:
    """Solve the nuclear-norm SVM of data that barely separates, given the approximate value of the Frobenius-norm SVM.

    Constraints are scaled so that the optimum has the size that the penalties were tuned for.
    """
    p, z = operator.differences, operator.queries
    return solve_factorised(MarginOperator(p * (frobenius / TUNED_VALUE), z), limits)


def solve_factorised(operator: MarginOperator, limits: Limits, patience: float = math.inf) -> Answer:
    """Run the augmented Lagrangian; ``max_iter`` counts L-BFGS iterations, ``patience`` rounds without separation."""
    progress = Progress(operator, NuclearNorm(), limits)
    n, d = operator.output_shape[0], operator.weight_shape[0]
    U, V = _start(operator, rank=min(d, 2 * math.isqrt(n) + 12))
    lam, penalty, violation = torch.zeros_like(operator.apply(operator.zeros())), FIRST_PENALTY, math.inf
    spent, rounds, best, best_round = 0, 0, math.inf, 0
    refine_below = REFINE_BELOW
    while spent < limits.max_iter:
        goal = min(1e-2, max(1e-9, 0.1 * violation))
        room = min(INNER_ITERATIONS, limits.max_iter - spent)
        U, V, used = _minimise(operator, U, V, lam, penalty, goal, room)
        spent, rounds = spent + used, rounds + 1
        margins = operator.apply(U @ V.mT)
        lam = (lam + penalty * (1 - margins)).clamp_min(0)
        if progress.see(U @ V.mT, lam, spent) or (not progress.separates and rounds >= patience):
            break
        if progress.relative_gap < 0.9 * best:
            best, best_round = progress.relative_gap, rounds
        elif (rounds - best_round >= STALL_ROUNDS and progress.separates) or rounds >= MAX_ROUNDS:
            progress.status = Status.STALLED
            break
        if progress.relative_gap <= refine_below:
            few = low_rank_point(U @ V.mT, lam)
            spent += 0 if few is None else refine(operator, few, penalty, progress, spent)
            if progress.status is not Status.MAX_ITER:
                break
            refine_below = REFINE_AGAIN * progress.relative_gap
        U, V = _grown(operator, U, V, lam)
        before, violation = violation, max(float((1 - margins).max()), 0.0)
        if violation > max(0.3 * before, 1e-7):
            penalty = min(3 * penalty, LAST_PENALTY)
    return progress.answer()


def _normalised(operator: MarginOperator) -> MarginOperator:
    """Scale differences and queries to norm one on average, so that step sizes and penalties suit all data."""
    p, z = operator.differences, operator.queries
    tiny = torch.finfo(p.dtype).tiny
    return MarginOperator(
        p / p.norm(dim=2).mean().clamp_min(tiny),
        z / z.norm(dim=1).mean().clamp_min(tiny),
    )


def _start(operator: MarginOperator, rank: int) -> tuple[Tensor, Tensor]:
    """Return balanced factors of the mean constraint, scaled to a median margin of one, and a little noise."""
    d = operator.weight_shape[0]
    M = operator.adjoint(torch.ones_like(operator.apply(operator.zeros())))
    left, sizes, right = torch.linalg.svd(M)
    root = sizes[:rank].sqrt()
    U, V = left[:, :rank] * root, right[:rank].mT * root
    scale = max(float(operator.apply(U @ V.mT).median()), 1e-3 * float(sizes[0]), torch.finfo(M.dtype).tiny)
    noise = torch.randn((2, d, rank), generator=torch.Generator().manual_seed(0), dtype=M.dtype).to(M) / math.sqrt(d)
    return U / math.sqrt(scale) + 1e-2 * noise[0], V / math.sqrt(scale) + 1e-2 * noise[1]


def _minimise(
    operator: MarginOperator, U: Tensor, V: Tensor, lam: Tensor, penalty: float, goal: float, iterations: int
) -> tuple[Tensor, Tensor, int]:
    """L-BFGS on ``1/2 (|U|^2 + |V|^2) + sum (t^2 - lam^2) / (2 penalty)``, ``t = (lam + penalty (1 - A U V^T))_+``.

    It runs in the coordinates of :class:`FactorMetric`, fixed at the start.
    """
    p, pT, z = operator.differences, operator.differences.mT, operator.queries
    d, r = U.shape
    offset = float(lam.square().sum())

    factors = torch.stack([U, V])
    binding = lam + penalty * (1 - operator.apply(U @ V.mT)) > 0
    metric = FactorMetric.at(operator, factors, binding, penalty)

    def value_and_gradient(x: np.ndarray) -> tuple[float, np.ndarray]:
        factors = metric.leave(torch.from_numpy(x).to(p).view(2, d, r))
        U, V = factors[0], factors[1]
        zV = z @ V  # (n, r)
        margins = ((zV @ U.mT)[:, None, :] @ pT)[:, 0]
        t = (lam + penalty * (1 - margins)).clamp_min(0)
        S = (t[:, None, :] @ p)[:, 0]  # (n, d); A^T t = S^T z
        value = 0.5 * float(factors.square().sum()) + (float(t.square().sum()) - offset) / (2 * penalty)
        gradient = torch.stack([U - S.mT @ zV, V - z.mT @ (S @ U)])
        return value, metric.pull(gradient).flatten().cpu().numpy()

    start = metric.enter(factors).flatten().cpu().numpy()
    options = {"maxiter": iterations, "maxfun": 2 * iterations, "maxcor": LBFGS_PAIRS, "ftol": 1e-16, "gtol": goal}
    found: Any = minimize(value_and_gradient, start, jac=True, method="L-BFGS-B", options=options)
    factors = metric.leave(torch.from_numpy(found.x).to(p).view(2, d, r))
    return factors[0], factors[1], max(int(found.nit), 1)


def _grown(operator: MarginOperator, U: Tensor, V: Tensor, lam: Tensor) -> tuple[Tensor, Tensor]:
    """Append the singular pairs of ``A^T lam`` above one that the factors lack: they are descent directions."""
    d, r = U.shape
    if r >= d:
        return U, V
    left, sizes, right = torch.linalg.svd(operator.adjoint(lam))
    left, right = left[:, sizes > 1.01], right[sizes > 1.01].mT
    # singular pairs that already lie in the span of the factors are not added
    known = torch.linalg.qr(U).Q
    lacking = ((left - known @ (known.mT @ left)).norm(dim=0) > 1e-3).nonzero().flatten()[: min(d - r, 4)]
    size = 1e-2 * float(U.norm()) / math.sqrt(r)
    return torch.cat([U, size * left[:, lacking]], 1), torch.cat([V, size * right[:, lacking]], 1)

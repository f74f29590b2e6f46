"""The nuclear-norm SVM.

    min ||W||_*   s.t.  p_il^T W z_i >= 1                                     (Sheen et al. 2024, W_*-SVM)

Small problems go to alternating directions, others to an augmented Lagrangian over factors ``W = U V^T``:

    ||W||_* = min_{U V^T = W} 1/2 (||U||_F^2 + ||V||_F^2),   U, V: (d, r)

Each round minimises the augmented Lagrangian over the factors by L-BFGS and updates the multipliers ``lam``. Factors
can get stuck only while ``r`` is too small, and then ``sigma_max(A^T lam) > 1`` says so: the singular pair joins the
factors. At ``r = d`` every second-order critical point is optimal, and the certificate decides in any case.
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
from convexformer.margin.operator import MarginOperator
from convexformer.margin.progress import Answer, Limits, Progress
from convexformer.solution import Status

SMALL = (1500, 100)  # constraints and width up to which alternating directions are faster
QUICK_ITERATIONS = 400  # and the iterations that they get
GOOD_VALUE = 10.0  # the Frobenius optimum at which the penalties below are about right
FIRST_PENALTY, LAST_PENALTY = 3.0, 30.0  # a larger one drowns the line search in rounding
INNER_ITERATIONS = 300
MEMORY = 10  # pairs that L-BFGS keeps
STALL_ROUNDS, MOST_ROUNDS = 15, 400  # without a better gap, and in all, after which rounding has won


def solve_nuclear(operator: MarginOperator, limits: Limits) -> Answer:
    """Solve the nuclear-norm SVM to ``limits.tolerance``, for data that separates well.

    A solve that finds no separating matrix in its first part stops, so that the caller can look for a proof that there
    is none; one that is slow stops too. :func:`insist_nuclear` then goes on.
    """
    unit = _normalised(operator)
    constraints = operator.output_shape[0] * operator.output_shape[1]
    if constraints <= SMALL[0] and operator.weight_shape[0] <= SMALL[1]:
        first = Limits(limits.tolerance, min(limits.max_iter, QUICK_ITERATIONS), limits.max_time)
        return solve_admm(unit, NuclearNorm(), first)
    return solve_factorised(unit, limits, patience=10)


def insist_nuclear(operator: MarginOperator, limits: Limits, frobenius: float) -> Answer:
    """Solve it for data that barely separates, given about the value of the Frobenius-norm SVM.

    Constraints are scaled so that the optimum has the size that the penalties were tuned for.
    """
    p, z = operator.differences, operator.queries
    return solve_factorised(MarginOperator(p * (frobenius / GOOD_VALUE), z), limits)


def solve_factorised(operator: MarginOperator, limits: Limits, patience: float = math.inf) -> Answer:
    """Run the augmented Lagrangian; ``max_iter`` counts L-BFGS iterations, ``patience`` rounds without separation."""
    progress = Progress(operator, NuclearNorm(), limits)
    n, d = operator.output_shape[0], operator.weight_shape[0]
    U, V = _start(operator, rank=min(d, 2 * math.isqrt(n) + 12))
    lam, penalty, violation = torch.zeros_like(operator.apply(operator.zeros())), FIRST_PENALTY, math.inf
    spent, rounds, best, best_round = 0, 0, math.inf, 0
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
        elif (rounds - best_round >= STALL_ROUNDS and progress.separates) or rounds >= MOST_ROUNDS:
            progress.status = Status.STALLED
            break
        U, V = _grown(operator, U, V, lam)
        before, violation = violation, max(float((1 - margins).max()), 0.0)
        if violation > max(0.3 * before, 1e-7):
            penalty = min(3 * penalty, LAST_PENALTY)
    return progress.answer()


def _normalised(operator: MarginOperator) -> MarginOperator:
    """Scale differences and queries to norm one on average, so that steps and penalties mean the same for all data."""
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
    """L-BFGS on ``1/2 (|U|^2 + |V|^2) + sum (t^2 - lam^2) / (2 penalty)``, ``t = (lam + penalty (1 - A U V^T))_+``."""
    p, pT, z = operator.differences, operator.differences.mT, operator.queries
    d, r = U.shape
    offset = float(lam.square().sum())

    def value_and_gradient(x: np.ndarray) -> tuple[float, np.ndarray]:
        factors = torch.from_numpy(x).to(p).view(2, d, r)
        U, V = factors[0], factors[1]
        zV = z @ V  # (n, r)
        margins = ((zV @ U.mT)[:, None, :] @ pT)[:, 0]
        t = (lam + penalty * (1 - margins)).clamp_min(0)
        S = (t[:, None, :] @ p)[:, 0]  # (n, d); A^T t = S^T z
        value = 0.5 * float(factors.square().sum()) + (float(t.square().sum()) - offset) / (2 * penalty)
        gradient = torch.stack([U - S.mT @ zV, V - z.mT @ (S @ U)])
        return value, gradient.flatten().cpu().numpy()

    start = torch.stack([U, V]).flatten().cpu().numpy()
    options = {"maxiter": iterations, "maxfun": 2 * iterations, "maxcor": MEMORY, "ftol": 1e-16, "gtol": goal}
    found: Any = minimize(value_and_gradient, start, jac=True, method="L-BFGS-B", options=options)
    factors = torch.from_numpy(found.x).to(p).view(2, d, r)
    return factors[0], factors[1], max(int(found.nit), 1)


def _grown(operator: MarginOperator, U: Tensor, V: Tensor, lam: Tensor) -> tuple[Tensor, Tensor]:
    """Append the singular pairs of ``A^T lam`` above one that the factors lack; they point downhill."""
    d, r = U.shape
    if r >= d:
        return U, V
    left, sizes, right = torch.linalg.svd(operator.adjoint(lam))
    left, right = left[:, sizes > 1.01], right[sizes > 1.01].mT
    # a pair that the factors already hold needs no copy
    known = torch.linalg.qr(U).Q
    lacking = ((left - known @ (known.mT @ left)).norm(dim=0) > 1e-3).nonzero().flatten()[: min(d - r, 4)]
    size = 1e-2 * float(U.norm()) / math.sqrt(r)
    return torch.cat([U, size * left[:, lacking]], 1), torch.cat([V, size * right[:, lacking]], 1)

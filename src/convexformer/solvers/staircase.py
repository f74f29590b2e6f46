"""The staircase: few factors, a certificate, and more factors along the directions that the certificate finds.

``min_{U, V} F(A(sum_j U_j V_j^T)) + beta/2 (|U|^2 + |V|^2)`` (Burer and Monteiro) has the optimum of the nuclear-norm
program once there are enough terms. It may have bad stationary points before; the dual matrix ``M = -A^T V`` tells: where
its largest singular value exceeds beta, its top pairs are directions of descent, and they are appended.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from convexformer.architecture import Weights
from convexformer.gauges.spectral import top_pairs
from convexformer.operators import BilinearOperator, LowRank
from convexformer.problem import Problem
from convexformer.solvers.bursts import SHORTEST, Point, burst, factor_weight, line_minimum, look
from convexformer.solvers.fista import fista
from convexformer.solvers.monitor import Monitor
from convexformer.threads import tensor_cores

FIRST_TERMS = 8  # appended at a time, at least
LONGEST = 100  # iterations of a burst
LARGE = 1e8  # beta_max, or one over it, from which on squares of what float32 holds may overflow
RUNG = 0.3  # between betas of a cold start's ladder
COARSE = 1e-2  # the local gap at which float32 hands over
NEAR = 1e-2  # the relative gap from which on weights of high rank may be taken dense
MANY_TERMS, DENSE = 64, 1 << 20  # sizes of the matrix between which that pays
AIM = 0.005  # a burst ends at this fraction of the last gap


def staircase(problem: Problem, start: Weights, monitor: Monitor) -> None:
    """Alternate bursts of L-BFGS on the factors with gap checks and growth; prune what has died.

    A cold start walks down a short ladder of betas first: rank grows as it is needed, from the strongest directions on.
    A burst ends when the local optimality gap ``beta g - <M, Z>`` is a fraction of the last duality gap, so that what is
    left is missing rank; then the top singular pairs of ``M`` above beta are appended. Where the rank turns out high and
    the matrix small, FISTA on dense weights finishes: its dual point lags less.
    """
    A = problem.operator
    assert isinstance(A, BilinearOperator)
    Z = start.Z if isinstance(start.Z, LowRank) else LowRank.of(start.Z)
    point = look(problem, Z, A.apply(Z), start.intercept)
    dual = monitor.check(Z, point.fit)
    steps, stuck = iter(monitor), 0
    if Z.n_terms == 0 and not monitor.done:
        point = _first(problem, point, dual.polar.value, monitor, steps)
        dual = monitor.check(point.Z, point.fit)
    while not monitor.done:
        if _dense_pays(problem, point.Z, monitor):
            fista(problem, Weights(point.Z.dense(), point.fit.intercept), monitor)
            break
        point = _grow(problem, point, dual.M) or point
        if point.Z.n_terms == 0:
            monitor.stall()
            break
        aim = max(AIM * monitor.history[-1].relative_gap, 0.05 * monitor.tolerance)
        before = monitor.iteration
        point, ended = burst(problem, point, monitor, steps, aim, LONGEST)
        dual = monitor.check(point.Z, point.fit)
        stuck = stuck + 1 if monitor.iteration - before < SHORTEST else 0
        if ended:
            break
        if stuck == 3 and not monitor.done:  # bursts end at once: rounding hides every descent
            monitor.stall()


def _dense_pays(problem: Problem, Z: LowRank, monitor: Monitor) -> bool:
    """Tell whether to hand over to FISTA: near the optimum, for high ranks, its gap follows the objective more closely."""
    A, (rows, columns) = problem.operator, Z.shape[-2:]
    assert isinstance(A, BilinearOperator)
    # a step on dense weights must cost no more than one on the factors
    cheap = A.dense_pays(Z.n_terms) and not Z.U.is_cuda
    small = cheap and min(rows, columns) >= MANY_TERMS and rows * columns <= DENSE
    gap = monitor.history[-1].relative_gap
    return small and Z.n_terms > min(rows, columns) / 8 and 10 * monitor.tolerance < gap < NEAR


def _first(problem: Problem, point: Point, beta_max: float, monitor: Monitor, steps: Any) -> Point:
    """Walk down to the problem's beta in a precision that is exact enough for a start, and twice as fast.

    On a CPU in float32, on a GPU with TF32 products; what follows is in the problem's own precision.
    """
    if problem.operator.like.is_cuda:
        with tensor_cores():
            point = _descend(problem, point, beta_max, monitor, steps)
        return look(problem, point.Z, problem.operator.apply(point.Z), point.fit.intercept)
    if problem.operator.like.dtype != torch.float64 or not 1 / LARGE < beta_max < LARGE:
        return _descend(problem, point, beta_max, monitor, steps)
    coarse = problem.coarse()
    rough = look(coarse, point.Z.to(dtype=torch.float32), point.outputs.float(), point.fit.intercept)
    rough = _descend(coarse, rough, beta_max, monitor, steps)
    rough = _grow(coarse, rough, coarse.operator.dual_matrix(rough.fit.V)) or rough
    if rough.Z.n_terms:
        rough, _ = burst(coarse, rough, monitor, steps, COARSE, LONGEST)
    Z = rough.Z.to(dtype=torch.float64)
    return look(problem, Z, problem.operator.apply(Z), rough.fit.intercept)


def _descend(problem: Problem, point: Point, beta_max: float, monitor: Monitor, steps: Any) -> Point:
    """Walk down from ``beta_max`` by the factor ``RUNG``, roughly, and end at the problem's own beta."""
    beta = RUNG * beta_max
    while beta > problem.beta / RUNG**0.5:
        rung = problem.with_beta(beta)
        point = look(rung, point.Z, point.outputs, point.fit.intercept)
        point = _grow(rung, point, problem.operator.dual_matrix(point.fit.V)) or point
        if point.Z.n_terms == 0:
            break
        point, ended = burst(rung, point, monitor, steps, 1e-2, SHORTEST)
        if ended:
            break
        beta *= RUNG
    return look(problem, point.Z, point.outputs, point.fit.intercept)


def _grow(problem: Problem, point: Point, M: Any) -> Point | None:
    """Append the top singular pairs of ``M`` above beta, scaled by the best common step; None when there is none."""
    wanted = max(FIRST_TERMS, point.Z.n_terms // 2)
    sigma, U, V, block = top_pairs(M, wanted, sweeps=2)
    beta = factor_weight(problem)
    above = sigma > beta * (1 + 1e-12)
    if not bool(above.any()):
        return None
    root = (sigma[above] - beta).clamp_min(0)[:, None].sqrt()
    root = root / root.max()
    new = LowRank(root * U[above].to(point.Z.U), root * V[above].to(point.Z.V), block[above], point.Z.shape)
    D, size, rest = problem.operator.apply(new), float(root.square().sum()), float(point.value - point.fit.value)
    slope = float((root[:, 0].square() * (sigma[above] - beta)).sum())
    curvature = problem.loss.curvature * float((problem.w[:, None] * D.double().square()).sum())
    unit = slope / curvature if 0 < curvature < math.inf else 1.0  # the step of a loss that is as curved as it can be

    def value(t: float) -> float:
        fit = problem.fit(point.outputs + t * unit * D, point.fit.intercept)
        return float(fit.value) + beta * t * unit * size + rest

    t = line_minimum(value, float(point.value))
    if t is None:
        return None
    t *= unit
    Z = point.Z.append(math.sqrt(t) * new.U, math.sqrt(t) * new.V, new.block)
    return look(problem, Z, point.outputs + t * D, point.fit.intercept)

"""The staircase: few factors, a certificate, and more factors along the directions that the certificate finds.

``min_{U, V} F(A(sum_j U_j V_j^T)) + beta/2 (|U|^2 + |V|^2)`` (Burer and Monteiro) has the optimum of the nuclear-norm
program once there are enough terms. It may have bad stationary points before; the dual matrix ``M = -A^T V`` tells: where
its largest singular value exceeds beta, its top pairs are directions of descent, and they are appended.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from convexformer.architecture import Weights
from convexformer.gauges.spectral import top_pairs
from convexformer.operators import BilinearOperator, LowRank
from convexformer.problem import Fit, Problem
from convexformer.solvers.fista import fista
from convexformer.solvers.lbfgs import InverseHessian
from convexformer.solvers.monitor import Monitor
from convexformer.threads import tensor_cores

FIRST_TERMS = 8  # appended at a time, at least
SHORTEST, LONGEST = 7, 100  # iterations of a burst
MEMORY = 30  # pairs of L-BFGS
RUNG = 0.3  # between betas of a cold start's ladder
COARSE = 1e-2  # the local gap at which float32 hands over
NEAR = 1e-2  # the relative gap from which on weights of high rank may be taken dense
MANY_TERMS, DENSE = 64, 1 << 20  # sizes of the matrix between which that pays
AIM = 0.005  # a burst ends at this fraction of the last gap


@final
@dataclass(frozen=True)
class Point:
    """Factors, their outputs, the loss there and the objective."""

    Z: LowRank
    outputs: Tensor
    fit: Fit
    value: float


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
    point = _look(problem, Z, A.apply(Z), start.intercept)
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
        aim = max(AIM * monitor.history[-1].relative_gap, 0.05 * monitor.tolerance)
        before = monitor.iteration
        point, ended = _burst(problem, point, monitor, steps, aim, LONGEST)
        dual = monitor.check(point.Z, point.fit)
        stuck = stuck + 1 if monitor.iteration - before < SHORTEST else 0
        if ended:
            break
        if stuck == 3 and not monitor.done:  # bursts end at once: rounding hides every descent
            monitor.stall()


def _dense_pays(problem: Problem, Z: LowRank, monitor: Monitor) -> bool:
    """Tell whether to hand over to FISTA: near the optimum, for high ranks, its gap follows the objective more closely."""
    rows, columns = Z.shape[-2:]
    small = min(rows, columns) >= MANY_TERMS and rows * columns <= DENSE and not Z.U.is_cuda
    gap = monitor.history[-1].relative_gap
    return small and Z.n_terms > min(rows, columns) / 8 and 10 * monitor.tolerance < gap < NEAR


def _first(problem: Problem, point: Point, beta_max: float, monitor: Monitor, steps: Any) -> Point:
    """Walk down to the problem's beta in a precision that is exact enough for a start, and twice as fast.

    On a CPU in float32, on a GPU with TF32 products; what follows is in the problem's own precision.
    """
    if problem.operator.like.is_cuda:
        with tensor_cores():
            point = _descend(problem, point, beta_max, monitor, steps)
        return _look(problem, point.Z, problem.operator.apply(point.Z), point.fit.intercept)
    if problem.operator.like.dtype != torch.float64:
        return _descend(problem, point, beta_max, monitor, steps)
    coarse = problem.coarse()
    rough = _look(coarse, point.Z.to(dtype=torch.float32), point.outputs.float(), point.fit.intercept)
    rough = _descend(coarse, rough, beta_max, monitor, steps)
    rough = _grow(coarse, rough, coarse.operator.dual_matrix(rough.fit.V)) or rough
    rough, _ = _burst(coarse, rough, monitor, steps, COARSE, LONGEST)
    Z = rough.Z.to(dtype=torch.float64)
    return _look(problem, Z, problem.operator.apply(Z), rough.fit.intercept)


def _descend(problem: Problem, point: Point, beta_max: float, monitor: Monitor, steps: Any) -> Point:
    """Walk down from ``beta_max`` by the factor ``RUNG``, roughly, and end at the problem's own beta."""
    beta = RUNG * beta_max
    while beta > problem.beta / RUNG**0.5:
        rung = problem.with_beta(beta)
        point = _look(rung, point.Z, point.outputs, point.fit.intercept)
        point = _grow(rung, point, problem.operator.dual_matrix(point.fit.V)) or point
        point, ended = _burst(rung, point, monitor, steps, 1e-2, SHORTEST)
        if ended:
            break
        beta *= RUNG
    return _look(problem, point.Z, point.outputs, point.fit.intercept)


def _burst(
    problem: Problem, point: Point, monitor: Monitor, steps: Any, aim: float, longest: int
) -> tuple[Point, bool]:
    """L-BFGS until the local gap is below ``aim``, relative to the objective; tell whether the iterations ran out.

    Factors are balanced first, dead terms dropped, and each term scaled by the curvature that its size gives it
    (as in scaled gradient descent; Tong, Ma and Chi 2021), so that weak terms move as fast as strong ones.
    """
    point = _tidy(problem, point)
    scale = _scales(problem, point)
    hessian = InverseHessian(MEMORY)
    x, g = _flat(point.Z) / scale, _gradient(problem, point) * scale
    for count in range(longest):
        size = float((x * scale).square().sum())
        local = 0.5 * _weight(problem) * size + float((point.fit.V * point.outputs).sum())
        if count >= SHORTEST and abs(local) <= aim * abs(point.value):
            return point, False
        if monitor.late or next(steps, None) is None:
            return point, True
        direction = hessian.direction(g)
        if direction is None or float(direction @ g) >= 0:
            hessian.forget()
            direction = -g  # terms are scaled by their curvature, so that this step has about the right length
        following = _unit_step(problem, point, x * scale, float(g @ direction), direction * scale)
        if following is None:
            return point, False  # rounding: nothing more to gain here
        x_next, g_next = _flat(following.Z) / scale, _gradient(problem, following) * scale
        hessian.update(x_next - x, g_next - g)
        point, x, g = following, x_next, g_next
    return point, False


def _scales(problem: Problem, point: Point) -> Tensor:
    """``(lambda sigma_j + beta)^(-1/2)`` for every number of term j: the inverse root of its curvature."""
    Z = point.Z
    sigma = Z.V.square().sum(1)
    total = float(sigma.square().sum())
    curvature = float((point.outputs.square() * problem.w[:, None]).sum()) / total if total > 0 else 0.0
    each = (problem.loss.curvature * curvature * sigma + _weight(problem)).rsqrt()
    return torch.cat([each.repeat_interleave(Z.U.shape[1]), each.repeat_interleave(Z.V.shape[1])])


def _unit_step(problem: Problem, point: Point, x: Tensor, slope: float, direction: Tensor) -> Point | None:
    """Take the whole step if it descends enough, else the best one along the line."""
    trial = _at(problem, point, x + direction)
    if trial.value <= point.value + 1e-4 * slope:
        return trial
    return _exact_step(problem, point, x, direction)


def _exact_step(problem: Problem, point: Point, x: Tensor, direction: Tensor) -> Point | None:
    """Minimise along the line without further products: outputs are quadratic in the step, ``F0 + t F1 + t^2 F2``."""
    beta, A = _weight(problem), problem.operator
    D = _factors(point.Z, direction)
    F2 = A.apply(D)
    F1 = A.apply(_factors(point.Z, x + direction)) - point.outputs - F2
    a, b, c = float(x @ x), float(x @ direction), float(direction @ direction)

    def value(t: float) -> tuple[float, Fit]:
        fit = problem.fit(point.outputs + t * F1 + t * t * F2, point.fit.intercept)
        return fit.value + 0.5 * beta * (a + 2 * t * b + t * t * c), fit

    t = _line_minimum(lambda t: value(t)[0], point.value)
    if t is None:
        return None
    best, fit = value(t)
    if not best < point.value:
        return None
    outputs = point.outputs + t * F1 + t * t * F2
    return Point(_factors(point.Z, x + t * direction), outputs, fit, best)


def _line_minimum(value: Any, at_zero: float) -> float | None:
    """Return a step near the first minimum of ``value`` on ``t > 0``: bracket by powers of two, then parabolas."""
    t, f = 1.0, value(1.0)
    if f < at_zero:
        while (further := value(2 * t)) < f and t < 1e12:
            t, f = 2 * t, further
        low, high, f_low, f_high = t / 2, 2 * t, (value(t / 2) if t > 1 else value(0.5)), further
    else:
        high, f_high = t, f
        while f >= at_zero:
            high, f_high = t, f
            t /= 2
            if t < 1e-18:
                return None
            f = value(t)
        low, f_low = 0.0, at_zero
    for _ in range(3):
        num = (t - low) ** 2 * (f - f_high) - (t - high) ** 2 * (f - f_low)
        den = (t - low) * (f - f_high) - (t - high) * (f - f_low)
        if den == 0.0 or not math.isfinite(num / den):
            break
        new = t - 0.5 * num / den
        if not low < new < high or abs(new - t) < 1e-3 * t:
            break
        f_new = value(new)
        if f_new < f:
            low, high, f_low, f_high = (low, t, f_low, f) if new < t else (t, high, f, f_high)
            t, f = new, f_new
        else:
            low, high, f_low, f_high = (new, high, f_new, f_high) if new < t else (low, new, f_low, f_new)
    return t


def _grow(problem: Problem, point: Point, M: Any) -> Point | None:
    """Append the top singular pairs of ``M`` above beta, scaled by the best common step; None when there is none."""
    wanted = max(FIRST_TERMS, point.Z.n_terms // 2)
    sigma, U, V, block = top_pairs(M, wanted, sweeps=2)
    beta = _weight(problem)
    above = sigma > beta * (1 + 1e-12)
    if not bool(above.any()):
        return None
    root = (sigma[above] - beta).clamp_min(0)[:, None].sqrt()
    root = root / root.max()
    new = LowRank(root * U[above].to(point.Z.U), root * V[above].to(point.Z.V), block[above], point.Z.shape)
    D, size = problem.operator.apply(new), float(root.square().sum())

    def value(t: float) -> float:
        fit = problem.fit(point.outputs + t * D, point.fit.intercept)
        return fit.value + beta * t * size + (point.value - point.fit.value)

    t = _line_minimum(value, point.value)
    if t is None:
        return None
    Z = point.Z.append(math.sqrt(t) * new.U, math.sqrt(t) * new.V, new.block)
    return _look(problem, Z, point.outputs + t * D, point.fit.intercept)


def _tidy(problem: Problem, point: Point) -> Point:
    """Balance the factors and drop terms that have died: same outputs, and the objective only falls."""
    Z = point.Z.balanced(1e-7)
    if Z.n_terms < point.Z.n_terms:
        return _look(problem, Z, problem.operator.apply(Z), point.fit.intercept)
    return _look(problem, Z, point.outputs, point.fit.intercept)


def _look(problem: Problem, Z: LowRank, outputs: Tensor, intercept: Tensor | None) -> Point:
    fit = problem.fit(outputs, intercept)
    size = 0.5 * float(Z.U.square().sum() + Z.V.square().sum())
    return Point(Z, outputs, fit, fit.value + _weight(problem) * size)


def _at(problem: Problem, point: Point, x: Tensor) -> Point:
    Z = _factors(point.Z, x)
    return _look(problem, Z, problem.operator.apply(Z), point.fit.intercept)


def _gradient(problem: Problem, point: Point) -> Tensor:
    """Gradient in the factors: ``A^T V`` times the other factor, plus beta times the factor."""
    A = problem.operator
    assert isinstance(A, BilinearOperator)
    GU, GV = A.pull(point.fit.V, point.Z)
    return torch.cat([GU.flatten(), GV.flatten()]) + _weight(problem) * _flat(point.Z)


def _weight(problem: Problem) -> float:
    """The weight of ``1/2 (|U|^2 + |V|^2)``: beta, times the scale of the nuclear norm."""
    return problem.beta * (problem.penalty.factor_weight() or 1.0)


def _flat(Z: LowRank) -> Tensor:
    return torch.cat([Z.U.flatten(), Z.V.flatten()])


def _factors(Z: LowRank, x: Tensor) -> LowRank:
    """Undo :func:`_flat`."""
    cut = Z.U.numel()
    return LowRank(x[:cut].view_as(Z.U), x[cut:].view_as(Z.V), Z.block, Z.shape)

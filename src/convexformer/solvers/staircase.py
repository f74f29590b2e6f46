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
from convexformer.solvers.lbfgs import InverseHessian
from convexformer.solvers.monitor import Monitor

FIRST_TERMS = 64
BURST = 12
MEMORY = 20


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

    A burst ends when the local optimality gap ``beta g - <M, Z>`` is small against the tolerance, so that what is left of
    the duality gap is missing rank; then the top singular pairs of ``M`` above beta are appended.
    """
    A = problem.operator
    assert isinstance(A, BilinearOperator)
    Z = start.Z if isinstance(start.Z, LowRank) else LowRank.of(start.Z)
    point = _look(problem, Z, A.apply(Z), start.intercept)
    dual = monitor.check(Z, point.fit)
    hessian = InverseHessian(MEMORY)
    goal = 0.1
    steps = iter(monitor)
    while not monitor.done:
        grown = _grow(problem, point, dual.M)
        if grown is not None:
            point = grown
            hessian.forget()
        point, ended = _burst(problem, point, hessian, monitor, steps, goal)
        point = _tidy(problem, point, hessian)
        before = monitor.history[-1].relative_gap
        dual = monitor.check(point.Z, point.fit)
        gap = monitor.history[-1].relative_gap
        goal = 0.1 if gap < 0.5 * before else max(0.3 * goal, 1e-4)  # a burst that left the gap was too short
        if ended:
            break


def _burst(
    problem: Problem, point: Point, hessian: InverseHessian, monitor: Monitor, steps: Any, goal: float
) -> tuple[Point, bool]:
    """L-BFGS until the local gap is ``goal`` times what the tolerance allows; tell whether the iterations ran out."""
    beta = problem.beta
    x, g = _flat(point.Z), _gradient(problem, point)
    for count in range(10_000):
        local = beta * 0.5 * float(x @ x) + float((point.fit.V * point.outputs).sum())
        noise = float(g @ g) / max(beta**2 * float(x @ x), 1e-300)  # squared residual of M V_j = beta U_j
        aim = goal * monitor.tolerance
        if count >= BURST and abs(local) <= aim * abs(point.value) and noise <= (10 * aim) ** 2:
            return point, False
        if monitor.late or next(steps, None) is None:
            return point, True
        direction = hessian.direction(g)
        if direction is None or float(direction @ g) >= 0:
            hessian.forget()
            direction = -g
            following = _exact_step(problem, point, x, direction)
        else:
            following = _unit_step(problem, point, x, g, direction)
        if following is None:
            return point, False  # rounding: nothing more to gain here
        x_next, g_next = _flat(following.Z), _gradient(problem, following)
        hessian.update(x_next - x, g_next - g)
        point, x, g = following, x_next, g_next
    return point, False


def _unit_step(problem: Problem, point: Point, x: Tensor, g: Tensor, direction: Tensor) -> Point | None:
    """Take the whole step if it descends enough, else the best one along the line."""
    trial = _at(problem, point, x + direction)
    if trial.value <= point.value + 1e-4 * float(g @ direction):
        return trial
    return _exact_step(problem, point, x, direction)


def _exact_step(problem: Problem, point: Point, x: Tensor, direction: Tensor) -> Point | None:
    """Minimise along the line without further products: outputs are quadratic in the step, ``F0 + t F1 + t^2 F2``."""
    beta, A = problem.beta, problem.operator
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
    wanted = FIRST_TERMS if point.Z.n_terms == 0 else max(4, point.Z.n_terms // 3)
    sigma, U, V, block = top_pairs(M, wanted, start=point.Z.V if point.Z.n_blocks == 1 else None)
    above = sigma > problem.beta * (1 + 1e-12)
    if not bool(above.any()):
        return None
    root = (sigma[above] - problem.beta).clamp_min(0)[:, None].sqrt()
    root = root / root.max()
    new = LowRank(root * U[above].to(point.Z.U), root * V[above].to(point.Z.V), block[above], point.Z.shape)
    D, size = problem.operator.apply(new), float(root.square().sum())

    def value(t: float) -> float:
        fit = problem.fit(point.outputs + t * D, point.fit.intercept)
        return fit.value + problem.beta * t * size + (point.value - point.fit.value)

    t = _line_minimum(value, point.value)
    if t is None:
        return None
    Z = point.Z.append(math.sqrt(t) * new.U, math.sqrt(t) * new.V, new.block)
    return _look(problem, Z, point.outputs + t * D, point.fit.intercept)


def _tidy(problem: Problem, point: Point, hessian: InverseHessian) -> Point:
    """Drop terms that have died; the objective falls by their penalty and nothing else."""
    sizes = point.Z.U.square().sum(1) + point.Z.V.square().sum(1)
    alive = sizes > 1e-9 * sizes.max() if len(sizes) else sizes > 0
    if bool(alive.all()):
        return point
    hessian.forget()
    Z = point.Z.select(alive)
    return _look(problem, Z, problem.operator.apply(Z), point.fit.intercept)


def _look(problem: Problem, Z: LowRank, outputs: Tensor, intercept: Tensor | None) -> Point:
    fit = problem.fit(outputs, intercept)
    size = 0.5 * float(Z.U.square().sum() + Z.V.square().sum())
    return Point(Z, outputs, fit, fit.value + problem.beta * size)


def _at(problem: Problem, point: Point, x: Tensor) -> Point:
    Z = _factors(point.Z, x)
    return _look(problem, Z, problem.operator.apply(Z), point.fit.intercept)


def _gradient(problem: Problem, point: Point) -> Tensor:
    """Gradient in the factors: ``A^T V`` times the other factor, plus beta times the factor."""
    A = problem.operator
    assert isinstance(A, BilinearOperator)
    GU, GV = A.pull(point.fit.V, point.Z)
    return torch.cat([GU.flatten(), GV.flatten()]) + problem.beta * _flat(point.Z)


def _flat(Z: LowRank) -> Tensor:
    return torch.cat([Z.U.flatten(), Z.V.flatten()])


def _factors(Z: LowRank, x: Tensor) -> LowRank:
    """Undo :func:`_flat`."""
    cut = Z.U.numel()
    return LowRank(x[:cut].view_as(Z.U), x[cut:].view_as(Z.V), Z.block, Z.shape)

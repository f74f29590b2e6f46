"""Bursts of L-BFGS on the factors of a nuclear-norm program, ``F(A(sum_j U_j V_j^T)) + beta/2 (|U|^2 + |V|^2)``.

A step is computed without a look at any of its numbers; a verdict on it is sent to the host, which reads it one step
behind on a GPU: the device is at the next step by then and never waits. On a CPU it is read at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from convexformer.operators import BilinearOperator, LowRank
from convexformer.problem import Fit, Problem
from convexformer.solvers.lbfgs import InverseHessian
from convexformer.solvers.monitor import Monitor
from convexformer.threads import Reading

SHORTEST = 7  # iterations of a burst
MEMORY = 30  # pairs of L-BFGS


@final
@dataclass(frozen=True)
class Point:
    """Factors, their outputs, the loss there and the objective, a scalar on the device."""

    Z: LowRank
    outputs: Tensor
    fit: Fit
    value: Tensor


@final
@dataclass(frozen=True)
class _State:
    """A point in scaled coordinates ``x = (U, V) / scale``, its gradient ``g``, and the curvature seen on the way to it."""

    point: Point
    x: Tensor
    g: Tensor
    hessian: InverseHessian
    verdict: Reading | None = None
    """Whether the step to it is taken, whether its direction descended, and the relative local gap."""


def burst(
    problem: Problem,
    point: Point,
    monitor: Monitor,
    steps: Iterator[int],
    aim: float,
    longest: int,
    *,
    behind: int | None = None,
) -> tuple[Point, bool]:
    """L-BFGS until the local gap is below ``aim``, relative to the objective; tell whether the iterations ran out.

    Factors are balanced first, dead terms dropped, and each term scaled by the curvature that its size gives it
    (as in scaled gradient descent; Tong, Ma and Chi 2021), so that weak terms move as fast as strong ones. Verdicts are
    read ``behind`` steps late; where one refuses its step, those computed after it are dropped and the line is searched.
    """
    point = _tidy(problem, point)
    scale = _scales(problem, point)
    behind = int(point.outputs.is_cuda) if behind is None else behind
    kept = _State(point, _flat(point.Z) / scale, _gradient(problem, point) * scale, InverseHessian(MEMORY))
    ahead: list[_State] = []
    launched = done = 0
    ended = False
    while True:
        if launched < longest and not ended:
            ended = monitor.late or next(steps, None) is None
            if not ended:
                launched += 1
                ahead.append(_step(problem, ahead[-1] if ahead else kept, scale, follow=behind > 0))
                if len(ahead) <= behind:
                    continue
        if not ahead:
            return _settled(problem, kept.point, behind), ended
        trial = ahead.pop(0)
        assert trial.verdict is not None
        taken, downhill, local = trial.verdict.read()
        if not taken or not downhill:  # what came after it went astray with it
            ahead.clear()
        if not taken:
            found = _exact_step(problem, kept, trial, scale)
            if found is None:
                return _settled(problem, kept.point, behind), False  # rounding: nothing more to gain here
            trial, local = found
        kept = trial
        done += 1
        if done >= SHORTEST and local <= aim:
            under_way = ahead[0] if ahead else None  # computed already: take it if it is good
            if under_way is not None and under_way.verdict is not None and under_way.verdict.read()[0]:
                kept = under_way
            return _settled(problem, kept.point, behind), False


def _step(problem: Problem, state: _State, scale: Tensor, *, follow: bool) -> _State:
    """Take the whole step along L-BFGS's direction; whether it descends enough is for the verdict."""
    point, x, g = state.point, state.x, state.g
    direction = state.hessian.direction(g)
    slope = direction @ g
    downhill = slope < 0
    # terms are scaled by their curvature, so that a step along the gradient has about the right length
    direction, slope = torch.where(downhill, direction, -g), torch.where(downhill, slope, -(g @ g))
    Z = _factors(point.Z, (x + direction) * scale)
    trial = look(problem, Z, problem.operator.apply(Z), point.fit.intercept, follow=follow)
    taken = trial.value <= point.value + 1e-4 * slope.double()
    verdict = Reading(taken, downhill, _local_gap(problem, trial))
    return _arrive(problem, state, trial, scale, verdict)


def _arrive(problem: Problem, state: _State, point: Point, scale: Tensor, verdict: Reading | None) -> _State:
    """Return the state at a point, with the curvature along the step to it."""
    x, g = _flat(point.Z) / scale, _gradient(problem, point) * scale
    return _State(point, x, g, state.hessian.updated(x - state.x, g - state.g), verdict)


def _local_gap(problem: Problem, point: Point) -> Tensor:
    """``|beta/2 (|U|^2 + |V|^2) - <M, Z>|`` relative to the objective: zero where the factors are stationary."""
    own = point.value - point.fit.value + (point.fit.V * point.outputs).sum()
    return own.abs() / point.value.abs()


def _exact_step(problem: Problem, state: _State, trial: _State, scale: Tensor) -> tuple[_State, float] | None:
    """Minimise along the line with one more product: outputs are quadratic in the step, ``F0 + t F1 + t^2 F2``.

    Return the state there and its local gap; None where rounding hides every descent. The search reads its values.
    """
    beta, A, point = factor_weight(problem), problem.operator, state.point
    x, direction = state.x * scale, (trial.x - state.x) * scale
    F2 = A.apply(_factors(point.Z, direction))
    F1 = trial.point.outputs - point.outputs - F2
    a, b, c = float(x @ x), float(x @ direction), float(direction @ direction)

    def at(t: float) -> tuple[float, Fit]:
        fit = problem.fit(point.outputs + t * F1 + t * t * F2, point.fit.intercept)
        return float(fit.value) + 0.5 * beta * (a + 2 * t * b + t * t * c), fit

    before = float(point.value)
    t = line_minimum(lambda t: at(t)[0], before)
    if t is None:
        return None
    best, fit = at(t)
    if not best < before:
        return None
    outputs = point.outputs + t * F1 + t * t * F2
    value = fit.value + 0.5 * beta * (a + 2 * t * b + t * t * c)
    there = Point(_factors(point.Z, x + t * direction), outputs, fit, value)
    return _arrive(problem, state, there, scale, None), float(_local_gap(problem, there))


def line_minimum(value: Callable[[float], float], at_zero: float) -> float | None:
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


def look(problem: Problem, Z: LowRank, outputs: Tensor, intercept: Tensor | None, *, follow: bool = False) -> Point:
    """Evaluate the loss and the objective at factors with these outputs."""
    fit = problem.fit(outputs, intercept, follow=follow)
    size = 0.5 * (Z.U.square().sum() + Z.V.square().sum()).double()
    return Point(Z, outputs, fit, fit.value + factor_weight(problem) * size)


def factor_weight(problem: Problem) -> float:
    """The weight of ``1/2 (|U|^2 + |V|^2)``: beta, times the scale of the nuclear norm."""
    return problem.beta * (problem.penalty.factor_weight() or 1.0)


def _settled(problem: Problem, point: Point, behind: int) -> Point:
    """Minimise exactly over an intercept that was only followed."""
    if not (behind and problem.intercept):
        return point
    return look(problem, point.Z, point.outputs, point.fit.intercept)


def _tidy(problem: Problem, point: Point) -> Point:
    """Balance the factors and drop terms that have died: same outputs, and the objective only falls."""
    Z = point.Z.balanced(1e-7)
    outputs = problem.operator.apply(Z) if Z.n_terms < point.Z.n_terms else point.outputs
    return look(problem, Z, outputs, point.fit.intercept)


def _scales(problem: Problem, point: Point) -> Tensor:
    """``(lambda sigma_j + beta)^(-1/2)`` for every number of term j: the inverse root of its curvature."""
    Z = point.Z
    sigma = Z.V.square().sum(1)
    total = sigma.square().sum()
    curvature = (point.outputs.square() * problem.w[:, None]).sum() / total.clamp_min(torch.finfo(sigma.dtype).tiny)
    each = (problem.loss.curvature * curvature.to(sigma) * sigma + factor_weight(problem)).rsqrt()
    return torch.cat([each.repeat_interleave(Z.U.shape[1]), each.repeat_interleave(Z.V.shape[1])])


def _gradient(problem: Problem, point: Point) -> Tensor:
    """Gradient in the factors: ``A^T V`` times the other factor, plus beta times the factor."""
    A = problem.operator
    assert isinstance(A, BilinearOperator)
    GU, GV = A.pull(point.fit.V, point.Z)
    return torch.cat([GU.flatten(), GV.flatten()]) + factor_weight(problem) * _flat(point.Z)


def _flat(Z: LowRank) -> Tensor:
    return torch.cat([Z.U.flatten(), Z.V.flatten()])


def _factors(Z: LowRank, x: Tensor) -> LowRank:
    """Undo :func:`_flat`."""
    cut = Z.U.numel()
    return Z.with_factors(x[:cut].view_as(Z.U), x[cut:].view_as(Z.V))

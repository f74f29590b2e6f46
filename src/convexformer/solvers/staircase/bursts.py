"""Bursts of L-BFGS on the factors of a nuclear-norm program, ``F(A(sum_j U_j V_j^T)) + beta/2 (|U|^2 + |V|^2)``.

A step is computed without a host sync; whether it was taken is sent to the host, which reads it one step behind on a GPU:
the device is at the next step by then and never waits, and steps can be captured as CUDA graphs. On a CPU it is read at
once.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, final

import torch
from torch import Tensor

from convexformer.gauges import Factored
from convexformer.objective import Evaluation, Objective
from convexformer.operators import LowRank
from convexformer.solvers.cuda_graph import CudaGraphLoop, select
from convexformer.solvers.monitor import TimeUp
from convexformer.solvers.staircase.lbfgs import Pairs
from convexformer.solvers.staircase.options import StaircaseOptions
from convexformer.threads import AsyncScalars


@final
@dataclass(frozen=True)
class Point:
    """Factors, their outputs, the loss there and the objective, a scalar on the device."""

    Z: LowRank
    outputs: Tensor
    evaluation: Evaluation
    value: Tensor


class _State(NamedTuple):
    """A point in scaled coordinates ``x = (U, V) / scale``, its gradient ``g``, and the pairs of L-BFGS.

    After a step that was refused the state stands still: steps computed before the host knew of it do nothing.
    """

    x: Tensor
    g: Tensor
    outputs: Tensor
    value: Tensor
    b: Tensor | None
    S: Tensor
    Y: Tensor
    verdict: Tensor
    """Whether the last step was taken, whether its direction descended, and the relative local gap here."""


def burst(
    objective: Objective,
    point: Point,
    steps: Iterator[int],
    aim: float,
    longest: int,
    options: StaircaseOptions = StaircaseOptions(),  # noqa: B008  (frozen)
    *,
    behind: int | None = None,
) -> tuple[Point, bool]:
    """L-BFGS until the local gap is below ``aim``, relative to the objective; tell whether iterations or time ran out.

    Each term of the balanced factors is scaled by the curvature that its size gives it (as in scaled gradient descent;
    Tong, Ma and Chi 2021), so that weak terms move as fast as strong ones. Verdicts are read ``behind`` steps late; where
    one refuses its step the line is searched.
    """
    behind = int(point.outputs.is_cuda) if behind is None else behind
    line = _Line(objective, point.Z, _scales(objective, point), options, sync_free=behind > 0)
    iteration = CudaGraphLoop(objective, line.advance, line.first(point), record=behind > 0)
    verdicts: deque[AsyncScalars] = deque()
    launched = done = 0
    ended = False
    try:
        while True:
            if launched < longest and not ended:
                ended = next(steps, None) is None
                if not ended:
                    launched += 1
                    iteration()
                    verdicts.append(AsyncScalars(iteration.state.verdict))
                    if len(verdicts) <= behind:
                        continue
            if not verdicts:
                return line.point(iteration.state), ended
            taken, downhill, local = verdicts.popleft().read()
            if not taken:
                verdicts.clear()
                found = line.searched(iteration.state)
                if found is None:
                    return line.point(iteration.state), False  # rounding: nothing more to gain here
                iteration.set(found)
                local = AsyncScalars(found.verdict).read()[-1]
            elif not downhill:
                iteration.set(line.forgetful(iteration.state))
            done += 1
            if done >= options.shortest_burst and local <= aim:
                return line.point(iteration.state), False
    except TimeUp:
        return line.point(iteration.state), True


@final
class _Line:
    """Steps in the space of factors with the blocks of ``Z``, in coordinates that ``scale`` makes alike."""

    def __init__(
        self, objective: Objective, Z: LowRank, scale: Tensor, options: StaircaseOptions, *, sync_free: bool
    ) -> None:
        self.objective, self.Z, self.scale, self.options = objective, Z, scale, options
        self.sync_free = sync_free

    def first(self, point: Point) -> _State:
        """Return the state at a point."""
        x, g = self._flat(point.Z), self._gradient(point)
        return _State(
            x, g, point.outputs, point.value, point.evaluation.intercept, *self._none(g), self._verdict(point)
        )

    def forgetful(self, at: _State) -> _State:
        """Return the same state without its pairs."""
        return at._replace(**self._none(at.g)._asdict())

    def point(self, at: _State) -> Point:
        """Return the point of a state; an inexact intercept is minimised over exactly."""
        x = at.x.clone()  # the state of a CUDA graph will be written over
        return point_at(self.objective, self._factors(x), at.outputs.clone(), at.b)

    def advance(self, at: _State) -> _State:
        """Try the whole step along L-BFGS's direction, and take it if it descends enough.

        Where rounding hides whether it does, the slopes tell (the approximate Wolfe condition of Hager and Zhang 2005).
        """
        direction, slope, downhill = self._direction(at)
        Z = self._factors(at.x + direction)
        trial = point_at(self.objective, Z, self.objective.apply(Z), at.b, inexact_intercept=self.sync_free)
        there = self._arrive(at, trial, downhill)
        gain = at.value - trial.value
        unclear = gain.abs() <= self.options.noise * torch.finfo(at.x.dtype).eps * at.value.abs()
        taken = (gain >= -1e-4 * slope) | (unclear & ((there.g @ direction) <= -0.8 * slope))
        taken = taken & (at.verdict[0] > 0)
        refused = at._replace(verdict=torch.stack([torch.zeros_like(slope), downhill.to(slope), at.verdict[-1]]))
        if self.sync_free:
            return select(taken, there, refused)
        return there if taken else refused

    def searched(self, at: _State) -> _State | None:
        """Minimise along the line instead: outputs are quadratic in the step, ``F0 + t F1 + t^2 F2``.

        None where nothing descends. The search reads its values.
        """
        objective, beta = self.objective, factor_weight(self.objective)
        step, _, downhill = self._direction(at)
        at = at if downhill else self.forgetful(at)
        x, d = at.x * self.scale, step * self.scale
        F2 = objective.apply(self._factors(step))
        F1 = objective.apply(self._factors(at.x + step)) - at.outputs - F2
        a, b, c = float(x @ x), float(x @ d), float(d @ d)

        def look_at(t: float) -> Point:
            outputs = at.outputs + t * F1 + t * t * F2
            evaluation = objective.evaluate(outputs, at.b)
            value = evaluation.value + 0.5 * beta * (a + 2 * t * b + t * t * c)
            return Point(self._factors(at.x + t * step), outputs, evaluation, value)

        def slope_at(t: float) -> float:
            return float(objective.rows.dot(look_at(t).evaluation.V, F1 + 2 * t * F2)) + beta * (b + t * c)

        before = float(at.value)
        t = line_minimum(lambda t: float(look_at(t).value), before)
        t = slope_root(slope_at) if t is None else t
        if t is None:
            return None
        found = look_at(t)
        noise = self.options.noise * torch.finfo(at.x.dtype).eps * abs(before)
        return self._arrive(at, found, downhill) if float(found.value) <= before + noise else None

    def _direction(self, at: _State) -> tuple[Tensor, Tensor, Tensor]:
        """Return L-BFGS's direction, the slope along it, and whether it was one of descent; if not, it is the gradient's."""
        direction = Pairs(at.S, at.Y).direction(at.g, sync_free=self.sync_free)
        slope = direction @ at.g
        downhill = slope < 0
        # terms are scaled by their curvature, so that a step along the gradient has about the right length
        direction, slope = torch.where(downhill, direction, -at.g), torch.where(downhill, slope, -(at.g @ at.g))
        return direction, slope.double(), downhill

    def _arrive(self, at: _State, point: Point, downhill: Tensor) -> _State:
        """Return the state at a point, with the curvature along the step to it."""
        x, g = self._flat(point.Z), self._gradient(point)
        pairs = Pairs(at.S, at.Y).updated(x - at.x, g - at.g, self.options.memory, sync_free=self.sync_free)
        return _State(
            x, g, point.outputs, point.value, point.evaluation.intercept, *pairs, self._verdict(point, downhill)
        )

    def _verdict(self, point: Point, downhill: Tensor | None = None) -> Tensor:
        """The local gap is ``|beta/2 (|U|^2 + |V|^2) - <M, Z>|`` over the objective: zero where factors are stationary."""
        inner = self.objective.rows.dot(point.evaluation.V, point.outputs)
        local = (point.value - point.evaluation.value + inner).abs() / point.value.abs()
        one = torch.ones_like(local)
        return torch.stack([one, one if downhill is None else downhill.to(local), local])

    def _none(self, g: Tensor) -> Pairs:
        """What is recorded has tensors of one size: there all places for pairs are there from the start."""
        return Pairs.none(g, self.options.memory if self.sync_free else 0)

    def _gradient(self, point: Point) -> Tensor:
        """``A^T V`` times the other factor, plus beta times the factor, in scaled coordinates."""
        Z = point.Z
        GU, GV = self.objective.factor_gradients(point.evaluation.V, Z)
        decay = factor_weight(self.objective)
        return torch.cat([(GU + decay * Z.U).flatten(), (GV + decay * Z.V).flatten()]) * self.scale

    def _flat(self, Z: LowRank) -> Tensor:
        return torch.cat([Z.U.flatten(), Z.V.flatten()]) / self.scale

    def _factors(self, x: Tensor) -> LowRank:
        """Undo :meth:`_flat`."""
        x, cut = x * self.scale, self.Z.U.numel()
        return self.Z.with_factors(x[:cut].view_as(self.Z.U), x[cut:].view_as(self.Z.V))


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


def slope_root(slope: Callable[[float], float]) -> float | None:
    """Return a step at which a rising ``slope`` has become small, for where rounding hides the values' differences."""
    low, high, at_low = 0.0, 1.0, slope(0.0)
    enough = 0.1 * abs(at_low)
    if not at_low < 0:
        return None
    while (at_high := slope(high)) < -enough:
        low, high, at_low = high, 2 * high, at_high
        if high > 1e12:
            return None
    for _ in range(60):
        t = low - at_low * (high - low) / (at_high - at_low)
        at_t = slope(t)
        if abs(at_t) <= enough:
            return t
        if at_t < 0:
            low, at_low, at_high = t, at_t, at_high / 2  # the Illinois method: halved, so that both ends move
        else:
            high, at_high, at_low = t, at_t, at_low / 2
    return None


def point_at(
    objective: Objective, Z: LowRank, outputs: Tensor, intercept: Tensor | None, *, inexact_intercept: bool = False
) -> Point:
    """Evaluate the loss and the objective at factors with these outputs."""
    evaluation = objective.evaluate(outputs, intercept, inexact_intercept=inexact_intercept)
    size = 0.5 * (Z.U.square().sum() + Z.V.square().sum()).double()
    return Point(Z, outputs, evaluation, evaluation.value + factor_weight(objective) * size)


def factor_weight(objective: Objective) -> float:
    """The weight of ``1/2 (|U|^2 + |V|^2)``: beta, times the scale of the nuclear norm."""
    assert isinstance(objective.penalty, Factored)
    return objective.beta * objective.penalty.factor_weight()


def tidy(objective: Objective, point: Point) -> Point:
    """Balance the factors and drop terms that have died: same outputs, and the objective only falls."""
    Z = point.Z.balanced(1e-7)
    outputs = objective.apply(Z) if Z.n_terms < point.Z.n_terms else point.outputs
    return point_at(objective, Z, outputs, point.evaluation.intercept)


def _scales(objective: Objective, point: Point) -> Tensor:
    """``(lambda sigma_j + beta)^(-1/2)`` for every number of term j: the inverse root of its curvature."""
    Z = point.Z
    sigma = Z.V.square().sum(1)
    total = sigma.square().sum()
    squares = objective.rows.weighted(objective.sample_weight.to(point.outputs), point.outputs.square()).sum()
    curvature = squares / total.clamp_min(torch.finfo(sigma.dtype).tiny)
    each = (objective.loss.curvature * curvature.to(sigma) * sigma + factor_weight(objective)).rsqrt()
    return torch.cat([each.repeat_interleave(Z.U.shape[1]), each.repeat_interleave(Z.V.shape[1])])

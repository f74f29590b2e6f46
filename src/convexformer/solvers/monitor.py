"""The part all solvers share: history, gap checks, limits, progress, callbacks, Ctrl-C and checkpoints.

A solver iterates over the monitor and shows it each point; the monitor decides when to stop and keeps the best. Once the
time is up, the next product with the operator raises :class:`TimeUp` instead (:meth:`Monitor.watched`): what comes after
the limit is the product that was under way, and the certificate of the point at hand.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple, final

import numpy as np
import torch
from torch import Tensor

from convexformer.certificates import Certificate, DualPoint, certificate, dual_point, with_best_intercept
from convexformer.clock import Clock
from convexformer.objective import Evaluation, Objective
from convexformer.operators import BilinearOperator, LowRank
from convexformer.progress import GapBar
from convexformer.solvers.checkpoint import Checkpoint
from convexformer.solvers.status import Record, Status
from convexformer.solvers.turn import Turn
from convexformer.weights import Operand, Representer, Weights

Callback = Callable[[Record, Weights], object]

DENSE_WEIGHTS = 1 << 24  # entries up to which factors are returned as one tensor, for operators on dense weights
MATERIAL = 0.25  # of the gap: by so much the point at hand must be below the best one to be certified at the end
CHECK_EVERY = 10  # iterations between gap checks at most
SOONEST_CHECK = 3  # at least: a check costs about an iteration
PACE = 0.7  # of the iterations that the last pace would take: a gap falls the faster the smaller it is
STALL_CHECKS = 60  # gap checks without progress after which a float64 solve has stalled; a sixth of them in float32
FASTER_ELSEWHERE = 1e-3  # with another solver at hand, a check must lower the objective by this share of the gap


class TimeUp(Exception):  # noqa: N818  (like StopIteration: not an error)
    """Raised where the time is up: before a product with the operator, and by :meth:`Monitor.check`."""


class _Held(NamedTuple):
    """The point at hand; its outputs without the intercept and its objective where they are known; about its intercept."""

    Z: Operand
    outputs: Tensor | None
    intercept: Tensor | None
    value: float | None


@final
class Monitor:
    """Watches one solve of ``objective``, which is ``whole`` itself or a compressed form of it.

    The gap is checked at the start, every ``CHECK_EVERY`` iterations, sooner near the end, and at the limits. In float32 a
    point that seems to meet the tolerance must meet it in float64 too before the solve may end.
    """

    def __init__(
        self,
        objective: Objective,
        tolerance: float,
        max_iter: int,
        clock: Clock,
        callback: Callback | None = None,
        bar: GapBar | None = None,
        checkpoint: Checkpoint | None = None,
    ) -> None:
        self.objective = self.whole = objective
        self.tolerance = tolerance
        self.max_iter = max_iter
        self.clock = clock
        self.callback = callback
        self.bar = bar
        self.checkpoint = checkpoint
        self.history: list[Record] = []
        self.iteration = 0
        self.status = Status.MAX_ITER
        self._solver = ""
        self._patience, self._least_gain = STALL_CHECKS, 0.0
        self._turn: Turn | None = None
        self._turn_over, self._began, self._first_record = False, 0, 0
        self._best: Weights | None = None
        self._best_gap = math.inf
        self._best_value = math.inf
        self._best_primal = math.inf
        self._held: _Held | None = None
        self._gained_at = math.inf
        self._checks_without_gain = 0
        self._proof: tuple[Weights, Certificate] | None = None
        self._done = False
        self._next_check = CHECK_EVERY

    def watch(
        self,
        objective: Objective,
        whole: Objective,
        solver: str = "",
        *,
        patience: int = STALL_CHECKS,
        least_gain: float = 0.0,
        turn: Turn | None = None,
    ) -> None:
        """Begin to watch a solve of ``objective``, a form of ``whole``; the best point so far is kept.

        ``patience`` checks in a row without progress are a stall, a sixth of them in float32. Progress is a gap smaller by
        1%, or an objective lower by more than rounding and by ``least_gain`` of the gap. ``turn`` says after which gap check
        another solver is to go on.
        """
        self._turn, self._turn_over = turn, False
        self._began, self._first_record = self.iteration, len(self.history)
        self.objective, self.whole, self._solver = objective, whole, solver
        self.status, self._done, self._checks_without_gain = Status.MAX_ITER, False, 0
        self._patience = patience if whole.like.dtype == torch.float64 else max(1, patience // 6)
        self._least_gain, self._gained_at = least_gain, math.inf

    def watched(self, objective: Objective) -> Objective:
        """Return the same objective, whose products raise :class:`TimeUp` once the time is up."""
        return timed(objective, self.clock)

    def hold(self, Z: Operand, outputs: Tensor | None, intercept: Tensor | None, value: float | None = None) -> None:
        """Take note of the point at hand, in case the time is up before it is checked.

        With its outputs (without intercept) it can be compared with the best point; where its penalty costs a product,
        with its objective (minus infinity: no worse than the best one).
        """
        self._held = _Held(Z, outputs, intercept, value)

    @property
    def at_hand(self) -> Weights:
        """The point at hand."""
        assert self._held is not None, "a solver begins at a point"
        return self._weights(self._held.Z, self._held.intercept)

    def end(self) -> None:
        """The time is up: certify the point at hand, if it is clearly better than the best one checked, else that one."""
        if self._done:
            return
        weights = self.last_point()
        if self._proof is not None and self._proof[0] is weights:
            proof = self._proof[1]
        elif weights is self._best or self._held is None or self._held.outputs is not None:
            proof = certificate(self.whole, weights)
        else:  # without outputs the intercept is that of a point before
            weights, proof = with_best_intercept(self.whole, weights)
        self._best, self._best_gap, self._proof = weights, proof.relative_gap, (weights, proof)
        self._stop(Status.CONVERGED if proof.meets(self.tolerance) else Status.MAX_TIME)
        self._show(weights, proof.primal, proof.dual, proof.relative_gap)

    def interrupt(self) -> None:
        """Ctrl-C: end with the point at hand, if it is clearly better than the best one checked, else with that one."""
        self._best = self.last_point()
        self._stop(Status.INTERRUPTED)

    def last_point(self) -> Weights:
        """Return the point at hand where its objective is lower by a good part of the gap, else the best one."""
        if self._best is None or self._held is None:
            return self.at_hand if self._best is None else self._best
        Z, outputs, b, value = self._held
        if value is None and outputs is None:
            return self._best
        if value is None:
            assert outputs is not None
            at = self.objective.evaluate(outputs, b)
            b, value = at.intercept, float(at.value) + self.objective.beta * float(self.objective.penalty.value(Z))
        gap = self._best_gap * abs(self._best_value)
        enough = MATERIAL * gap if math.isfinite(gap) else 0.0
        return self._weights(Z, b) if value < self._best_value - enough else self._best

    def stall(self) -> None:
        """Say that the solver can make no more progress in this precision."""
        self._stop(Status.STALLED)

    def proof(self) -> Certificate:
        """Return the certificate of the best point, from its weights alone."""
        if self._proof is not None and self._proof[0] is self.best:
            return self._proof[1]
        return certificate(self.whole, self.best)

    @property
    def best(self) -> Weights:
        """The point with the smallest gap so far."""
        assert self._best is not None, "a solver shows its start before it iterates"
        return self._best

    @property
    def best_gap(self) -> float:
        """The relative gap of that point, as far as it is known; infinite before the first check."""
        return self._best_gap

    @property
    def seconds(self) -> float:
        """Seconds since the call began."""
        return self.clock.seconds

    def __iter__(self) -> Iterator[int]:
        while not self.done and self.iteration < self.max_iter:
            self.iteration += 1
            yield self.iteration

    @property
    def done(self) -> bool:
        """Whether the solver is to end, since the solve is, or since another one is to go on."""
        return self._done or self._turn_over

    @property
    def turn_over(self) -> bool:
        """Whether the solver ended because another one is to go on."""
        return self._turn_over and not self._done and self.iteration < self.max_iter

    @property
    def late(self) -> bool:
        """Whether the time is up."""
        return self.clock.late

    @property
    def due(self) -> bool:
        """Whether it is time for a gap check."""
        return self.late or self.iteration >= self._next_check or self.iteration == self.max_iter

    def check(self, Z: Operand, at: Evaluation, dual: DualPoint | None = None) -> DualPoint:
        """Check the gap of the point ``Z`` now; return the dual point, for the solver to steer by.

        ``dual`` is given where the solver has looked along the dual matrix itself. When the time is up :class:`TimeUp`
        ends the solver, and the point may be the one that is certified.
        """
        if self._held is None or self._held.Z is not Z:
            self.hold(Z, at.outputs if at.intercept is None else at.outputs - at.intercept, at.intercept)
        if self.late and not self._done:
            raise TimeUp
        objective = self.objective
        point = dual_point(objective, at, quick=True) if dual is None else dual
        primal = float(at.value) + objective.beta * float(objective.penalty.value(Z))
        weights = self._weights(Z, at.intercept)
        relative = (primal - point.value) / max(abs(primal), 1e-300)
        self._keep(weights, primal, relative)
        if relative <= self.tolerance and self._confirmed(weights):
            self._stop(Status.CONVERGED)
        elif self.late and self._proof is not None and self._proof[0] is weights:
            self._best, self._best_gap = self._proof[0], self._proof[1].relative_gap  # no time for another certificate
            self._held = None
            raise TimeUp
        elif self._checks_without_gain >= self._patience:
            self._stop(Status.STALLED)
        self._show(weights, primal, point.value, relative)
        if self._turn is not None and not self._done:
            self._turn_over = self._turn.over(self.history[self._first_record :], self._began, self.tolerance)
        return point

    def _weights(self, Z: Operand, intercept: Tensor | None) -> Weights:
        """Factors stay factors where the operator works on them; for a dense operator ``Z`` is one tensor again."""
        bilinear = isinstance(self.whole.operator, BilinearOperator)
        if isinstance(Z, LowRank) and not bilinear and math.prod(Z.shape) <= DENSE_WEIGHTS:
            return Weights(Z.dense(), intercept)
        if isinstance(Z, Tensor) and self.whole.operator.on_coefficients:
            return Weights(Representer(Z), intercept)
        return Weights(Z, intercept)

    def _wait(self) -> int:
        """Return the iterations until the next check: fewer where the pace of the last ones promises the end before."""
        if len(self.history) < 2:
            return CHECK_EVERY
        before, last = self.history[-2:]
        fell, goal = last.relative_gap / before.relative_gap if before.relative_gap > 0 else 1.0, self.tolerance
        if not (0 < goal < last.relative_gap and 0 < fell < 1 and last.iteration > before.iteration):
            return CHECK_EVERY
        left = math.log(goal / last.relative_gap) / math.log(fell) * (last.iteration - before.iteration)
        return min(CHECK_EVERY, max(SOONEST_CHECK, self.iteration // CHECK_EVERY, math.ceil(PACE * left)))

    def _show(self, weights: Weights, primal: float, dual: float, relative: float) -> None:
        """Write the check into the history and onto the bar, and tell the callback and the checkpoint."""
        record = Record(self.iteration, self.seconds, primal, dual, relative, self._solver)
        self.history.append(record)
        if self.bar is not None:
            self.bar.show(record)
        self._next_check = self.iteration + self._wait()
        if self.callback is not None and self.callback(record, weights) is True and not self._done:
            self._stop(Status.INTERRUPTED)
        if self.checkpoint is not None:
            self.checkpoint.keep(self.best, self.iteration)

    def _keep(self, weights: Weights, primal: float, relative: float) -> None:
        """Remember the best point, and count the checks since the gap or the objective last fell."""
        self._checks_without_gain += 1
        noise = 16 * torch.finfo(weights.form.dtype).eps * abs(primal)
        gap = relative * abs(primal)
        enough = max(noise, self._least_gain * gap if math.isfinite(gap) else 0.0)
        if relative < 0.99 * self._best_gap or primal < self._gained_at - enough:
            self._checks_without_gain, self._gained_at = 0, min(self._gained_at, primal)
        self._best_primal = min(self._best_primal, primal)
        # without a polar that certifies every gap is infinite; the objective then decides
        blind = math.isinf(relative) and math.isinf(self._best_gap) and primal <= self._best_primal
        if relative < self._best_gap or blind or self._best is None:
            self._best, self._best_gap, self._best_value = weights, relative, primal

    def _confirmed(self, weights: Weights) -> bool:
        """A solver's gap is a hint (float32, compression, an estimated polar, rounding); the certificate decides."""
        proof = certificate(self.whole, weights)
        self._proof = (weights, proof)
        if not proof.meets(self.tolerance):
            self._checks_without_gain += self._patience // 3  # the hint is at its limit: do not ask for ever
        elif self._best is not weights:
            self._best, self._best_gap, self._best_value = weights, proof.relative_gap, proof.primal
        return proof.meets(self.tolerance)

    def _stop(self, status: Status) -> None:
        self.status, self._done = status, True


def timed(objective: Objective, clock: Clock) -> Objective:
    """Return the same objective, whose products raise :class:`TimeUp` once the time is up."""
    if clock.max_time == math.inf:
        return objective

    def guard() -> None:
        capturing = objective.like.is_cuda and torch.cuda.is_current_stream_capturing()
        if clock.late and not capturing:
            raise TimeUp

    return objective.guarded(guard)


def is_true(answer: object) -> bool:
    """Tell whether a callback's answer is True, be it Python's, NumPy's or torch's; anything else lets a solve go on."""
    if isinstance(answer, Tensor) and answer.dtype == torch.bool and answer.numel() == 1:
        return bool(answer)
    return isinstance(answer, (bool, np.bool_)) and bool(answer)

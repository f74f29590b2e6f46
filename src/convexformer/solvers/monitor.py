"""The part all solvers share: history, gap checks, limits, progress, callbacks, Ctrl-C and checkpoints.

A solver iterates over the monitor and shows it each point; the monitor decides when to stop and keeps the best.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from typing import final

import numpy as np
import torch
from torch import Tensor

from convexformer.certificates import Certificate, DualPoint, certificate, dual_point
from convexformer.objective import Evaluation, Objective
from convexformer.progress import GapBar
from convexformer.solvers.checkpoint import Checkpoint
from convexformer.solvers.status import Record, Status
from convexformer.weights import Operand, Weights

Callback = Callable[[Record, Weights], object]

CHECK_EVERY = 10  # iterations between gap checks
STALL_CHECKS = 60  # gap checks without progress after which a float64 solve has stalled; a sixth of them in float32


@final
class Monitor:
    """Watches one solve of ``objective``, which is ``whole`` itself or a compressed form of it.

    The gap is checked at the start, every ``CHECK_EVERY`` iterations and at the limits. In float32 a point that seems
    to meet the tolerance must meet it in float64 too before the solve may end.
    """

    def __init__(
        self,
        objective: Objective,
        tolerance: float,
        max_iter: int,
        max_time: float | None,
        callback: Callback | None,
        bar: GapBar | None,
        checkpoint: Checkpoint | None,
    ) -> None:
        self.objective = self.whole = objective
        self.tolerance = tolerance
        self.max_iter = max_iter
        self.max_time = math.inf if max_time is None else max_time
        self.callback = callback
        self.bar = bar
        self.checkpoint = checkpoint
        self.history: list[Record] = []
        self.iteration = 0
        self.status = Status.MAX_ITER
        self.started = time.perf_counter()
        self._best: Weights | None = None
        self._best_gap = math.inf
        self._best_primal = math.inf
        self._checks_without_gain = 0
        self._proof: tuple[Weights, Certificate] | None = None
        self._done = False

    def watch(self, objective: Objective, whole: Objective) -> None:
        """Begin to watch a solve of ``objective``, a form of ``whole``; the best point so far is kept."""
        self.objective, self.whole = objective, whole
        self.status, self._done, self._checks_without_gain = Status.MAX_ITER, False, 0
        self._patience = STALL_CHECKS if whole.like.dtype == torch.float64 else STALL_CHECKS // 6

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
    def seconds(self) -> float:
        """Seconds since the solve began."""
        return time.perf_counter() - self.started

    def __iter__(self) -> Iterator[int]:
        while not self._done and self.iteration < self.max_iter:
            self.iteration += 1
            yield self.iteration

    @property
    def done(self) -> bool:
        """Whether the solve is to end."""
        return self._done

    @property
    def late(self) -> bool:
        """Whether the time is up."""
        return self.seconds >= self.max_time

    @property
    def due(self) -> bool:
        """Whether it is time for a gap check."""
        return self.late or self.iteration % CHECK_EVERY == 0 or self.iteration == self.max_iter

    def check(self, Z: Operand, at: Evaluation) -> DualPoint:
        """Check the gap of the point ``Z`` now; return the dual point, for the solver to steer by."""
        objective = self.objective
        point = dual_point(objective, at, quick=True)
        self._record(Z, at, point)
        if self.late and not self._done:
            self._stop(Status.MAX_TIME)
        return point

    def _record(self, Z: Operand, at: Evaluation, point: DualPoint) -> None:
        objective = self.objective
        primal = float(at.value) + objective.beta * float(objective.penalty.value(Z))
        relative = (primal - point.value) / max(abs(primal), 1e-300)
        weights = Weights(Z, at.intercept)
        record = Record(self.iteration, self.seconds, primal, point.value, relative)
        self.history.append(record)
        self._keep(weights, primal, relative)
        if self.bar is not None:
            self.bar.show(record)
        if relative <= self.tolerance and self._confirmed(weights):
            self._stop(Status.CONVERGED)
        elif self._checks_without_gain >= self._patience:
            self._stop(Status.STALLED)
        if self.callback is not None and self.callback(record, weights) is True and not self._done:
            self._stop(Status.INTERRUPTED)
        if self.checkpoint is not None:
            self.checkpoint.keep(self.best, self.iteration)

    def _keep(self, weights: Weights, primal: float, relative: float) -> None:
        """Remember the best point; a check is a gain when the gap or the objective still falls."""
        self._checks_without_gain += 1
        noise = 16 * torch.finfo(weights.form.dtype).eps * abs(primal)
        if relative < 0.99 * self._best_gap or primal < self._best_primal - noise:
            self._checks_without_gain = 0
        self._best_primal = min(self._best_primal, primal)
        # without a polar that certifies every gap is infinite; the objective then decides
        blind = math.isinf(relative) and math.isinf(self._best_gap) and primal <= self._best_primal
        if relative < self._best_gap or blind or self._best is None:
            self._best, self._best_gap = weights, relative

    def _confirmed(self, weights: Weights) -> bool:
        """A solver's gap is a hint (float32, compression, an estimated polar, rounding); the certificate decides."""
        proof = certificate(self.whole, weights)
        self._proof = (weights, proof)
        if not proof.meets(self.tolerance):
            self._checks_without_gain += self._patience // 3  # the hint is at its limit: do not ask for ever
        elif self._best is not weights:
            self._best, self._best_gap = weights, proof.relative_gap
        return proof.meets(self.tolerance)

    def _stop(self, status: Status) -> None:
        self.status, self._done = status, True


def is_true(answer: object) -> bool:
    """Tell whether a callback's answer is True, be it Python's, NumPy's or torch's; anything else lets a solve go on."""
    if isinstance(answer, Tensor) and answer.dtype == torch.bool and answer.numel() == 1:
        return bool(answer)
    return isinstance(answer, (bool, np.bool_)) and bool(answer)

"""State shared by the three solvers: limits, the best primal and dual point so far, and the status."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import final

from torch import Tensor

from convexformer.certificates import Certificate
from convexformer.gauges import Gauge
from convexformer.margin.certificate import margin_certificate
from convexformer.operators import Operator
from convexformer.solvers.status import Record, Status


@final
@dataclass(frozen=True)
class Limits:
    """When to stop: the relative gap to reach, and how many iterations or seconds to spend at most."""

    tolerance: float
    max_iter: int
    max_time: float = math.inf


@final
@dataclass(frozen=True)
class Answer:
    """The best matrix and the best multipliers found (both scale-free), and how the solve ended."""

    W: Tensor
    multipliers: Tensor
    status: Status
    history: tuple[Record, ...]


@final
class Progress:
    """Keeps the best primal and the best dual point; each gives its own bound, so they may be of different iterates."""

    def __init__(self, operator: Operator, gauge: Gauge, limits: Limits) -> None:
        self.operator, self.gauge, self.limits = operator, gauge, limits
        self.history: list[Record] = []
        self.status = Status.MAX_ITER
        self.started = time.perf_counter()
        self._W: Tensor | None = None
        self._lam: Tensor | None = None
        self._primal, self._dual = math.inf, -math.inf

    @property
    def seconds(self) -> float:
        """Seconds since the solve began."""
        return time.perf_counter() - self.started

    @property
    def relative_gap(self) -> float:
        """The gap between the best primal and the best dual value; infinite until a matrix separates."""
        return (self._primal - self._dual) / self._primal if math.isfinite(self._primal) else math.inf

    @property
    def separates(self) -> bool:
        """Whether any matrix seen has a positive margin."""
        return math.isfinite(self._primal)

    def see(self, W: Tensor, multipliers: Tensor, iteration: int) -> bool:
        """Check a primal and a dual point; tell whether to stop."""
        proof: Certificate = margin_certificate(self.operator, self.gauge, W, multipliers)
        if self._W is None or proof.primal < self._primal:
            self._W, self._primal = W, proof.primal
        if self._lam is None or proof.dual > self._dual:
            self._lam, self._dual = multipliers, proof.dual
        self.history.append(Record(iteration, self.seconds, self._primal, self._dual, self.relative_gap))
        if self.relative_gap <= self.limits.tolerance:
            self.status = Status.CONVERGED
        elif self.seconds > self.limits.max_time:
            self.status = Status.MAX_TIME
        return self.status is not Status.MAX_ITER

    def answer(self) -> Answer:
        """Return the best primal and the best dual point."""
        assert self._W is not None, "a solver must call see() at least once"
        assert self._lam is not None, "a solver must call see() at least once"
        return Answer(self._W, self._lam, self.status, tuple(self.history))

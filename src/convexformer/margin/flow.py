"""Gradient flow on the exponential loss, followed to physical times of exp(10^6) and beyond."""

from __future__ import annotations

import math
import numbers
import warnings
from dataclasses import dataclass
from typing import Any, final

import torch
from sklearn.exceptions import ConvergenceWarning
from torch import Tensor

from convexformer.margin.data import Sequences
from convexformer.margin.initial import start
from convexformer.margin.parametrizations import DEFAULT_STEP, Parametrization
from convexformer.margin.pull import Pull
from convexformer.margin.trajectory import Flow
from convexformer.threads import few_threads

LOG_TIMES = {"separate": 1e7, "diagonal": 1e7, "reparametrized": 1e7, "combined": 1e5}
"""Default horizons: natural logarithm of physical time, which the final margin is of the order of."""
MAX_WEIGHT = 1e250  # weights beyond this are frozen, since their products would overflow
CLOCK_EVERY = 20  # steps between two checks of the clock
SETTLE_STEPS, SETTLE_RATIO = 120, 0.96  # steps taken before each record, and the ratio of successive step sizes


def gradient_flow(
    X: Any,
    z: Any,
    y: Any,
    v: Any,
    parametrization: str = "separate",
    init: Any = None,
    log_time: float | None = None,
    *,
    n_init: int | None = None,
    seed: int = 0,
    width: int | None = None,
    step: float = DEFAULT_STEP,
    records: int = 60,
    max_steps: int = 1_000_000,
    device: str | torch.device | None = None,
) -> Flow:
    """Follow gradient flow on ``1/n sum_i exp(-y_i v^T X_i^T softmax(X_i W z_i))`` (Sheen et al. 2024, equation (1)).

    ``parametrization``: ``"separate"`` trains keys and queries, ``W = K Q^T``; ``"combined"`` trains ``W``; ``"diagonal"``
    trains the diagonals of ``K`` and ``Q``; ``"reparametrized"`` is lemma 4.1's equivalent form of it.

    ``init`` is a scale or the weights themselves (``(K, Q)``, ``W``, ``(k, q)``, ``(plus, minus)``); ``n_init`` draws a
    batch of random starts, run at once. ``width`` is the number of columns of K and Q (default d).

    ``log_time`` is the natural logarithm of the physical time to stop at. The margin grows like it, whatever the
    parametrization, and the direction converges like a power of it: steps in physical time cannot reach it (at t = 10^4
    the direction is still 20 to 30% off, and float64 overflows at log_time = 709). The flow uses the normalised time
    ``dtau = (sum of pulls) dt``, which leaves the trajectory unchanged.

    ``step`` is the relative change of the weights in a step. Once the margin is large the pulls switch between support
    tokens, and a step of that size leaves the direction in error by about as much; before each of the ``records`` points
    that the result keeps, a few steps of decreasing size damp this chattering.
    """
    data = Sequences.of(X, z, y, v, device=device)
    data.warn_of_ties()
    _check_options(step, records, max_steps)
    with torch.no_grad(), few_threads(data.X):
        weights = start(data, parametrization, init, n_init, width, seed)
        horizon = _horizon(parametrization, log_time)
        recorder = _Run(data, weights, step).follow(horizon, records, max_steps)
    batched = n_init is not None or _has_batch_axis(init, parametrization)
    return recorder.flow(parametrization, batched)


@final
@dataclass
class _Record:
    tau: Tensor  # (R,)
    log_time: Tensor  # (R,)
    W: Tensor  # (R, d, d)
    impulse: Tensor  # (R, n, L-1): the integral of the normalised pulls over tau
    factors: dict[str, Tensor]


@final
class _Run:
    """The state of one batch: weights, both clocks, and the records."""

    def __init__(self, data: Sequences, weights: Parametrization, step: float) -> None:
        self.data, self.weights, self.step = data, weights, step
        self.pull = Pull(data)
        R, (n, L, _) = weights.batch, data.shape
        self.tau = data.X.new_zeros(R)
        self.log_time = data.X.new_full((R,), -math.inf)
        self.impulse = data.X.new_zeros((R, n, L))
        self.steps = 0
        self.alive: Tensor | None = None  # (R,) of zeros and ones once some weights are frozen, else None
        self.records: list[_Record] = []

    def follow(self, horizon: float, records: int, max_steps: int) -> _Run:
        """Step until the slowest clock of the batch shows ``horizon``; record on an even grid of ``asinh(log t)``."""
        self.record()
        self.advance(1)
        first, last = math.asinh(self.clock()), math.asinh(horizon)
        spacing, due = (last - first) / max(records - 1, 1), first
        while True:
            clock = self.clock()
            done = clock >= horizon or self.stopped()
            if done or math.asinh(clock) >= due:
                self.settle()
                self.record()
                due = max(due, math.asinh(clock)) + spacing if spacing > 0 else math.inf
            if done:
                break
            if self.steps >= max_steps:
                self.settle()
                self.record()
                warnings.warn(
                    f"stopped after {self.steps} steps at log_time {self.clock():.4g} of {horizon:.4g}; raise max_steps, "
                    "or step, or start from larger weights (small ones stay long near saddle points).",
                    ConvergenceWarning,
                    stacklevel=3,
                )
                break
            self.advance(CLOCK_EVERY)
        return self

    def clock(self) -> float:
        """The logarithm of physical time of the slowest of the batch."""
        return float(self.log_time.min())

    def stopped(self) -> bool:
        """Freeze the weights whose products would overflow float64; tell whether all are frozen."""
        alive = self.weights.matrix().abs().flatten(1).amax(1) < MAX_WEIGHT
        self.alive = None if bool(alive.all()) else alive.to(self.tau.dtype)
        return not bool(alive.any())

    def advance(self, steps: int) -> None:
        """Take steps of the full relative size."""
        for _ in range(steps):
            self._step(self.step)

    def settle(self) -> None:
        """Shrink the step from full size towards zero, so that margins of support tokens become equal."""
        size = self.step
        for _ in range(SETTLE_STEPS):
            size *= SETTLE_RATIO
            self._step(size)

    def record(self) -> None:
        """Record the weights and clocks of the batch."""
        parts = {name: value.clone() for name, value in self.weights.factors().items()}
        impulse = self.impulse[..., 1:].clone()
        self.records.append(
            _Record(self.tau.clone(), self.log_time.clone(), self.weights.matrix().clone(), impulse, parts)
        )

    def flow(self, parametrization: str, batched: bool) -> Flow:
        """Stack the records, on the CPU; without a batch axis if there was none."""

        def stack(parts: list[Tensor]) -> Tensor:
            out = torch.stack(parts).cpu()
            return out if batched else out[:, 0]

        return Flow(
            data=Sequences(*(part.cpu() for part in (self.data.X, self.data.z, self.data.y, self.data.v))),
            parametrization=parametrization,
            norm=self.weights.norm,
            exponential=self.weights.exponential,
            n_steps=self.steps,
            _tau=stack([r.tau for r in self.records]),
            _log_time=stack([r.log_time for r in self.records]),
            _W=stack([r.W for r in self.records]),
            _impulse=stack([r.impulse for r in self.records]),
            _factors={name: stack([r.factors[name] for r in self.records]) for name in self.records[0].factors},
        )

    def _step(self, relative: float) -> None:
        pulls, log_total = self.pull(self.weights.logits())
        if self.alive is not None:
            pulls = pulls * self.alive[:, None, None]
        eta = self.weights.advance(pulls, relative)
        if self.alive is not None:
            eta = eta * self.alive
        self.tau = self.tau + eta
        self.log_time = torch.logaddexp(self.log_time, eta.log() - log_total)
        self.impulse = self.impulse + eta[:, None, None] * pulls
        self.steps += 1


def _horizon(parametrization: str, log_time: float | None) -> float:
    if log_time is None:
        return LOG_TIMES[parametrization]
    if isinstance(log_time, bool) or not isinstance(log_time, numbers.Real) or not math.isfinite(log_time):
        raise ValueError(
            f"log_time={log_time!r} was given; expected the natural logarithm of the physical time to stop at, such as 1e6."
        )
    return min(float(log_time), MAX_WEIGHT)


def _check_options(step: float, records: int, max_steps: int) -> None:
    if not isinstance(step, numbers.Real) or not 0 < step <= 0.1:
        raise ValueError(f"step={step} was given; expected a relative step in (0, 0.1], such as {DEFAULT_STEP}.")
    if not isinstance(records, numbers.Integral) or records < 2:
        raise ValueError(f"records={records} was given; expected a whole number of at least 2.")
    if not isinstance(max_steps, numbers.Integral) or max_steps < 1:
        raise ValueError(f"max_steps={max_steps} was given; expected a positive whole number.")


def _has_batch_axis(init: Any, parametrization: str) -> bool:
    if init is None or isinstance(init, numbers.Real):
        return False
    part = init if parametrization == "combined" else init[0]
    axes = 2 if parametrization in ("separate", "combined") else 1
    return len(getattr(part, "shape", ())) == axes + 1

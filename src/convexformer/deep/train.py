"""Training: all seeds of a configuration at once, with a full history."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from typing import Any, final

import numpy as np
import torch

from convexformer.data.tokens import pick_device
from convexformer.deep.base import SequenceModel
from convexformer.deep.batches import Data, Split
from convexformer.deep.checkpoint import TrainingCheckpoint
from convexformer.deep.history import SERIES, History, Outcome, Run
from convexformer.deep.options import Training
from convexformer.deep.spectra import singular_values
from convexformer.deep.stepper import Stepper
from convexformer.progress import StepBar, step_bar
from convexformer.threads import few_threads

CHECKPOINT_SECONDS = 30.0  # between two checkpoints
MAX_GRAPH_STEPS = 10  # training steps captured in one CUDA graph, at most


def train(
    model: SequenceModel,
    data: Data,
    training: Training | None = None,
    *,
    device: torch.device | str | None = "auto",
    graph: bool = True,
    progress: bool = False,
    checkpoint: str | os.PathLike[str] | None = None,
    callback: Callable[[Run], object] | None = None,
    **changes: Any,
) -> Run:
    """Train a model in place, from its current weights, and return it with its history.

    ``data`` is a task, split anew for each seed (``training.train_fraction``), or a pair ``(train, test)``. ``training``
    holds the options, and keywords change single ones: ``train(model, task, learning_rate=1e-2, iterations=500)``. All
    seeds run at once. On a GPU steps are replayed as a CUDA graph, unless ``graph=False``.

    ``checkpoint`` names a file that is rewritten every half minute and at the end; a call that finds it continues from it,
    with the same result as without the interruption. ``callback(run)`` gets the run at every evaluation and stops it by
    returning True. Ctrl-C returns the run so far.

    The training problem is not convex, unless ``model.convex_last_layer``, so its result has no certificate; the last layer
    alone can be certified afterwards (``certify_last_layer``).
    """
    options = (training or Training()).but(**changes)
    started = time.perf_counter()
    model.to(pick_device(device))
    split = Split.of(data, options.train_fraction, model)
    keeper = None if checkpoint is None else TrainingCheckpoint(checkpoint, model, split, options)
    with few_threads(split.train[0]), step_bar(split.task, options.iterations, shown=progress) as bar:
        loop = _Loop(model, split, options, keeper)
        found = None if keeper is None else keeper.read()
        if found is not None:
            loop.resume(*found)
        if graph and split.train[0].is_cuda:
            loop.stepper.capture()
        loop.setup_seconds = time.perf_counter() - started
        try:
            outcome = loop.follow(callback, bar)
        except KeyboardInterrupt:
            if not loop.evaluations:
                raise
            outcome = Outcome.INTERRUPTED
        loop.keep(now=True)
    return loop.run(outcome)


@final
class _Loop:
    """The state of one training: the stepper, the iteration, the records."""

    def __init__(
        self, model: SequenceModel, split: Split, training: Training, keeper: TrainingCheckpoint | None
    ) -> None:
        self.model, self.split, self.training, self.keeper = model, split, training, keeper
        # blocks of steps end at evaluations
        self.stepper = Stepper(model, split, training, math.gcd(MAX_GRAPH_STEPS, training.evaluate_every))
        self.iteration, self.seconds, self.setup_seconds = 0, 0.0, 0.0
        self.evaluations: list[np.ndarray] = []  # (4, S) each
        self.clock: list[tuple[int, float]] = []
        self.spectra: dict[str, list[np.ndarray]] = {}
        self.spectra_at: list[int] = []
        self._kept = time.perf_counter()

    def follow(self, callback: Callable[[Run], object] | None, bar: StepBar | None) -> Outcome:
        """Train to the target or a limit."""
        last, every = self.training.iterations, self.training.evaluate_every
        if not self.evaluations:
            self.record()
        begun = time.perf_counter() - self.seconds
        while (outcome := self._ended(callback)) is None:
            stop = min(self.iteration - self.iteration % every + every, last)
            while self.iteration < stop:
                self.iteration += self.stepper.take(self.iteration, stop - self.iteration)
            self.record(begun)
            if bar is not None:
                bar.move_to(self.iteration, self._note())
            self.keep()
        return outcome

    def record(self, begun: float | None = None) -> None:
        """Evaluate, and take singular values where they are due; the clock counts training and evaluation."""
        numbers = self.stepper.evaluate().cpu().numpy().astype(float)  # synchronises with the device
        self.seconds = 0.0 if begun is None else time.perf_counter() - begun
        self.evaluations.append(numbers)
        self.clock.append((self.iteration, self.seconds))
        every = self.training.spectra_every
        if every is not None and self.iteration % every == 0:
            for name, values in singular_values(self.model).items():
                self.spectra.setdefault(name, []).append(values)
            self.spectra_at.append(self.iteration)

    def keep(self, *, now: bool = False) -> None:
        """Write a checkpoint if the last one is old enough."""
        if self.keeper is None or not (now or time.perf_counter() - self._kept > CHECKPOINT_SECONDS):
            return
        history = {"evaluations": np.stack(self.evaluations), "clock": np.array(self.clock, dtype=float)}
        history["spectra_at"] = np.array(self.spectra_at, dtype=float)
        history |= {f"spectra.{name}": np.stack(values) for name, values in self.spectra.items()}
        self.keeper.write(self.iteration, self.stepper.state(), history)
        self._kept = time.perf_counter()

    def resume(self, iteration: int, state: dict[str, torch.Tensor], history: dict[str, np.ndarray]) -> None:
        """Continue from the state of a checkpoint."""
        self.stepper.restore(state)
        self.iteration = iteration
        self.evaluations = list(history["evaluations"])
        self.clock = [(int(step), float(seconds)) for step, seconds in history["clock"]]
        self.seconds = self.clock[-1][1]
        self.spectra_at = [int(step) for step in history["spectra_at"]]
        self.spectra = {name[8:]: list(values) for name, values in history.items() if name.startswith("spectra.")}

    def run(self, outcome: Outcome) -> Run:
        """Return the run so far."""
        table = np.stack(self.evaluations)  # (E, 4, S)
        steps, seconds = zip(*self.clock, strict=True)
        history = History(
            iteration=np.array(steps),
            seconds=np.array(seconds),
            **{name: table[:, k] for k, name in enumerate(SERIES)},
            spectra_iteration=np.array(self.spectra_at, dtype=int),
            spectra={name: np.stack(values) for name, values in self.spectra.items()},
        )
        X = self.split.train[0]
        device = torch.cuda.get_device_name(X.device) if X.is_cuda else "cpu"
        return Run(self.model, self.training, history, outcome, self.split.task, device, self.setup_seconds)

    def _ended(self, callback: Callable[[Run], object] | None) -> Outcome | None:
        if not np.isfinite(self.evaluations[-1][[1, 3]]).any():
            return Outcome.DIVERGED
        if self._reached():
            return Outcome.TARGET
        if self.iteration >= self.training.iterations:
            return Outcome.ITERATIONS
        if self.training.max_time is not None and self.seconds > self.training.max_time:
            return Outcome.MAX_TIME
        if callback is not None and callback(self.run(Outcome.INTERRUPTED)):
            return Outcome.INTERRUPTED
        return None

    def _reached(self) -> bool:
        if self.training.target is None:
            return False
        best = np.stack(self.evaluations)[:, [0, 2]].max(0)  # (2, S)
        return bool((best >= self.training.target).all())

    def _note(self) -> str:
        train, _, test, _ = self.evaluations[-1]
        return f"train {train.mean():.1%}, test {test.min():.1%} to {test.max():.1%}"

"""What the claims about training curves and spectra are measured by.

The bars were set before the runs that they judge on a CPU; iterations to 99%, and effective ranks at start and end, of
earlier runs on a GPU were known.

All functions return one number a seed. Iterations are those of evaluations, so the interval between evaluations is the
resolution, and curves are compared only if that interval is the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np

from convexformer.deep import Run

BAR = 0.05  # a size, spread or rank "grows" or "shrinks" when it changes by more than this share
COLLAPSED = 0.5  # of the effective rank at the start: a collapse leaves fewer than half of the directions in use
SUBSTANTIAL = 2.0  # "substantially faster": half of the iterations; "no noticeable difference": between half and twice


def excess_variation(run: Run, until: float = np.inf) -> np.ndarray:
    """``(S,)`` how far from smooth the test accuracy rises: the sum of its falls between evaluations, in accuracy.

    It counts from the start to the first evaluation with 99% test accuracy, or to the last one no later than ``until``. The
    total variation of that stretch is its net rise plus twice this number, so 0 is a curve that never falls.
    """
    history = run.history
    falls = np.maximum(0.0, -np.diff(history.test_accuracy, axis=0))  # (E - 1, S)
    arrived = run.iterations_to()
    last = np.where(np.isfinite(arrived), np.minimum(arrived, until), until)
    return np.where(history.iteration[1:, None] <= last, falls, 0.0).sum(0)


def plateau(run: Run, part: str) -> np.ndarray:
    """``(S,)`` iterations until a curve first has 99% of its best accuracy."""
    curve = getattr(run.history, f"{part}_accuracy")
    return run.history.iteration[(curve >= 0.99 * curve.max(0)).argmax(0)]


def loss_at(run: Run, iteration: float) -> np.ndarray:
    """``(S,)`` the test loss at the last evaluation that is no later than an iteration."""
    at = int(np.searchsorted(run.history.iteration, iteration, side="right")) - 1
    return run.history.test_loss[max(0, at)]


def best_test_loss(run: Run, iteration: float) -> np.ndarray:
    """``(S,)`` the smallest test loss up to an iteration."""
    return run.history.test_loss[run.history.iteration <= iteration].min(0)


@final
@dataclass(frozen=True)
class Spectrum:
    """The singular values of one layer at the turning points of training, seed by seed.

    Turning points are the first records of singular values at or after these evaluations: ``start``, the first of all;
    ``learning``, 10% training accuracy; ``memorised``, 99% training accuracy; ``rising``, where the test accuracy has gone
    10% of the way from its first value to its best; ``generalised``, where it has reached 99% of its best (which is a
    plateau below 100% where the model does not generalise); ``end``, the last record, which also stands for a point that was
    not reached.
    """

    run: Run
    layer: str

    def at(self, point: str) -> np.ndarray:
        """``(S, r)`` the singular values at a turning point."""
        values = self.run.history.spectra[self.layer]
        return values[self.records(point), np.arange(values.shape[1])]

    def records(self, point: str) -> np.ndarray:
        """``(S,)`` the numbers of the records."""
        history = self.run.history
        seeds = history.test_accuracy.shape[1]
        if point in ("start", "end"):
            return np.full(seeds, 0 if point == "start" else len(history.spectra_iteration) - 1)
        train, test = history.train_accuracy, history.test_accuracy
        best = test.max(0)
        curve, level = {
            "learning": (train, np.full(seeds, 0.1)),
            "memorised": (train, np.full(seeds, 0.99)),
            "rising": (test, test[0] + 0.1 * (best - test[0])),
            "generalised": (test, 0.99 * best),
        }[point]
        reached = curve >= level
        when = np.where(reached.any(0), history.iteration[reached.argmax(0)], history.iteration[-1])
        record = np.searchsorted(history.spectra_iteration, when)
        return np.minimum(record, len(history.spectra_iteration) - 1)

    def iteration(self, point: str) -> np.ndarray:
        """``(S,)`` the iterations of a turning point."""
        return self.run.history.spectra_iteration[self.records(point)]

    def rank(self, point: str) -> np.ndarray:
        """``(S,)`` the effective rank: the exponential of the entropy of the normalised singular values."""
        ranks = self.run.history.effective_rank(self.layer)
        return ranks[self.records(point), np.arange(ranks.shape[1])]

    def of(self, quantity: str, point: str) -> np.ndarray:
        """``(S,)`` one of ``rank``, ``size``, ``spread`` and ``lead`` at a turning point."""
        measures = {"rank": self.rank, "size": self.size, "spread": self.spread, "lead": self.lead}
        return measures[quantity](point)

    def size(self, point: str) -> np.ndarray:
        """``(S,)`` the magnitude: the root mean square of the singular values."""
        return np.sqrt((self.at(point) ** 2).mean(1))

    def spread(self, point: str) -> np.ndarray:
        """``(S,)`` the standard deviation of the singular values."""
        return self.at(point).std(1)

    def lead(self, point: str) -> np.ndarray:
        """``(S,)`` the spectral norm over the median singular value."""
        values = self.at(point)
        return values[:, 0] / np.maximum(np.median(values, axis=1), np.finfo(float).tiny)


def grows(before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """``(S,)`` whether a quantity grew by more than the bar."""
    return after > (1 + BAR) * before


def shrinks(before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """``(S,)`` whether a quantity shrank by more than the bar."""
    return after < (1 - BAR) * before


def collapses(before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """``(S,)`` whether an effective rank fell below half of what it was."""
    return after < COLLAPSED * before

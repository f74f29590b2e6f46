"""One fold of a search: a path on the training part, scored on the part left out until scores get no better."""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from joblib import Parallel
from sklearn.base import is_classifier
from sklearn.metrics import check_scoring

from convexformer.clock import Clock
from convexformer.data.stores import Tokens
from convexformer.estimators.base import TokenEstimator
from convexformer.path import walk
from convexformer.progress import StepBar
from convexformer.solution import Solution
from convexformer.solvers.status import Status

VISIBLE = 0.01  # a score is better if it is so by this share of the rise since Z = 0: less is noise to selection
REFIT_SHARE = 0.25  # the last fit's share of the time, in units of a fold's


@final
@dataclass(frozen=True)
class FoldOptions:
    """What the folds of a search have in common."""

    ratios: np.ndarray
    """``(n_betas,)`` the path, as fractions of ``beta_max``."""
    scoring: Any
    patience: int | None
    """Betas in a row without a better score after which a fold ends its path."""
    tolerance: float


@final
@dataclass(frozen=True)
class Share:
    """How the time of a search is divided: folds run in waves of ``workers``, and each has its wave's share of the rest.

    The deadline is wall-clock time, which processes and machines have in common.
    """

    deadline: float
    waves: int
    workers: int
    wave: int = 0

    @classmethod
    def of(cls, clock: Clock, n_folds: int, workers: int) -> Share:
        """Divide what is left on a clock."""
        left = clock.left()
        deadline = math.inf if left is None else time.time() + left
        return cls(deadline, math.ceil(n_folds / workers), workers)

    def of_fold(self, k: int) -> Share:
        """Return the share of the k-th fold."""
        return Share(self.deadline, self.waves, self.workers, k // self.workers)

    def clock(self) -> Clock:
        """Start the clock of this fold."""
        if math.isinf(self.deadline):
            return Clock()
        return Clock(max(self.deadline - time.time(), 0.0) / (self.waves - self.wave + REFIT_SHARE))


def score_path(
    estimator: TokenEstimator,
    tokens: Tokens,
    targets: np.ndarray,
    w: np.ndarray | None,
    train: np.ndarray,
    test: np.ndarray,
    options: FoldOptions,
    share: Share,
) -> tuple[np.ndarray, np.ndarray]:
    """Walk the path on one fold; return scores and relative gaps, ``(n_betas,)`` each, NaN where it has not got.

    Scores that have not yet left that of ``Z = 0`` (labels in unequal numbers, a weak signal) are no reason to stop.
    """
    clock = share.clock()
    part = None if w is None else w[train]
    problem = estimator.path_problem(tokens.select(train), targets[train], part)
    scorer = check_scoring(estimator, scoring=options.scoring)
    outside = tokens.select(test)
    weighted = {"sample_weight": w[test]} if w is not None and takes_weight(scorer, options.scoring) else {}
    scores, gaps = np.full((2, len(options.ratios)), np.nan)
    best, best_at = -math.inf, 0  # the last score that was visibly better than those before, and where
    solver_options = {**estimator._solver_options(), "tolerance": options.tolerance}
    for k, solution in enumerate(uninterrupted(walk(problem, options.ratios, clock=clock, **solver_options))):
        if clock.late and not solution.certificate.meets(options.tolerance):
            break
        estimator._keep(problem.with_beta(solution.beta), solution)
        scores[k] = one_number(scored(scorer, estimator, options.scoring, outside, targets[test], weighted))
        gaps[k] = solution.certificate.relative_gap
        if k == 0 or scores[k] > best + VISIBLE * (scores[k] - scores[0]):
            best, best_at = scores[k], k
        if options.patience is not None and best_at > 0 and k - best_at >= options.patience:
            break
    return scores, gaps


def carried_forward(scores: np.ndarray) -> np.ndarray:
    """Return scores ``(folds, betas)`` with each fold's last one in place of the NaN after it."""
    filled = scores.copy()
    for k in range(1, scores.shape[1]):
        filled[:, k] = np.where(np.isnan(filled[:, k]), filled[:, k - 1], filled[:, k])
    return filled


def uninterrupted(solutions: Iterator[Solution]) -> Iterator[Solution]:
    """Pass solutions on; an interrupted one ends the whole search, since a partial path must not choose a beta."""
    for solution in solutions:
        if solution.status is Status.INTERRUPTED:
            raise KeyboardInterrupt
        yield solution


def scored(
    scorer: Any, estimator: TokenEstimator, scoring: Any, X: Tokens, y: np.ndarray, weighted: dict[str, np.ndarray]
) -> Any:
    """Return the score of a fold; the accuracy of plain labels, which have been validated, without validating them again."""
    if scoring is None and is_classifier(estimator) and y.ndim == 1:
        return np.average(estimator.predict(X) == y, weights=weighted.get("sample_weight"))
    return scorer(estimator, X, y, **weighted)


def one_number(score: Any) -> float:
    """Return a score as a number; several are refused, and so is NaN."""
    if isinstance(score, dict):
        raise ValueError(f"scoring returned {len(score)} scores ({', '.join(map(str, score))}); beta is chosen by one.")
    number = float(score)
    if math.isnan(number):
        raise ValueError(
            "scoring returned NaN for the part that a fold leaves out, as R^2 of a single sample does; beta is chosen by "
            "scores. Use fewer folds, or a score that is defined there, such as scoring='neg_mean_squared_error'."
        )
    return number


def takes_weight(scorer: Any, scoring: Any) -> bool:
    """Tell whether a scorer can weigh samples; the estimators' own scores can."""
    if scoring is None:
        return True
    function = getattr(scorer, "_score_func", scorer)
    return "sample_weight" in inspect.signature(function).parameters


class CountedParallel(Parallel):
    """joblib's ``Parallel``, on any backend, that shows finished folds on a bar."""

    def __init__(self, bar: StepBar | None, **options: Any) -> None:
        super().__init__(**options)
        self._step_bar, self._shown = bar, 0

    def print_progress(self) -> None:
        """Called by joblib whenever tasks are done."""
        if self._step_bar is not None:
            self._step_bar.advance(self.n_completed_tasks - self._shown)
            self._shown = self.n_completed_tasks

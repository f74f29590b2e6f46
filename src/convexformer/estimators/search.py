"""Model selection: folds in parallel, one warm-started path each."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from typing import Any

import numpy as np
import torch
from joblib import Parallel, delayed, effective_n_jobs
from sklearn.base import clone, is_classifier
from sklearn.metrics import check_scoring
from sklearn.model_selection import check_cv
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

from convexformer.data import TokenDataset
from convexformer.estimators.base import TokenEstimator
from convexformer.estimators.classifier import TokenClassifier
from convexformer.estimators.regressor import TokenRegressor
from convexformer.heads.base import Head
from convexformer.path import beta_ratios, walk
from convexformer.progress import StepBar, step_bar
from convexformer.registry import one_of
from convexformer.solution import Solution
from convexformer.solvers.status import Status


class CrossValidated(TokenEstimator):
    """Base of the estimators that choose beta by cross-validation; it must come first among their bases.

    Each fold standardises on its own training part, walks a warm-started path of ``n_betas`` from its ``beta_max`` down to
    ``beta_min_ratio`` of it, and scores every certified solution on the part left out. ``selection="best"`` takes the ratio
    with the best mean score (the largest one on ties), ``"1se"`` the largest ratio, the sparsest head, whose mean score is
    within one standard error of the best. It is then fitted to all samples. Sample weights count in the fit, and in the
    score where the scorer takes them. ``max_iter`` and ``max_time`` apply to each beta of each path; there is no
    ``warm_start``, since every path is warm-started anyway. Folds run in parallel on joblib's current backend (``n_jobs``,
    ``joblib.parallel_config``), Dask's or Ray's too; ``verbose`` shows their progress. Ctrl-C ends the whole search and
    keeps nothing.

    After ``fit``: ``cv_results_``, ``beta_ratios_``, ``best_index_`` (the one selected), ``best_score_`` and ``beta_ratio_``
    besides the attributes of the plain estimator; ``n_iter_`` counts the path of the last fit.
    """

    def __init__(
        self,
        head: str | Head = "attention",
        activation: str = "linear",
        tolerance: float = 1e-3,
        fit_intercept: bool = True,
        standardize: bool = True,
        gates: Any = 16,
        decay: str = "l1",
        class_weight: dict[Any, float] | str | None = None,
        device: str | torch.device = "auto",
        random_state: int | np.random.RandomState | None = 0,
        verbose: int = 0,
        *,
        n_betas: int = 20,
        beta_min_ratio: float = 1e-3,
        cv: Any = 5,
        scoring: Any = None,
        selection: str = "best",
        n_jobs: int | None = None,
        loss: str = "auto",
        token_shape: tuple[int, int] | None = None,
        max_iter: int | None = None,
        max_time: float | None = None,
    ) -> None:
        super().__init__(
            head=head,
            activation=activation,
            tolerance=tolerance,
            fit_intercept=fit_intercept,
            standardize=standardize,
            gates=gates,
            decay=decay,
            class_weight=class_weight,
            device=device,
            random_state=random_state,
            verbose=verbose,
            loss=loss,
            token_shape=token_shape,
            max_iter=max_iter,
            max_time=max_time,
        )
        self.n_betas = n_betas
        self.beta_min_ratio = beta_min_ratio
        self.cv = cv
        self.scoring = scoring
        self.selection = selection
        self.n_jobs = n_jobs

    def fit_checkpointed(
        self,
        X: Any,
        y: Any,
        sample_weight: Any = None,
        mask: Any = None,
        checkpoint: str | PathLike[str] | None = None,
    ) -> None:
        """Raise: a search has no checkpoints."""
        raise TypeError(
            f"{type(self).__name__} has no checkpoints: its folds run in parallel and keep nothing. Call fit, or fit a "
            "plain estimator at a beta of your choice."
        )

    def _choose_and_fit(self, X: Any, y: Any, sample_weight: Any, mask: Any, groups: Any) -> None:
        """Choose beta by cross-validation, then fit all samples with it."""
        one_of("selection", self.selection, ("best", "1se"))
        if isinstance(self.scoring, (list, tuple, set, dict)):
            raise ValueError(f"scoring={self.scoring!r} names several scores; beta is chosen by one. Pass one of them.")
        tokens, codes, w = self._read_training(X, y, sample_weight, mask)
        targets = self._read_targets(y)
        if self.scoring is None and targets.ndim > 2:
            raise ValueError(
                f"y has shape {targets.shape}, targets per token, and scoring=None means R^2, one row per sample. "
                "Pass scoring=callable(estimator, X, y), or choose beta yourself along cf.path."
            )
        ratios = beta_ratios(self.n_betas, self.beta_min_ratio)
        splitter = check_cv(self.cv, targets if targets.ndim == 1 else None, classifier=is_classifier(self))
        folds = list(splitter.split(np.zeros(len(targets)), targets, groups))
        own = self._read_weight(sample_weight, tokens.n_samples)
        host = tokens.to(device="cpu")
        jobs = (
            delayed(_fold)(self._single(), host, targets, own, train, test, ratios, self.scoring)
            for train, test in folds
        )
        shown = step_bar("cross-validation", len(folds), shown=bool(self.verbose))
        with shown as bar, _divided_threads(effective_n_jobs(self.n_jobs)):
            rows = _CountedParallel(bar, n_jobs=self.n_jobs)(jobs)
        scores, gaps = (np.array(part) for part in zip(*rows, strict=True))  # (folds, betas)
        self._record(ratios, scores, gaps)
        self._learn_scale(tokens, w)
        problem = self._problem(tokens, codes, w, beta_ratio=1.0)
        total = 0
        for solution in _uninterrupted(walk(problem, ratios[: self.best_index_ + 1], **self._solver_options())):
            total += solution.n_iter
            last = solution
        self._keep(problem.with_beta(last.beta), last)
        self.n_iter_ = max(1, total)  # scikit-learn asks for at least one

    def _single(self) -> TokenEstimator:
        """Return an unfitted plain estimator with the same options, for one fold."""
        plain = TokenClassifier if is_classifier(self) else TokenRegressor
        names = set(plain().get_params())
        own = {name: value for name, value in self.get_params(deep=False).items() if name in names}
        return clone(plain(**{**own, "verbose": 0, "random_state": self.seed_}))  # the same gates in every fold

    def _record(self, ratios: np.ndarray, scores: np.ndarray, gaps: np.ndarray) -> None:
        mean, n_folds = scores.mean(0), len(scores)
        error = scores.std(0, ddof=1) / np.sqrt(n_folds) if n_folds > 1 else np.zeros_like(mean)
        best = int(np.argmax(mean))  # on ties the first: the largest beta
        if self.selection == "1se":
            best = int(np.argmax(mean >= mean[best] - error[best]))
        self.beta_ratios_ = ratios
        self.cv_results_ = {
            "beta_ratio": ratios,
            "mean_test_score": mean,
            "std_test_score": scores.std(0),
            "standard_error": error,
            "max_relative_gap": gaps.max(0),
            **{f"split{k}_test_score": row for k, row in enumerate(scores)},
        }
        self.best_index_ = best
        self.best_score_ = float(mean[best])
        self.beta_ratio_ = float(ratios[best])


class TokenClassifierCV(CrossValidated, TokenClassifier):
    """A :class:`TokenClassifier` whose beta is chosen by cross-validation; see :class:`CrossValidated` for how.

    Folds are stratified unless ``cv`` says otherwise; ``scoring`` is the accuracy by default.
    """

    def fit(self, X: Any, y: Any, sample_weight: Any = None, mask: Any = None, groups: Any = None) -> TokenClassifierCV:
        """Choose beta by cross-validation, then fit all samples with it; ``groups`` is for the splitter."""
        self._choose_and_fit(X, y, sample_weight, mask, groups)
        return self


class TokenRegressorCV(CrossValidated, TokenRegressor):
    """A :class:`TokenRegressor` whose beta is chosen by cross-validation; see :class:`CrossValidated` for how.

    ``scoring`` is R^2 by default.
    """

    def fit(self, X: Any, y: Any, sample_weight: Any = None, mask: Any = None, groups: Any = None) -> TokenRegressorCV:
        """Choose beta by cross-validation, then fit all samples with it; ``groups`` is for the splitter."""
        self._choose_and_fit(X, y, sample_weight, mask, groups)
        return self


class _CountedParallel(Parallel):
    """joblib's ``Parallel``, on any backend, that shows finished folds on a bar."""

    def __init__(self, bar: StepBar | None, **options: Any) -> None:
        super().__init__(**options)
        self._step_bar, self._shown = bar, 0

    def print_progress(self) -> None:
        """Called by joblib whenever tasks are done."""
        if self._step_bar is not None:
            self._step_bar.advance(self.n_completed_tasks - self._shown)
            self._shown = self.n_completed_tasks


@contextmanager
def _divided_threads(n_workers: int) -> Iterator[None]:
    """Divide this process's threads among folds that run as threads, and restore the setting afterwards.

    For folds that run as processes joblib does this itself.
    """
    if n_workers == 1:
        yield
        return
    before = torch.get_num_threads()
    share = max(1, before // n_workers)
    with threadpool_limits(limits=share):
        torch.set_num_threads(share)
        try:
            yield
        finally:
            torch.set_num_threads(before)


def _fold(
    estimator: TokenEstimator,
    tokens: TokenDataset,
    targets: np.ndarray,
    w: np.ndarray | None,
    train: np.ndarray,
    test: np.ndarray,
    ratios: np.ndarray,
    scoring: Any,
) -> tuple[list[float], list[float]]:
    """Walk the path on one fold; return the score and the certified relative gap at each beta."""
    part = None if w is None else w[train]
    problem = estimator.path_problem(tokens.select(train), targets[train], part)
    scorer = check_scoring(estimator, scoring=scoring)
    outside = tokens.select(test)
    weighted = {"sample_weight": w[test]} if w is not None and _takes_weight(scorer, scoring) else {}
    scores, gaps = [], []
    for solution in _uninterrupted(walk(problem, ratios, **estimator._solver_options())):
        estimator._keep(problem.with_beta(solution.beta), solution)
        scores.append(_one_number(scorer(estimator, outside, targets[test], **weighted)))
        gaps.append(solution.certificate.relative_gap)
    return scores, gaps


def _one_number(score: Any) -> float:
    if isinstance(score, dict):
        raise ValueError(f"scoring returned {len(score)} scores ({', '.join(map(str, score))}); beta is chosen by one.")
    return float(score)


def _uninterrupted(solutions: Iterator[Solution]) -> Iterator[Solution]:
    """Pass solutions on; an interrupted one ends the whole search, since a partial path must not choose a beta."""
    for solution in solutions:
        if solution.status is Status.INTERRUPTED:
            raise KeyboardInterrupt
        yield solution


def _takes_weight(scorer: Any, scoring: Any) -> bool:
    """Tell whether a scorer can weigh samples; the estimators' own scores can."""
    if scoring is None:
        return True
    function = getattr(scorer, "_score_func", scorer)
    return "sample_weight" in inspect.signature(function).parameters

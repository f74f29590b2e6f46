"""Model selection: folds in parallel, one warm-started path each."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from joblib import Parallel, delayed
from sklearn.base import clone
from sklearn.metrics import check_scoring
from sklearn.model_selection import check_cv

from convexformer.architecture import Head
from convexformer.data import TokenDataset
from convexformer.estimators import TokenClassifier, read_labels
from convexformer.path import beta_ratios, walk

__all__ = ["TokenClassifierCV"]


class TokenClassifierCV(TokenClassifier):
    """A :class:`TokenClassifier` whose beta is chosen by cross-validation.

    Each fold standardises on its own training part, walks a warm-started path of ``n_betas`` from its ``beta_max`` down to
    ``beta_min_ratio`` of it, and scores every certified solution on the part left out. The ratio with the best mean score
    (the largest one on ties) is then fitted to all samples. After ``fit``: ``cv_results_``, ``beta_ratios_``,
    ``best_index_``, ``best_score_``, ``beta_ratio_`` besides those of :class:`TokenClassifier`.
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
        random_state: int = 0,
        verbose: int = 0,
        *,
        n_betas: int = 20,
        beta_min_ratio: float = 1e-3,
        cv: Any = 5,
        scoring: Any = None,
        n_jobs: int | None = None,
        loss: str = "auto",
        token_shape: tuple[int, int] | None = None,
        max_iter: int | None = None,
        max_time: float | None = None,
        warm_start: bool = False,
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
            warm_start=warm_start,
        )
        self.n_betas = n_betas
        self.beta_min_ratio = beta_min_ratio
        self.cv = cv
        self.scoring = scoring
        self.n_jobs = n_jobs

    def fit(self, X: Any, y: Any, sample_weight: Any = None, mask: Any = None, groups: Any = None) -> TokenClassifierCV:
        """Choose beta by cross-validation, then fit all samples with it."""
        tokens, codes, w = self._read_training(X, y, sample_weight, mask)
        labels = read_labels(y)
        ratios = beta_ratios(self.n_betas, self.beta_min_ratio)
        folds = list(check_cv(self.cv, labels, classifier=True).split(np.zeros(len(labels)), labels, groups))
        own = None if sample_weight is None else self._read_weight(sample_weight, tokens.n_samples)
        host = tokens.to(device="cpu")
        rows = Parallel(n_jobs=self.n_jobs)(
            delayed(_fold)(self._single(), host, labels, own, train, test, ratios, self.scoring)
            for train, test in folds
        )
        scores, gaps = (np.array(part) for part in zip(*rows, strict=True))  # (folds, betas)
        self._record(ratios, scores, gaps)
        self._learn_scale(tokens, w)
        problem = self._problem(tokens, codes, w, beta_ratio=1.0)
        *_, last = walk(problem, ratios[: self.best_index_ + 1], **self._solver_options())
        self._keep(problem.with_beta(last.beta), last)
        return self

    def _single(self) -> TokenClassifier:
        """Return an unfitted classifier with the same options, for one fold."""
        names = set(TokenClassifier().get_params())
        own = {name: value for name, value in self.get_params(deep=False).items() if name in names}
        return clone(TokenClassifier(**{**own, "verbose": 0}))

    def _record(self, ratios: np.ndarray, scores: np.ndarray, gaps: np.ndarray) -> None:
        mean = scores.mean(0)
        self.beta_ratios_ = ratios
        self.cv_results_ = {
            "beta_ratio": ratios,
            "mean_test_score": mean,
            "std_test_score": scores.std(0),
            "max_relative_gap": gaps.max(0),
            **{f"split{k}_test_score": row for k, row in enumerate(scores)},
        }
        self.best_index_ = int(np.argmax(mean))  # the first, and so the sparsest, on ties
        self.best_score_ = float(mean[self.best_index_])
        self.beta_ratio_ = float(ratios[self.best_index_])


def _fold(
    estimator: TokenClassifier,
    tokens: TokenDataset,
    labels: np.ndarray,
    w: np.ndarray | None,
    train: np.ndarray,
    test: np.ndarray,
    ratios: np.ndarray,
    scoring: Any,
) -> tuple[list[float], list[float]]:
    """Walk the path on one fold; return the score and the certified relative gap at each beta."""
    part = None if w is None else w[train]
    inside, codes, weights = estimator._read_training(tokens.select(train), labels[train], part, None)
    estimator._learn_scale(inside, weights)
    problem = estimator._problem(inside, codes, weights, beta_ratio=1.0)
    scorer = check_scoring(estimator, scoring=scoring)
    outside = tokens.select(test)
    scores, gaps = [], []
    for solution in walk(problem, ratios, **estimator._solver_options()):
        estimator._keep(problem.with_beta(solution.beta), solution)
        scores.append(float(scorer(estimator, outside, labels[test])))
        gaps.append(solution.certificate.relative_gap)
    return scores, gaps

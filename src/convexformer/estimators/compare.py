"""Heads and scikit-learn's probes on the same folds, in one table."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.model_selection import GridSearchCV, KFold, StratifiedKFold
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.multiclass import type_of_target

from convexformer.data import TokenDataset
from convexformer.estimators.leaderboard import Entry, Leaderboard
from convexformer.estimators.search import CrossValidated, TokenClassifierCV, TokenRegressorCV
from convexformer.features import Flatten, MeanPooling, TokenFeature
from convexformer.heads.base import Head

STRENGTHS = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)  # C of a logistic regression, 1 / alpha of a ridge, on standardised features
BASELINES = {"mean token": MeanPooling(), "flattened tokens": Flatten()}


def compare(
    X: Any,
    y: Any,
    heads: Sequence[str | Head] | None = None,
    baselines: bool = True,
    *,
    mask: Any = None,
    cv: int = 5,
    n_jobs: int | None = None,
    random_state: int = 0,
    **options: Any,
) -> Leaderboard:
    """Cross-validate heads, and scikit-learn's probes beside them, on the same folds; return the leaderboard.

    Parameters
    ----------
    X, y, mask
        Tokens, targets and the mask of real tokens, as :class:`TokenClassifierCV` takes them; real targets are regressed.
    heads : list of names or heads, optional
        ``["auto", "linear"]`` by default. Each chooses its beta by cross-validation.
    baselines : bool
        Whether to add logistic regressions (ridges, for real targets) on the mean token and on the flattened tokens, their
        strength out of five by the same folds. Nothing is certified about them.
    cv, n_jobs, random_state
        The number of folds, shuffled with this seed and stratified for classes; processes.
    **options
        Further options of :class:`TokenClassifierCV`.
    """
    tokens = TokenDataset.of(X, mask)
    targets = np.asarray(y)
    classes = type_of_target(targets) in ("binary", "multiclass")
    folds = (StratifiedKFold if classes else KFold)(cv, shuffle=True, random_state=random_state)
    estimator: type[CrossValidated] = TokenClassifierCV if classes else TokenRegressorCV
    entries: list[Entry] = []
    for head in ("auto", "linear") if heads is None else heads:
        found: Any = estimator(head=head, cv=folds, n_jobs=n_jobs, random_state=random_state, **options)
        entries.extend(found.fit(tokens, targets).leaderboard_)
    if baselines:
        entries.extend(probe.entry for probe in fit_probes(tokens, targets, folds, n_jobs))
    return Leaderboard(entries)


@final
@dataclass(frozen=True)
class Probe:
    """A fitted baseline of scikit-learn, what it reads of the tokens, and its row of a leaderboard."""

    search: GridSearchCV
    feature: TokenFeature
    entry: Entry

    def score(self, tokens: TokenDataset, targets: np.ndarray) -> float:
        """Return accuracy or R^2 on other tokens."""
        return float(self.search.score(self.feature.raw(tokens).cpu().numpy(), targets))


def fit_probes(tokens: TokenDataset, targets: np.ndarray, folds: Any, n_jobs: int | None = None) -> Iterator[Probe]:
    """Fit logistic regressions (ridges, for real targets) on the mean token and on the flattened tokens."""
    classes = type_of_target(targets) in ("binary", "multiclass")
    probe = LogisticRegression(max_iter=300) if classes else Ridge()
    name = "logisticregression__C" if classes else "ridge__alpha"
    values = STRENGTHS if classes else tuple(1 / s for s in STRENGTHS)
    for reads, feature in BASELINES.items():
        began = time.perf_counter()
        features = feature.raw(tokens).cpu().numpy()
        pipeline = make_pipeline(StandardScaler(), probe)
        search = GridSearchCV(pipeline, {name: list(values)}, cv=folds, n_jobs=n_jobs).fit(features, targets)
        at, seconds = search.best_index_, time.perf_counter() - began
        entry = Entry(
            name=f"scikit-learn {type(probe).__name__}",
            score=float(search.best_score_),
            spread=float(search.cv_results_["std_test_score"][at]),
            seconds=seconds,
            gap=None,
            reads=reads,
            setting=f"{name.split('__')[1]} {search.best_params_[name]:g}",
        )
        yield Probe(search, feature, entry)

"""Rows of the leaderboard and the path of betas: read where the model or the run folder has them, else computed."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from sklearn.base import clone, is_classifier
from sklearn.exceptions import ConvergenceWarning
from sklearn.model_selection import check_cv

from convexformer.data import TokenDataset
from convexformer.estimators import Leaderboard, TokenEstimator
from convexformer.estimators.compare import fit_probes
from convexformer.estimators.search import CrossValidated
from convexformer.heads.combined import Sum
from convexformer.path import follow, total_clock
from convexformer.report.evidence import BetaPath, Evidence, Measured

PATH_TOLERANCE = (
    1e-3  # relative gap of the fits along a path that is computed for the page, unless the model's is larger
)
OTHER_DATA = 0.01  # relative difference of beta_max above which training data is not the model's


@final
@dataclass(frozen=True)
class Training:
    """Training data, for what a fitted model alone cannot tell: baselines, and other betas."""

    X: Any
    y: Any
    mask: Any = None
    weight: Any = None


def beta_ratio(model: TokenEstimator) -> float:
    """Return ``beta / beta_max`` of the fit."""
    return model.beta_ / model.beta_max_ if model.beta_max_ > 0 else 1.0


def own_row(evidence: Evidence) -> Measured:
    """Return the row of the model itself."""
    model, head = evidence.model, evidence.model.solution_.head
    searched = isinstance(model, CrossValidated)
    return Measured(
        name=model.head if isinstance(model.head, str) else head.label(),
        reads=f"{len(head.heads)} maps of the tokens" if isinstance(head, Sum) else "tokens",
        setting=f"beta {beta_ratio(model):.2g} of beta_max",
        cv_score=model.best_score_ if searched else None,
        spread=float(model.cv_results_["std_test_score"][model.best_index_]) if searched else None,
        test_score=evidence.score,
        seconds=getattr(model, "search_seconds_", model.solution_.seconds),
        gap=model.certificate_.relative_gap if model.certificate_.kind != "none" else None,
        ours=True,
    )


def board_rows(board: Leaderboard, own: Measured) -> Iterator[Measured]:
    """Return the rows of a leaderboard without that of the model itself."""
    for entry in board:
        if entry.name != own.name or entry.score != own.cv_score:
            yield Measured(
                entry.name, entry.reads, entry.setting, entry.score, entry.spread, None, entry.seconds, entry.gap
            )


def probe_rows(evidence: Evidence, training: Training) -> Iterator[Measured]:
    """Fit scikit-learn's probes on the training data and score them on the test data."""
    tokens = TokenDataset.of(training.X, training.mask, token_shape=evidence.model.token_shape)
    targets = np.asarray(training.y)
    # the folds of the model's own search, where a number gave them: only then do their scores compare
    cv = getattr(evidence.model, "cv", 5)
    same = isinstance(cv, int) and fold_name(evidence.model) == test_name(evidence.model)
    splitter = check_cv(cv if isinstance(cv, int) else 5, targets, classifier=is_classifier(evidence.model))
    folds = list(splitter.split(np.zeros(len(targets)), targets))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        for probe in fit_probes(tokens, targets, folds):
            score = None
            if evidence.tokens is not None and evidence.y is not None and evidence.tokens.n_tokens == tokens.n_tokens:
                score = probe.score(evidence.tokens, evidence.y)
            entry = probe.entry
            mean, spread = (entry.score, entry.spread) if same else (None, None)
            yield Measured(entry.name, entry.reads, entry.setting, mean, spread, score, entry.seconds, entry.gap)


# ---------------------------------------------------------------------- paths of betas


def computed_path(evidence: Evidence, training: Training, n_betas: int, seconds: float) -> BetaPath:
    """Fit the model's head at other betas, from ``beta_max`` down past its own, and score each on the test data."""
    model = evidence.model
    single: Any = model.single() if isinstance(model, CrossValidated) else clone(model).set_params(verbose=0)
    clock = total_clock(seconds)
    tokens, codes, w = single._read_training(training.X, training.y, training.weight, training.mask)
    tokens = tokens.to(dtype=model.solution_.weights.form.dtype)
    single._learn_scale(tokens, w)
    problem = single._problem(tokens, codes, w, beta_ratio=1.0)
    if not abs(problem.beta_max - model.beta_max_) <= OTHER_DATA * model.beta_max_:
        raise ValueError(
            f"X_train has beta_max={problem.beta_max:.6g}; the model was fitted with beta_max={model.beta_max_:.6g}. "
            "Pass the data (and sample weights) of the fit, or leave X_train out."
        )
    ratios = _ratios(model, n_betas)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        options = {**single._solver_options(), "tolerance": max(model.tolerance, PATH_TOLERANCE)}
        found = follow(problem, ratios, clock=clock, **options)
        scores = None
        if evidence.tokens is not None and evidence.y is not None and evidence.score is not None:
            scores = []
            for solution in found.solutions:
                single._keep(problem.with_beta(solution.beta), solution)
                scores.append(single.score(evidence.tokens, evidence.y))
    ratios = ratios[: len(found)]
    cv_scores, cv_spread = _cv_scores(model, ratios)
    positional = found.solutions[0].token_norms() is not None
    return BetaPath(
        ratios=ratios,
        gaps=np.array(found.relative_gaps),
        source="fitted to the training data for this page",
        norms=found.token_norms.to(torch.float64).numpy() if positional else None,
        cv_scores=cv_scores,
        cv_spread=cv_spread,
        test_scores=None if scores is None else np.array(scores),
        stopped=found.stopped,
    )


def searched_path(model: TokenEstimator) -> BetaPath | None:
    """Return the scores of a cross-validation; None for a model without."""
    if not isinstance(model, CrossValidated):
        return None
    table = {name: np.asarray(values, dtype=np.float64) for name, values in model.cv_results_.items()}
    reached = ~np.isnan(table["mean_test_score"])
    return BetaPath(
        ratios=table["beta_ratio"][reached],
        gaps=table["max_relative_gap"][reached],
        source="the folds of the cross-validation",
        cv_scores=table["mean_test_score"][reached],
        cv_spread=table["std_test_score"][reached],
    )


def saved_path(summary: Mapping[str, Any], model: TokenEstimator) -> BetaPath:
    """Return a path as ``Path.summary()`` has it; raise ValueError where it is another model's or something else."""
    try:
        beta_max = float(summary["beta_max"])
        betas, gaps = (np.array([float(v) for v in summary[name]]) for name in ("betas", "relative_gaps"))
        norms = np.array(summary["token_norms"], dtype=np.float64) if "token_norms" in summary else None
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"this is no path ({type(error).__name__}: {error}); expected cf.path(...), its summary(), or the path.json "
            "that `convexformer path` writes."
        ) from error
    if not abs(beta_max - model.beta_max_) <= OTHER_DATA * model.beta_max_:
        raise ValueError(
            f"the path has beta_max={beta_max:.6g}, the model {model.beta_max_:.6g}: it is of another fit."
        )
    if len(betas) != len(gaps) or not len(betas) or (norms is not None and len(norms) != len(betas)):
        raise ValueError(f"the path has {len(betas)} betas and {len(gaps)} gaps; expected one for each.")
    scores, spread = _cv_scores(model, betas / beta_max)
    return BetaPath(
        betas / beta_max, gaps, "a path solved before", norms, scores, spread, None, str(summary["stopped"])
    )


def _ratios(model: TokenEstimator, n_betas: int) -> np.ndarray:
    """Return the ratios of the search, where there was one; else from 1 down to the model's own, and some way beyond."""
    known = searched_path(model)
    if known is not None:
        return known.ratios
    chosen = min(beta_ratio(model), 0.5)
    beyond = max(1, n_betas // 4)
    step = chosen ** (1 / max(1, n_betas - 1 - beyond))
    return step ** np.arange(n_betas)


def _cv_scores(model: TokenEstimator, ratios: np.ndarray) -> tuple[np.ndarray | None, np.ndarray | None]:
    known = searched_path(model)
    if known is None or known.cv_scores is None or known.cv_spread is None or len(known.ratios) < len(ratios):
        return None, None
    if not np.allclose(known.ratios[: len(ratios)], ratios, rtol=1e-6):
        return None, None
    return known.cv_scores[: len(ratios)], known.cv_spread[: len(ratios)]


def test_name(model: TokenEstimator) -> str:
    """Return what ``model.score`` is, the score on the test data."""
    return "accuracy" if is_classifier(model) else "R²"


def fold_name(model: TokenEstimator) -> str:
    """Return what the folds of a search were scored by."""
    scoring = getattr(model, "scoring", None)
    if isinstance(scoring, str):
        return scoring.replace("_", " ")
    return test_name(model) if scoring is None else "score"

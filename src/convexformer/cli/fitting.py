"""What the commands share around a fit: the estimator of a task, how it is fitted, how that ended."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from convexformer.cli.options import FileData
from convexformer.estimators import (
    TokenClassifier,
    TokenClassifierCV,
    TokenEstimator,
    TokenRegressor,
    TokenRegressorCV,
)
from convexformer.estimators.search import CrossValidated
from convexformer.io import load
from convexformer.solvers.status import Status


def estimator_type(task: str, y: np.ndarray, search: bool = False) -> Callable[..., Any]:
    """Return the estimator of a task, which ``auto`` reads off the targets; with ``search`` the one that chooses beta."""
    if task == "auto":
        task = "regress" if y.dtype.kind == "f" else "classify"
    if task not in ("classify", "regress"):
        raise ValueError(f"unknown task {task!r}; expected auto, classify or regress.")
    if search:
        return TokenClassifierCV if task == "classify" else TokenRegressorCV
    return TokenClassifier if task == "classify" else TokenRegressor


def load_estimator(folder: Path) -> TokenEstimator:
    """Read a model folder that holds a fitted estimator."""
    model = load(folder)
    if not isinstance(model, TokenEstimator):
        raise ValueError(f"{folder} holds a {type(model).__name__}; expected a model written by `convexformer fit`.")
    return model


def fit_estimator(estimator: TokenEstimator, data: FileData, checkpoint: Path | None) -> None:
    """Fit; Ctrl-C ends the fit with the best point so far, if there is one."""
    if isinstance(estimator, CrossValidated):
        if checkpoint is not None:
            raise ValueError(
                "head auto chooses beta by cross-validation, which has no checkpoints; give --beta-ratio as well."
            )
        estimator._choose_and_fit(data.X, data.y, data.weight, data.mask, None)
        return
    try:
        estimator.fit_checkpointed(data.X, data.y, data.weight, data.mask, checkpoint=checkpoint)
    except KeyboardInterrupt:
        if not hasattr(estimator, "solution_"):
            raise


def status(status: Status, checkpoint: Path | None) -> str:
    """Say how the fit ended; after an interruption, how to continue on the command line."""
    if status is not Status.INTERRUPTED:
        return str(status)
    how = (
        "the same command resumes from it" if checkpoint else "with --checkpoint the same command would resume from it"
    )
    return f"interrupted; this is the best point so far, {how}"


def train_score(estimator: Any, data: FileData) -> float | None:
    """Return the score on the training data; targets per token have none."""
    if np.ndim(data.y) > 2:
        return None
    return estimator.score(data.X, data.y, sample_weight=data.weight, mask=data.mask)

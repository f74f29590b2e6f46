"""Estimators for the commands: which one the targets ask for, fitting, loading, and keeping what is there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from convexformer.cli.options import FileData

if TYPE_CHECKING:
    from convexformer.estimators import TokenEstimator
    from convexformer.solvers.status import Status


def estimator_type(task: str, y: Any, search: bool = False) -> Callable[..., Any]:
    """Return the class of the estimator; ``search`` chooses beta by cross-validation."""
    from convexformer import estimators

    if task == "auto":
        task = "regress" if y.dtype.kind == "f" else "classify"
    if task not in ("classify", "regress"):
        raise ValueError(f"unknown task {task!r}; expected auto, classify or regress.")
    if search:
        return estimators.TokenClassifierCV if task == "classify" else estimators.TokenRegressorCV
    return estimators.TokenClassifier if task == "classify" else estimators.TokenRegressor


def load_estimator(folder: Path) -> TokenEstimator:
    """Load a fitted model."""
    from convexformer.estimators import TokenEstimator
    from convexformer.io import load

    model = load(folder)
    if not isinstance(model, TokenEstimator):
        raise ValueError(f"{folder} holds a {type(model).__name__}; expected a model written by `convexformer fit`.")
    return model


def keep_existing(output: Path, name: str, force: bool, resumes: bool = False) -> None:
    """Raise if a folder holds results already, unless the user said so or the run goes on from its own checkpoint."""
    if output.exists() and not output.is_dir():
        raise ValueError(f"{output} is a file; expected a folder to write to.")
    if (output / name).exists() and not (force or resumes):
        raise ValueError(f"{output} holds results already ({name}); choose another folder, or overwrite with --force.")


def fit_model(estimator: TokenEstimator, data: FileData, checkpoint: Path | None) -> None:
    """Fit; Ctrl-C ends the fit with the best point so far, if there is one."""
    from convexformer.estimators.search import CrossValidated

    if isinstance(estimator, CrossValidated):
        if checkpoint is not None:
            raise ValueError(
                "head auto chooses beta by cross-validation, without checkpoints; give --beta-ratio as well."
            )
        estimator._choose_and_fit(data.X, data.y, data.weight, data.mask, None)
        return
    try:
        estimator.fit_checkpointed(data.X, data.y, data.weight, data.mask, checkpoint=checkpoint)
    except KeyboardInterrupt:
        if not hasattr(estimator, "solution_"):
            raise


def fit_status(status: Status, checkpoint: Path | None) -> str:
    """Say how the fit ended; after an interruption, how to continue on the command line."""
    if status.name != "INTERRUPTED":
        return str(status)
    how = (
        "the same command resumes from it" if checkpoint else "with --checkpoint the same command would resume from it"
    )
    return f"interrupted; this is the best point so far, {how}"

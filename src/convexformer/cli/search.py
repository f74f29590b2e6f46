"""``convexformer cv``: beta by cross-validation."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Annotated

import typer

from convexformer.cli.heads import BlocksOption, GridOption, HeadChoice, HeadOptionOption, WindowOption
from convexformer.cli.models import estimator_type, keep_existing
from convexformer.cli.options import (
    ActivationOption,
    DecayOption,
    DeviceOption,
    FileData,
    ForceOption,
    GatesOption,
    HeadOption,
    InterceptOption,
    JsonOption,
    LossOption,
    MaskOption,
    MaxIterOption,
    MaxTimeOption,
    SeedOption,
    SolverOption,
    StandardizeOption,
    TargetsOption,
    TaskOption,
    TokensArgument,
    ToleranceOption,
    TotalTimeOption,
    WeightOption,
    XOption,
    YOption,
)
from convexformer.cli.output import Exit, certificate_rows, out, show, user_errors


def cv(
    tokens: TokensArgument,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder to write the model to.")],
    targets: TargetsOption = None,
    x: XOption = "X",
    y: YOption = "y",
    mask: MaskOption = None,
    weight: WeightOption = None,
    groups: Annotated[
        str | None, typer.Option(help="Name of an array (N,): samples of one group stay in one fold.")
    ] = None,
    folds: Annotated[int, typer.Option(help="Number of folds.")] = 5,
    scoring: Annotated[
        str | None, typer.Option(help="A score of scikit-learn by name; default accuracy or R^2.")
    ] = None,
    selection: Annotated[
        str, typer.Option(help="best, or 1se: the sparsest within one standard error of it.")
    ] = "best",
    n_betas: Annotated[int, typer.Option(help="How many betas, from beta_max down, evenly in logarithm.")] = 20,
    beta_min_ratio: Annotated[float, typer.Option(help="The smallest beta, as a fraction of beta_max.")] = 1e-3,
    n_jobs: Annotated[int | None, typer.Option(help="Folds at a time; -1 takes all cores.")] = None,
    task: TaskOption = "auto",
    head: HeadOption = "attention",
    activation: ActivationOption = "linear",
    decay: DecayOption = "l1",
    gates: GatesOption = 16,
    grid: GridOption = None,
    window: WindowOption = None,
    blocks: BlocksOption = None,
    head_option: HeadOptionOption = None,
    tolerance: ToleranceOption = 1e-3,
    loss: LossOption = "auto",
    max_iter: MaxIterOption = None,
    max_time: MaxTimeOption = None,
    total_time: TotalTimeOption = None,
    solver: SolverOption = "auto",
    standardize: StandardizeOption = True,
    intercept: InterceptOption = True,
    device: DeviceOption = "auto",
    seed: SeedOption = 0,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Choose beta by cross-validation, fit all samples with it, and write the model folder.

    Example: [bold]convexformer cv train.npz --head attention --folds 5 --output model[/]
    """
    with user_errors():
        from sklearn.exceptions import ConvergenceWarning
        from sklearn.model_selection import GroupKFold

        from convexformer.io import save

        keep_existing(output, "config.json", force)
        data = FileData.read(tokens, targets, x, y, mask, weight, groups)
        chosen = HeadChoice(head, activation, decay, gates, grid, window, blocks, head_option)
        estimator = estimator_type(task, data.y, search=True)(
            **chosen.parameters(seed),
            n_betas=n_betas,
            beta_min_ratio=beta_min_ratio,
            cv=folds if data.groups is None else GroupKFold(folds),
            scoring=scoring,
            selection=selection,
            n_jobs=n_jobs,
            tolerance=tolerance,
            loss=loss,
            max_iter=max_iter,
            max_time=max_time,
            total_time=total_time,
            solver=solver,
            standardize=standardize,
            fit_intercept=intercept,
            device=device,
            verbose=int(not as_json and out.is_terminal),
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # the exit code and the table say so
            estimator.fit(data.X, data.y, sample_weight=data.weight, mask=data.mask, groups=data.groups)
        estimator.data_fingerprint_ = data.fingerprint()
        save(estimator, output)
    certified = estimator.certificate_.meets(tolerance)
    show(
        {
            "model": str(output),
            "task": "classify" if hasattr(estimator, "classes_") else "regress",
            "head": head,
            "score": float(estimator.best_score_),
            "beta": estimator.beta_,
            "beta_ratio": float(estimator.beta_ratio_),
            "beta_max": estimator.beta_max_,
            "seconds": round(float(estimator.search_seconds_), 3),
            **certificate_rows(estimator.certificate_, tolerance),
        },
        as_json,
        "cross-validated",
    )
    raise typer.Exit(Exit.DONE if certified else Exit.NOT_CERTIFIED)

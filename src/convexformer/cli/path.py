"""``convexformer path``: a head at a whole range of betas."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Annotated, Any

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
from convexformer.cli.output import Exit, out, show, user_errors


def path(
    tokens: TokensArgument,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for path.json and path.png.")],
    targets: TargetsOption = None,
    x: XOption = "X",
    y: YOption = "y",
    mask: MaskOption = None,
    weight: WeightOption = None,
    n_betas: Annotated[int, typer.Option(help="How many betas, from beta_max down, evenly in logarithm.")] = 20,
    beta_min_ratio: Annotated[float, typer.Option(help="The smallest beta, as a fraction of beta_max.")] = 1e-3,
    stop_early: Annotated[bool, typer.Option("--stop-early", help="End where the fit is saturated.")] = False,
    checkpoint: Annotated[Path | None, typer.Option(help="Folder to resume from after an interruption.")] = None,
    task: TaskOption = "auto",
    head: HeadOption = "attention",
    activation: ActivationOption = "linear",
    decay: DecayOption = "l1",
    gates: GatesOption = 16,
    grid: GridOption = None,
    window: WindowOption = None,
    blocks: BlocksOption = None,
    head_option: HeadOptionOption = None,
    tolerance: ToleranceOption = 1e-4,
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
    """Fit a head at a whole range of betas; draw which tokens enter and the certified gap along the way.

    --max-iter and --max-time are for each beta, --total-time is for all of them with what comes before.

    Example: [bold]convexformer path train.npz --n-betas 20 --beta-min-ratio 0.01 --output path[/]
    """
    with user_errors():
        from sklearn.exceptions import ConvergenceWarning

        from convexformer.data.files import write_json
        from convexformer.path import beta_ratios, follow, total_clock

        clock = total_clock(total_time)
        keep_existing(output, "path.json", force, resumes=checkpoint is not None and checkpoint.exists())
        data = FileData.read(tokens, targets, x, y, mask, weight)
        chosen = HeadChoice(head, activation, decay, gates, grid, window, blocks, head_option)
        estimator = estimator_type(task, data.y)(
            **chosen.parameters(seed),
            loss=loss,
            device=device,
            standardize=standardize,
            fit_intercept=intercept,
        )
        problem = estimator.path_problem(data.X, data.y, data.weight, data.mask)
        ratios = beta_ratios(n_betas, beta_min_ratio)
        options: dict[str, Any] = {"tolerance": tolerance, "max_iter": max_iter, "max_time": max_time, "solver": solver}
        options.update(checkpoint=checkpoint, clock=clock)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # the exit code and the table say so
            found = follow(problem, ratios, stop_early=stop_early, progress=not as_json and out.is_terminal, **options)
        output.mkdir(parents=True, exist_ok=True)
        found.plot().savefig(output / "path.png", dpi=150)
        write_json(output / "path.json", found.summary())
    certified = all(solution.certificate.meets(tolerance) for solution in found.solutions)
    brief = {"betas": len(found), "beta_max": found.beta_max, "stopped": found.stopped or None, "tolerance": tolerance}
    worst = {"worst_relative_gap": max(found.relative_gaps), "certified": certified}
    show({"written": str(output), **(found.summary() if as_json else brief), **worst}, as_json, "path")
    raise typer.Exit(Exit.DONE if certified else Exit.NOT_CERTIFIED)

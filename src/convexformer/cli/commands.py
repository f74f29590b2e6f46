"""The commands. Exit codes: 0 done and certified, 2 bad input, 3 not certified to the tolerance, 1 an internal error.

Ctrl-C in ``fit`` and ``path`` writes the best model, or the part of the path, so far; the exit code is 3 unless that is
certified. ``--json`` prints strict JSON: infinity and NaN are the strings "inf", "-inf" and "nan".
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from sklearn.exceptions import ConvergenceWarning

from convexformer import __version__
from convexformer.cli.embed import embed
from convexformer.cli.fitting import estimator_type, fit_estimator, load_estimator, status, train_score
from convexformer.cli.options import (
    ActivationOption,
    DecayOption,
    DeviceOption,
    FileData,
    GatesOption,
    HeadOption,
    InterceptOption,
    JsonOption,
    LossOption,
    MaskOption,
    MaxIterOption,
    MaxTimeOption,
    ModelArgument,
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
from convexformer.cli.output import Exit, certificate_rows, out, print_json, show, user_errors, write_predictions
from convexformer.data.files import write_json
from convexformer.estimators import (
    TokenClassifier,
)
from convexformer.io import save
from convexformer.path import beta_ratios, follow, total_clock

app = typer.Typer(
    name="convexformer",
    help="Attention heads on frozen tokens, trained to a certified global optimum.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


app.command()(embed)


def main() -> None:
    """Run the command line."""
    app()


@app.callback(invoke_without_command=True)
def version(show: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    """Attention heads on frozen tokens, trained to a certified global optimum."""
    if show:
        out.print(__version__)
        raise typer.Exit


@app.command()
def demo(
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the figures.")] = Path("demo_output"),
    as_json: JsonOption = False,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer samples and betas: under a minute.")] = False,
) -> None:
    """Fit certified heads on handwritten digits and compare with everyday tools.

    Example: [bold]convexformer demo --output demo_output[/]
    """
    from convexformer.experiments.demo import run

    with user_errors():
        result = run(output, quick=quick, console=Console(stderr=True) if as_json else out)
    if as_json:
        print_json(result)
    raise typer.Exit(Exit.DONE if result["certified"] else Exit.NOT_CERTIFIED)


@app.command()
def experiment(
    name: Annotated[str | None, typer.Argument(help="Which experiment; leave out for the list.")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder to write to; default runs/NAME.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Smaller and shorter: under two minutes.")] = False,
    preset: Annotated[
        str | None, typer.Option(help="tuned, paper, report or all, where an experiment has them.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Run an experiment of the papers: figures, summary.md, results.json and the exact config.json.

    Example: [bold]convexformer experiment implicit-bias --quick --output runs/implicit-bias[/]
    """
    from convexformer.experiments.registry import EXPERIMENTS, experiment_of

    if name is None:
        show({key: entry.help for key, entry in EXPERIMENTS.items()}, as_json, "experiments")
        return
    with user_errors():
        entry = experiment_of(name)
        folder = output or Path("runs") / name
        result = entry.load()(
            folder, quick=quick, console=Console(stderr=True) if as_json else out, **entry.options(preset)
        )
    if as_json:
        print_json(result)
    raise typer.Exit(Exit.DONE if result["certified"] else Exit.NOT_CERTIFIED)


@app.command()
def fit(
    tokens: TokensArgument,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder to write the model to.")],
    targets: TargetsOption = None,
    x: XOption = "X",
    y: YOption = "y",
    mask: MaskOption = None,
    weight: WeightOption = None,
    task: TaskOption = "auto",
    head: HeadOption = "attention",
    activation: ActivationOption = "linear",
    decay: DecayOption = "l1",
    gates: GatesOption = 16,
    beta: Annotated[float | None, typer.Option(help="Penalty, absolute; overrides --beta-ratio.")] = None,
    beta_ratio: Annotated[
        float | None,
        typer.Option(help="Penalty as a fraction of beta_max, default 0.1; of head auto by cross-validation."),
    ] = None,
    tolerance: ToleranceOption = 1e-4,
    loss: LossOption = "auto",
    max_iter: MaxIterOption = None,
    max_time: MaxTimeOption = None,
    solver: SolverOption = "auto",
    checkpoint: Annotated[Path | None, typer.Option(help="File to resume from after an interruption.")] = None,
    standardize: StandardizeOption = True,
    intercept: InterceptOption = True,
    device: DeviceOption = "auto",
    seed: SeedOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Fit a head to tokens and write the model folder.

    Example: [bold]convexformer fit train.npz --head attention --beta-ratio 0.05 --output model[/]
    """
    with user_errors():
        data = FileData.read(tokens, targets, x, y, mask, weight)
        search = head == "auto" and beta is None and beta_ratio is None
        betas = {} if search else {"beta": beta, "beta_ratio": 0.1 if beta_ratio is None else beta_ratio}
        estimator = estimator_type(task, data.y, search)(
            head=head,
            activation=activation,
            decay=decay,
            gates=gates,
            **betas,
            tolerance=tolerance,
            loss=loss,
            max_iter=max_iter,
            max_time=max_time,
            solver=solver,
            standardize=standardize,
            fit_intercept=intercept,
            device=device,
            random_state=seed,
            verbose=int(not as_json and out.is_terminal),
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # the exit code and the table say so
            fit_estimator(estimator, data, checkpoint)
        save(estimator, output)
        score = train_score(estimator, data)
    certified = estimator.certificate_.meets(tolerance)
    solution = estimator.solution_
    show(
        {
            "model": str(output),
            "task": "classify" if isinstance(estimator, TokenClassifier) else "regress",
            "head": head,
            "loss": solution.loss.name,
            "beta": estimator.beta_,
            "beta_max": estimator.beta_max_,
            "validation_score": getattr(estimator, "best_score_", None),
            "train_score": score,
            "iterations": solution.n_iter,
            "seconds": round(solution.seconds, 3),
            "status": status(solution.status, checkpoint),
            **certificate_rows(estimator.certificate_, tolerance),
        },
        as_json,
        "fitted",
    )
    raise typer.Exit(Exit.DONE if certified else Exit.NOT_CERTIFIED)


@app.command()
def predict(
    model: ModelArgument,
    tokens: TokensArgument,
    output: Annotated[Path, typer.Option("--output", "-o", help="npz (predictions, outputs), npy or csv to write.")],
    x: XOption = "X",
    mask: MaskOption = None,
    as_json: JsonOption = False,
) -> None:
    """Predict with a fitted model.

    Example: [bold]convexformer predict model test.npz --output predictions.csv[/]
    """
    with user_errors():
        estimator = load_estimator(model)
        data = FileData.read(tokens, None, x, None, mask, None)
        predictions = estimator.predict(data.X, mask=data.mask)
        outputs = estimator.outputs(data.X, data.mask)
        write_predictions(output, predictions, outputs)
    show({"predictions": str(output), "samples": len(predictions)}, as_json, "predicted")


@app.command()
def certify(
    model: ModelArgument,
    tokens: TokensArgument,
    targets: TargetsOption = None,
    x: XOption = "X",
    y: YOption = "y",
    mask: MaskOption = None,
    weight: WeightOption = None,
    tolerance: Annotated[float | None, typer.Option(help="Default: the tolerance of the fit.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Recompute a model's duality gap from its weights and the training data alone.

    Example: [bold]convexformer certify model train.npz[/]
    """
    with user_errors():
        estimator = load_estimator(model)
        data = FileData.read(tokens, targets, x, y, mask, weight)
        proof = estimator.certify(data.X, data.y, sample_weight=data.weight, mask=data.mask)
        goal = estimator.tolerance if tolerance is None else tolerance
    show({"model": str(model), **certificate_rows(proof, goal)}, as_json, "recomputed")
    raise typer.Exit(Exit.DONE if proof.meets(goal) else Exit.NOT_CERTIFIED)


@app.command()
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
    as_json: JsonOption = False,
) -> None:
    """Fit a head at a whole range of betas; draw which tokens enter and the certified gap along the way.

    --max-iter and --max-time are for each beta, --total-time is for all of them with what comes before.

    Example: [bold]convexformer path train.npz --n-betas 20 --beta-min-ratio 0.01 --output path[/]
    """
    with user_errors():
        clock = total_clock(total_time)
        data = FileData.read(tokens, targets, x, y, mask, weight)
        estimator = estimator_type(task, data.y)(
            head=head,
            activation=activation,
            decay=decay,
            gates=gates,
            loss=loss,
            device=device,
            standardize=standardize,
            fit_intercept=intercept,
            random_state=seed,
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


@app.command()
def bench(
    samples: Annotated[int, typer.Option(help="N, the number of samples.")] = 1000,
    n_tokens: Annotated[int, typer.Option(help="s, the tokens of a sample.")] = 49,
    width: Annotated[int, typer.Option(help="d, the size of a token.")] = 32,
    beta_ratio: Annotated[float, typer.Option(help="Penalty as a fraction of beta_max.")] = 0.1,
    steps: Annotated[int, typer.Option(help="Steps of Adam, for each of three rates.")] = 300,
    as_json: JsonOption = False,
) -> None:
    """Time our solvers against Adam on synthetic tokens, on this machine; `make bench` has the other tools.

    Example: [bold]convexformer bench --samples 2000 --n-tokens 196 --width 64[/]
    """
    from convexformer.experiments.comparison import compare

    with user_errors():
        for name, value in {"samples": samples, "n-tokens": n_tokens, "width": width, "steps": steps}.items():
            if value < 3:
                raise ValueError(f"--{name} {value} was given; expected at least 3.")
        result = compare(samples, n_tokens, width, beta_ratio, steps)
    if as_json:
        print_json(result)
    else:
        table = Table(
            "tool", *(f"seconds to {goal:.0e}" for goal in result["goals"]), "gap at the end", title=result["problem"]
        )
        for row in result["rows"]:
            times = ("never" if t is None else f"{t:.3g}" for t in row["seconds"])
            table.add_row(row["tool"], *times, f"{row['gap']:.1e}")
        out.print(table)
    raise typer.Exit(Exit.DONE if result["certified"] else Exit.NOT_CERTIFIED)

"""The commands. Exit codes: 0 done and certified, 2 bad input, 3 not certified to the tolerance, 1 an internal error.

``experiment`` ends with 4 when it is done and certified but could not test some claims in its mode, as ``--quick``.

Ctrl-C ends a command with 130, but ``fit`` and ``path`` write the best model, or the part of the path, so far; the exit code
is then 3 unless that is certified. ``--json`` prints strict JSON: infinity and NaN are the strings "inf", "-inf" and "nan".
Nothing heavy is imported before a command runs, so that help need not wait for it.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from convexformer import __version__
from convexformer.cli.bench import bench
from convexformer.cli.embed import embed
from convexformer.cli.export import export
from convexformer.cli.heads import BlocksOption, GridOption, HeadChoice, HeadOptionOption, WindowOption
from convexformer.cli.interrupt import answered
from convexformer.cli.models import estimator_type, fit_model, fit_status, keep_existing, load_estimator
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
    ModelArgument,
    SeedOption,
    SolverOption,
    StandardizeOption,
    TargetsOption,
    TaskOption,
    TokensArgument,
    ToleranceOption,
    WeightOption,
    XOption,
    YOption,
)
from convexformer.cli.output import (
    Exit,
    certificate_rows,
    out,
    print_json,
    show,
    user_errors,
    warn_user,
    write_predictions,
)
from convexformer.cli.path import path
from convexformer.cli.score import score
from convexformer.cli.search import cv

app = typer.Typer(
    name="convexformer",
    help="Attention heads on frozen tokens, trained to a certified global optimum.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """Run the command line."""
    with answered():
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
    quick: Annotated[
        bool, typer.Option("--quick", help="Smaller and shorter: under two minutes (claims: ten).")
    ] = False,
    preset: Annotated[
        str | None, typer.Option(help="tuned, paper, report or all, where an experiment has them; grokking has more.")
    ] = None,
    seeds: Annotated[int | None, typer.Option(help="Models trained of each kind, where an experiment trains.")] = None,
    budget: Annotated[
        int | None, typer.Option(help="Iterations that no model may exceed, where an experiment trains.")
    ] = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Keep each training in OUTPUT/checkpoints, and go on from those that are there."),
    ] = False,
    data: Annotated[str | None, typer.Option(help="File of activations, for student-teacher.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Run an experiment of the papers: figures, summary.md, results.json and the exact config.json.

    Exit codes: 0 done and certified, 2 bad input, 3 not certified, 4 done and certified, but some claims could not be tested
    in this mode or budget (the summary says which and why).

    Example: [bold]convexformer experiment implicit-bias --quick --output runs/implicit-bias[/]
    """
    from convexformer.experiments.registry import EXPERIMENTS, experiment_of

    if name is None:
        show({key: entry.help for key, entry in EXPERIMENTS.items()}, as_json, "experiments")
        return
    with user_errors():
        entry = experiment_of(name)
        folder = output or Path("runs") / name
        options = entry.options(preset, data, seeds, budget, resume)
        result = entry.load()(folder, quick=quick, console=Console(stderr=True) if as_json else out, **options)
    if as_json:
        print_json(result)
    if not result["certified"]:
        raise typer.Exit(Exit.NOT_CERTIFIED)
    raise typer.Exit(Exit.UNTESTED if result.get("untested", 0) else Exit.DONE)


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
    grid: GridOption = None,
    window: WindowOption = None,
    blocks: BlocksOption = None,
    head_option: HeadOptionOption = None,
    beta: Annotated[float | None, typer.Option(help="Penalty, absolute; overrides --beta-ratio.")] = None,
    beta_ratio: Annotated[
        float | None,
        typer.Option(help="Penalty as a fraction of beta_max, default 0.1; of head auto by cross-validation."),
    ] = None,
    tolerance: ToleranceOption = 1e-3,
    loss: LossOption = "auto",
    max_iter: MaxIterOption = None,
    max_time: MaxTimeOption = None,
    solver: SolverOption = "auto",
    checkpoint: Annotated[Path | None, typer.Option(help="File to resume from after an interruption.")] = None,
    standardize: StandardizeOption = True,
    intercept: InterceptOption = True,
    device: DeviceOption = "auto",
    seed: SeedOption = 0,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Fit a head to tokens and write the model folder.

    Example: [bold]convexformer fit train.npz --head attention --beta-ratio 0.05 --output model[/]
    """
    with user_errors():
        from sklearn.exceptions import ConvergenceWarning

        from convexformer.io import save

        keep_existing(output, "config.json", force, resumes=checkpoint is not None and checkpoint.exists())
        data = FileData.read(tokens, targets, x, y, mask, weight)
        chosen = HeadChoice(head, activation, decay, gates, grid, window, blocks, head_option)
        search = head == "auto" and beta is None and beta_ratio is None
        betas = {} if search else {"beta": beta, "beta_ratio": 0.1 if beta_ratio is None else beta_ratio}
        estimator = estimator_type(task, data.y, search)(
            **chosen.parameters(seed),
            **betas,
            tolerance=tolerance,
            loss=loss,
            max_iter=max_iter,
            max_time=max_time,
            solver=solver,
            standardize=standardize,
            fit_intercept=intercept,
            device=device,
            verbose=int(not as_json and out.is_terminal),
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # the exit code and the table say so
            fit_model(estimator, data, checkpoint)
        estimator.data_fingerprint_ = data.fingerprint()
        save(estimator, output)
        train_score = _train_score(estimator, data)
    certified = estimator.certificate_.meets(tolerance)
    solution = estimator.solution_
    show(
        {
            "model": str(output),
            "task": "classify" if hasattr(estimator, "classes_") else "regress",
            "head": head,
            "loss": solution.loss.name,
            "beta": estimator.beta_,
            "beta_max": estimator.beta_max_,
            "validation_score": getattr(estimator, "best_score_", None),
            "train_score": train_score,
            "iterations": solution.n_iter,
            "seconds": round(solution.seconds, 3),
            "status": fit_status(solution.status, checkpoint),
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
    output: Annotated[
        Path,
        typer.Option("--output", "-o", help="npz, csv or tsv (labels and probabilities), or npy (labels) to write."),
    ],
    x: XOption = "X",
    mask: MaskOption = None,
    as_json: JsonOption = False,
) -> None:
    """Predict with a fitted model.

    Example: [bold]convexformer predict model test.npz --output predictions.csv[/]
    """
    with user_errors():
        estimator: Any = load_estimator(model)
        data = FileData.read(tokens, None, x, None, mask, None)
        predictions = estimator.predict(data.X, mask=data.mask)
        found = {"predictions": predictions, "outputs": estimator.outputs(data.X, data.mask)}
        if hasattr(estimator, "predict_proba"):
            found.update(probabilities=estimator.predict_proba(data.X, data.mask), classes=estimator.classes_)
        write_predictions(output, found)
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
        estimator: Any = load_estimator(model)
        data = FileData.read(tokens, targets, x, y, mask, weight)
        proof = estimator.certify(data.X, data.y, sample_weight=data.weight, mask=data.mask)
        goal = estimator.tolerance if tolerance is None else tolerance
        fitted_to = getattr(estimator, "data_fingerprint_", None)
        same = None if fitted_to is None else data.fingerprint() == fitted_to
    if same is False:
        warn_user(
            "this is not the data of the fit (the fingerprints differ): the certificate says how far the model is from the "
            "optimum on these tokens, targets, mask and weights, which it was not fitted to."
        )
    show({"model": str(model), "data_of_the_fit": same, **certificate_rows(proof, goal)}, as_json, "recomputed")
    raise typer.Exit(Exit.DONE if proof.meets(goal) else Exit.NOT_CERTIFIED)


for command in (embed, path, score, cv, export, bench):
    app.command()(command)


def _train_score(estimator: Any, data: FileData) -> float | None:
    """Return the score on the training data; targets per token have none."""
    if data.y is None or data.y.ndim > 2:
        return None
    return estimator.score(data.X, data.y, sample_weight=data.weight, mask=data.mask)

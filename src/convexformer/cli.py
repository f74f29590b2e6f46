"""The command line. Exit codes: 0 done and certified, 2 bad input, 3 not certified to the tolerance."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table
from sklearn.exceptions import ConvergenceWarning

from convexformer import __version__
from convexformer.certificates import Certificate
from convexformer.data import TokenDataset
from convexformer.data.files import pick_array, read_arrays
from convexformer.estimators import TokenClassifier, TokenEstimator, TokenRegressor
from convexformer.io import load, save

app = typer.Typer(
    name="convexformer",
    help="Attention heads on frozen tokens, trained to a certified global optimum.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
out, err = Console(), Console(stderr=True)


class Exit(IntEnum):
    """What a script can rely on."""

    DONE = 0
    BAD_INPUT = 2
    NOT_CERTIFIED = 3


TokensArgument = Annotated[Path, typer.Argument(help="Tokens: npz, npy or safetensors, an array (N, s, d) or (N, p).")]
TargetsOption = Annotated[Path | None, typer.Option("--targets", help="A file for the targets, if not in TOKENS.")]
XOption = Annotated[str, typer.Option("--x", help="Name of the tokens array.")]
YOption = Annotated[str, typer.Option("--y", help="Name of the targets array.")]
MaskOption = Annotated[str | None, typer.Option("--mask", help="Name of the mask array (N, s), 1 = real token.")]
WeightOption = Annotated[str | None, typer.Option("--weight", help="Name of the sample weights array (N,).")]
ModelArgument = Annotated[Path, typer.Argument(help="A model folder written by `convexformer fit`.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]


def main() -> None:
    """Run the command line."""
    app()


@app.callback(invoke_without_command=True)
def version(show: Annotated[bool, typer.Option("--version", help="Print the version and leave.")] = False) -> None:
    """Attention heads on frozen tokens, trained to a certified global optimum."""
    if show:
        out.print(__version__)
        raise typer.Exit


@app.command()
def demo(
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the figures.")] = Path("demo_output"),
    as_json: JsonOption = False,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer samples and betas: a few seconds.")] = False,
) -> None:
    """Fit certified heads on handwritten digits and compare with everyday tools.

    Example: [bold]convexformer demo --output demo_output[/]
    """
    from convexformer.experiments.demo import run

    with _user_errors():
        result = run(output, quick=quick, console=Console(stderr=True) if as_json else out)
    if as_json:
        print(json.dumps(result, indent=2))
    raise typer.Exit(Exit.DONE if result["certified"] else Exit.NOT_CERTIFIED)


@app.command()
def experiment(
    name: Annotated[str | None, typer.Argument(help="Which experiment; leave out for the list.")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder to write to; default runs/NAME.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Smaller and shorter: under two minutes.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Run an experiment of the papers: figures, summary.md, results.json and the exact config.json.

    Example: [bold]convexformer experiment implicit-bias --quick --output runs/implicit-bias[/]
    """
    from convexformer.experiments.registry import EXPERIMENTS, experiment_of

    if name is None:
        _show({key: entry.help for key, entry in EXPERIMENTS.items()}, as_json, "experiments")
        return
    with _user_errors():
        run = experiment_of(name).load()
        folder = output or Path("runs") / name
        result = run(folder, quick=quick, console=Console(stderr=True) if as_json else out)
    if as_json:
        print(json.dumps(result, indent=2))
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
    task: Annotated[str, typer.Option(help="auto (by the targets), classify or regress.")] = "auto",
    head: Annotated[
        str, typer.Option(help="attention, self_attention, mlp_mixer, fno, mlp, linear, ...")
    ] = "attention",
    activation: Annotated[str, typer.Option(help="linear or gated_relu.")] = "linear",
    decay: Annotated[str, typer.Option(help="Attention only: l1 (sparse heads) or l2 (ordinary weight decay).")] = "l1",
    gates: Annotated[int, typer.Option(help="Number of gates, for gated_relu.")] = 16,
    beta: Annotated[float | None, typer.Option(help="Penalty, absolute; overrides --beta-ratio.")] = None,
    beta_ratio: Annotated[float, typer.Option(help="Penalty as a fraction of beta_max.")] = 0.1,
    tolerance: Annotated[float, typer.Option(help="Relative duality gap to certify.")] = 1e-4,
    loss: Annotated[str, typer.Option(help="auto, or the name of a loss.")] = "auto",
    max_iter: Annotated[int | None, typer.Option(help="Stop after this many iterations.")] = None,
    max_time: Annotated[float | None, typer.Option(help="Stop after this many seconds.")] = None,
    standardize: Annotated[bool, typer.Option(help="Centre and scale each channel.")] = True,
    intercept: Annotated[bool, typer.Option(help="Fit an unpenalised intercept.")] = True,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    seed: Annotated[int, typer.Option(help="Seed of the gates.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Fit a head to tokens and write the model folder.

    Example: [bold]convexformer fit train.npz --head attention --beta-ratio 0.05 --output model[/]
    """
    with _user_errors():
        data = _Data.read(tokens, targets, x, y, mask, weight)
        kind = _estimator_type(task, data.y)
        estimator = kind(
            head=head,
            activation=activation,
            decay=decay,
            gates=gates,
            beta=beta,
            beta_ratio=beta_ratio,
            tolerance=tolerance,
            loss=loss,
            max_iter=max_iter,
            max_time=max_time,
            standardize=standardize,
            fit_intercept=intercept,
            device=device,
            random_state=seed,
            verbose=int(not as_json and out.is_terminal),
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # the exit code and the table say it
            estimator.fit(data.X, data.y, sample_weight=data.weight, mask=data.mask)
        save(estimator, output)
    certified = estimator.certificate_.meets(tolerance)
    solution = estimator.solution_
    _show(
        {
            "model": str(output),
            "head": head,
            "beta": estimator.beta_,
            "beta_max": estimator.beta_max_,
            "train_score": float(estimator.score(TokenDataset.of(data.X, data.mask), data.y)),
            "iterations": solution.n_iter,
            "seconds": round(solution.seconds, 3),
            "status": str(solution.status),
            **_certificate_rows(estimator.certificate_, tolerance),
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
    with _user_errors():
        estimator = _load_estimator(model)
        data = _Data.read(tokens, None, x, None, mask, None)
        predictions = estimator.predict(data.X, mask=data.mask)
        outputs = estimator._outputs(data.X, data.mask)
        _write_predictions(output, predictions, outputs)
    _show({"predictions": str(output), "samples": len(predictions)}, as_json, "predicted")


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
    with _user_errors():
        estimator = _load_estimator(model)
        data = _Data.read(tokens, targets, x, y, mask, weight)
        proof = estimator.certify(data.X, data.y, sample_weight=data.weight, mask=data.mask)
        goal = estimator.tolerance if tolerance is None else tolerance
    _show({"model": str(model), **_certificate_rows(proof, goal)}, as_json, "recomputed")
    raise typer.Exit(Exit.DONE if proof.meets(goal) else Exit.NOT_CERTIFIED)


# ---------------------------------------------------------------------- reading


class _Data:
    """Tokens, targets, mask and weights from one or two files."""

    def __init__(self, X: np.ndarray, y: Any, mask: np.ndarray | None, weight: np.ndarray | None) -> None:
        self.X, self.y, self.mask, self.weight = X, y, mask, weight

    @classmethod
    def read(
        cls, tokens: Path, targets: Path | None, x: str, y: str | None, mask: str | None, weight: str | None
    ) -> _Data:
        arrays = read_arrays(tokens)
        labels = None
        if y is not None and targets is not None:
            labels = pick_array(read_arrays(targets), y, "targets", targets)
        elif y is not None:
            if y not in arrays:
                raise ValueError(
                    f"{tokens} has no array {y!r} for the targets; it holds {', '.join(sorted(arrays))}. "
                    "Name it with --y, or give another file with --targets."
                )
            labels = arrays[y]
        inputs = pick_array(arrays, x, "tokens", tokens)
        own_mask = None if mask is None else _exact(arrays, mask, "mask", tokens)
        own_weight = None if weight is None else _exact(arrays, weight, "weights", tokens)
        return cls(inputs, labels, own_mask, own_weight)


def _exact(arrays: dict[str, np.ndarray], name: str, role: str, source: Path) -> np.ndarray:
    if name not in arrays:
        raise ValueError(f"{source} has no array {name!r} for the {role}; it holds {', '.join(sorted(arrays))}.")
    return arrays[name]


def _estimator_type(task: str, y: np.ndarray) -> Callable[..., Any]:
    if task == "auto":
        task = "regress" if y.dtype.kind == "f" else "classify"
    if task not in ("classify", "regress"):
        raise ValueError(f"unknown task {task!r}; expected auto, classify or regress.")
    return TokenClassifier if task == "classify" else TokenRegressor


def _load_estimator(folder: Path) -> TokenEstimator:
    model = load(folder)
    if not isinstance(model, TokenEstimator):
        raise ValueError(f"{folder} holds a {type(model).__name__}; expected a model written by `convexformer fit`.")
    return model


@contextmanager
def _user_errors() -> Iterator[None]:
    """Bad input ends with one clear line and exit code 2, never a traceback."""
    try:
        yield
    except (ValueError, TypeError, OSError) as error:
        err.print(f"[bold red]error:[/] {error}", highlight=False, soft_wrap=True)
        raise typer.Exit(Exit.BAD_INPUT) from error


# ---------------------------------------------------------------------- writing


def _write_predictions(path: Path, predictions: np.ndarray, outputs: np.ndarray) -> None:
    if path.suffix == ".npz":
        np.savez(path, predictions=predictions, outputs=outputs)
    elif path.suffix == ".npy":
        np.save(path, predictions)
    elif path.suffix == ".csv":
        flat = predictions.reshape(len(predictions), -1)
        names = ["prediction"] if flat.shape[1] == 1 else [f"prediction_{k}" for k in range(flat.shape[1])]
        rows = [",".join(names), *(",".join(str(value) for value in row) for row in flat)]
        path.write_text("\n".join(rows) + "\n")
    else:
        raise ValueError(f"{path} has the suffix {path.suffix!r}; expected .npz, .npy or .csv.")


def _certificate_rows(proof: Certificate, tolerance: float) -> dict[str, Any]:
    return {
        "objective": proof.primal,
        "dual": proof.dual,
        "relative_gap": proof.relative_gap,
        "kind": proof.kind,
        "tolerance": tolerance,
        "certified": proof.meets(tolerance),
    }


def _show(values: dict[str, Any], as_json: bool, title: str) -> None:
    if as_json:
        json.dump(values, sys.stdout, indent=2)
        print()
        return
    table = Table(title=title, show_header=False)
    for name, value in values.items():
        if value is None:
            continue
        if isinstance(value, bool):
            text = "[green]yes[/]" if value else "[red]no[/]"
        else:
            text = f"{value:.6g}" if isinstance(value, float) else str(value)
        table.add_row(name.replace("_", " "), text)
    out.print(table)

"""The command ``report``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from convexformer.cli.options import FileData, JsonOption, MaskOption, TargetsOption, XOption, YOption
from convexformer.cli.output import Exit, show, user_errors

if TYPE_CHECKING:
    import numpy as np


def report(
    run: Annotated[Path, typer.Argument(help="A model folder written by `convexformer fit` or `cf.save`.")],
    output: Annotated[Path | None, typer.Option("--output", "-o", help="HTML file; default RUN/report.html.")] = None,
    data: Annotated[
        Path | None, typer.Option("--data", help="Test data: npz, npy, safetensors, or a token store.")
    ] = None,
    train: Annotated[
        Path | None, typer.Option("--train", help="Data of the fit, for baselines and other betas.")
    ] = None,
    targets: TargetsOption = None,
    x: XOption = "X",
    y: YOption = "y",
    mask: MaskOption = None,
    texts: Annotated[
        str | None, typer.Option(help="Texts of the test samples: a file with one a line, or the name of an array.")
    ] = None,
    images: Annotated[
        str | None,
        typer.Option(help="Name of the array of image file names or of pictures, (N, h, w) or (N, h, w, 3)."),
    ] = None,
    image_root: Annotated[Path | None, typer.Option(help="Folder of the image files; default: that of --data.")] = None,
    grid: Annotated[str | None, typer.Option(help="Rows and columns of the tokens of an image: 14x14.")] = None,
    classes: Annotated[Path | None, typer.Option(help="A file with the names of the classes, one a line.")] = None,
    title: Annotated[str | None, typer.Option(help="The headline.")] = None,
    baselines: Annotated[bool, typer.Option(help="With --train: fit scikit-learn's probes.")] = True,
    n_betas: Annotated[int, typer.Option(help="With --train: betas of the path.")] = 12,
    max_time: Annotated[float, typer.Option(help="With --train: seconds for the path.")] = 60.0,
    as_json: JsonOption = False,
) -> None:
    """Write one self-contained HTML page about a fitted model.

    RUN/path.json (from `convexformer path`) and RUN/leaderboard.json are shown where they are there.

    Example: [bold]convexformer report model --data test.npz --train train.npz --grid 4x4[/]
    """
    with user_errors():
        from convexformer.data.files import read_arrays
        from convexformer.estimators import Leaderboard, TokenEstimator
        from convexformer.io import load, saved_with
        from convexformer.report import report as write

        model = load(run)
        if not isinstance(model, TokenEstimator):
            raise ValueError(f"{run} holds a {type(model).__name__}; expected a model written by `convexformer fit`.")
        options: dict[str, Any] = {"title": title, "baselines": baselines, "n_betas": n_betas, "max_time": max_time}
        options["fitted_with"] = saved_with(run)
        options["grid"] = None if grid is None else _grid(grid)
        options["class_names"] = None if classes is None else _lines(classes)
        if data is not None:
            test = FileData.read(data, targets, x, y, mask, None)
            options.update(X_test=test.X, y_test=test.y, mask_test=test.mask)
            arrays = {} if data.is_dir() or (texts is None and images is None) else read_arrays(data)
            options["texts"] = None if texts is None else _texts(texts, arrays, data)
            options["images"] = None if images is None else _images(images, arrays, data)
            options["image_root"] = image_root if image_root is not None or images is None else data.parent
        elif texts is not None or images is not None:
            raise ValueError("--texts and --images are those of the test samples; give the test data with --data.")
        if train is not None:
            fit = FileData.read(train, None, x, y, mask, None)
            options.update(X_train=fit.X, y_train=fit.y, mask_train=fit.mask)
        if (run / "path.json").is_file():
            options["beta_path"] = _json(run / "path.json")
        if (run / "leaderboard.json").is_file():
            options["leaderboard"] = Leaderboard.of_records(_json(run / "leaderboard.json"))
        written = write(model, output or run / "report.html", **options)
        certified = model.certificate_.meets(model.tolerance)
    show({"report": str(written), "bytes": written.stat().st_size, "certified": certified}, as_json, "report")
    raise typer.Exit(Exit.DONE if certified else Exit.NOT_CERTIFIED)


def _grid(text: str) -> tuple[int, int]:
    rows, _, columns = text.partition("x")
    if not (rows.isdecimal() and columns.isdecimal()):
        raise ValueError(f"--grid {text} was given; expected rows and columns as in 14x14.")
    return int(rows), int(columns)


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8 text ({error}); expected one entry a line.") from error


def _texts(name: str, arrays: dict[str, np.ndarray], source: Path) -> list[str]:
    if name in arrays:
        return [str(text) for text in arrays[name].tolist()]
    if Path(name).is_file():
        return _lines(Path(name))
    raise ValueError(
        f"--texts {name} is neither a file nor an array of {source}, which holds {', '.join(sorted(arrays))}."
    )


def _images(name: str, arrays: dict[str, np.ndarray], source: Path) -> list[Any]:
    if name not in arrays:
        raise ValueError(f"{source} has no array {name!r} for the images; it holds {', '.join(sorted(arrays))}.")
    return arrays[name].tolist() if arrays[name].dtype.kind in "US" else list(arrays[name])


def _json(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is not valid JSON ({error}); delete it, or write it again.") from error

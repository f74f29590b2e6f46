"""``convexformer export``: the network of a model as one file for other runtimes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from convexformer.cli.options import ForceOption, JsonOption
from convexformer.cli.output import show, user_errors


def export(
    model: Annotated[Path, typer.Argument(help="A model folder: an estimator, a solution or a network.")],
    onnx: Annotated[Path | None, typer.Option("--onnx", help="ONNX file to write.")] = None,
    torch: Annotated[Path | None, typer.Option("--torch", help="File to write for torch.export.load.")] = None,
    n_tokens: Annotated[int | None, typer.Option(help="Tokens a sample; default as in training.")] = None,
    mask: Annotated[
        bool | None, typer.Option("--mask/--no-mask", help="Whether the file takes a mask; default as in training.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="float32 or float64: weights, tokens and outputs.")] = "float32",
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Write a model's network, standardisation included, as ONNX or as a torch.export program.

    The file takes batches of any size and is run and compared with the network once it is written.

    Example: [bold]convexformer export model --onnx model.onnx[/]
    """
    with user_errors():
        from convexformer.io import export as write
        from convexformer.io import load

        wanted = [(path, kind) for path, kind in ((onnx, "onnx"), (torch, "torch")) if path is not None]
        if not wanted:
            raise ValueError("no file to write was given; expected --onnx FILE, --torch FILE, or both.")
        for path, _ in wanted:
            if path.exists() and not force:
                raise ValueError(f"{path} exists already; choose another file, or overwrite with --force.")
        loaded = load(model)
        done = [write(loaded, path, kind, n_tokens=n_tokens, mask=mask, dtype=dtype) for path, kind in wanted]
    for one in done:
        inputs = {name: " x ".join(map(str, shape)) for name, shape in one.inputs.items()}
        rows = {
            "written": str(one.path),
            "format": one.format,
            "dtype": one.dtype,
            **{f"input_{name}": text for name, text in inputs.items()},
            "outputs": ", ".join(one.outputs),
            "classes": None if one.classes is None else ", ".join(map(str, one.classes)),
            "largest_difference": "not checked: onnxruntime is not installed"
            if one.difference is None
            else one.difference,
        }
        show(rows, as_json, "exported")

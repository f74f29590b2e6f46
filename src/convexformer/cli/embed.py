"""The command ``embed``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from convexformer.cli.options import DeviceOption, JsonOption
from convexformer.cli.output import Exit, out, show, user_errors


def embed(
    source: Annotated[
        Path,
        typer.Argument(
            help="Texts: txt, csv, tsv, jsonl, a Hugging Face dataset (its name, or a folder). "
            "Images: a folder with one folder a class, or a csv of files."
        ),
    ],
    model: Annotated[str, typer.Option("--model", "-m", help="A local model folder, an id, or timm:NAME.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder of the token store.")],
    layers: Annotated[str, typer.Option(help="Layers, counted from 1: last, -1, 6 or 6,9,12.")] = "last",
    combine: Annotated[
        str, typer.Option(help="Several layers: concatenate (their channels) or separate.")
    ] = "concatenate",
    class_token: Annotated[str, typer.Option(help="keep, drop, or mark (one more channel).")] = "keep",
    max_length: Annotated[int, typer.Option(help="The longest text, in tokens.")] = 256,
    pad: Annotated[bool, typer.Option("--pad", help="Give every text max-length places, masked.")] = False,
    batch_size: Annotated[int, typer.Option(help="Samples at a time.")] = 32,
    precision: Annotated[str, typer.Option(help="Of the model: float32, bfloat16 or float16 (mixed).")] = "float32",
    dtype: Annotated[str, typer.Option(help="Of the store: float32, float16, bfloat16 or float64.")] = "float32",
    column: Annotated[str | None, typer.Option(help="Column of the texts or image files.")] = None,
    label_column: Annotated[str | None, typer.Option(help="Column of the labels.")] = None,
    split: Annotated[str | None, typer.Option(help="Split of a dataset, where it has several.")] = None,
    limit: Annotated[int | None, typer.Option(help="Take the first samples only.")] = None,
    shard_samples: Annotated[int | None, typer.Option(help="Samples a shard; default about 128 MiB.")] = None,
    activations: Annotated[
        int | None,
        typer.Option(
            help="Write input, output and attention maps of this layer to OUTPUT, a .safetensors file, instead."
        ),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a store of another job.")] = False,
    device: DeviceOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Embed texts or images with a frozen backbone into a token store, which the other commands take as TOKENS.

    An interrupted job is completed by the same command.

    Example: [bold]convexformer embed reviews.tsv --model all-MiniLM-L6-v2 --output reviews[/]
    """
    from convexformer.embedding import activations as write_activations
    from convexformer.embedding import embed as write_store

    shown = not as_json and out.is_terminal
    common: dict[str, Any] = {"column": column, "label_column": label_column, "limit": limit, "progress": shown}
    common.update(split=split, max_length=max_length, batch_size=batch_size, device=device)
    with user_errors():
        if activations is not None:
            tensors = write_activations(source, model, activations, output, **common)
            N, s, d = tensors["X_in"].shape
            facts = {"activations": str(output), "layer": activations, "samples": N, "tokens": s, "width": d}
            show({**facts, "heads": tensors["attention"].shape[1]}, as_json, "written")
            raise typer.Exit(Exit.DONE)
        store = write_store(
            source,
            model,
            output,
            layers=layers,
            combine=combine,
            class_token=class_token,
            pad=pad,
            precision=precision,
            dtype=dtype,
            shard_samples=shard_samples,
            overwrite=overwrite,
            **common,
        )
    classes = store.index.classes
    size = sum(shard.bytes for shard in store.index.shards)
    show(
        {
            "store": str(output),
            "model": store.backbone.model,
            "samples": len(store),
            "tokens": store.shape[1],
            "width": sum(store.index.arrays.values()),
            "grid": None if store.grid is None else f"{store.grid[0]}x{store.grid[1]}",
            "classes": None if classes is None else len(classes),
            "shards": len(store.index.shards),
            "bytes": size,
            "fingerprint": store.fingerprint[:16],
        },
        as_json,
        "embedded",
    )
    raise typer.Exit(Exit.DONE)

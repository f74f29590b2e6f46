"""``embed``: items of a source through a frozen backbone into a token store, resumable at any moment."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from convexformer.data.fingerprint import fingerprint
from convexformer.data.stores import Backbone, StoreError, StoreWriter, TokenStore
from convexformer.data.stores.index import DTYPES
from convexformer.data.stores.writer import SHARD_BYTES
from convexformer.data.tokens import pick_device
from convexformer.embedding.base import LAST, Encoder, Options
from convexformer.embedding.sources import Source, read_source
from convexformer.embedding.text import TextEncoder
from convexformer.embedding.vision import TIMM_PREFIX, TimmEncoder, TransformersImageEncoder
from convexformer.progress import step_bar
from convexformer.registry import one_of


def embed(
    source: str | os.PathLike[str] | Sequence[str],
    model: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    labels: Sequence[Any] | None = None,
    layers: str | int | Sequence[int | str] = LAST,
    combine: str = "concatenate",
    class_token: str = "keep",
    max_length: int = 256,
    pad: bool = False,
    batch_size: int = 32,
    device: torch.device | str = "auto",
    precision: str = "float32",
    dtype: str = "float32",
    column: str | None = None,
    label_column: str | None = None,
    split: str | None = None,
    limit: int | None = None,
    shard_samples: int | None = None,
    overwrite: bool = False,
    progress: bool = False,
) -> TokenStore:
    """Embed texts or images with a frozen backbone; return the token store that was written to ``output``.

    Parameters
    ----------
    source : path or list of texts
        Texts: a list, a file (txt with one text a line, csv, tsv, jsonl), or a dataset of Hugging Face: its name (``imdb``,
        ``glue/mrpc``) or a folder with it, which needs no network. Images: a folder tree whose top folders name the
        classes, or a csv of files. See :func:`convexformer.embedding.sources.read_source` for the columns of tables.
    model : str
        A local folder, which needs no network, or an id. Texts: any encoder of transformers. Images: a vision model of
        transformers, or of timm (``timm:NAME``, or a folder that timm wrote).
    output : path
        The folder of the store. A store of the same job is returned as it is; one that was interrupted, at whatever moment,
        is completed, and comes out as if it had not been; anything else there is an error unless ``overwrite``.
    layers : int, str or several
        Which layers: numbers count blocks (stages of a convolutional network) from 1, -1 is the last block, ``"last"`` (the
        default) what the model itself returns. ``"6,9,12"`` or a list takes several.
    combine : str
        Several layers: ``"concatenate"`` their channels, or keep them ``"separate"``, as arrays ``layer_6``, ...
    class_token : str
        ``"keep"`` it in front, ``"drop"`` it (of a text all special tokens), or ``"mark"`` it by one more channel, which is
        1 there and 0 elsewhere. Register tokens of vision models are always dropped.
    max_length : int
        The longest text, in tokens; the rest is cut off.
    pad : bool
        Whether every text has ``max_length`` places, the further ones masked; by default as many as the longest text. Stores
        of training and test texts then fit heads that tell positions apart.
    split : str
        Which split of a dataset, where it has several: ``"train"``.
    precision, dtype : str
        Precision of the model (float32, or mixed: bfloat16, float16), and of the store (also float64).
    """
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size} was given; expected a positive number.")
    one_of("dtype", dtype, tuple(DTYPES))
    found = read_source(source, labels, column=column, label_column=label_column, split=split, limit=limit)
    options = Options(read_layers(layers), combine, class_token, max_length, pick_device(device), precision)
    encoder = load_encoder(str(model), found, options)
    if isinstance(encoder, TextEncoder):
        encoder.prepare(found.items, pad=pad)
    probe = encoder.encode(found.items[:1])
    arrays = probe.arrays(options)
    if shard_samples is None:
        each = sum(X[0].numel() for X in arrays.values()) * DTYPES[dtype].itemsize
        shard_samples = max(1, SHARD_BYTES // each // batch_size) * batch_size
    backbone = Backbone(
        model=_shown_name(str(model)),
        layers=tuple(map(str, options.layers)),
        combine=combine,
        options={"class_token": class_token, "precision": precision, "kind": found.kind, **_plain(encoder.facts())},
    )
    job = {
        "source": fingerprint({"source": found.facts()}),
        "weights": encoder.weights_sha256(),
        "layers": list(map(str, options.layers)),
        "combine": combine,
        "class_token": class_token,
        "precision": precision,
        "dtype": dtype,
        "batch_size": batch_size,
        "shard_samples": shard_samples,
        "max_length": max_length,
        "model": _plain(encoder.facts()),
    }
    if not overwrite and (ready := StoreWriter.finished(output, job)) is not None:
        return ready
    with StoreWriter(
        output,
        dtype=dtype,
        shard_samples=shard_samples,
        grid=probe.grid,
        class_token=probe.class_token,
        backbone=backbone,
        job=job,
        overwrite=overwrite,
    ) as writer:
        _fill(writer, encoder, found, batch_size, shard_samples, progress)
        if found.kind == "image":
            return writer.finish(labels=found.labels, names=found.names)
        return writer.finish(labels=found.labels, texts=found.items, pieces=encoder.pieces(found.items))


def load_encoder(model: str, source: Source, options: Options) -> Encoder:
    """Return the encoder of a model: for texts, of timm, or a vision model of transformers."""
    if source.kind == "text":
        return TextEncoder(model, options)
    config = Path(model) / "config.json"
    of_timm = model.startswith((TIMM_PREFIX, "hf-hub:timm/", "timm/"))
    if of_timm or (config.is_file() and "pretrained_cfg" in config.read_text()):
        return TimmEncoder(model.replace("hf-hub:", "hf_hub:"), options)
    return TransformersImageEncoder(model, options)


def read_layers(layers: str | int | Sequence[int | str]) -> tuple[int | str, ...]:
    """Return layers as numbers and ``"last"``; text is cut at commas."""
    parts: Sequence[int | str] = (
        layers.split(",") if isinstance(layers, str) else [layers] if isinstance(layers, int) else layers
    )
    found: list[int | str] = []
    for part in parts:
        text = str(part).strip()
        if text != LAST:
            try:
                found.append(int(text))
                continue
            except ValueError as error:
                raise ValueError(f"layer {text!r} was asked for; expected numbers or 'last', e.g. 6,9,12.") from error
        found.append(LAST)
    return tuple(found)


def _fill(
    writer: StoreWriter, encoder: Encoder, source: Source, batch_size: int, shard_samples: int, progress: bool
) -> None:
    """Embed what is missing. Batches begin anew with each shard, so that a resumed job has the batches of a whole one."""
    start, total = writer.done, len(source)
    with step_bar("embedding", total, shown=progress) as bar:
        if bar is not None:
            bar.move_to(start)
        while start < total:
            left = shard_samples - start % shard_samples
            items = source.items[start : start + min(batch_size, left)]
            encoded = encoder.encode(items)
            arrays = encoded.arrays(encoder.options)
            _check_finite(arrays, writer.dtype, source, start)
            writer.add(arrays, encoded.mask)
            start += len(items)
            if bar is not None:
                bar.advance(len(items))


def _check_finite(arrays: dict[str, torch.Tensor], dtype: str, source: Source, start: int) -> None:
    for X in arrays.values():
        bad = ~torch.isfinite(X.to(DTYPES[dtype])).flatten(1).all(1)
        if bool(bad.any()):
            i = start + int(bad.nonzero()[0])
            which = source.names[i] if source.names else f"text {i} ({source.items[i][:60]!r})"
            raise StoreError(
                f"the tokens of {which} are not finite in {dtype}: the backbone overflowed. Use precision float32, "
                "and dtype bfloat16 or float32."
            )


def _shown_name(model: str) -> str:
    """Return the name of a model without the place of a local folder."""
    return Path(model).name if Path(model).is_dir() else model


def _plain(facts: dict[str, Any]) -> dict[str, Any]:
    return {name: list(value) if isinstance(value, tuple) else value for name, value in facts.items()}

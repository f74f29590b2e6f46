"""Activations of one layer of a BERT-like model: what goes in, what comes out, and its attention maps."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as serialize_tensors
from torch import Tensor

from convexformer.data.files import atomic_write
from convexformer.data.tokens import pick_device
from convexformer.embedding.base import Options
from convexformer.embedding.sources import read_source
from convexformer.embedding.text import TextEncoder
from convexformer.progress import step_bar


def activations(
    source: str | os.PathLike[str] | Sequence[str],
    model: str | os.PathLike[str],
    layer: int,
    output: str | os.PathLike[str],
    *,
    max_length: int = 64,
    batch_size: int = 32,
    device: torch.device | str = "auto",
    column: str | None = None,
    label_column: str | None = None,
    split: str | None = None,
    limit: int | None = None,
    progress: bool = False,
) -> dict[str, Tensor]:
    """Write the activations of a layer on some texts to a safetensors file; return the tensors.

    ``layer`` counts blocks from 1. The file holds ``X_in`` and ``X_out: (N, s, d)``, the tokens that enter and leave the
    block, ``attention: (N, heads, s, s)``, its attention maps, ``mask: (N, s)``, ``ids: (N, s)``, the pieces, and
    ``labels`` where the source has whole numbers for them. Padding is zero everywhere.
    """
    target = Path(output)
    if target.suffix != ".safetensors":
        raise ValueError(f"{target} has the suffix {target.suffix!r}; activations are written as .safetensors.")
    found = read_source(source, column=column, label_column=label_column, split=split, limit=limit)
    if found.kind != "text":
        raise ValueError(f"{source} holds images; activations and attention maps are those of a model of texts.")
    encoder = TextEncoder(str(model), Options(max_length=max_length, device=pick_device(device)), attentions=True)
    encoder.prepare(found.items)
    with step_bar("activations", len(found), shown=progress) as bar:
        parts = []
        for i in range(0, len(found), batch_size):
            parts.append(_batch(encoder, found.items[i : i + batch_size], layer))
            if bar is not None:
                bar.advance(len(parts[-1]["mask"]))
    tensors = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    if found.labels is not None and all(isinstance(label, int) for label in found.labels):
        tensors["labels"] = torch.tensor(found.labels)
    facts = {"model": Path(str(model)).name, "layer": str(layer)}
    data = serialize_tensors(tensors, metadata=facts)
    target.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(target, lambda file: file.write(data))
    return tensors


@torch.inference_mode()
def _batch(encoder: TextEncoder, texts: Sequence[str], layer: int) -> dict[str, Tensor]:
    """Return the activations of a batch in places for the longest text of all."""
    ids = [own for own, _ in encoder.tokenized(texts)]
    outputs, mask = encoder.run(ids, output_hidden_states=True, output_attentions=True)
    maps: Any = outputs.attentions
    if not maps or maps[0] is None:
        raise ValueError(f"{type(encoder.model).__name__} returns no attention maps; expected a BERT-like model.")
    if not 1 <= layer <= len(maps):
        raise ValueError(f"layer {layer} was asked for; the model has the layers 1 to {len(maps)}.")
    assert encoder.length is not None
    extra = encoder.length - mask.shape[1]
    real = mask.bool()

    def padded(X: Tensor) -> Tensor:
        return torch.nn.functional.pad(torch.where(real[..., None], X.float(), 0.0), (0, 0, 0, extra)).cpu()

    both = real[:, None, :, None] & real[:, None, None, :]
    attention = torch.nn.functional.pad(torch.where(both, maps[layer - 1].float(), 0.0), (0, extra, 0, extra))
    table = torch.zeros((len(ids), encoder.length), dtype=torch.int64)
    for i, own in enumerate(ids):
        table[i, : len(own)] = torch.tensor(own)
    return {
        "X_in": padded(outputs.hidden_states[layer - 1]),
        "X_out": padded(outputs.hidden_states[layer]),
        "attention": attention.cpu(),
        "mask": torch.nn.functional.pad(real, (0, extra)).cpu(),
        "ids": table,
    }

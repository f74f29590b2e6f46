"""One shard: a safetensors file with the tokens ``(n, s, d)`` of some samples and their mask, memory-mapped."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from convexformer.data.stores.index import DTYPES, Index, Shard, StoreError

MASK = "mask"
SAFETENSORS_NAMES = {"float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64"}
LARGEST_HEADER = 1 << 20
HASHED_AT_ONCE = 1 << 22


def check_size(folder: Path, shard: Shard) -> None:
    """Raise unless the file is there and as long as the index says."""
    file = folder / shard.file
    try:
        size = file.stat().st_size
    except OSError as error:
        raise StoreError(f"{folder} misses {shard.file}, which its index names ({error}).") from error
    if size != shard.bytes:
        raise StoreError(
            f"{file} has {size:,} bytes; the index says {shard.bytes:,}. It is truncated or damaged: delete the file and "
            "run the command that made the store again."
        )


def check_sum(folder: Path, shard: Shard) -> None:
    """Raise unless the sha256 of the file is that of the index."""
    digest = hashlib.sha256()
    with (folder / shard.file).open("rb", buffering=0) as file:
        while block := file.read(HASHED_AT_ONCE):
            digest.update(block)
    if digest.hexdigest() != shard.sha256:
        raise StoreError(
            f"{folder / shard.file} does not match its checksum in the index: it is damaged or from another store. "
            "Delete the file and run the command that made the store again."
        )


def map_shard(folder: Path, shard: Shard, index: Index, name: str) -> tuple[Tensor, Tensor | None]:
    """Return tokens ``(n, s, d)`` and mask ``(n, s)`` as views of the file; nothing is read before it is used."""
    file = folder / shard.file
    header, start = _header(file)
    shape = (shard.samples, index.n_tokens, index.arrays[name])
    X = _view(file, header, start, name, SAFETENSORS_NAMES[index.dtype], shape)
    tokens = torch.from_numpy(X).view(DTYPES[index.dtype])
    if not index.masked:
        return tokens, None
    mask = _view(file, header, start, MASK, "BOOL", shape[:2])
    return tokens, torch.from_numpy(mask)


def _header(file: Path) -> tuple[dict[str, Any], int]:
    """Return the header of a safetensors file, and where its data begins."""
    with file.open("rb") as data:
        length = int.from_bytes(data.read(8), "little")
        if length > LARGEST_HEADER:
            raise StoreError(f"{file} is no shard: its header would have {length:,} bytes.")
        try:
            header = json.loads(data.read(length))
        except ValueError as error:
            raise StoreError(f"{file} is no shard: its header is not JSON ({error}).") from error
    if not isinstance(header, dict):
        raise StoreError(f"{file} is no shard: its header is not a table of tensors.")
    return header, 8 + length


def _view(file: Path, header: dict[str, Any], start: int, name: str, kind: str, shape: tuple[int, ...]) -> np.ndarray:
    """Map one tensor of the file; copy-on-write, so that torch sees writable memory and the file never changes."""
    entry = header.get(name)
    if not isinstance(entry, dict) or entry.get("dtype") != kind or tuple(entry.get("shape", ())) != shape:
        raise StoreError(
            f"{file} has no tensor {name!r} of type {kind} and shape {shape}, as the index says; it has {entry}."
        )
    dtype = {"F16": np.float16, "BF16": np.int16, "F32": np.float32, "F64": np.float64, "BOOL": np.bool_}[kind]
    first, last = entry["data_offsets"]
    if last - first != math.prod(shape) * np.dtype(dtype).itemsize or start + last > file.stat().st_size:
        raise StoreError(
            f"{file} places tensor {name!r} at bytes {first} to {last}, which does not fit; it is damaged."
        )
    return np.memmap(file, dtype, "c", start + first, shape)

"""The index of a token store: what ``index.json`` says, checked before anything else is read."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, final

import torch

from convexformer.data.files import strict_json

FORMAT, SCHEMA = "convexformer-tokens", 1
INDEX_NAME, SAMPLES_NAME = "index.json", "samples.json"
SHARD_NAME = re.compile(r"shard-\d{5,9}\.safetensors")  # a plain name: no path can climb out of the folder
ARRAY_NAME = re.compile(r"[A-Za-z0-9_.-]{1,100}")
DTYPES: dict[str, torch.dtype] = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
}


class StoreError(ValueError):
    """A token store that cannot be read or continued: missing, truncated, damaged, or of another job."""


@final
@dataclass(frozen=True)
class Shard:
    """One file of consecutive samples."""

    file: str
    samples: int
    bytes: int
    sha256: str


@final
@dataclass(frozen=True)
class Backbone:
    """Where tokens come from: the model, and what was taken of it."""

    model: str = ""
    layers: tuple[str, ...] = ()
    """The layers, as they were asked for."""
    combine: str = "concatenate"
    """``"concatenate"``: channels side by side in one array; ``"separate"``: one array a layer."""
    options: dict[str, Any] = field(default_factory=dict)
    """Anything else that tokens depend on: precision, longest text, size of images, ..."""


@final
@dataclass(frozen=True)
class Index:
    """The facts of a store. ``arrays`` gives the width ``d`` of each array of tokens ``(N, s, d)``."""

    n_samples: int
    n_tokens: int
    dtype: str
    arrays: dict[str, int]
    masked: bool
    shards: tuple[Shard, ...]
    samples_sha256: str
    grid: tuple[int, int] | None = None
    """Height and width of the grid that the tokens, without the class token, were on."""
    class_token: int | None = None
    """The position of the class token."""
    classes: tuple[Any, ...] | None = None
    """The names of the classes 0, 1, ...; None where labels are none or numbers."""
    backbone: Backbone = field(default_factory=Backbone)

    @property
    def fingerprint(self) -> str:
        """A hash of everything that the store holds, by the checksums of its files."""
        return hashlib.sha256(strict_json(asdict(self), indent=None).encode()).hexdigest()

    def to_json(self) -> dict[str, Any]:
        """Return the content of ``index.json``."""
        return {"format": FORMAT, "schema": SCHEMA, "fingerprint": self.fingerprint, **asdict(self)}


def read_index(folder: Path) -> Index:
    """Return the index of a store; anything else is a :class:`StoreError` that says what is wrong."""
    file = folder / INDEX_NAME
    if not file.is_file():
        unfinished = any(folder.glob("shard-*.safetensors"))
        how = "its writing was interrupted; run the same command again to finish it" if unfinished else "no token store"
        raise StoreError(f"{folder} has no {INDEX_NAME}: {how}.")
    try:
        values = json.loads(file.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise StoreError(f"{file} is not valid JSON ({error}); the file is truncated or damaged.") from error
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        raise StoreError(f"{file} was not written by convexformer; expected the index of a token store.")
    if values.get("schema") != SCHEMA:
        raise StoreError(f"{folder} has schema version {values.get('schema')}; this version reads {SCHEMA}.")
    try:
        return _parse(values)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise StoreError(f"{file} is damaged: {error}") from error


def _parse(values: dict[str, Any]) -> Index:
    shards = tuple(
        Shard(_shard_name(s["file"]), _count(s["samples"]), _count(s["bytes"]), str(s["sha256"]))
        for s in values["shards"]
    )
    grid, classes, source = values["grid"], values["classes"], values["backbone"]
    index = Index(
        n_samples=_count(values["n_samples"]),
        n_tokens=_count(values["n_tokens"]),
        dtype=str(values["dtype"]),
        arrays={str(name): _count(width) for name, width in values["arrays"].items()},
        masked=bool(values["masked"]),
        shards=shards,
        samples_sha256=str(values["samples_sha256"]),
        grid=None if grid is None else (_count(grid[0]), _count(grid[1])),
        class_token=None if values["class_token"] is None else int(values["class_token"]),
        classes=None if classes is None else tuple(classes),
        backbone=Backbone(source["model"], tuple(source["layers"]), source["combine"], source["options"]),
    )
    if index.dtype not in DTYPES:
        raise ValueError(f"it says dtype {index.dtype!r}; expected one of {', '.join(DTYPES)}")
    if not index.arrays or not all(ARRAY_NAME.fullmatch(name) for name in index.arrays):
        raise ValueError(f"it names the arrays {list(index.arrays)}")
    if sum(shard.samples for shard in shards) != index.n_samples:
        raise ValueError(f"its shards have {sum(s.samples for s in shards)} samples in all, not {index.n_samples}")
    if len({shard.file for shard in shards}) != len(shards):
        raise ValueError("it names a shard twice")
    if values.get("fingerprint") != index.fingerprint:
        raise ValueError("its fingerprint does not match its content; it was edited or damaged")
    return index


def _shard_name(name: Any) -> str:
    if not isinstance(name, str) or not SHARD_NAME.fullmatch(name):
        raise ValueError(f"it names the shard {name!r}; expected a plain name such as shard-00000.safetensors")
    return name


def _count(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"it holds {value!r} where a positive whole number is expected")
    return value

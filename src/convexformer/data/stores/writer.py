"""Writing a token store: shard by shard, each in one step, so that an interrupted job goes on where it stopped."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from safetensors.torch import save as serialize_tensors
from torch import Tensor

from convexformer.data.files import atomic_write, strict_json, sync_folder
from convexformer.data.fingerprint import fingerprint
from convexformer.data.stores.index import (
    ARRAY_NAME,
    DTYPES,
    INDEX_NAME,
    SAMPLES_NAME,
    SHARD_NAME,
    Backbone,
    Index,
    Shard,
    StoreError,
    read_index,
)
from convexformer.data.stores.shards import MASK
from convexformer.data.stores.store import MEMORY, TokenStore
from convexformer.data.tokens import as_tensor
from convexformer.registry import one_of

JOB_NAME = "job.json"
COLUMNS = ("labels", "names", "pieces", "texts")
SHARD_BYTES = 128 << 20
OWN_FILE = re.compile(rf"({SHARD_NAME.pattern}|index\.json|samples\.json|job\.json)")
PART_FILE = re.compile(rf"\.({OWN_FILE.pattern})\.[0-9a-f]{{16}}\.part")


@final
class StoreWriter:
    """Writes tokens batch by batch::

        writer = cf.data.StoreWriter("store", dtype="float16")
        for images, labels in loader:
            writer.add(model(images), labels=labels)  # tokens (n, s, d)
        store = writer.finish()

    Every batch has the same ``s`` and ``d``; ``mask: (n, s)`` marks real tokens where lengths differ. Arrays side by side
    are given by name: ``add({"layer_6": X6, "layer_12": X12})``. ``job`` is anything that says what the tokens depend on: a
    folder with shards of the same job is continued from ``done`` samples on, one of another job is an error unless
    ``overwrite``. The folder is locked while a writer is at work.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        dtype: str = "float32",
        shard_samples: int | None = None,
        grid: tuple[int, int] | None = None,
        class_token: int | None = None,
        backbone: Backbone | None = None,
        job: dict[str, Any] | None = None,
        overwrite: bool = False,
    ) -> None:
        one_of("dtype", dtype, tuple(DTYPES))
        if shard_samples is not None and shard_samples < 1:
            raise ValueError(f"shard_samples={shard_samples} was given; expected at least one sample a shard.")
        self.folder, self.dtype, self.shard_samples = Path(folder), dtype, shard_samples
        self.grid, self.class_token, self.backbone = grid, class_token, backbone or Backbone()
        self._parts: list[tuple[dict[str, Tensor], Tensor | None]] = []
        self._waiting = 0
        self._columns: dict[str, list[Any]] = {}
        self._facts: tuple[dict[str, int], int, bool] | None = None  # widths, n_tokens, masked
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = _lock(self.folder)
        try:
            self._shards = self._begin(job, overwrite)
        except BaseException:
            self.close()
            raise
        if self._shards and shard_samples is None:
            self.shard_samples = self._shards[0].samples

    @classmethod
    def finished(cls, folder: str | os.PathLike[str], job: dict[str, Any], memory: int = MEMORY) -> TokenStore | None:
        """Return the store of this job if it is there, complete."""
        path = Path(folder)
        if not (path / INDEX_NAME).is_file() or _earlier_job(path) != _digest(job):
            return None
        index = read_index(path)
        return TokenStore(path, index, next(iter(index.arrays)), memory=memory)

    @property
    def done(self) -> int:
        """How many samples lie in shards already: where an interrupted job goes on."""
        return sum(shard.samples for shard in self._shards)

    def add(self, X: Any, mask: Any = None, **columns: Sequence[Any]) -> None:
        """Append tokens ``(n, s, d)``; full shards are written at once.

        ``columns`` are facts of the samples, one each: ``labels``, ``names`` (of files), ``texts``, ``pieces`` (the text of
        each token).
        """
        arrays = {
            name: as_tensor(values, name).to("cpu", DTYPES[self.dtype])
            for name, values in (X if isinstance(X, dict) else {"X": X}).items()
        }
        real = None if mask is None else as_tensor(mask, "mask").cpu().bool()
        self._check(arrays, real)
        n, s, _ = next(iter(arrays.values())).shape
        if real is not None:
            arrays = {
                name: torch.where(real[..., None], values, values.new_zeros(())) for name, values in arrays.items()
            }
        if self.shard_samples is None:
            each = sum(s * values.shape[2] for values in arrays.values()) * DTYPES[self.dtype].itemsize
            self.shard_samples = max(1, SHARD_BYTES // each)
        for name, values in _columns(columns).items():
            if len(values) != n:
                raise ValueError(f"{len(values)} {name} were given for {n} samples; they must match.")
            self._columns.setdefault(name, []).extend(values)
        self._parts.append((arrays, real))
        self._waiting += n
        while self._waiting >= self.shard_samples:
            self._write_shard(self.shard_samples)

    def finish(self, **columns: Sequence[Any] | None) -> TokenStore:
        """Write what is left and the index; return the store. Labels and other columns may come here for all samples."""
        if self._waiting:
            self._write_shard(self._waiting)
        if not self._shards:
            raise ValueError(f"no tokens were added to {self.folder}; a store needs at least one sample.")
        table = {**self._columns, **_columns(columns)}
        for name, values in table.items():
            if len(values) != self.done:
                raise ValueError(f"{len(values)} {name} were given for {self.done} samples; they must match.")
        classes = None
        if "labels" in table:
            table["labels"], classes = _encode(table["labels"])
        data = (strict_json(dict(sorted(table.items()))) + "\n").encode()
        widths, n_tokens, masked = self._known_facts()
        index = Index(
            n_samples=self.done,
            n_tokens=n_tokens,
            dtype=self.dtype,
            arrays=widths,
            masked=masked,
            shards=tuple(self._shards),
            samples_sha256=hashlib.sha256(data).hexdigest(),
            grid=self.grid,
            class_token=self.class_token,
            classes=classes,
            backbone=self.backbone,
        )
        atomic_write(self.folder / SAMPLES_NAME, lambda file: file.write(data))
        text = strict_json(index.to_json()) + "\n"
        atomic_write(self.folder / INDEX_NAME, lambda file: file.write(text.encode()))
        self.close()
        return TokenStore(self.folder, index, next(iter(widths)))

    def close(self) -> None:
        """Let others write to the folder."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> StoreWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------------ inside

    def _begin(self, job: dict[str, Any] | None, overwrite: bool) -> list[Shard]:
        """Clear what a crash left; return the shards of the same job."""
        digest = None if job is None else _digest(job)
        for file in list(self.folder.iterdir()):
            if PART_FILE.fullmatch(file.name):
                file.unlink(missing_ok=True)
        if digest is not None and _earlier_job(self.folder) == digest and not overwrite:
            (self.folder / INDEX_NAME).unlink(missing_ok=True)  # written last, once all is there
            return list(self._earlier_shards())
        own = [file for file in self.folder.iterdir() if OWN_FILE.fullmatch(file.name)]
        if own and not overwrite:
            raise StoreError(
                f"{self.folder} holds a token store of another job ({own[0].name}, ...); choose another folder, or replace "
                "it with overwrite=True (--overwrite)."
            )
        for file in sorted(
            own, key=lambda file: file.name != INDEX_NAME
        ):  # the index first: no store without its shards
            file.unlink(missing_ok=True)
        sync_folder(self.folder)
        if digest is not None:
            text = strict_json({"fingerprint": digest, "job": job}) + "\n"
            atomic_write(self.folder / JOB_NAME, lambda file: file.write(text.encode()))
        return []

    def _earlier_shards(self) -> Sequence[Shard]:
        """Shards are renamed into place when complete, in order: those that are there are whole."""
        found: list[Shard] = []
        while (file := self.folder / _shard_name(len(found))).is_file():
            data = file.read_bytes()
            facts, samples = _shard_facts(data)
            if self._facts not in (None, facts):
                break
            if found and samples > found[0].samples:
                break
            self._facts = facts
            found.append(Shard(file.name, samples, len(data), hashlib.sha256(data).hexdigest()))
        if len(found) > 1 and found[-1].samples < found[0].samples:
            found.pop()  # the last one of a finished job: written again, the same
        elif len(found) == 1 and self.shard_samples is not None and found[0].samples < self.shard_samples:
            found.pop()
        return found

    def _check(self, arrays: dict[str, Tensor], mask: Tensor | None) -> None:
        """Compare a batch with what came before."""
        for name, values in arrays.items():
            if not ARRAY_NAME.fullmatch(name) or name == MASK:
                raise ValueError(
                    f"an array is called {name!r}; expected letters, digits, '_', '.' and '-', not 'mask'."
                )
            if values.ndim != 3 or 0 in values.shape:
                raise ValueError(f"{name} has shape {tuple(values.shape)}; expected tokens (n, s, d).")
        sizes = {values.shape[:2] for values in arrays.values()}
        if len(sizes) > 1 or (mask is not None and tuple(mask.shape) != tuple(next(iter(sizes)))):
            shapes = {name: tuple(values.shape) for name, values in arrays.items()}
            raise ValueError(
                f"arrays and mask must agree in (n, s); got {shapes}{'' if mask is None else tuple(mask.shape)}."
            )
        facts = (
            {name: values.shape[2] for name, values in sorted(arrays.items())},
            next(iter(sizes))[1],
            mask is not None,
        )
        if self._facts is None:
            self._facts = facts
            if self.grid is not None and math.prod(self.grid) + (self.class_token is not None) != facts[1]:
                raise ValueError(
                    f"grid={self.grid} has {math.prod(self.grid)} places, class_token={self.class_token}; there are "
                    f"{facts[1]} tokens."
                )
        elif self._facts != facts:
            raise ValueError(
                f"this batch has (widths, tokens, masked) = {facts}; the store has {self._facts}. All batches must "
                "agree: pad, with a mask."
            )

    def _known_facts(self) -> tuple[dict[str, int], int, bool]:
        assert self._facts is not None, "a shard has been written or found"
        return self._facts

    def _write_shard(self, samples: int) -> None:
        """Write the first samples of those that wait."""
        arrays = {name: torch.cat([part[0][name] for part in self._parts]) for name in self._parts[0][0]}
        masks = [part[1] for part in self._parts if part[1] is not None]
        mask = torch.cat(masks) if masks else None
        tensors = {name: values[:samples].contiguous() for name, values in arrays.items()}
        if mask is not None:
            tensors[MASK] = mask[:samples].contiguous()
        data = serialize_tensors(tensors)
        name = _shard_name(len(self._shards))
        atomic_write(self.folder / name, lambda file: file.write(data))
        self._shards.append(Shard(name, samples, len(data), hashlib.sha256(data).hexdigest()))
        self._waiting -= samples
        rest = {key: values[samples:] for key, values in arrays.items()}
        self._parts = [(rest, None if mask is None else mask[samples:])] if self._waiting else []


def _digest(job: dict[str, Any]) -> str:
    return fingerprint({"job": strict_json(job)})


def _earlier_job(folder: Path) -> str | None:
    """Return the fingerprint of the job that a folder was begun with."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        return str(json.loads((folder / JOB_NAME).read_text())["fingerprint"])
    return None


def _shard_name(number: int) -> str:
    return f"shard-{number:05d}.safetensors"


def _shard_facts(data: bytes) -> tuple[tuple[dict[str, int], int, bool], int]:
    """Return widths, tokens, whether masked, and the samples of a shard."""
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    header.pop("__metadata__", None)
    masked = header.pop(MASK, None) is not None
    n, s, _ = next(iter(header.values()))["shape"]
    return ({name: entry["shape"][2] for name, entry in sorted(header.items())}, s, masked), n


def _columns(columns: dict[str, Any]) -> dict[str, list[Any]]:
    """Return columns of a table as lists; those that are None are left out."""
    for name in columns:
        one_of("column", name, COLUMNS)
    given = {name: values for name, values in columns.items() if values is not None}
    return {
        name: values.tolist() if isinstance(values, (Tensor, np.ndarray)) else list(values)
        for name, values in given.items()
    }


def _encode(labels: list[Any]) -> tuple[list[Any], tuple[Any, ...] | None]:
    """Return text labels as numbers 0, 1, ... with their sorted names; numbers stay as they are."""
    if not any(isinstance(label, str) for label in labels):
        return labels, None
    classes = tuple(sorted({str(label) for label in labels}))
    code = {name: number for number, name in enumerate(classes)}
    return [code[str(label)] for label in labels], classes


def _lock(folder: Path) -> int | None:
    """Lock a folder for this process as long as it lives; None where the system has no such locks."""
    try:
        import fcntl
    except ImportError:
        return None
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise StoreError(f"another process is writing to {folder}; wait for it, or choose another folder.") from error
    except OSError:  # a file system without locks
        os.close(descriptor)
        return None
    return descriptor

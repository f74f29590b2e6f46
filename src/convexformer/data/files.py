"""Files: arrays in (NumPy's, safetensors, torch's, tables; nothing is executed), strict JSON and durable writes out."""

from __future__ import annotations

import json
import math
import os
import secrets
import zipfile
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file
from safetensors.torch import save as serialize_tensors
from torch import Tensor

from convexformer.data.readers import DELIMITERS, check_numpy_headers, read_table, read_torch

SUFFIXES = (".npz", ".npy", ".safetensors", ".pt", ".pth", ".csv", ".tsv")  # of files that arrays are read from

# ---------------------------------------------------------------------- arrays


def read_arrays(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """Return the arrays of a file by name; an npy file has one, named like the file; columns of a table by their header."""
    file = Path(path)
    if not file.exists():
        raise ValueError(f"{file} does not exist.")
    if file.suffix not in SUFFIXES:
        raise ValueError(f"{file} has the suffix {file.suffix!r}; expected one of {', '.join(SUFFIXES)}.")
    if file.is_dir():
        raise ValueError(f"{file} is a folder; expected a file, one of {', '.join(SUFFIXES)}.")
    if file.suffix in DELIMITERS:
        return read_table(file)
    if file.suffix in (".pt", ".pth"):
        return read_torch(file)
    try:
        if file.suffix == ".safetensors":
            return load_file(file)
        check_numpy_headers(file)
        loaded = np.load(file, allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            return {file.stem: loaded}
        with loaded:
            return {name: loaded[name] for name in loaded.files}
    except MemoryError as error:
        raise ValueError(f"{file} does not fit into memory ({error}); read a part of it, or a float16 copy.") from error
    except (SafetensorError, zipfile.BadZipFile, zlib.error, ValueError, OSError, EOFError, KeyError) as error:
        # NumPy's message advises to allow pickles, which can execute code: leave it out
        reason = "" if "pickle" in str(error) else f": {error}"
        raise ValueError(
            f"{file} cannot be read as {file.suffix}{reason}. It may be truncated, of another format, or hold objects."
        ) from error


def pick_array(arrays: dict[str, np.ndarray], name: str, role: str, source: object) -> np.ndarray:
    """Return the array called ``name``; a file with a single array needs no name."""
    if name in arrays:
        return arrays[name]
    if len(arrays) == 1:
        return next(iter(arrays.values()))
    raise ValueError(f"{source} has no array {name!r} for the {role}; it holds {', '.join(sorted(arrays))}.")


# ---------------------------------------------------------------------- durable writes


def atomic_write(path: str | os.PathLike[str], write: Callable[[BinaryIO], object]) -> None:
    """Replace a file as a whole: ``write(file)`` fills a temporary file beside it, which is then renamed over ``path``.

    The data is flushed to disk before the rename and the folder after it, so after a crash or a power cut ``path`` holds
    the old content or the new one, never a part. Temporary names are unique: two processes may write the same path.
    """
    target = Path(path)
    part, descriptor = _create_beside(target)
    try:
        with os.fdopen(descriptor, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, target)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    sync_folder(target.parent)


def part_name(name: str) -> str:
    """Return a unique name for the temporary file from which ``name`` is to be replaced."""
    return f".{name}.{secrets.token_hex(8)}.part"


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries to disk, so that renames and removals survive a power cut; a no-op where unsupported."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _create_beside(target: Path) -> tuple[Path, int]:
    """Create an empty file with a new name in the folder of ``target``, with the permissions of any new file."""
    while True:
        part = target.with_name(part_name(target.name))
        with suppress(FileExistsError):
            return part, os.open(part, os.O_CREAT | os.O_EXCL | os.O_WRONLY | getattr(os, "O_BINARY", 0), 0o666)


# ---------------------------------------------------------------------- JSON


def strict_json(value: Any, indent: int | None = 2) -> str:
    """Return ``value`` as JSON that every parser reads.

    JSON has no infinity and no NaN; they are written as the strings ``"inf"``, ``"-inf"`` and ``"nan"``, which
    ``float()`` reads.
    """
    return json.dumps(_finite(value), indent=indent, allow_nan=False)


def write_json(path: str | os.PathLike[str], value: Any, indent: int | None = 2) -> None:
    """Write ``value`` to a file as :func:`strict_json`."""
    text = strict_json(value, indent) + "\n"
    atomic_write(path, lambda file: file.write(text.encode()))


def _finite(value: Any) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


# ---------------------------------------------------------------------- checkpoints


def read_checkpoint(path: Path, fingerprint: str, whose: str) -> tuple[int, dict[str, Tensor]] | None:
    """Return the iteration and the tensors of a checkpoint; None when there is no file yet.

    A file that cannot be read, or that has another fingerprint, is an error; ``whose`` says what it should belong to.
    """
    if not path.exists():
        return None
    try:
        with safe_open(str(path), framework="pt") as file:
            meta = file.metadata() or {}
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  (not a dict)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"the checkpoint {path} cannot be read ({error}); delete it to start afresh.") from error
    if meta.get("fingerprint") != fingerprint:
        raise ValueError(f"the checkpoint {path} belongs to another {whose}; delete it or choose another path.")
    return int(meta.get("iteration", "0")), tensors


def write_checkpoint(path: Path, fingerprint: str, iteration: int, tensors: dict[str, Tensor]) -> None:
    """Replace a checkpoint as a whole; a crash leaves the previous one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = serialize_tensors(tensors, metadata={"fingerprint": fingerprint, "iteration": str(iteration)})
    atomic_write(path, lambda file: file.write(data))

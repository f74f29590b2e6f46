"""Arrays from files: npz, npy and safetensors. Nothing here can execute code."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file
from safetensors.torch import save_file
from torch import Tensor

SUFFIXES = (".npz", ".npy", ".safetensors")


def read_arrays(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """Return the arrays of a file by name; an npy file has one, named like the file."""
    file = Path(path)
    if not file.exists():
        raise ValueError(f"{file} does not exist.")
    if file.suffix not in SUFFIXES:
        raise ValueError(f"{file} has the suffix {file.suffix!r}; expected one of {', '.join(SUFFIXES)}.")
    try:
        if file.suffix == ".safetensors":
            return load_file(file)
        loaded = np.load(file, allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            return {file.stem: loaded}
        with loaded:
            return {name: loaded[name] for name in loaded.files}
    except (SafetensorError, zipfile.BadZipFile, ValueError, OSError, EOFError, KeyError) as error:
        # NumPy advises here to allow pickles, which can execute code
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


def read_checkpoint(path: Path, fingerprint: str, whose: str) -> tuple[int, dict[str, Tensor]] | None:
    """Return the iteration and the tensors of a checkpoint; None when there is no file yet.

    A file that cannot be read, or whose fingerprint is another's, is an error; ``whose`` says what it should belong to.
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
    """Write a checkpoint anew; a crash never leaves half of one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    save_file(tensors, str(part), metadata={"fingerprint": fingerprint, "iteration": str(iteration)})
    os.replace(part, path)

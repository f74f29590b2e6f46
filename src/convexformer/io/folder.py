"""The two files of a model folder, replaced as one step.

The tensors go to ``model-<first 16 hex digits of their sha256>.safetensors``, a new name for new content; ``config.json``
names that file and is replaced last, which is the moment the folder changes from the old model to the new one. A crash
before it leaves the old model complete, with an unused tensor file beside it that the next save removes. Schema 1 (version
0.1) had one fixed ``model.safetensors``; it is still read.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load as parse_tensors
from safetensors.torch import save as serialize_tensors
from torch import Tensor

from convexformer.data.files import atomic_write, sync_folder
from convexformer.io.numbers import decode_numbers, encode_numbers

FORMAT, SCHEMA = "convexformer", 2
READABLE_SCHEMAS = (1, 2)  # schema versions that this version reads
CONFIG_NAME, SCHEMA_1_TENSORS = "config.json", "model.safetensors"
TENSORS_NAME = re.compile(r"model-[0-9a-f]{16}\.safetensors")
PART_NAME = re.compile(r"\.(config\.json|model-[0-9a-f]{16}\.safetensors)\.[0-9a-f]{16}\.part")
STALE_SECONDS = 600.0  # temporary files older than this were left by a crash, not by a save that is running
READ_ATTEMPTS = 5  # reads of a folder that another process is replacing, at most


class ModelFileError(ValueError):
    """A model folder that cannot be read: missing, truncated, corrupted, of another format or too new."""


def write_folder(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Replace the model in ``folder`` by this one; the folder holds the old or the new model at every moment."""
    data = serialize_tensors(tensors, metadata={"format": FORMAT})
    digest = hashlib.sha256(data).hexdigest()
    name = f"model-{digest[:16]}.safetensors"
    header = {"format": FORMAT, "schema": SCHEMA, "tensors": name, "sha256": digest}
    text = json.dumps({**header, **encode_numbers(config)}, indent=2, allow_nan=False) + "\n"
    folder.mkdir(parents=True, exist_ok=True)
    replaced = _current_tensors(folder)
    atomic_write(folder / name, lambda file: file.write(data))
    atomic_write(folder / CONFIG_NAME, lambda file: file.write(text.encode()))
    if not (folder / name).exists():  # another process has saved to this folder and removed it
        atomic_write(folder / name, lambda file: file.write(data))
    _tidy(folder, keep=name, replaced=replaced)


def read_folder(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the configuration and the tensors of a model folder; raise :class:`ModelFileError` for anything else."""
    for attempt in range(1, READ_ATTEMPTS + 1):
        config = read_config(folder)
        try:
            return _decoded(folder, config), _read_tensors(folder, config)
        except FileNotFoundError as error:
            # the tensors vanish between the two reads when another process saves to this folder
            if attempt == READ_ATTEMPTS or read_config(folder) == config:
                raise ModelFileError(
                    f"{folder} has no {_tensors_name(folder, config)}; expected a folder written by convexformer.save."
                ) from error
    raise AssertionError("unreachable")


def read_config(folder: Path) -> dict[str, Any]:
    """Return ``config.json`` as it is, numbers encoded; raise :class:`ModelFileError` where this version cannot read it."""
    if not folder.is_dir():
        raise ModelFileError(f"{folder} is not a folder; expected one written by convexformer.save.")
    file = folder / CONFIG_NAME
    if not file.is_file():
        raise ModelFileError(f"{folder} has no {CONFIG_NAME}; expected a folder written by convexformer.save.")
    try:
        config = json.loads(file.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ModelFileError(f"{file} is not valid JSON ({error}); the file is truncated or damaged.") from error
    if not isinstance(config, dict) or config.get("format") != FORMAT:
        raise ModelFileError(f"{file} was not written by convexformer.save.")
    if config.get("schema") not in READABLE_SCHEMAS:
        raise ModelFileError(
            f"{folder} has schema version {config.get('schema')}; this version of convexformer reads "
            f"{' and '.join(map(str, READABLE_SCHEMAS))}. It was written by version {config.get('version')}: install that "
            "one or a newer one."
        )
    return config


def _decoded(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    try:
        return decode_numbers(config)
    except (TypeError, ValueError) as error:
        raise ModelFileError(f"{folder / CONFIG_NAME} holds a damaged number: {error}") from error


def _tensors_name(folder: Path, config: dict[str, Any]) -> str:
    if config["schema"] == 1:
        return SCHEMA_1_TENSORS
    name = config.get("tensors")
    if not isinstance(name, str) or not TENSORS_NAME.fullmatch(name):  # never a path out of the folder
        raise ModelFileError(f"{folder / CONFIG_NAME} names the tensor file {name!r}; the file is damaged.")
    return name


def _read_tensors(folder: Path, config: dict[str, Any]) -> dict[str, Tensor]:
    file = folder / _tensors_name(folder, config)
    data = file.read_bytes()
    if hashlib.sha256(data).hexdigest() != config.get("sha256"):
        raise ModelFileError(
            f"{file} does not match its checksum in {CONFIG_NAME}: it is truncated, damaged or from another model."
        )
    try:
        return parse_tensors(data)
    except (SafetensorError, ValueError) as error:
        raise ModelFileError(f"{file} cannot be read: {error}") from error


def _current_tensors(folder: Path) -> str | None:
    """Return the name of the tensor file of the model that is there; None if the folder holds no model."""
    try:
        return _tensors_name(folder, read_config(folder))
    except ModelFileError:
        return None


def _tidy(folder: Path, keep: str, replaced: str | None) -> None:
    """Remove tensor files that the configuration no longer names, and temporary files that a crash left."""
    now = time.time()
    for file in folder.iterdir():
        unused = file.name != keep and (TENSORS_NAME.fullmatch(file.name) or file.name == replaced)
        if unused or (PART_NAME.fullmatch(file.name) and _age(file, now) > STALE_SECONDS):
            file.unlink(missing_ok=True)
    sync_folder(folder)


def _age(file: Path, now: float) -> float:
    try:
        return now - file.stat().st_mtime
    except FileNotFoundError:
        return 0.0

"""Datasets of Hugging Face: by name, or in a local folder, which needs no network."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from convexformer.embedding.base import need

SAVED = ("state.json", "dataset_dict.json")  # save_to_disk writes one of them: one dataset, or several splits
TABLES = (".parquet", ".csv", ".jsonl")
NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*){0,2}", re.ASCII)


def may_be_name(path: Path) -> bool:
    """Whether this could be ``name``, ``owner/name``, either with ``/configuration``, rather than a mistyped path."""
    return NAME.fullmatch(path.as_posix()) is not None and not Path(path.parts[0]).exists()


def holds_dataset(folder: Path) -> bool:
    """Whether ``save_to_disk`` wrote a folder, or there are tables in it."""
    return _is_saved(folder) or any(file.suffix in TABLES for file in folder.rglob("*"))


def read_dataset(source: Path, split: str | None) -> Any:
    """Return one split of a dataset, a ``datasets.Dataset``."""
    local = source.is_dir()
    what = "is a folder with a dataset" if local else "is no file or folder here, and may name a Hugging Face dataset"
    try:
        datasets: Any = need("datasets", "datasets")
    except ValueError as error:
        raise ValueError(f"{source} {what}, but {error}") from error
    if local:
        read = datasets.load_from_disk if _is_saved(source) else datasets.load_dataset
        attempts: list[tuple[str, ...]] = [
            (str(source.resolve()),)
        ]  # load_dataset takes some bare names ("csv") for formats
    else:
        read, attempts = datasets.load_dataset, _attempts(source.parts)
    failures = []
    for attempt in attempts:
        try:
            found = read(*attempt)
        except Exception as error:  # of HTTP clients, file systems, Arrow: datasets does not translate them
            failures.append(error)
        else:
            return _one_split(source, found, split)
    reasons = "; ".join(f"{type(error).__name__}: {error}" for error in failures)
    if local:
        raise ValueError(f"{source} cannot be read as a Hugging Face dataset: {reasons}") from failures[0]
    raise ValueError(
        f"{source} is no file or folder here, and no Hugging Face dataset of this name could be read ({reasons}). Check the "
        "name (imdb, owner/name, or with a configuration: glue/mrpc). Without a network, load the dataset elsewhere, call "
        "its save_to_disk(folder), and pass that folder."
    ) from failures[0]


def class_labels(data: Any, column: str) -> list[Any]:
    """Return a column of labels, numbers of classes by the classes' names; None where there is no label (-1)."""
    names = getattr(data.features[column], "names", None)
    values = list(data[column])
    return values if names is None else [None if k is None or k < 0 else names[k] for k in values]


def _is_saved(folder: Path) -> bool:
    return any((folder / name).is_file() for name in SAVED)


def _attempts(parts: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Return the arguments of load_dataset: ``a/b`` is owner and name, or else name and configuration."""
    if len(parts) == 3:
        return [("/".join(parts[:2]), parts[2])]
    return [("/".join(parts),), parts] if len(parts) == 2 else [parts]


def _one_split(source: Path, found: Any, split: str | None) -> Any:
    if not isinstance(found, Mapping):  # one dataset, whose split need not have a name
        if split in (None, found.split):
            return found
        raise ValueError(f"split={split!r} was given; {source} holds a single dataset without it; leave split out.")
    if split is None and len(found) == 1:
        return next(iter(found.values()))
    if split not in found:
        have = ", ".join(map(repr, found))
        raise ValueError(f"split={split!r} was given; {source} has the splits {have}; name one (split=, --split).")
    return found[split]

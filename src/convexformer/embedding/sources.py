"""What is embedded: texts from a table, a dataset or a list, images from a folder tree or a table, with their labels."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from convexformer.embedding.hub import class_labels, holds_dataset, may_be_name, read_dataset

TEXT_SUFFIXES = (".txt", ".csv", ".tsv", ".jsonl")
IMAGE_SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp")
TEXT_COLUMNS = ("text", "sentence", "review", "content")
IMAGE_COLUMNS = ("file", "image", "path", "filename")
LABEL_COLUMNS = ("label", "class", "target", "y")


@final
@dataclass(frozen=True)
class Source:
    """Samples and their labels: texts themselves, or images by file and by the name to show."""

    kind: str
    """``"text"`` or ``"image"``."""
    items: tuple[str, ...]
    """Texts, or paths of images."""
    names: tuple[str, ...]
    """Paths relative to the folder or the table; empty for texts."""
    labels: tuple[Any, ...] | None

    def __len__(self) -> int:
        return len(self.items)

    def facts(self) -> dict[str, Any]:
        """Return what tells this source from others, for the fingerprint of a job: texts, or names and sizes of files."""
        if self.kind == "text":
            return {"texts": list(self.items), "labels": self.labels}
        return {
            "names": list(self.names),
            "bytes": [os.stat(file).st_size for file in self.items],
            "labels": self.labels,
        }


def read_source(
    source: str | os.PathLike[str] | Sequence[str],
    labels: Sequence[Any] | None = None,
    *,
    column: str | None = None,
    label_column: str | None = None,
    split: str | None = None,
    limit: int | None = None,
) -> Source:
    """Read texts (a list, txt with one text a line, csv, tsv, jsonl, a dataset) or images (a folder tree, a csv of files).

    A table has a header; the column of texts is called text, sentence, review or content, that of image files file, image,
    path or filename, that of labels label, class, target or y, unless ``column`` and ``label_column`` name them. The class
    of an image in a folder tree is the name of the folder at the top of the tree that it is in.

    A dataset is one of Hugging Face, by name, or a folder that its ``save_to_disk`` wrote or that holds parquet, csv or
    jsonl files and no images; ``split`` says which part of it, where there are several. It has columns as tables have.
    """
    if isinstance(source, (str, os.PathLike)):
        path = Path(source)
        if _is_dataset(path):
            found = _dataset(path, column, label_column, split, limit)
        elif split is not None:
            raise ValueError(f"split={split!r} was given, but {path} is no dataset; only these have splits.")
        elif not path.exists():
            raise ValueError(
                f"{path} does not exist; expected a file of texts, a folder of images or of a dataset, the name of a "
                "Hugging Face dataset, or a list of texts."
            )
        else:
            found = _folder(path) if path.is_dir() else _file(path, column, label_column)
    else:
        if split is not None:
            raise ValueError(f"split={split!r} was given with a list of texts; only datasets have splits.")
        found = Source("text", tuple(_text(item, i) for i, item in enumerate(source)), (), None)
    if labels is not None:
        if found.labels is not None:
            raise ValueError(f"{source} has labels of its own; pass labels=None.")
        if len(labels) != len(found):
            raise ValueError(f"{len(labels)} labels were given for {len(found)} samples; they must match.")
        found = Source(found.kind, found.items, found.names, tuple(labels))
    if limit is not None:
        kept = None if found.labels is None else found.labels[:limit]
        found = Source(found.kind, found.items[:limit], found.names[:limit], kept)
    if not len(found):
        raise ValueError(f"{source} holds no samples.")
    return found


def _text(item: Any, i: int) -> str:
    if not isinstance(item, str):
        raise TypeError(f"sample {i} is a {type(item).__name__}; expected a list of texts.")
    return item


def _is_dataset(path: Path) -> bool:
    if path.is_dir():
        return holds_dataset(path) and not _images(path)
    return not path.exists() and path.suffix not in TEXT_SUFFIXES and may_be_name(path)


def _dataset(path: Path, column: str | None, label_column: str | None, split: str | None, limit: int | None) -> Source:
    data = read_dataset(path, split)
    if limit is not None:
        data = data.select(range(min(limit, len(data))))  # before texts are read
    name = _pick(path, column, TEXT_COLUMNS, data.column_names, "texts")
    label = _pick(path, label_column, LABEL_COLUMNS, data.column_names, "labels", needed=label_column is not None)
    assert name is not None
    if "string" not in str(getattr(data.features[name], "dtype", "")):
        raise ValueError(f"{path}: column {name!r} holds {data.features[name]}; expected text.")
    labels = None
    if label is not None:
        values = class_labels(data, label)
        if label_column is not None or any(value is not None for value in values):  # splits for tests have no labels
            labels = _numbers(values, path, label)
    return Source("text", _texts(list(data[name]), path, name), (), labels)


def _images(path: Path) -> list[Path]:
    """Find all images, in the order of their names."""
    return sorted(file for file in path.rglob("*") if file.suffix.lower() in IMAGE_SUFFIXES and file.is_file())


def _folder(path: Path) -> Source:
    files = _images(path)
    if not files:
        raise ValueError(
            f"{path} holds no images ({', '.join(IMAGE_SUFFIXES)}) and no dataset; expected one folder a class."
        )
    inside = [file.relative_to(path) for file in files]
    deep = [len(name.parts) > 1 for name in inside]
    if any(deep) and not all(deep):
        stray = inside[deep.index(False)]
        raise ValueError(
            f"{path} has images both in folders, which name classes, and beside them ({stray}); move those."
        )
    labels = tuple(name.parts[0] for name in inside) if all(deep) else None
    return Source("image", tuple(map(str, files)), tuple(name.as_posix() for name in inside), labels)


def _file(path: Path, column: str | None, label_column: str | None) -> Source:
    if path.suffix not in TEXT_SUFFIXES:
        raise ValueError(f"{path} has the suffix {path.suffix!r}; expected {', '.join(TEXT_SUFFIXES)} or a folder.")
    if path.suffix == ".txt":
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        return Source("text", tuple(lines), (), None)
    rows = _json_lines(path) if path.suffix == ".jsonl" else _table(path)
    if not rows:
        raise ValueError(f"{path} holds no samples.")
    columns = list(rows[0])
    name = _pick(path, column, (*TEXT_COLUMNS, *IMAGE_COLUMNS), columns, "texts or image files")
    assert name is not None
    label = _pick(path, label_column, LABEL_COLUMNS, columns, "labels", needed=label_column is not None)
    values = _texts([row.get(name) for row in rows], path, name)
    labels = None if label is None else _numbers([row.get(label) for row in rows], path, label)
    if name in IMAGE_COLUMNS or all(Path(value).suffix.lower() in IMAGE_SUFFIXES for value in values):
        files = tuple(str(path.parent / value) for value in values)
        for value, file in zip(values, files, strict=True):
            if not Path(file).is_file():
                raise ValueError(
                    f"{path} names the image {value}, which does not exist; paths are relative to the table."
                )
        return Source("image", files, values, labels)
    return Source("text", values, (), labels)


def _texts(values: list[Any], path: Path, column: str) -> tuple[str, ...]:
    for i, value in enumerate(values):
        if not isinstance(value, str):
            raise ValueError(f"{path}, sample {i}: column {column!r} holds {value!r}; expected text.")
    return tuple(values)


def _table(path: Path) -> list[dict[str, Any]]:
    csv.field_size_limit(1 << 24)
    with path.open(newline="", encoding="utf-8-sig") as file:
        if path.suffix == ".csv":
            return list(csv.DictReader(file))
        return list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))  # tsv files quote nothing


def _json_lines(path: Path) -> list[dict[str, Any]]:
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}, line {number} is not JSON: {error}") from error
        if not isinstance(row, dict):
            raise ValueError(f"{path}, line {number} holds a {type(row).__name__}; expected an object.")
        rows.append(row)
    return rows


def _pick(
    path: Path, asked: str | None, usual: Sequence[str], columns: list[str], what: str, *, needed: bool = True
) -> str | None:
    """Return the column asked for, or the first usual one."""
    found = next((name for name in ([asked] if asked is not None else usual) if name in columns), None)
    if found is None and needed:
        wanted = repr(asked) if asked is not None else " or ".join(usual)
        raise ValueError(f"{path} has no column {wanted} for the {what}; it has {', '.join(map(repr, columns))}.")
    return found


def _numbers(labels: list[Any], path: Path, column: str) -> tuple[Any, ...]:
    """Return whole or real numbers where all labels are such, else text."""
    if any(label is None or label == "" for label in labels):
        first = next(i for i, label in enumerate(labels) if label is None or label == "")
        raise ValueError(f"{path}, sample {first} has no label in column {column!r}.")
    texts = tuple(str(label).strip() for label in labels)
    try:
        whole = tuple(int(text) for text in texts)
        return whole if texts == tuple(map(str, whole)) else texts  # "007" is a name
    except ValueError:
        pass
    try:
        return tuple(float(text) for text in texts)
    except ValueError:
        return texts

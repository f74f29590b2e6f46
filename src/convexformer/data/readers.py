"""Readers of single formats: text tables, tensors that torch saved, and the headers of NumPy's files."""

from __future__ import annotations

import csv
import io
import math
import pickle
import zipfile
from pathlib import Path
from typing import BinaryIO

import numpy as np

DELIMITERS = {".csv": ",", ".tsv": "\t"}


def read_table(file: Path) -> dict[str, np.ndarray]:
    """Return the columns of a csv or tsv file by their names in its first line: whole numbers, numbers or text.

    A first line of numbers is no header; columns are then named "0", "1", ...
    """
    rows = [(line, row) for line, row in _rows(file) if row]
    if not rows:
        raise ValueError(f"{file} is empty; expected a line of column names, then one line a sample.")
    width = len(rows[0][1])
    for line, row in rows:
        if len(row) != width:
            raise ValueError(f"{file}, line {line} has {len(row)} columns; the first line has {width}.")
    named = _numbers(rows[0][1]) is None
    header, body = ([name.strip() for name in rows[0][1]], rows[1:]) if named else (list(map(str, range(width))), rows)
    if len(set(header)) < width:
        raise ValueError(f"{file} names a column twice in its first line: {', '.join(header)}.")
    return {name: _column([row[k] for _, row in body]) for k, name in enumerate(header)}


def _rows(file: Path) -> list[tuple[int, list[str]]]:
    """Lines as cells with the number of each line."""
    data = file.read_bytes().removeprefix(b"\xef\xbb\xbf")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ValueError(
            f"{file}, line {line} is not UTF-8 (byte 0x{data[error.start]:02x}). Save it as UTF-8; spreadsheets offer that."
        ) from error
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=DELIMITERS[file.suffix])
    try:
        return [(reader.line_num, row) for row in reader]
    except csv.Error as error:
        raise ValueError(f"{file}, line {reader.line_num} cannot be read: {error}.") from error


def _column(cells: list[str]) -> np.ndarray:
    numbers = _numbers(cells)
    if numbers is None:
        return np.array(cells, dtype=str)
    whole = all(cell.strip().lstrip("+-").isdigit() for cell in cells)
    return np.array([int(cell) for cell in cells]) if whole else np.array(numbers)


def _numbers(cells: list[str]) -> list[float] | None:
    try:
        return [float(cell) for cell in cells]
    except ValueError:
        return None


def read_torch(file: Path) -> dict[str, np.ndarray]:
    """Return the tensors of a file that ``torch.save`` wrote: one, or a dictionary; nothing in it is executed."""
    import torch

    try:
        loaded = torch.load(file, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, KeyError, ValueError, AttributeError) as error:
        raise ValueError(
            f"{file} cannot be read: it is damaged or holds objects. Only tensors are read, as a pickle can execute code: "
            "save a dictionary of tensors, torch.save({'X': X, 'y': y}, file)."
        ) from error
    tensors = {file.stem: loaded} if isinstance(loaded, torch.Tensor) else loaded
    if not isinstance(tensors, dict) or not tensors:
        raise ValueError(f"{file} holds a {type(loaded).__name__}; expected a tensor or a dictionary of tensors.")
    for name, value in tensors.items():
        if not isinstance(value, torch.Tensor):
            raise ValueError(f"{file} holds a {type(value).__name__} named {name!r}; expected tensors only.")
    return {str(name): _array(value) for name, value in tensors.items()}


def _array(tensor: object) -> np.ndarray:
    import torch

    assert isinstance(tensor, torch.Tensor)
    dense = tensor.detach().to_dense() if tensor.layout is not torch.strided else tensor.detach()
    return (dense.float() if dense.dtype == torch.bfloat16 else dense).numpy()  # NumPy has no bfloat16


def check_numpy_headers(file: Path) -> None:
    """Raise if an array of an npy or npz file says in its header that it is larger than what the file holds."""
    if file.suffix == ".npy":
        with file.open("rb") as stream:
            _check_header(stream, file.stat().st_size, str(file))
        return
    with zipfile.ZipFile(file) as archive:
        for entry in archive.infolist():
            if entry.filename.endswith(".npy"):
                with archive.open(entry) as stream:
                    _check_header(stream, entry.file_size, f"{file}, array {entry.filename[:-4]!r}")  # type: ignore[arg-type]


def _check_header(stream: BinaryIO, size: int, where: str) -> None:
    version = np.lib.format.read_magic(stream)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, dtype = read(stream)
    needed, left = math.prod(shape) * dtype.itemsize, size - stream.tell()
    if not dtype.hasobject and (min(shape, default=0) < 0 or needed > left):
        raise ValueError(
            f"{where}: its header says {dtype} {tuple(shape)}, {needed:,} bytes, and there are {left:,}. The file is "
            "truncated or damaged; copy or write it again."
        )

"""What the commands leave behind: tables or JSON, files of predictions, one-line errors, exit codes."""

from __future__ import annotations

import csv
import json
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from convexformer.certificates import Certificate

out, err = Console(), Console(stderr=True)


class Exit(IntEnum):
    """What a script can rely on."""

    DONE = 0
    BAD_INPUT = 2
    NOT_CERTIFIED = 3


@contextmanager
def user_errors() -> Iterator[None]:
    """Bad input ends with one clear line and exit code 2, never a traceback."""
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            yield
    except (ValueError, TypeError, OSError) as error:
        err.print(f"[bold red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        raise typer.Exit(Exit.BAD_INPUT) from error


def _show_warning(message: Warning | str, *where: Any, **more: Any) -> None:
    """One line like that of an error: a user of the command line has no use for a line of Python."""
    err.print(f"[yellow]warning:[/] {escape(str(message))}", highlight=False, soft_wrap=True)


def show(values: dict[str, Any], as_json: bool, title: str) -> None:
    """Print names and values, those that there are, as a table or as one JSON object."""
    if as_json:
        json.dump(values, sys.stdout, indent=2)
        print()
        return
    table = Table(title=title, show_header=False)
    table.add_column()
    table.add_column(overflow="fold")  # a long path stays whole
    for name, value in values.items():
        if value is None:
            continue
        if isinstance(value, bool):
            text = "[green]yes[/]" if value else "[red]no[/]"
        else:
            text = f"{value:.6g}" if isinstance(value, float) else escape(str(value))
        table.add_row(escape(name.replace("_", " ")), text)
    out.print(table)


def certificate_rows(proof: Certificate, tolerance: float) -> dict[str, Any]:
    """Return a certificate as rows of a table."""
    return {
        "objective": proof.primal,
        "dual": proof.dual,
        "relative_gap": proof.relative_gap,
        "kind": proof.kind,
        "tolerance": tolerance,
        "certified": proof.meets(tolerance),
    }


def write_predictions(path: Path, predictions: np.ndarray, outputs: np.ndarray) -> None:
    """Write predictions in the format that the suffix names; an npz file has the outputs, too."""
    if path.suffix == ".npz":
        np.savez(path, predictions=predictions, outputs=outputs)
    elif path.suffix == ".npy":
        np.save(path, predictions)
    elif path.suffix == ".csv":
        flat = predictions.reshape(len(predictions), -1)
        names = ["prediction"] if flat.shape[1] == 1 else [f"prediction_{k}" for k in range(flat.shape[1])]
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")  # quotes labels with commas, quotes or line breaks
            writer.writerow(names)
            writer.writerows(flat.tolist())
    else:
        raise ValueError(f"{path} has the suffix {path.suffix!r}; expected .npz, .npy or .csv.")

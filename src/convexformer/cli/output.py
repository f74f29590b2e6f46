"""What the commands print and write: tables or JSON, files of predictions, one-line errors, exit codes."""

from __future__ import annotations

import csv
import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from convexformer.cli.errors import explained, is_bad_input

if TYPE_CHECKING:
    import numpy as np

    from convexformer.certificates import Certificate

out, err = Console(), Console(stderr=True)


class Exit(IntEnum):
    """Exit codes for scripts. A bug ends with a traceback and exit code 1."""

    DONE = 0
    BAD_INPUT = 2
    NOT_CERTIFIED = 3
    UNTESTED = 4  # an experiment is done, but this mode or budget left some claims open
    INTERRUPTED = 130  # Ctrl-C before there was anything to keep


@contextmanager
def user_errors() -> Iterator[None]:
    """Report bad input as one line with exit code 2, Ctrl-C as the code 130; a bug keeps its traceback."""
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            yield
    except KeyboardInterrupt as error:
        raise typer.Exit(Exit.INTERRUPTED) from error
    except Exception as error:
        if not is_bad_input(error):
            raise
        err.print(f"[bold red]error:[/] {escape(explained(error))}", highlight=False, soft_wrap=True)
        raise typer.Exit(Exit.BAD_INPUT) from error


def _show_warning(message: Warning | str, *where: Any, **more: Any) -> None:
    """Print a warning on one line, like an error, without the line of Python code it comes from."""
    warn_user(str(message))


def warn_user(message: str) -> None:
    """Print a warning on one line."""
    err.print(f"[yellow]warning:[/] {escape(message)}", highlight=False, soft_wrap=True)


def print_json(values: dict[str, Any]) -> None:
    """Print one strict JSON object; infinite numbers and NaN are the strings "inf", "-inf" and "nan"."""
    from convexformer.data.files import strict_json

    print(strict_json(values))


def show(values: dict[str, Any], as_json: bool, title: str) -> None:
    """Print names and values as a table (None is left out) or as one JSON object."""
    if as_json:
        print_json(values)
        return
    table = Table(title=title, show_header=False)
    table.add_column()
    table.add_column(overflow="fold")  # long paths are folded, not cut
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


def write_predictions(path: Path, found: dict[str, np.ndarray]) -> None:
    """Write predictions in the format of the suffix: npz holds every array, tables labels and probabilities, npy labels."""
    import numpy as np

    from convexformer.data.files import atomic_write

    delimiters = {".csv": ",", ".tsv": "\t"}
    predictions = found["predictions"]
    if path.suffix == ".npz":
        atomic_write(path, lambda file: np.savez(file, **found))  # type: ignore[arg-type]
    elif path.suffix == ".npy":
        atomic_write(path, lambda file: np.save(file, predictions))
    elif path.suffix in delimiters:
        flat = predictions.reshape(len(predictions), -1)
        names = ["prediction"] if flat.shape[1] == 1 else [f"prediction_{k}" for k in range(flat.shape[1])]
        columns = flat.tolist()
        if "probabilities" in found and found["probabilities"].ndim == 2:
            names += [f"probability_{label}" for label in found["classes"].tolist()]
            columns = [[*row, *more] for row, more in zip(columns, found["probabilities"].tolist(), strict=True)]
        text = io.StringIO()
        writer = csv.writer(text, delimiter=delimiters[path.suffix], lineterminator="\n")  # quotes what needs quotes
        writer.writerow(names)
        writer.writerows(columns)
        atomic_write(path, lambda file: file.write(text.getvalue().encode()))
    else:
        raise ValueError(f"{path} has the suffix {path.suffix!r}; expected .npz, .npy, .csv or .tsv.")

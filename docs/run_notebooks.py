"""Runs the notebooks of the gallery: `python docs/run_notebooks.py [name ...] [--check]`.

A source is a Python file with cells: `# %%` begins code, `# %% [markdown]` text, and the comment at the top is the title.
For each, a page (`.md`), a notebook (`.ipynb`, outputs included) and figures (`images/gallery_*.png`) are written. The value
of a cell's last line is shown as Jupyter shows it: a figure, `_repr_html_`, or its text. `--check` runs them and
writes nothing.
"""

from __future__ import annotations

import argparse
import ast
import base64
import contextlib
import io
import json
import os
import re
import time
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.figure import Figure

DOCS = Path(__file__).parent
GALLERY = DOCS / "gallery"


class Cell(NamedTuple):
    """A cell of a source."""

    kind: str  # "code" or "markdown"
    text: str


class Output(NamedTuple):
    """What a cell printed, and its last value as text, HTML or PNG."""

    printed: str = ""
    value: str = ""
    html: str = ""
    png: bytes = b""


def cells(source: str) -> list[Cell]:
    """Cut a source into cells."""
    parts = re.split(r"^# %%(.*)\n", source, flags=re.M)
    found = [Cell("markdown", _uncommented(parts[0]))]
    for tag, body in zip(parts[1::2], parts[2::2], strict=True):
        if "[markdown]" in tag:
            found.append(Cell("markdown", _uncommented(body)))
        else:
            found.append(Cell("code", body.strip()))
    return found


def _uncommented(text: str) -> str:
    return "\n".join(line.removeprefix("#").removeprefix(" ") for line in text.strip().splitlines())


def run_cell(code: str, names: dict[str, Any], label: str) -> Output:
    """Run one cell in ``names``."""
    tree = ast.parse(code)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    printed, value = io.StringIO(), None
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, label, "exec"), names)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), label, "eval"), names)
    if value is None:
        return Output(printed.getvalue())
    if isinstance(value, Figure):
        buffer = io.BytesIO()
        value.savefig(buffer, format="png", dpi=90, metadata={"Software": None})
        return Output(printed.getvalue(), repr(value), png=buffer.getvalue())
    shown = value._repr_html_() if hasattr(value, "_repr_html_") else ""
    return Output(printed.getvalue(), repr(value), html=shown)


def run(file: Path) -> list[tuple[Cell, Output]]:
    """Run all cells of a source, one after the other."""
    names: dict[str, Any] = {"__name__": "__main__"}
    return [
        (cell, run_cell(cell.text, names, f"{file.name}, cell {k}") if cell.kind == "code" else Output())
        for k, cell in enumerate(cells(file.read_text()))
    ]


def page(name: str, done: list[tuple[Cell, Output]]) -> tuple[str, dict[str, bytes]]:
    """Return the page in Markdown and its images by name."""
    parts, images = [], {}
    for k, (cell, output) in enumerate(done):
        if cell.kind == "markdown":
            parts.append(cell.text)
            continue
        parts.append(f"```python\n{cell.text}\n```")
        text = output.printed + ("" if output.html or output.png else output.value)
        if text.strip():
            parts.append(f"```text\n{text.rstrip()}\n```")
        if output.html:
            parts.append(f"<div>{output.html}</div>")
        if output.png:
            image = f"gallery_{name}_{k}.png"
            images[image] = output.png
            parts.append(f"![output of the cell above](../images/{image})")
    parts.append(f"*Run by `make notebooks` from `docs/gallery/{name}.py`; as a [notebook]({name}.ipynb).*")
    return "\n\n".join(parts) + "\n", images


def notebook(done: list[tuple[Cell, Output]]) -> dict[str, Any]:
    """Return the notebook in Jupyter's format, version 4.5."""
    made = []
    for k, (cell, output) in enumerate(done):
        entry: dict[str, Any] = {
            "cell_type": cell.kind,
            "id": f"cell-{k}",
            "metadata": {},
            "source": cell.text.splitlines(keepends=True),
        }
        if cell.kind == "code":
            entry |= {"execution_count": k, "outputs": _jupyter_outputs(output, k)}
        made.append(entry)
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return {"cells": made, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}


def _jupyter_outputs(output: Output, count: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    if output.printed:
        found.append({"output_type": "stream", "name": "stdout", "text": output.printed.splitlines(keepends=True)})
    if output.value:
        data: dict[str, Any] = {"text/plain": [output.value]}
        if output.html:
            data["text/html"] = [output.html]
        if output.png:
            data["image/png"] = base64.b64encode(output.png).decode()
        found.append({"output_type": "execute_result", "execution_count": count, "data": data, "metadata": {}})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="of notebooks; all by default")
    parser.add_argument("--check", action="store_true", help="run them and write nothing")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for file in sorted(GALLERY.glob("*.py")):
        name = file.stem
        if options.names and name not in options.names:
            continue
        began, cpu = time.perf_counter(), time.process_time()
        done = run(file)
        if not options.check:
            text, images = page(name, done)
            (GALLERY / f"{name}.md").write_text(text)
            (GALLERY / f"{name}.ipynb").write_text(json.dumps(notebook(done), indent=1) + "\n")
            for image, content in images.items():
                (DOCS / "images" / image).write_bytes(content)
        print(f"{name}: {time.process_time() - cpu:.1f} CPU s, {time.perf_counter() - began:.1f} s")


if __name__ == "__main__":
    main()

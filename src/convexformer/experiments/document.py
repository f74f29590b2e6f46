"""A small document of headings, text, tables and figures, written as Markdown and as one self-contained HTML page."""

from __future__ import annotations

import base64
import html
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

# CSS of the HTML page
STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:64rem;margin:2rem auto;padding:0 1rem;color:#222}
table{border-collapse:collapse;margin:1rem 0;font-size:13px}td,th{border:1px solid #ccc;padding:.3rem .6rem;text-align:left}
th{background:#f3f3f3}img{max-width:100%}"""


@final
@dataclass
class Document:
    """Headings, paragraphs, tables and figures in order, of plain text."""

    title: str
    _markdown: list[str] = field(default_factory=list)
    _html: list[str] = field(default_factory=list)

    def heading(self, text: str) -> None:
        """Begin a section."""
        self._add(f"## {text}", f"<h2>{html.escape(text)}</h2>")

    def text(self, text: str) -> None:
        """Add a paragraph."""
        self._add(text, f"<p>{html.escape(text)}</p>")

    def table(self, header: list[str], rows: list[list[str]]) -> None:
        """Add a table."""
        lines = [header, ["---"] * len(header), *rows]
        self._add(
            "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines),
            "<table>"
            + "".join(_row(line, "th" if k == 0 else "td") for k, line in enumerate([header, *rows]))
            + "</table>",
        )

    def figure(self, file: Path, caption: str) -> None:
        """Add a PNG that lies beside the document."""
        data = base64.b64encode(file.read_bytes()).decode()
        image = f'<img alt="{html.escape(caption)}" src="data:image/png;base64,{data}">'
        self._add(
            f"![{caption}]({file.name})", f"<figure>{image}<figcaption>{html.escape(caption)}</figcaption></figure>"
        )

    def markdown(self) -> str:
        """Return the document as Markdown."""
        return "\n\n".join([f"# {self.title}", *self._markdown]) + "\n"

    def write(self, folder: Path) -> None:
        """Write ``summary.md`` and ``summary.html``."""
        (folder / "summary.md").write_text(self.markdown())
        head = f'<!doctype html><meta charset="utf-8"><title>{html.escape(self.title)}</title><style>{STYLE}</style>'
        (folder / "summary.html").write_text(
            head + f"<h1>{html.escape(self.title)}</h1>" + "\n".join(self._html) + "\n"
        )

    def _add(self, markdown: str, page: str) -> None:
        self._markdown.append(markdown)
        self._html.append(page)


def _row(cells: list[str], tag: str) -> str:
    return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

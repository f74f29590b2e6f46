"""One self-contained HTML page from sections: the template, the charts' script, and a policy that allows nothing else.

The page's Content-Security-Policy names the hashes of its two scripts and permits no other script and no request at all, so
that even a string that escaped the escaping could neither run nor call home.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from convexformer.report.blocks import Figure, Omission, Section, Slider
from convexformer.report.bundle import charts_script
from convexformer.report.charts import CONFIG


def render(
    title: str,
    summary: str,
    certified: bool,
    tiles: Sequence[tuple[str, str, str]],
    sections: Sequence[Section],
    omissions: Sequence[Omission],
    footer: str,
) -> str:
    """Return the page; ``tiles`` are figures of the headline: name, value, remark."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    figures = {block.id: block for section in sections for block in section.blocks if isinstance(block, Figure)}
    sliders = [block for section in sections for block in section.blocks if isinstance(block, Slider)]
    data = {
        "config": CONFIG,
        "charts": {name: _described(figure) for name, figure in figures.items()},
        "follows": [name for name, figure in figures.items() if figure.follows_slider],
        "steps": [list(step) for slider in sliders for step in slider.steps],
    }
    scripts = [f"/*\n{_resource('notices.txt')}*/\n{charts_script()}", _resource("page.js")]
    environment = Environment(
        loader=PackageLoader("convexformer.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html").render(
        title=title,
        summary=summary,
        certified=certified,
        tiles=tiles,
        sections=sections,
        omissions=omissions,
        footer=footer,
        policy=_policy(scripts),
        style=_resource("page.css"),
        data=embedded(data),
        scripts=scripts,
    )


def embedded(value: Any) -> str:
    """Return JSON for a script element: strict, and without any character that could end the element."""
    text = json.dumps(value, allow_nan=False, ensure_ascii=True, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _described(figure: Figure) -> dict[str, Any]:
    return {"description": figure.description, **figure.spec}


def _resource(name: str) -> str:
    return files("convexformer.report").joinpath(f"templates/{name}").read_text(encoding="utf-8")


def _policy(scripts: Sequence[str]) -> str:
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    allowed = " ".join(f"'sha256-{digest}'" for digest in hashes)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; "
        "form-action 'none'"
    )

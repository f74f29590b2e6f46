"""Where training keys and queries ends up: every claim of Sheen et al. 2024 beside what was measured.

Each part draws data, solves the attention SVMs with a certificate, follows the gradient flow, and compares. The claims
and their verdicts go to ``summary.md`` and ``results.json``, the curves to figures, the settings to ``config.json``.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from convexformer import __version__
from convexformer.experiments import implicit_bias_figures as figures
from convexformer.experiments.implicit_bias_parts import PARTS
from convexformer.experiments.implicit_bias_study import Config, Study


def run(output: Path, *, quick: bool = False, console: Console | None = None) -> dict[str, Any]:
    """Run the experiment; write figures, ``summary.md``, ``results.json`` and ``config.json`` to ``output``."""
    console = console or Console()
    output = Path(output)
    output.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    study = Study(Config.of(quick), output)
    settings = {"convexformer": __version__, "experiment": "implicit-bias", **asdict(study.config)}
    (output / "config.json").write_text(json.dumps(settings, indent=2) + "\n")
    with _spinner(console) as tick:
        for title, part in PARTS.items():
            tick(title)
            part(study)
        study.files.insert(0, figures.overview(study.curves, output / "overview.png"))
    seconds = time.perf_counter() - started
    result = {
        "certified": all(bool(claim.holds) for claim in study.claims),
        "claims": [{**asdict(claim), "holds": bool(claim.holds)} for claim in study.claims],
        "numbers": study.numbers,
        "figures": [str(file) for file in study.files],
        "seconds": seconds,
    }
    (output / "results.json").write_text(json.dumps(result, indent=2) + "\n")
    (output / "summary.md").write_text(_summary(study, seconds))
    _print(console, study, seconds)
    return result


def _summary(study: Study, seconds: float) -> str:
    mode = "quick" if study.config.quick else "full"
    held = sum(claim.holds for claim in study.claims)
    lines = [
        "# Implicit bias: gradient flow on attention against the attention SVMs",
        "",
        f"{held} of {len(study.claims)} rows as predicted ({mode} run, {seconds:.0f} s; settings in `config.json`).",
        "",
        "| source | claim | predicted | measured | |",
        "|---|---|---|---|---|",
    ]
    for claim in study.claims:
        cells = (text.replace("|", "\\|") for text in (claim.source, claim.claim, claim.predicted, claim.measured))
        lines.append("| " + " | ".join(cells) + f" | {'yes' if claim.holds else 'NO'} |")
    aligned, general = study.numbers["aligned"], study.numbers["general"]
    lines += [
        "",
        "The data of theorem 5.1 cannot tell nuclear from Frobenius: there both SVMs have the same solution (relative "
        f"distance {aligned['distance_between_the_svms']:.0e}). The general data above can: the Frobenius solution's "
        f"nuclear norm is {general['frobenius_solution_excess']:.1%} above the optimum. No theorem covers it.",
        "",
        *(f"![{file.stem}]({file.name})" for file in study.files),
        "",
    ]
    return "\n".join(lines)


def _print(console: Console, study: Study, seconds: float) -> None:
    table = Table(title="Gradient flow on attention: claims and measurements", show_lines=True)
    for title in ("claim", "predicted", "measured", ""):
        table.add_column(title)
    for claim in study.claims:
        verdict = "[green]yes[/]" if claim.holds else "[red]NO[/]"
        table.add_row(f"[bold]{claim.source}:[/] {claim.claim}", claim.predicted, claim.measured, verdict)
    console.print(table)
    console.print("mu: smallest margin; tau: normalised time; log t: natural logarithm of physical time.", style="dim")
    console.print("The data of theorem 5.1 cannot tell nuclear from Frobenius; the general data can.")
    console.print("Figures: " + ", ".join(str(file) for file in study.files))
    console.print(f"[dim]{seconds:.0f} s in all; {study.output / 'summary.md'}, results.json, config.json[/]")


@contextmanager
def _spinner(console: Console) -> Iterator[Any]:
    """Yield a function that says what is going on."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("implicit bias", total=None)
        yield lambda text: progress.update(task, description=text)

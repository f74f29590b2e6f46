"""Where training keys and queries ends up: every claim of Sheen et al. 2024 beside what was measured.

Each part draws data, solves the attention SVMs with a certificate, follows the gradient flow, and compares. The claims
and their verdicts go to ``summary.md`` and ``results.json``, the curves to figures, the settings to ``config.json``.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from convexformer.experiments import implicit_bias_figures as figures
from convexformer.experiments.document import Document
from convexformer.experiments.implicit_bias_more import PARTS as MORE_PARTS
from convexformer.experiments.implicit_bias_parts import PARTS
from convexformer.experiments.implicit_bias_study import Config, FlowStudy
from convexformer.experiments.study import Study
from convexformer.progress import spinner

TITLE = "Implicit bias: gradient flow on attention against the attention SVMs"


def run(output: Path, *, quick: bool = False, console: Console | None = None) -> dict[str, Any]:
    """Run the experiment; write figures, ``summary.md``, ``results.json`` and ``config.json`` to ``output``."""
    study = Study.begin("implicit-bias", TITLE, output, quick, console)
    flows = FlowStudy(study, Config.of(quick))
    study.write_config(asdict(flows.config))
    with spinner("implicit bias", study.console) as say:
        for title, part in {**PARTS, **MORE_PARTS}.items():
            say(title)
            part(flows)
        study.draw(figures.overview, "overview.png", "overview", flows.curves)
        study.figures.insert(0, study.figures.pop())  # the overview comes first
    seconds = study.seconds
    result = study.finish(
        certified=all(each.holds for each in study.findings),
        parts={"claims": [each.record() for each in study.findings]},
        figures=[str(file) for file, _ in study.figures],
        page=_page(study, seconds),
        seconds=seconds,
    )
    _print(study, seconds)
    return result


def _page(study: Study, seconds: float) -> Document:
    page = study.page()
    mode = "quick" if study.quick else "full"
    held = sum(each.holds for each in study.findings)
    page.text(
        f"{held} of {len(study.findings)} rows as predicted ({mode} run, {seconds:.0f} s; settings in `config.json`)."
    )
    page.table(
        ["source", "claim", "predicted", "measured", ""],
        [
            [each.source, each.claim, each.predicted, each.measured, "yes" if each.holds else "NO"]
            for each in study.findings
        ],
    )
    aligned, general = study.numbers["aligned"], study.numbers["general"]
    page.text(
        "The data of theorem 5.1 cannot tell nuclear from Frobenius: there both SVMs have the same solution (relative "
        f"distance {aligned['distance_between_the_svms']:.0e}). The general data above can: the Frobenius solution's "
        f"nuclear norm is {general['frobenius_solution_excess']:.1%} above the optimum. No theorem covers it."
    )
    for file, caption in study.figures:
        page.figure(file, caption)
    return page


def _print(study: Study, seconds: float) -> None:
    verdicts = {True: "[green]yes[/]", False: "[red]NO[/]"}
    study.print_findings(
        "Gradient flow on attention: claims and measurements",
        ("predicted", "measured", ""),
        [(each.predicted, each.measured, verdicts[each.holds]) for each in study.findings],
    )
    study.console.print(
        "mu: smallest margin; tau: normalised time; log t: natural logarithm of physical time.", style="dim"
    )
    study.console.print("The data of theorem 5.1 cannot tell nuclear from Frobenius; the general data can.")
    study.print_files(seconds, "results.json, config.json")

"""The state of a running experiment: claims and measurements, figures and numbers, and the folder it writes.

An experiment begins a :class:`Study`, adds findings and figures, and finishes it with its results. The folder then holds
the figures, ``config.json`` (all settings that the numbers depend on), ``results.json`` and ``summary.md`` with
``summary.html``. The ``"certified"`` and ``"untested"`` of the results decide the exit code of the command line.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, final

from rich.console import Console
from rich.table import Table

from convexformer import __version__
from convexformer.data.files import write_json
from convexformer.experiments.document import Document


class Verdict(Enum):
    """Whether a claim was confirmed by the measurement."""

    YES = "reproduced"
    PARTLY = "partly"
    NO = "not reproduced"
    OPEN = "not tested"
    BEYOND = "not testable here"

    @property
    def colour(self) -> str:
        """The colour of the verdict on a terminal."""
        colours = {Verdict.YES: "green", Verdict.PARTLY: "yellow", Verdict.NO: "red"}
        return colours.get(self, "dim")


@final
@dataclass(frozen=True)
class Finding:
    """A claim beside what was measured; ``predicted`` is the number that theory gives, where it gives one.

    ``budget`` says for how many iterations models were trained, at most, where the verdict depends on it.
    """

    source: str
    claim: str
    measured: str
    verdict: Verdict
    predicted: str = ""
    budget: str = ""

    @classmethod
    def of_prediction(cls, source: str, claim: str, predicted: str, measured: str, holds: bool) -> Finding:
        """Set a prediction beside a measurement that agrees with it to the stated bound, or does not."""
        return cls(source, claim, measured, Verdict.YES if holds else Verdict.NO, predicted)

    @property
    def holds(self) -> bool:
        """Whether the measurement confirms the claim."""
        return self.verdict is Verdict.YES

    def record(self) -> dict[str, Any]:
        """Return the entry of the list ``"claims"`` of ``results.json``: the same keys in every experiment."""
        return {
            "source": self.source,
            "claim": self.claim,
            "predicted": self.predicted,
            "measured": self.measured,
            "verdict": self.verdict.value,
            "holds": self.holds,
            "budget": self.budget,
        }


@final
@dataclass
class Study:
    """Settings, findings, numbers and figures of one experiment, and the folder that they are written to."""

    name: str
    title: str
    output: Path
    quick: bool
    console: Console
    findings: list[Finding] = field(default_factory=list)
    numbers: dict[str, Any] = field(default_factory=dict)
    figures: list[tuple[Path, str]] = field(default_factory=list)
    """Files with their captions, in the order of the summary."""
    settings: dict[str, Any] = field(default_factory=dict)
    """What ``config.json`` holds; a part of the results as well."""
    started: float = field(default_factory=time.perf_counter)

    @classmethod
    def begin(cls, name: str, title: str, output: Path, quick: bool, console: Console | None) -> Study:
        """Make the folder and start the clock."""
        output = Path(output)
        output.mkdir(parents=True, exist_ok=True)
        return cls(name, title, output, quick, console or Console())

    @property
    def seconds(self) -> float:
        """Seconds since the study began."""
        return time.perf_counter() - self.started

    @property
    def untested(self) -> int:
        """How many claims this run could not test."""
        return sum(each.verdict is Verdict.OPEN for each in self.findings)

    def find(self, source: str, claim: str, measured: str, verdict: Verdict, budget: str = "") -> None:
        """Set a claim beside what was measured."""
        self.findings.append(Finding(source, claim, measured, verdict, budget=budget))

    def draw(self, figure: Callable[..., Path], name: str, caption: str, *arguments: Any, **options: Any) -> None:
        """Draw a figure into the folder."""
        self.figures.append((figure(*arguments, file=self.output / name, **options), caption))

    def write_config(self, settings: dict[str, Any]) -> None:
        """Write ``config.json``: the version, the experiment, and all other settings that the numbers depend on."""
        self.settings = {"convexformer": __version__, "experiment": self.name, **settings}
        write_json(self.output / "config.json", self.settings, 1)

    def page(self) -> Document:
        """Begin the summary."""
        return Document(self.title)

    def finish(
        self, certified: bool, parts: dict[str, Any], figures: list[str], page: Document, seconds: float
    ) -> dict[str, Any]:
        """Write ``results.json`` and the summary; return the results. ``parts`` are those of the experiment alone."""
        result = {
            "config": self.settings,
            "certified": certified,
            "untested": self.untested,
            **parts,
            "numbers": self.numbers,
            "figures": figures,
            "seconds": seconds,
        }
        write_json(self.output / "results.json", result, 1)
        page.write(self.output)
        return result

    def print_findings(self, title: str, columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
        """Print a row for each finding: source and claim, then ``rows``."""
        table = Table(title=title, show_lines=True)
        for column in ("claim", *columns):
            table.add_column(column)
        for each, cells in zip(self.findings, rows, strict=True):
            table.add_row(f"[bold]{each.source}:[/] {each.claim}", *cells)
        self.console.print(table)

    def print_files(self, seconds: float, written: str) -> None:
        """Print where the figures and the files are."""
        self.console.print("Figures: " + ", ".join(str(file) for file, _ in self.figures))
        self.console.print(f"[dim]{seconds:.0f} s in all; {self.output / 'summary.md'}, {written}[/]")

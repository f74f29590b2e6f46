"""What the experiments on trained stacks share: rows of a table, claims and verdicts, and the folder they are written to."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from convexformer import __version__
from convexformer.data import SymbolTask
from convexformer.data.tokens import pick_device
from convexformer.deep import CertifiedLayer, Outcome, Recipe, Run, certify_last_layer, train
from convexformer.experiments.document import Document
from convexformer.experiments.registry import PRESETS
from convexformer.registry import one_of

TOLERANCE = 1e-4


class Verdict(Enum):
    """Whether a claim of a paper was seen."""

    YES = "reproduced"
    PARTLY = "partly"
    NO = "not reproduced"
    OPEN = "not tested"


@final
@dataclass(frozen=True)
class Finding:
    """A paper's claim beside what was measured."""

    source: str
    claim: str
    measured: str
    verdict: Verdict


@final
@dataclass
class Study:
    """One experiment on its way: settings, runs by name, findings, certified last layers, figures."""

    name: str
    title: str
    output: Path
    quick: bool
    presets: tuple[str, ...]
    console: Console
    device: torch.device
    seeds: int
    runs: dict[str, Run] = field(default_factory=dict)
    recipes: dict[str, Recipe] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    layers: dict[str, list[CertifiedLayer]] = field(default_factory=dict)
    figures: list[tuple[Path, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    numbers: dict[str, Any] = field(default_factory=dict)
    started: float = field(default_factory=time.perf_counter)

    @classmethod
    def begin(
        cls,
        name: str,
        title: str,
        output: Path,
        quick: bool,
        preset: str | None,
        console: Console | None,
        quick_seeds: int = 2,
    ) -> Study:
        """Read the options and make the folder; a full run has all presets and five seeds, a quick one fewer."""
        name_of = ("tuned" if quick else "all") if preset is None else one_of("preset", preset, PRESETS)
        chosen = tuple(each for each in PRESETS if each != "all") if name_of == "all" else (name_of,)
        output = Path(output)
        output.mkdir(parents=True, exist_ok=True)
        return cls(
            name, title, output, quick, chosen, console or Console(), pick_device("auto"), quick_seeds if quick else 5
        )

    def train(self, key: str, recipe: Recipe, task: SymbolTask, **changes: Any) -> Run:
        """Train one row of the table."""
        recipe = recipe.but(**changes)
        model = recipe.model(task, seeds=self.seeds)
        with self.console.status(f"{recipe.label}, {task.name}: {self.seeds} seeds on {self.device.type}"):
            run = train(model, task, recipe.training, device=self.device)
        self.runs[key], self.recipes[key] = run, recipe
        reached = int(np.isfinite(run.iterations_to()).sum())
        self.console.print(
            f"[dim]{time.perf_counter() - self.started:6.1f} s[/] {recipe.label}, {task.name}: 99% on {reached} of "
            f"{self.seeds} seeds, iterations {steps(run.iterations_to())}, best {span(run.history.test_accuracy.max(0))}",
            highlight=False,
        )
        return run

    def certify(self, key: str, task: SymbolTask, **options: Any) -> None:
        """Solve the last layer of a row's model, of its first seed in a quick run, of all in a full one."""
        run = self.runs[key]
        options.setdefault("train_fraction", run.training.train_fraction)
        with self.console.status(f"last layer of {self.recipes[key].label}"):
            seeds = [run.model.seeds[0]] if self.quick else None
            self.layers[key] = certify_last_layer(run.model, task, tolerance=TOLERANCE, seeds=seeds, **options)

    def find(self, source: str, claim: str, measured: str, verdict: Verdict) -> None:
        """Set a claim beside what was measured."""
        self.findings.append(Finding(source, claim, measured, verdict))

    def draw(self, figure: Callable[..., Path], name: str, caption: str, *arguments: Any, **options: Any) -> None:
        """Draw a figure into the folder."""
        self.figures.append((figure(*arguments, file=self.output / name, **options), caption))

    # ------------------------------------------------------------------ the folder

    def finish(self) -> dict[str, Any]:
        """Write summary, results and config; return the results."""
        seconds = time.perf_counter() - self.started
        self._be_fair()
        proofs = [layer for layers in self.layers.values() for layer in layers]
        result = {
            "certified": all(layer.certificate.meets(TOLERANCE) for layer in proofs),
            "findings": [{**asdict(each), "verdict": each.verdict.value} for each in self.findings],
            "rows": dict(zip(self.runs, self.rows(), strict=True)),
            "last_layers": {key: [layer.summary() for layer in layers] for key, layers in self.layers.items()},
            "numbers": self.numbers,
            "figures": [file.name for file, _ in self.figures],
            "seconds": seconds,
        }
        (self.output / "results.json").write_text(json.dumps(result, indent=1) + "\n")
        (self.output / "config.json").write_text(json.dumps(self.settings(), indent=1) + "\n")
        np.savez_compressed(self.output / "histories.npz", **self._curves())  # every curve, to draw figures anew
        self._document(seconds).write(self.output)
        self._print(seconds)
        return result

    def _be_fair(self) -> None:
        """A quick run that stopped by the clock refutes nothing: its negative verdicts become open ones."""
        if not self.quick or not any(run.outcome is Outcome.MAX_TIME for run in self.runs.values()):
            return
        self.findings = [
            replace(each, verdict=Verdict.OPEN) if each.verdict is Verdict.NO else each for each in self.findings
        ]
        self.notes.append(
            "Some models of this quick run were stopped by the clock; what they did not reach is not tested."
        )

    def rows(self) -> list[dict[str, Any]]:
        """Return the numbers of every row of the table."""
        return [{"label": self.recipes[key].label, **run.summary()} for key, run in self.runs.items()]

    def settings(self) -> dict[str, Any]:
        """Return everything that decides the numbers."""
        return {
            "convexformer": __version__,
            "torch": torch.__version__,
            "experiment": self.name,
            "quick": self.quick,
            "presets": list(self.presets),
            "seeds": list(range(self.seeds)),
            "device": next((run.device for run in self.runs.values()), str(self.device)),
            "rows": {key: {"task": self.runs[key].task, **recipe.settings()} for key, recipe in self.recipes.items()},
        }

    def _curves(self) -> dict[str, Any]:
        curves: dict[str, Any] = {}
        for key, run in self.runs.items():
            parts = {**vars(run.history), **{f"spectra/{name}": values for name, values in run.history.spectra.items()}}
            curves |= {f"{key}/{name}": values for name, values in parts.items() if isinstance(values, np.ndarray)}
        return curves

    def _document(self, seconds: float) -> Document:
        page = Document(self.title)
        device = self.settings()["device"]
        page.text(
            f"{'Quick' if self.quick else 'Full'} run, presets {', '.join(self.presets)}, {self.seeds} seeds, {device}, "
            f"{seconds:.0f} s. Settings: config.json; all numbers: results.json; curves: histories.npz."
        )
        page.heading("Claims and measurements")
        page.table(
            ["source", "claim", "measured", "verdict"],
            [[each.source, each.claim, each.measured, each.verdict.value] for each in self.findings],
        )
        page.heading("Models")
        page.table(ROW_HEADER, [self._row(key) for key in self.runs])
        page.text(
            "Iterations are the median over the seeds that reached 99% (all of them unless a count says otherwise); the gap "
            "is from 99% train to 99% test accuracy. Seconds are those of all seeds at once, after setup."
        )
        if self.layers:
            page.heading("Last layers, certified")
            page.text(
                "The lower part is frozen as trained; the last layer is solved as a convex problem. The certificate is for "
                "that layer alone: the stack and its embedding were found by gradient descent and have none."
            )
            page.table(
                LAYER_HEADER,
                [_layer_row(self.recipes[key].label, each) for key in self.layers for each in self.layers[key]],
            )
        for note in self.notes:
            page.text(note)
        for file, caption in self.figures:
            page.figure(file, caption)
        return page

    def _row(self, key: str) -> list[str]:
        run, recipe = self.runs[key], self.recipes[key]
        options = recipe.training
        return [
            recipe.label,
            run.task,
            f"{run.model.n_parameters:,}",
            f"{options.learning_rate:g} / {options.weight_decay:g} / {options.batch_size or 'all'}",
            steps(run.iterations_to(part="train")),
            steps(run.iterations_to()),
            steps(run.grokking_gap()),
            steps(run.seconds_to(), "{:.2f}"),
            span(run.history.test_accuracy.max(0)),
            f"{run.history.iteration[-1]:,}",
        ]

    def _print(self, seconds: float) -> None:
        table = Table(title=self.title, show_lines=True)
        for column in ("claim", "measured", "verdict"):
            table.add_column(column)
        colours = {Verdict.YES: "green", Verdict.PARTLY: "yellow", Verdict.NO: "red", Verdict.OPEN: "dim"}
        for each in self.findings:
            verdict = f"[{colours[each.verdict]}]{each.verdict.value}[/]"
            table.add_row(f"[bold]{each.source}:[/] {each.claim}", each.measured, verdict)
        self.console.print(table)
        for key, layers in self.layers.items():
            gap = max(layer.certificate.relative_gap for layer in layers)
            self.console.print(f"Last layer of {self.recipes[key].label}: certified to a relative gap of {gap:.0e}")
        self.console.print("Figures: " + ", ".join(str(file) for file, _ in self.figures))
        self.console.print(
            f"[dim]{seconds:.0f} s in all; {self.output / 'summary.md'}, .html, results.json, config.json[/]"
        )


ROW_HEADER = [
    "model",
    "task",
    "parameters",
    "rate / decay / batch",
    "iterations, train",
    "iterations, test",
    "gap",
    "s to 99% test",
    "best test accuracy",
    "trained for",
]
LAYER_HEADER = [
    "model",
    "seed",
    "relative gap",
    "train, test accuracy",
    "as trained",
    "its gap in the same problem",
    "s",
]


def _layer_row(label: str, layer: CertifiedLayer) -> list[str]:
    return [
        label,
        str(layer.seed),
        f"{layer.certificate.relative_gap:.1e} ({layer.certificate.kind})",
        f"{layer.train_accuracy:.2%}, {layer.test_accuracy:.2%}",
        f"{layer.trained_train_accuracy:.2%}, {layer.trained_test_accuracy:.2%}",
        f"{layer.trained.relative_gap:.1e}",
        f"{layer.solution.seconds:.1f}",
    ]


def every(count: int, total: int) -> Verdict:
    """All seeds: yes. Some: partly."""
    return Verdict.YES if count == total else Verdict.PARTLY if count else Verdict.NO


def steps(values: np.ndarray, form: str = "{:,.0f}") -> str:
    """Write the median of those that arrived, and how many did if not all."""
    there = values[np.isfinite(values)]
    if not len(there):
        return "never"
    return form.format(float(np.median(there))) + (
        "" if len(there) == len(values) else f" ({len(there)} of {len(values)})"
    )


def span(values: np.ndarray) -> str:
    """Write the smallest and the largest share."""
    low, high = float(np.min(values)), float(np.max(values))
    return f"{low:.1%}" if high - low < 5e-4 else f"{low:.1%} to {high:.1%}"


def worst(values: np.ndarray) -> str:
    """Write the largest, or that some never arrived."""
    return f"{values.max():,.0f}" if np.isfinite(values).all() else "never"


def median(values: np.ndarray) -> float:
    """Return the median over seeds, infinite if some seed never arrived."""
    return float(np.median(values)) if np.isfinite(values).all() else float("inf")


def ratio(slow: float, fast: float) -> str:
    """Write how many times fewer."""
    if not np.isfinite(fast):
        return "never"
    return f"{slow / fast:.1f}x" if np.isfinite(slow) else "the other never"

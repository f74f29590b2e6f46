"""Base of the experiments on trained stacks: models by name, claims with their budgets, certified last layers.

Training ends at the target accuracy or at a budget of iterations, never at a time, so that a verdict does not depend on
the machine. A quick run, or one with ``budget=``, has smaller budgets than a full one: what a model did not reach there is
"not tested", unless more iterations could not change the verdict.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from rich.console import Console

from convexformer.data import SymbolTask
from convexformer.data.files import atomic_write
from convexformer.data.tokens import pick_device
from convexformer.deep import CertifiedLayer, Recipe, Run, certify_last_layer, train
from convexformer.experiments import deep_figures as figures
from convexformer.experiments.document import Document
from convexformer.experiments.registry import EXPERIMENTS
from convexformer.experiments.study import Study, Verdict
from convexformer.registry import one_of

LAYER_TOLERANCE = 1e-4  # relative gap to which last layers are solved
FULL_SEEDS = 5


@final
@dataclass(frozen=True)
class Measured:
    """What a claim is compared with. ``settled``: more iterations of a model that stopped early would not change it.

    ``indifferent``: the positions of models whose further iterations would not, whatever they bring.
    """

    text: str
    verdict: Verdict
    settled: bool = False
    indifferent: tuple[int, ...] = ()


@final
@dataclass
class TrainedStacks:
    """The models that a study trains, by name, and their certified last layers."""

    study: Study
    presets: tuple[str, ...]
    device: torch.device
    seeds: int
    budget: int | None = None
    """Iterations that no model may exceed."""
    checkpoints: Path | None = None
    """Where each model's training is kept, to go on from; None keeps none."""
    runs: dict[str, Run] = field(default_factory=dict)
    recipes: dict[str, Recipe] = field(default_factory=dict)
    full: dict[str, int] = field(default_factory=dict)
    """Iterations of each model in a full run."""
    left_out: dict[str, Recipe] = field(default_factory=dict)
    """Models that a quick run does without."""
    layers: dict[str, list[CertifiedLayer]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @classmethod
    def begin(
        cls,
        name: str,
        title: str,
        output: Path,
        quick: bool,
        preset: str | None,
        console: Console | None,
        seeds: int | None = None,
        budget: int | None = None,
        resume: bool = False,
        quick_seeds: int = 2,
        quick_preset: str = "tuned",
    ) -> TrainedStacks:
        """Begin a study; a full run has all presets and five seeds, a quick one fewer."""
        presets = EXPERIMENTS[name].presets
        chosen = (quick_preset if quick else "all") if preset is None else one_of("preset", preset, presets)
        every_one = tuple(each for each in presets if each != "all")
        study = Study.begin(name, title, output, quick, console)
        count = (quick_seeds if quick else FULL_SEEDS) if seeds is None else seeds
        chosen_ones, kept = (
            every_one if chosen == "all" else (chosen,),
            study.output / "checkpoints" if resume else None,
        )
        return cls(study, chosen_ones, pick_device("auto"), count, budget, kept)

    @property
    def quick(self) -> bool:
        """Whether this is a quick run."""
        return self.study.quick

    def train(self, key: str, recipe: Recipe, task: SymbolTask, *, quick: int | None = None, **changes: Any) -> None:
        """Train one row of the table; ``quick`` is its budget of iterations in a quick run, 0 leaves it out of one."""
        recipe, console = recipe.but(**changes), self.study.console
        if self.quick and quick == 0:
            self.left_out[key] = recipe
            return
        self.full[key] = recipe.training.iterations
        limits = [self.full[key], quick if self.quick else None, self.budget]
        recipe = recipe.but(iterations=min(limit for limit in limits if limit is not None))
        model = recipe.model(task, seeds=self.seeds)
        with console.status(f"{recipe.label}, {task.name}: {self.seeds} seeds on {self.device.type}"):
            run = train(model, task, recipe.training, device=self.device, checkpoint=self._checkpoint(key))
        # a training that was kept may be longer than this budget
        recipe = recipe.but(iterations=max(recipe.training.iterations, int(run.history.iteration[-1])))
        self.runs[key], self.recipes[key] = run, recipe
        reached = int(np.isfinite(run.iterations_to()).sum())
        console.print(
            f"[dim]{self.study.seconds:6.1f} s[/] {recipe.label}, {task.name}: 99% on {reached} of "
            f"{self.seeds} seeds, iterations {steps(run.iterations_to())}, best {span(run.history.test_accuracy.max(0))}",
            highlight=False,
        )

    def find(
        self,
        source: str,
        claim: str,
        keys: tuple[str, ...],
        measure: Callable[..., Measured],
        *,
        whole: bool = False,
    ) -> None:
        """Set a claim beside what ``measure`` makes of the runs of these models, and state their budgets.

        The claim is not tested if one of them was left out, or stopped at less than its full budget without all seeds
        at 99% test accuracy, unless that settles the verdict. With ``whole`` it needs the full budget in any case.
        """
        missing = [key for key in keys if key not in self.runs]
        if missing:
            why = "left out of a quick run: " + "; ".join(
                f"{self.left_out[key].label} ({self.left_out[key].training.iterations:,} iterations)" for key in missing
            )
            self.study.find(source, claim, why, Verdict.OPEN, budget="none")
            return
        found = measure(*(self.runs[key] for key in keys))
        short = [key for k, key in enumerate(keys) if k not in found.indifferent and self.cut_short(key, whole)]
        text, verdict = found.text, found.verdict
        if short and not found.settled:
            verdict = Verdict.OPEN
            text += "; stopped before its full budget: " + "; ".join(
                f"{self.recipes[key].label} at {self.recipes[key].training.iterations:,} of {self.full[key]:,} iterations"
                for key in short
            )
        self.study.find(source, claim, text, verdict, self._budget(keys))

    def draw_learning(self, name: str, caption: str, keys: tuple[str, ...], **options: Any) -> None:
        """Draw the learning curves of those of these models that were trained."""
        runs = {self.recipes[key].label: self.runs[key] for key in keys if key in self.runs}
        self.study.draw(figures.learning, name, caption, runs, title=f"{self.study.title}: {caption}", **options)

    def cut_short(self, key: str, whole: bool = False) -> bool:
        """Whether a model had less than its full budget and, unless ``whole``, some seed is below 99% test accuracy."""
        less = self.recipes[key].training.iterations < self.full[key]
        return less and (whole or not bool(np.isfinite(self.runs[key].iterations_to()).all()))

    def _checkpoint(self, key: str) -> Path | None:
        """Return the file of a model's training, in a folder that is made."""
        if self.checkpoints is None:
            return None
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        return self.checkpoints / f"{re.sub('[^a-z0-9]+', '-', key)}.safetensors"

    def _budget(self, keys: tuple[str, ...]) -> str:
        """Write the budgets of models, and the seeds."""
        limits = {self.recipes[key].label: self.recipes[key].training.iterations for key in keys}
        same = len(set(limits.values())) == 1
        text = f"{max(limits.values()):,}" if same else "; ".join(f"{name}: {n:,}" for name, n in limits.items())
        return f"{text} iterations, {self.seeds} seed{'s' if self.seeds > 1 else ''}"

    def certify(self, key: str, task: SymbolTask, **options: Any) -> None:
        """Solve the last layer of a row's model, for its first seed in a quick run, for all seeds in a full one."""
        run = self.runs[key]
        options.setdefault("train_fraction", run.training.train_fraction)
        with self.study.console.status(f"last layer of {self.recipes[key].label}"):
            seeds = [run.model.seeds[0]] if self.quick else None
            self.layers[key] = certify_last_layer(run.model, task, tolerance=LAYER_TOLERANCE, seeds=seeds, **options)

    def rows(self) -> list[dict[str, Any]]:
        """Return the numbers of every row of the table."""
        return [{"label": self.recipes[key].label, **run.summary()} for key, run in self.runs.items()]

    # ------------------------------------------------------------------ the folder

    def finish(self) -> dict[str, Any]:
        """Write summary, results, config and curves; return the results."""
        study, seconds = self.study, self.study.seconds
        proofs = [layer for layers in self.layers.values() for layer in layers]
        parts = {
            "claims": [each.record() for each in study.findings],
            "rows": dict(zip(self.runs, self.rows(), strict=True)),
            "last_layers": {key: [layer.summary() for layer in layers] for key, layers in self.layers.items()},
        }
        study.write_config(self._settings())
        curves = self._curves()  # all of them, so that figures can be drawn again
        atomic_write(study.output / "histories.npz", lambda file: np.savez_compressed(file, **curves))
        result = study.finish(
            certified=all(layer.certificate.meets(LAYER_TOLERANCE) for layer in proofs),
            parts=parts,
            figures=[file.name for file, _ in study.figures],
            page=self._page(seconds),
            seconds=seconds,
        )
        self._print(seconds)
        return result

    def _settings(self) -> dict[str, Any]:
        """Return everything that decides the numbers."""
        return {
            "torch": torch.__version__,
            "quick": self.quick,
            "presets": list(self.presets),
            "seeds": list(range(self.seeds)),
            "device": self._device_name(),
            "threads": torch.get_num_threads(),
            "budget": self.budget,
            "full_budgets": self.full,
            "left_out": {key: recipe.training.iterations for key, recipe in self.left_out.items()},
            "rows": {key: {"task": self.runs[key].task, **recipe.settings()} for key, recipe in self.recipes.items()},
        }

    def _device_name(self) -> str:
        return next((run.device for run in self.runs.values()), str(self.device))

    def _curves(self) -> dict[str, Any]:
        curves: dict[str, Any] = {}
        for key, run in self.runs.items():
            parts = {**vars(run.history), **{f"spectra/{name}": values for name, values in run.history.spectra.items()}}
            curves |= {f"{key}/{name}": values for name, values in parts.items() if isinstance(values, np.ndarray)}
        return curves

    def _page(self, seconds: float) -> Document:
        study = self.study
        page = study.page()
        page.text(
            f"{'Quick' if self.quick else 'Full'} run, presets {', '.join(self.presets)}, {self.seeds} seeds, "
            f"{self._device_name()}, {seconds:.0f} s. Settings: config.json; all numbers: results.json; curves: "
            "histories.npz. Training stops at a budget of iterations, never at a time."
        )
        if study.untested:
            page.text(
                f"{study.untested} of {len(study.findings)} claims were not tested: their models were left out or stopped "
                "before the budget of a full run. The column of measurements says which; a full run tests them."
            )
        page.heading("Claims and measurements")
        page.table(
            ["source", "claim", "measured", "verdict", "budget"],
            [[each.source, each.claim, each.measured, each.verdict.value, each.budget] for each in study.findings],
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
        for file, caption in study.figures:
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
        study = self.study
        study.print_findings(
            study.title,
            ("measured", "verdict"),
            [(each.measured, f"[{each.verdict.colour}]{each.verdict.value}[/]") for each in study.findings],
        )
        for key, layers in self.layers.items():
            gap = max(layer.certificate.relative_gap for layer in layers)
            study.console.print(f"Last layer of {self.recipes[key].label}: certified to a relative gap of {gap:.0e}")
        if study.untested:
            study.console.print(f"[yellow]{study.untested} claims were not tested[/] in this mode; exit code 4.")
        study.print_files(seconds, ".html, results.json, config.json")


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
    """Return yes for all seeds, partly for some, no for none."""
    return Verdict.YES if count == total else Verdict.PARTLY if count else Verdict.NO


def steps(values: np.ndarray, form: str = "{:,.0f}") -> str:
    """Write the median over the seeds that reached a goal, and how many did if not all."""
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
    """Write the largest value, or "never" if some seed never reached the goal."""
    return f"{values.max():,.0f}" if np.isfinite(values).all() else "never"


def median(values: np.ndarray) -> float:
    """Return the median over seeds, infinite if some seed never reached the goal."""
    return float(np.median(values)) if np.isfinite(values).all() else float("inf")


def ratio(slow: float, fast: float) -> str:
    """Write how many times fewer."""
    if not np.isfinite(fast):
        return "never"
    return f"{slow / fast:.1f}x" if np.isfinite(slow) else "the other never"

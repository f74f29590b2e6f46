"""The periodicity task: figure 2 of Fisher et al., and a sweep of our own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from convexformer.data import periodicity
from convexformer.deep import recipe
from convexformer.experiments import deep_figures as figures
from convexformer.experiments.deep_study import TrainedStacks, every, median, ratio, span, steps
from convexformer.experiments.grokking import REPORT_RECIPES, SWEEP
from convexformer.experiments.study import Verdict

PERIODICITY_TUNED = ("periodicity-convex-1", "periodicity-convex-2", "periodicity-softmax-1", "periodicity-softmax-2")


def run(
    output: Path, *, quick: bool = False, console: Console | None = None, preset: str | None = None
) -> dict[str, Any]:
    """Run the experiment; write figures, summary, ``results.json`` and ``config.json`` to ``output``."""
    title = "Periodicity: (1/x + y^2) (2x mod 6) mod 97"
    stacks = TrainedStacks.begin("periodicity", title, output, quick, preset, console, quick_seeds=1)
    task = periodicity(97)
    zero = float((task.y == 0).double().mean())
    if "tuned" in stacks.presets or "paper" in stacks.presets:  # Ergen et al. have no such task
        for key in PERIODICITY_TUNED:
            if not (stacks.quick and key in ("periodicity-convex-1", "periodicity-softmax-2")):
                stacks.train(key, recipe(key), task)
        stacks.certify("periodicity-convex-2", task)
        own, other = (
            stacks.runs["periodicity-convex-2"].iterations_to(),
            stacks.runs["periodicity-softmax-1"].iterations_to(),
        )
        count = int(np.isfinite(own).sum())
        stacks.study.find(
            "this library",
            "convex, tuned, L=2: 99% test accuracy on every seed in fewer iterations than the tuned softmax transformer",
            f"{count} of {stacks.seeds} seeds; {steps(own)} against {steps(other)}: {ratio(median(other), median(own))}",
            Verdict.YES if median(own) < median(other) else Verdict.PARTLY if count else Verdict.NO,
        )
        stacks.study.find(
            "Fisher et al., section 6",
            "the task's difficulty prevents perfect validation accuracy, in the convex and the softmax case",
            f"convex L=2: 99% on {count} of {stacks.seeds} seeds; softmax L=1: "
            f"{int(np.isfinite(other).sum())} of {stacks.seeds}",
            Verdict.NO if count == stacks.seeds else Verdict.PARTLY,
        )
        _figure(stacks, "tuned.png", "tuned by one sweep, both families", PERIODICITY_TUNED, zero)
    if "report" in stacks.presets:
        for key in REPORT_RECIPES:
            stacks.train(key, recipe(key), task, max_time=20.0 if stacks.quick else 12.0)
        _report(stacks)
        _figure(stacks, "report.png", "the settings of Fisher et al. (their figure 2)", REPORT_RECIPES, zero)
    stacks.study.draw(figures.iterations, "iterations.png", "iterations to 99%, and the grokking gap", stacks.rows())
    stacks.notes.append(
        f"log2 97 is taken as its floor, 6. A share of {zero:.1%} of the answers is 0 (2x mod 6 = 0): the dashed line."
    )
    stacks.notes.append(SWEEP)
    return stacks.finish()


def _report(stacks: TrainedStacks) -> None:
    convex, kernel, softmax = (stacks.runs[key] for key in REPORT_RECIPES)
    best = [each.history.test_accuracy.max(0) for each in (convex, kernel, softmax)]
    stacks.study.find(
        "Fisher et al., figure 2",
        "both convex models reach a higher validation accuracy than the softmax transformer",
        f"best test accuracy: convex {span(best[0])}, kernel {span(best[1])}, softmax {span(best[2])}; trained for "
        + ", ".join(f"{each.history.iteration[-1]:,}" for each in (convex, kernel, softmax))
        + " iterations",
        Verdict.YES if min(np.median(best[0]), np.median(best[1])) > np.median(best[2]) else Verdict.NO,
    )
    stacks.study.find(
        "Fisher et al., figure 2",
        "the kernel model's train and validation accuracy converge together",
        f"99% train at {steps(kernel.iterations_to(part='train'))}, gap {steps(kernel.grokking_gap())}; "
        f"test accuracy at the end {span(kernel.history.test_accuracy[-1])}",
        every(int(np.isfinite(kernel.grokking_gap()).sum()), stacks.seeds),
    )


def _figure(stacks: TrainedStacks, name: str, caption: str, keys: tuple[str, ...], zero: float) -> None:
    runs = {stacks.recipes[key].label: stacks.runs[key] for key in keys if key in stacks.runs}
    stacks.study.draw(figures.learning, name, caption, runs, title=f"{stacks.study.title}: {caption}", chance=zero)

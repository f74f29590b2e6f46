"""The periodicity task: figure 2 of Fisher et al., and a sweep of our own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from convexformer.data import periodicity
from convexformer.deep import Run, recipe
from convexformer.experiments import deep_figures as figures
from convexformer.experiments.deep_study import Measured, TrainedStacks, median, ratio, steps
from convexformer.experiments.deep_verdicts import accuracies, smoother, together
from convexformer.experiments.grokking import SWEEP
from convexformer.experiments.grokking_report import REPORT, report_recipes
from convexformer.experiments.study import Verdict

TUNED = ("periodicity-convex-1", "periodicity-convex-2", "periodicity-softmax-1", "periodicity-softmax-2")
# iterations in a quick run; 0 leaves a model out. A full run has those of the recipes
QUICK = {
    "periodicity-convex-1": 0,
    "periodicity-convex-2": 500,
    "periodicity-softmax-1": 1200,
    "periodicity-softmax-2": 0,
    "report-convex": 5000,
    "report-kernel": 5000,
    "report-softmax": 5000,
}


def run(
    output: Path,
    *,
    quick: bool = False,
    console: Console | None = None,
    preset: str | None = None,
    seeds: int | None = None,
    budget: int | None = None,
    resume: bool = False,
) -> dict[str, Any]:
    """Run the experiment; write figures, summary, ``results.json`` and ``config.json`` to ``output``."""
    title = "Periodicity: (1/x + y^2) (2x mod 6) mod 97"
    stacks = TrainedStacks.begin(
        "periodicity", title, output, quick, preset, console, seeds, budget, resume, quick_seeds=1
    )
    task = periodicity(97)
    zero = float((task.y == 0).double().mean())
    if "tuned" in stacks.presets or "paper" in stacks.presets:  # Ergen et al. have no such task
        for key in TUNED:
            stacks.train(key, recipe(key), task, quick=QUICK[key])
        stacks.certify("periodicity-convex-2", task)
        tuned_claims(stacks)
        stacks.draw_learning("tuned.png", "tuned by one sweep, both families", TUNED, chance=zero)
    if "report" in stacks.presets:
        recipes = report_recipes()
        for key in REPORT:
            stacks.train(key, recipes[key], task, quick=QUICK[key])
        stacks.certify("report-convex", task)
        report_claims(stacks)
        stacks.draw_learning("report.png", "the settings of Fisher et al. (their figure 2)", REPORT, chance=zero)
    stacks.study.draw(figures.iterations, "iterations.png", "iterations to 99%, and the grokking gap", stacks.rows())
    stacks.notes.append(
        f"log2 97 is taken as its floor, 6. A share of {zero:.1%} of the answers is 0 (2x mod 6 = 0): the dashed line."
    )
    stacks.notes.append(SWEEP)
    return stacks.finish()


def tuned_claims(stacks: TrainedStacks) -> None:
    """Whether the task is within reach of tuned models."""
    stacks.find(
        "this library",
        "convex, tuned, L=2: 99% test accuracy on every seed in fewer iterations than the tuned softmax transformer",
        ("periodicity-convex-2", "periodicity-softmax-1"),
        _sooner,
    )
    stacks.find(
        "Fisher et al., section 6",
        "the task's difficulty prevents perfect validation accuracy, in the convex and the softmax case (tuned models)",
        ("periodicity-convex-2", "periodicity-softmax-1"),
        _unreached,
    )


def report_claims(stacks: TrainedStacks) -> None:
    """Figure 2 and section 6 of Fisher et al."""
    source = "Fisher et al., figure 2"
    stacks.find(
        source,
        "no model reaches 99% validation accuracy, in the settings of the report",
        REPORT,
        _unreached,
    )
    for key, name in (("report-convex", "convex"), ("report-kernel", "kernel")):
        stacks.find(
            source,
            f"the {name} model reaches a higher validation accuracy than the softmax transformer",
            (key, "report-softmax"),
            _higher,
        )
    stacks.find(
        source,
        "the kernel model reaches a higher validation accuracy than the convex one",
        ("report-kernel", "report-convex"),
        lambda kernel, convex: Measured(
            f"best test accuracy: kernel {accuracies(kernel)}, convex {accuracies(convex)}",
            Verdict.YES if _best(kernel) > _best(convex) else Verdict.NO,
        ),
    )
    stacks.find(
        source,
        "the kernel model's train and validation accuracy converge at the same time (within a factor of two)",
        ("report-kernel",),
        together,
    )
    stacks.find(
        "Fisher et al., section 6",
        "periodicity: both convex models converge more smoothly than the softmax transformer",
        REPORT,
        lambda convex, kernel, softmax: smoother([convex, kernel], softmax),
    )


def _sooner(convex: Run, softmax: Run) -> Measured:
    own, other = convex.iterations_to(), softmax.iterations_to()
    count = int(np.isfinite(own).sum())
    verdict = Verdict.YES if median(own) < median(other) else Verdict.PARTLY if count else Verdict.NO
    given = median(own) < softmax.history.iteration[-1]
    text = f"{count} of {len(own)} seeds; {steps(own)} against {steps(other)}: {ratio(median(other), median(own))}"
    return Measured(text, verdict, settled=bool(given))


def _unreached(*runs: Run) -> Measured:
    """No seed of any model at 99%: yes. Every seed of some model there: no, and more iterations cannot change that."""
    arrived = [np.isfinite(run.iterations_to()) for run in runs]
    some, whole = any(each.any() for each in arrived), any(each.all() for each in arrived)
    text = f"best test accuracy {accuracies(*runs)}"
    return Measured(text, Verdict.NO if whole else Verdict.PARTLY if some else Verdict.YES, settled=whole)


def _higher(ours: Run, softmax: Run) -> Measured:
    """More iterations only raise a best accuracy: below a softmax transformer that stopped early is below it for good."""
    higher = _best(ours) > _best(softmax)
    text = f"best test accuracy {accuracies(ours)}, softmax {accuracies(softmax)}"
    return Measured(text, Verdict.YES if higher else Verdict.NO, indifferent=() if higher else (1,))


def _best(run: Run) -> float:
    """The median of the best test accuracies; training ends at 99%, so that what is above is all the same."""
    return min(0.99, float(np.median(run.history.test_accuracy.max(0))))

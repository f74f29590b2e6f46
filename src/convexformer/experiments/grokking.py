"""Division mod 97: figures 4, 5 and 7 of Ergen et al. 2022, figure 1 and table 1 of Fisher et al., and our own sweep."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from convexformer.data import SymbolTask, modular_division
from convexformer.deep import Run, recipe
from convexformer.experiments import deep_figures as figures
from convexformer.experiments.deep_study import TrainedStacks, every, median, ratio, span, steps, worst
from convexformer.experiments.study import Verdict

MODULUS = 97  # of the division task
SWEEP = (
    "The tuned rows come from one sweep for both families (`benchmarks/gpu_grokking.py`): 3 learning rates, 3 weight decays "
    "and 2 shapes for each depth, 3 seeds each, other seeds than those reported here."
)
ITERATION_LIMITS = {1: 300, 2: 300, 4: 1000}  # by depth: iterations in which the tuned recipes should reach 99%
GROKKING_TUNED = ("convex-1", "convex-2", "convex-4", "softmax-1", "softmax-2", "softmax-4")
GROKKING_PAPER = (
    "convex-1-slow",
    "convex-1-group",
    "paper-dense-1",
    "paper-dense-2",
    "paper-fixed-1",
    "paper-softmax-1",
    "paper-softmax-2",
)
REPORT_RECIPES = ("report-convex", "report-kernel", "report-softmax")


def run(
    output: Path, *, quick: bool = False, console: Console | None = None, preset: str | None = None
) -> dict[str, Any]:
    """Run the experiment; write figures, summary, ``results.json`` and ``config.json`` to ``output``."""
    stacks = TrainedStacks.begin("grokking", "Grokking: division mod 97", output, quick, preset, console)
    task = modular_division(MODULUS)
    if "tuned" in stacks.presets:
        _tuned(stacks, task)
    if "paper" in stacks.presets:
        _paper(stacks, task)
    if "report" in stacks.presets:
        _report(stacks, task)
    stacks.study.draw(
        figures.iterations, "iterations.png", "iterations to 99%, and the grokking gap (figure 7)", stacks.rows()
    )
    stacks.notes.append(SWEEP)
    return stacks.finish()


def _tuned(stacks: TrainedStacks, task: SymbolTask) -> None:
    for key in GROKKING_TUNED:
        if not (stacks.quick and key in ("softmax-2", "softmax-4")):  # half a minute each on a CPU
            stacks.train(key, recipe(key), task)
    for key in ("convex-1", "convex-2"):
        stacks.certify(key, task)
    for depth in (1, 2, 4):
        own, other = stacks.runs[f"convex-{depth}"], stacks.runs.get(f"softmax-{depth}")
        within = int((own.iterations_to() <= ITERATION_LIMITS[depth]).sum())
        stacks.study.find(
            "this library",
            f"convex, tuned, L={depth}: 99% test accuracy on every seed within {ITERATION_LIMITS[depth]} iterations",
            f"{within} of {stacks.seeds} seeds; median {steps(own.iterations_to())}, at most {worst(own.iterations_to())}",
            every(within, stacks.seeds),
        )
        if other is not None:
            stacks.study.find(
                "Ergen et al., figure 4b",
                f"convex reaches perfect generalisation 10x faster, both tuned, L={depth}",
                f"{steps(own.iterations_to())} against {steps(other.iterations_to())}: {_times(other, own)}",
                _tenfold(other, own),
            )
    _figure(stacks, "tuned.png", "tuned by one sweep, both families (figures 4 and 5)", GROKKING_TUNED)


def _paper(stacks: TrainedStacks, task: SymbolTask) -> None:
    """The settings of Power et al. for softmax; equation (12) as printed, at the usual learning rate of 1e-3."""
    limits: dict[str, Any] = {"max_time": 8.0} if stacks.quick else {}
    for key in GROKKING_PAPER:
        stacks.train(key, recipe(key), task, **limits)
    slow, dense = stacks.runs["convex-1-slow"], stacks.runs["paper-dense-1"]
    one, two = stacks.runs["paper-softmax-1"], stacks.runs["paper-softmax-2"]
    if "convex-1" not in stacks.runs:
        stacks.train("convex-1", recipe("convex-1"), task)
        stacks.train("convex-2", recipe("convex-2"), task)
    best = stacks.runs["convex-2"]
    stacks.study.find(
        "Power et al.; Ergen et al., figure 4",
        "grokking: the softmax transformer learns the training data long before it generalises",
        f"L=2: train at {steps(two.iterations_to(part='train'))}, test at {steps(two.iterations_to())} iterations",
        Verdict.YES if median(two.grokking_gap()) > 5 * median(two.iterations_to(part="train")) / 2 else Verdict.PARTLY,
    )
    stacks.study.find(
        "Ergen et al., figure 4b",
        "convex reaches perfect generalisation 10x faster than the softmax transformer of Power et al.",
        f"tuned convex L=2 {steps(best.iterations_to())} against {steps(two.iterations_to())} (L=2): {_times(two, best)}; "
        f"L=1: {_times(one, stacks.runs['convex-1'])}",
        _tenfold(two, best),
    )
    stacks.study.find(
        "Ergen et al., figure 4b",
        "the same at an equal learning rate, 1e-3 (L=1)",
        f"convex {steps(slow.iterations_to())}, softmax {steps(one.iterations_to())}: {_times(one, slow)}",
        _tenfold(one, slow),
    )
    stacks.study.find(
        "Ergen et al., equation (12)",
        "gates as printed (rank one, all channels) generalise",
        f"best test accuracy L=1 {span(dense.history.test_accuracy.max(0))}, "
        f"L=2 {span(stacks.runs['paper-dense-2'].history.test_accuracy.max(0))}",
        Verdict.YES if np.isfinite(dense.iterations_to()).all() else Verdict.NO,
    )
    stacks.study.find(
        "Ergen et al., theorem 3",
        "the convex problem itself (fixed embedding, one layer) generalises on this task",
        f"best test accuracy {span(stacks.runs['paper-fixed-1'].history.test_accuracy.max(0))}",
        Verdict.YES if np.isfinite(stacks.runs["paper-fixed-1"].iterations_to()).all() else Verdict.NO,
    )
    _figure(stacks, "paper.png", "as printed: gates of (12), the softmax transformer of Power et al.", GROKKING_PAPER)


def _report(stacks: TrainedStacks, task: SymbolTask) -> None:
    """The settings of Fisher et al., section 5.2; iterations as in its figure 1, epochs as in its table 1."""
    for key in REPORT_RECIPES:
        stacks.train(key, recipe(key), task, max_time=20.0)
    convex, kernel, softmax = (stacks.runs[key] for key in REPORT_RECIPES)
    stacks.study.find(
        "Fisher et al., figure 1",
        "kernel preconditioning narrows the grokking gap",
        f"from {steps(convex.grokking_gap())} to {steps(kernel.grokking_gap())} iterations",
        _fewer(median(kernel.grokking_gap()), median(convex.grokking_gap())),
    )
    stacks.study.find(
        "Fisher et al., section 6",
        "the kernel model needs fewer iterations than the convex one, and that fewer than the softmax transformer",
        f"{steps(kernel.iterations_to())}, {steps(convex.iterations_to())}, {steps(softmax.iterations_to())}",
        _ordered([median(each.iterations_to()) for each in (kernel, convex, softmax)]),
    )
    epoch = -(-len(task) // 2) / 32
    printed = {"report-convex": (1556, 0.088), "report-kernel": (1475, 0.38), "report-softmax": (1662, 0.23)}
    rows = {}
    for key, (epochs, seconds) in printed.items():
        each = stacks.runs[key]
        rows[key] = {
            "epochs_printed": epochs,
            "seconds_an_epoch_printed": seconds,
            "epochs": [None if np.isnan(step) else float(step / epoch) for step in each.iterations_to()],
            "seconds_an_epoch_all_seeds": float(each.history.seconds[-1] / each.history.iteration[-1] * epoch),
        }
    stacks.study.numbers["table_1"] = rows
    stacks.study.find(
        "Fisher et al., table 1",
        "epochs to 99%: convex 1,556, kernel 1,475, softmax 1,662",
        ", ".join(steps(stacks.runs[key].iterations_to() / epoch) for key in REPORT_RECIPES),
        Verdict.NO if not np.isfinite(softmax.iterations_to()).all() else Verdict.PARTLY,
    )
    _figure(stacks, "report.png", "the settings of Fisher et al. (their figure 1)", REPORT_RECIPES)


def _figure(stacks: TrainedStacks, name: str, caption: str, keys: tuple[str, ...]) -> None:
    runs = {stacks.recipes[key].label: stacks.runs[key] for key in keys if key in stacks.runs}
    stacks.study.draw(figures.learning, name, caption, runs, title=f"{stacks.study.title}: {caption}")


def _times(slow: Run, fast: Run) -> str:
    return ratio(median(slow.iterations_to()), median(fast.iterations_to()))


def _tenfold(slow: Run, fast: Run) -> Verdict:
    """Ten times fewer iterations: yes. Fewer at all: partly."""
    theirs, ours = median(slow.iterations_to()), median(fast.iterations_to())
    return Verdict.YES if 10 * ours <= theirs else _fewer(ours, theirs, Verdict.PARTLY)


def _fewer(ours: float, theirs: float, verdict: Verdict = Verdict.YES) -> Verdict:
    return verdict if ours < theirs else Verdict.NO


def _ordered(values: list[float]) -> Verdict:
    if values == sorted(values) and np.isfinite(values[0]):
        return Verdict.YES
    return Verdict.PARTLY if values[0] < values[-1] or values[1] < values[-1] else Verdict.NO

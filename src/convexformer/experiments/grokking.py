"""Division mod 97: figures 4, 5 and 7 of Ergen et al. 2022, figure 1 and table 1 of Fisher et al., and our own sweep."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console

from convexformer.data import SymbolTask, modular_division
from convexformer.deep import Run, recipe
from convexformer.experiments import deep_figures as figures
from convexformer.experiments.deep_study import Measured, TrainedStacks, every, steps, worst
from convexformer.experiments.deep_verdicts import depth_helps, depth_makes_no_difference, lower_test_loss, tenfold
from convexformer.experiments.grokking_moduli import compare_moduli
from convexformer.experiments.grokking_paper import dense, paper, printed
from convexformer.experiments.grokking_report import report
from convexformer.experiments.grokking_scale import scale

MODULUS = 97  # of the division task
SWEEP = (
    "The tuned rows come from one sweep for both families (`benchmarks/gpu_grokking.py`): 3 learning rates, 3 weight decays "
    "and 2 shapes for each depth, 3 seeds each, other seeds than those reported here."
)
ITERATION_LIMITS = {1: 300, 2: 300, 4: 1000}  # by depth: iterations in which the tuned recipes should reach 99%
TUNED = ("convex-1", "convex-2", "convex-4", "softmax-1", "softmax-2", "softmax-4")
# iterations in a quick run; 0 leaves a model out. A full run has those of the recipes
QUICK = {"convex-1": 300, "convex-2": 300, "convex-4": 500, "softmax-1": 500, "softmax-2": 0, "softmax-4": 0}


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
    title = "Grokking: division mod 97"
    quick_seeds = 2 if preset in (None, "tuned") else 1
    stacks = TrainedStacks.begin("grokking", title, output, quick, preset, console, seeds, budget, resume, quick_seeds)
    task = modular_division(MODULUS)
    if "tuned" in stacks.presets:
        _tuned(stacks, task)
    if "paper" in stacks.presets:
        paper(stacks, task)
    if "printed" in stacks.presets:
        printed(stacks, task)
    if "dense" in stacks.presets:
        dense(stacks, task)
    if "moduli" in stacks.presets:
        compare_moduli(stacks)
    if "scale" in stacks.presets:
        scale(stacks, task)
    if "report" in stacks.presets:
        report(stacks, task)
    stacks.study.draw(
        figures.iterations, "iterations.png", "iterations to 99%, and the grokking gap (figure 7)", stacks.rows()
    )
    stacks.notes.append(SWEEP)
    return stacks.finish()


def _tuned(stacks: TrainedStacks, task: SymbolTask) -> None:
    """Both families by their own sweep, as Ergen et al. tune theirs by a grid search.

    One and two convex layers are trained on past 99%, so that test losses can be compared at equal iterations (figure 4c).
    """
    for key in TUNED:
        past = {"target": None} if key in ("convex-1", "convex-2") else {}
        stacks.train(key, recipe(key), task, quick=QUICK[key], **past)
    for key in ("convex-1", "convex-2"):
        stacks.certify(key, task)
    tuned_claims(stacks)
    stacks.draw_learning("tuned.png", "tuned by one sweep, both families (figures 4 and 5)", TUNED)


def tuned_claims(stacks: TrainedStacks) -> None:
    """Figures 4b, 4c and 5 of Ergen et al. with both families tuned, and our own limits."""
    for depth in (1, 2, 4):
        own, other = f"convex-{depth}", f"softmax-{depth}"
        limit = ITERATION_LIMITS[depth]
        stacks.find(
            "this library",
            f"convex, tuned, L={depth}: 99% test accuracy on every seed within {limit} iterations",
            (own,),
            lambda convex, limit=limit: _within(convex, limit),
        )
        stacks.find(
            "Ergen et al., figure 4b",
            f"convex reaches perfect generalisation 10x faster, both tuned, L={depth}",
            (own, other),
            tenfold,
        )
        if depth < 4:
            stacks.find(
                "Ergen et al., figure 4c",
                f"convex has the lower test loss at equal iterations, both tuned, L={depth}",
                (own, other),
                lower_test_loss,
            )
    stacks.find(
        "Ergen et al., figure 5",
        "a second layer speeds up the convex model substantially (half the iterations), tuned",
        ("convex-1", "convex-2"),
        depth_helps,
    )
    stacks.find(
        "Ergen et al., figure 5",
        "a second layer makes no difference to the softmax transformer (less than a factor of two), tuned",
        ("softmax-1", "softmax-2"),
        depth_makes_no_difference,
    )


def _within(run: Run, limit: int) -> Measured:
    found = run.iterations_to()
    within = int((found <= limit).sum())
    text = f"{within} of {len(found)} seeds; median {steps(found)}, at most {worst(found)}"
    return Measured(text, every(within, len(found)), settled=run.history.iteration[-1] >= limit)

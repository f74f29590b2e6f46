"""Division mod 15, units only: figure 6 of Ergen et al. 2022, and other shares of training data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from convexformer.data import modular_division
from convexformer.deep import Run, recipe
from convexformer.experiments import deep_figures as figures
from convexformer.experiments.deep_measures import best_test_loss
from convexformer.experiments.deep_study import Measured, TrainedStacks, every, median
from convexformer.experiments.deep_verdicts import accuracies, arrival, arrives
from convexformer.experiments.study import Verdict

RECIPES = ("mod15-convex-1", "mod15-convex-2", "mod15-convex-4", "mod15-softmax-1", "mod15-softmax-4")
FRACTIONS = (0.5, 0.6, 0.7, 0.8, 0.9)  # of the pairs used for training
# five times those of the recipes; the text of Ergen et al. does not state the budget of figure 6 (figure 4 goes to 10^5)
HALF_ITERATIONS = 20_000
# iterations in a quick run, by share and model; the rest is left out of one. Four layers take a minute or more
QUICK = {
    0.5: {"mod15-convex-1": 20_000, "mod15-convex-2": 2000, "mod15-softmax-1": 20_000},
    0.8: {"mod15-convex-2": 2000},
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
    """Run the experiment; write figures, summary, ``results.json`` and ``config.json`` to ``output``.

    The preset ``paper`` (and ``report``) has half of the pairs for training, as figure 6; ``tuned`` the other shares.
    Neither paper prints settings for this task. A quick run has both, fewer models and one seed.
    """
    title = "Division mod 15: 120 pairs"
    stacks = TrainedStacks.begin(
        "mod15", title, output, quick, preset, console, seeds, budget, resume, quick_seeds=1, quick_preset="all"
    )
    task = modular_division(15)
    curves: dict[str, dict[float, np.ndarray]] = {}
    half, others = "paper" in stacks.presets or "report" in stacks.presets, "tuned" in stacks.presets
    fractions = tuple(share for share in FRACTIONS if (half if share == 0.5 else others))
    for key in RECIPES:
        label = recipe(key).label
        for share in fractions:
            limit = QUICK.get(share, {}).get(key, 0)
            longer: dict[str, Any] = {"iterations": HALF_ITERATIONS, "evaluate_every": 100} if share == 0.5 else {}
            own = recipe(key).but(f"{label}, {share:.0%}", train_fraction=share, **longer)
            name = _name(key, share)
            stacks.train(name, own, task, quick=limit)
            if name in stacks.runs:
                curves.setdefault(label, {})[share] = stacks.runs[name].history.test_accuracy.max(0)
    stacks.certify(_name("mod15-convex-2", 0.5 if half else 0.8), task, beta_ratio=1e-3)
    if half:
        figure_6(stacks)
        stacks.draw_learning("half.png", "50% of the pairs for training (figure 6)", RECIPES, chance=1 / 15)
    by_share(stacks, tuple(share for share in fractions if not quick or share in QUICK))
    stacks.study.draw(
        figures.fractions,
        "fractions.png",
        "best test accuracy by share of training data",
        curves,
        title=stacks.study.title,
    )
    stacks.notes.append(
        "Division is defined for the 8 units mod 15 alone: 120 pairs, 60 for training, 4 for each answer. The papers do not "
        "say what they did with the other divisors, for which a / b has no answer or several. At 50% models have "
        f"{HALF_ITERATIONS:,} iterations in a full run, at other shares those of their recipes."
    )
    return stacks.finish()


def figure_6(stacks: TrainedStacks) -> None:
    """Half of the pairs for training."""
    source = "Ergen et al., figure 6"
    one, four = ("mod15-convex-1", "mod15-softmax-1"), ("mod15-convex-4", "mod15-softmax-4")
    stacks.find(source, "one layer fails to reach 99% test accuracy, in both families", one, _both_fail)
    stacks.find(source, "one layer: convex reaches a higher test accuracy than softmax", one, _higher)
    stacks.find(
        source, "one layer: convex reaches a lower test loss than softmax (smallest over training)", one, _lower
    )
    for key, family in zip(four, ("convex", "softmax"), strict=True):
        stacks.find(source, f"four layers reach perfect generalisation: {family}", (key,), arrives)
    stacks.find(
        source, "four layers: convex reaches perfect generalisation much faster (half the iterations)", four, _faster
    )
    stacks.find(
        source, "four layers: convex reaches a lower test loss than softmax (smallest over training)", four, _lower
    )


def by_share(stacks: TrainedStacks, shares: tuple[float, ...]) -> None:
    """What share of the pairs is enough."""
    for share in shares:
        stacks.find(
            "this library",
            f"convex, L=2, {share:.0%} of the pairs for training: 99% test accuracy on every seed",
            (_name("mod15-convex-2", share),),
            arrives,
        )


def _name(key: str, share: float) -> str:
    return key if share == 0.5 else f"{key} at {share:.0%}"


def _both_fail(convex: Run, softmax: Run) -> Measured:
    arrived = [bool(np.isfinite(each.iterations_to()).any()) for each in (convex, softmax)]
    text = f"best test accuracy: convex {accuracies(convex)}, softmax {accuracies(softmax)}"
    return Measured(text, every(2 - sum(arrived), 2))


def _higher(convex: Run, softmax: Run) -> Measured:
    ours, theirs = (float(np.median(each.history.test_accuracy.max(0))) for each in (convex, softmax))
    text = f"best test accuracy: convex {accuracies(convex)}, softmax {accuracies(softmax)}"
    return Measured(text, Verdict.YES if ours > theirs else Verdict.NO)


def _lower(convex: Run, softmax: Run) -> Measured:
    last = min(float(each.history.iteration[-1]) for each in (convex, softmax))
    ours, theirs = (float(np.median(best_test_loss(each, last))) for each in (convex, softmax))
    text = f"convex {ours:.2f}, softmax {theirs:.2f}, in {last:,.0f} iterations"
    return Measured(text, Verdict.YES if ours < theirs else Verdict.NO)


def _faster(convex: Run, softmax: Run) -> Measured:
    ours, theirs = median(convex.iterations_to()), median(softmax.iterations_to())
    verdict = (
        Verdict.YES if 2 * ours <= theirs and np.isfinite(ours) else Verdict.PARTLY if ours < theirs else Verdict.NO
    )
    return Measured(f"{arrival(convex)} against {arrival(softmax)}", verdict)

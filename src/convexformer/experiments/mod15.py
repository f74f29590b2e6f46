"""Division mod 15, units only: figure 6 of Ergen et al. 2022, and other shares of training data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from convexformer.data import modular_division
from convexformer.deep import recipe
from convexformer.experiments import deep_figures as figures
from convexformer.experiments.deep_study import TrainedStacks, every, span, steps
from convexformer.experiments.study import Verdict

MOD15_RECIPES = ("mod15-convex-1", "mod15-convex-2", "mod15-convex-4", "mod15-softmax-1", "mod15-softmax-4")
FRACTIONS = (0.5, 0.6, 0.7, 0.8, 0.9)  # of the pairs used for training


def run(
    output: Path, *, quick: bool = False, console: Console | None = None, preset: str | None = None
) -> dict[str, Any]:
    """Run the experiment; write figures, summary, ``results.json`` and ``config.json`` to ``output``.

    Every preset trains the same models here: neither paper prints settings for this task.
    """
    stacks = TrainedStacks.begin("mod15", "Division mod 15: 120 pairs", output, quick, preset, console)
    task = modular_division(15)
    keys = [key for key in MOD15_RECIPES if not quick or key in ("mod15-convex-1", "mod15-convex-2", "mod15-softmax-1")]
    fractions = (0.5, 0.8) if quick else FRACTIONS
    curves: dict[str, dict[float, np.ndarray]] = {}
    for key in keys:
        label = recipe(key).label
        for share in fractions:
            changes = {"train_fraction": share, **({"iterations": 2000} if quick else {})}
            name = key if share == 0.5 else f"{key} at {share:.0%}"
            own = stacks.train(name, recipe(key).but(f"{label}, {share:.0%}"), task, **changes)
            curves.setdefault(label, {})[share] = own.history.test_accuracy.max(0)
    if not quick:
        stacks.train("mod15-convex-2-long", recipe("mod15-convex-2-long"), task)
    stacks.certify("mod15-convex-2", task, beta_ratio=1e-3)
    _claims(stacks, keys, fractions)
    half = {recipe(key).label: stacks.runs[key] for key in keys}
    caption = "50% of the pairs for training (figure 6)"
    stacks.study.draw(
        figures.learning, "half.png", caption, half, title=f"{stacks.study.title}, {caption}", chance=1 / 15
    )
    stacks.study.draw(
        figures.fractions,
        "fractions.png",
        "best test accuracy by share of training data",
        curves,
        title=stacks.study.title,
    )
    stacks.notes.append(
        "Division is defined for the 8 units mod 15 alone: 120 pairs, 60 for training, 4 for each answer. The papers do not "
        "say what they did with the other divisors, for which a / b has no answer or several."
    )
    return stacks.finish()


def _claims(stacks: TrainedStacks, keys: list[str], fractions: tuple[float, ...]) -> None:
    best = {key: stacks.runs[key].history.test_accuracy.max(0) for key in keys}
    convex, softmax = best["mod15-convex-1"], best["mod15-softmax-1"]
    stacks.study.find(
        "Ergen et al., figure 6",
        "one layer fails to reach 99%, and convex generalises better than softmax",
        f"convex {span(convex)}, softmax {span(softmax)}",
        Verdict.YES
        if max(convex.max(), softmax.max()) < 0.99 and np.median(convex) > np.median(softmax)
        else Verdict.PARTLY,
    )
    if "mod15-convex-4" in best:
        own, other = stacks.runs["mod15-convex-4"], stacks.runs["mod15-softmax-4"]
        count = int(np.isfinite(own.iterations_to()).sum())
        stacks.study.find(
            "Ergen et al., figure 6",
            "four layers reach perfect generalisation, convex much faster",
            f"convex {span(best['mod15-convex-4'])} ({count} of {stacks.seeds} at 99%), softmax "
            f"{span(best['mod15-softmax-4'])} ({int(np.isfinite(other.iterations_to()).sum())} of {stacks.seeds})",
            every(count, stacks.seeds),
        )
    if "mod15-convex-2-long" in stacks.runs:
        long = stacks.runs["mod15-convex-2-long"].history
        stacks.study.find(
            "this library",
            "convex, L=2 at 50%: longer training goes on improving",
            f"best {span(long.test_accuracy.max(0))} in {long.iteration[-1]:,} iterations, at the end "
            f"{span(long.test_accuracy[-1])}",
            every(int((long.test_accuracy.max(0) >= 0.99).sum()), stacks.seeds),
        )
    two = {share: stacks.runs["mod15-convex-2" + ("" if share == 0.5 else f" at {share:.0%}")] for share in fractions}
    counts = {share: int(np.isfinite(each.iterations_to()).sum()) for share, each in two.items()}
    stacks.study.find(
        "this library",
        "convex, L=2: 99% test accuracy on every seed, by share of training data",
        "; ".join(
            f"{share:.0%}: {counts[share]} of {stacks.seeds}, best {span(each.history.test_accuracy.max(0))}"
            + (f", {steps(each.iterations_to())} iterations" if counts[share] else "")
            for share, each in two.items()
        ),
        every(counts[0.5], stacks.seeds) if counts[0.5] else Verdict.PARTLY if any(counts.values()) else Verdict.NO,
    )

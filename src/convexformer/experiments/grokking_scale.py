"""What moves the scale of grokking: weight decay, batch size and width of the softmax transformer of Power et al.

Figure 4 of Ergen et al. 2022 has 99% training accuracy at about 10^3 iterations and test accuracy past 10^5. They print
neither weight decay nor batch size.
"""

from __future__ import annotations

from typing import Any

from convexformer.data import SymbolTask
from convexformer.deep import Run, recipe
from convexformer.experiments.deep_measures import SUBSTANTIAL
from convexformer.experiments.deep_study import Measured, TrainedStacks, median
from convexformer.experiments.deep_verdicts import arrival
from convexformer.experiments.study import Verdict

BASE = "paper-softmax-1"
ITERATIONS = 100_000  # the scale of figure 4b
DECAYS = (1.0, 0.3, 0.1)
OTHERS: dict[str, dict[str, Any]] = {
    "batches of 128 instead of 512": {"batch_size": 128},
    "width 64 instead of 128": {"shape": {"width": 64}},
}
QUICK = 2000  # iterations in a quick run, which leaves out the smaller decays: they need more


def scale(stacks: TrainedStacks, task: SymbolTask) -> None:
    """Vary one setting at a time, from weight decay 1, batches of 512, width 128."""
    base = recipe(BASE)
    decays = {f"scale decay {decay:g}": decay for decay in DECAYS}
    for key, decay in decays.items():
        stacks.train(
            key,
            base.but(f"softmax, L=1, decay {decay:g}"),
            task,
            quick=QUICK if decay == DECAYS[0] else 0,
            weight_decay=decay,
            iterations=ITERATIONS,
        )
    for name, changes in OTHERS.items():
        stacks.train(
            f"scale {name}", base.but(f"softmax, L=1, {name}", **changes), task, quick=QUICK, iterations=ITERATIONS
        )
    names = tuple(decays)
    stacks.certify(names[0], task)
    for name, decay in list(decays.items())[1:]:
        stacks.find(
            "this library",
            f"less weight decay delays generalisation in proportion, to a factor of two: decay {DECAYS[0]:g} to {decay:g}",
            (names[0], name),
            lambda one, less, factor=DECAYS[0] / decay: _delayed(one, less, factor),
        )
    for name in OTHERS:
        stacks.find(
            "this library",
            f"{name} moves generalisation by a factor of two or more",
            (names[0], f"scale {name}"),
            _moved,
        )
    stacks.draw_learning(
        "scale.png", "what moves the scale of grokking", (*names, *(f"scale {name}" for name in OTHERS))
    )


def _delayed(one: Run, less: Run, factor: float) -> Measured:
    """Within a factor of two of the proportion: yes; later at all: partly."""
    ratio = median(less.iterations_to()) / median(one.iterations_to())
    text = f"99% test accuracy at {arrival(one)} and {arrival(less)}: {ratio:.1f} times for a factor of {factor:.1f}"
    if factor / SUBSTANTIAL <= ratio <= factor * SUBSTANTIAL:
        return Measured(text, Verdict.YES)
    return Measured(text, Verdict.PARTLY if ratio > 1 else Verdict.NO)


def _moved(one: Run, other: Run) -> Measured:
    before, after = median(one.iterations_to()), median(other.iterations_to())
    far = not 1 / SUBSTANTIAL < after / before < SUBSTANTIAL
    return Measured(f"99% test accuracy at {arrival(one)} and {arrival(other)}", Verdict.YES if far else Verdict.NO)

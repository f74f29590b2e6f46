"""Division mod 97 in the settings of Power et al.: figures 4 and 5 of Ergen et al. 2022, and equation (12) as printed."""

from __future__ import annotations

import numpy as np

from convexformer.data import SymbolTask
from convexformer.deep import Run, recipe
from convexformer.experiments.deep_study import Measured, TrainedStacks, every
from convexformer.experiments.deep_verdicts import (
    accuracies,
    arrival,
    arrives,
    beyond,
    depth_helps,
    depth_makes_no_difference,
    lower_test_loss,
    memorises_first,
    smoother,
    tenfold,
)

SOURCE = "Ergen et al., figure 4"
PRINTED_SCALE = 100_000  # "more than 10^5 iterations to reach perfect generalization in Figure 4b"
# about 10^3 iterations to 100% training accuracy in figure 4a: the powers of ten that round to it
MEMORISED_AT = (10**2.5, 10**3.5)
PRINTED = {"paper-dense-1": 500, "paper-dense-2": 300, "paper-fixed-1": 1200}  # iterations in a quick run: memorised
DENSE = {"dense-1": 600, "dense-2": 300}  # iterations in a quick run
SLOW_TWO = "convex-2-slow"
PAST = "convex-2-past"
# iterations in a quick run; 0 leaves a model out. A full run has those of the recipes
QUICK = {
    "convex-1": 300,
    PAST: 0,
    "convex-1-slow": 4000,
    SLOW_TWO: 4000,
    "convex-1-group": 500,
    "paper-softmax-1": 2500,
    "paper-softmax-2": 0,
}


def paper(stacks: TrainedStacks, task: SymbolTask) -> None:
    """The settings of Power et al. for softmax; convex models tuned, and at the learning rate of Power et al., 1e-3."""
    slow = recipe("convex-1-slow")
    recipes = {
        **{key: recipe(key) for key in QUICK if key not in (SLOW_TWO, PAST)},
        SLOW_TWO: slow.but("convex, learning rate 1e-3, L=2", shape={"depth": 2}),
        # past 99%, so that test losses can be compared where the softmax transformer arrives
        PAST: recipe("convex-2").but("convex, tuned, L=2, past 99%", target=None, iterations=4000, evaluate_every=50),
    }
    for key, each in recipes.items():
        if key not in stacks.runs:
            stacks.train(key, each, task, quick=QUICK[key])
    stacks.certify("convex-1-slow", task)
    paper_claims(stacks)
    shown = tuple(key for key in QUICK if key not in ("convex-1", PAST))
    stacks.draw_learning("paper.png", "the softmax transformer of Power et al., and convex stacks", shown)


def paper_claims(stacks: TrainedStacks) -> None:
    """Figures 4 and 5 of Ergen et al. at the scale of Power et al."""
    for depth in (1, 2):
        _scale_of_grokking(stacks, depth)
    _against_power(stacks)
    stacks.find(
        "Fisher et al., section 6",
        "division: convex converges more smoothly than softmax, in the settings of Power et al. (L=1, learning rate 1e-3)",
        ("convex-1-slow", "paper-softmax-1"),
        lambda convex, softmax: smoother([convex], softmax),
    )


def printed(stacks: TrainedStacks, task: SymbolTask) -> None:
    """Equation (12) as printed, rank-one gates on all channels, at the learning rate of Power et al.: 1e-3."""
    for key, quick in PRINTED.items():
        stacks.train(key, recipe(key), task, quick=quick)
    stacks.certify("paper-fixed-1", task)
    printed_claims(stacks)
    stacks.draw_learning("printed.png", "equation (12) as printed", tuple(PRINTED))


def printed_claims(stacks: TrainedStacks) -> None:
    """Whether equation (12) as printed, and the convex problem itself, generalise."""
    stacks.find(
        "Ergen et al., equation (12)",
        "gates as printed (rank one, all channels), at the learning rate of Power et al.: generalises",
        ("paper-dense-1", "paper-dense-2"),
        _generalise,
    )
    stacks.find(
        "Ergen et al., theorem 3",
        "the convex problem itself (fixed embedding, one layer) generalises on this task",
        ("paper-fixed-1",),
        _generalise,
    )


def dense(stacks: TrainedStacks, task: SymbolTask) -> None:
    """Equation (12) as printed with settings of a sweep of its own, on seeds that the sweep has not seen."""
    for key, quick in DENSE.items():
        stacks.train(key, recipe(key), task, quick=quick)
    dense_claims(stacks)
    stacks.draw_learning("dense.png", "equation (12) as printed, tuned by a sweep of its own", tuple(DENSE))


def dense_claims(stacks: TrainedStacks) -> None:
    """Whether gates as printed generalise once they are tuned: the share of the seeds that reach 99%."""
    for depth in (1, 2):
        stacks.find(
            "Ergen et al., equation (12)",
            f"gates as printed, tuned by a sweep of their own, L={depth}: generalises",
            (f"dense-{depth}",),
            arrives,
        )


def _scale_of_grokking(stacks: TrainedStacks, depth: int) -> None:
    softmax = (f"paper-softmax-{depth}",)
    stacks.find(
        f"Power et al.; {SOURCE}",
        f"grokking: the softmax transformer learns the training data long before it generalises, L={depth}",
        softmax,
        memorises_first,
    )
    stacks.find(
        f"{SOURCE}a",
        f"the softmax transformer has learned the training data at about 10^3 iterations, L={depth}",
        softmax,
        _about_a_thousand,
    )
    stacks.find(
        f"{SOURCE}b",
        f"the softmax transformer needs more than 10^5 iterations to generalise, L={depth}",
        softmax,
        lambda run: beyond(run, PRINTED_SCALE),
    )


def _against_power(stacks: TrainedStacks) -> None:
    stacks.find(
        f"{SOURCE}b",
        "convex reaches perfect generalisation 10x faster than the softmax transformer of Power et al., tuned convex, L=1",
        ("convex-1", "paper-softmax-1"),
        tenfold,
    )
    stacks.find(
        f"{SOURCE}b",
        "convex reaches perfect generalisation 10x faster than the softmax transformer of Power et al., tuned convex, L=2",
        (PAST, "paper-softmax-2"),
        tenfold,
    )
    stacks.find(
        f"{SOURCE}b",
        "convex reaches perfect generalisation 10x faster at an equal learning rate, 1e-3 (L=1)",
        ("convex-1-slow", "paper-softmax-1"),
        tenfold,
    )
    stacks.find(
        f"{SOURCE}c",
        "convex has the lower test loss at equal iterations than the softmax transformer of Power et al., tuned convex, L=2",
        (PAST, "paper-softmax-2"),
        lower_test_loss,
    )
    stacks.find(
        f"{SOURCE}c",
        "convex has the lower test loss at equal iterations and an equal learning rate, 1e-3 (L=1)",
        ("convex-1-slow", "paper-softmax-1"),
        lower_test_loss,
    )
    stacks.find(
        "Ergen et al., figure 5",
        "a second layer speeds up the convex model substantially (half the iterations), learning rate 1e-3",
        ("convex-1-slow", SLOW_TWO),
        depth_helps,
    )
    stacks.find(
        "Ergen et al., figure 5",
        "a second layer makes no difference to the softmax transformer (less than a factor of two), learning rate 1e-3",
        ("paper-softmax-1", "paper-softmax-2"),
        depth_makes_no_difference,
    )


def _about_a_thousand(run: Run) -> Measured:
    found = run.iterations_to(part="train")
    near = (found >= MEMORISED_AT[0]) & (found <= MEMORISED_AT[1])
    text = f"99% training accuracy at {arrival(run, 'train')}"
    return Measured(text, every(int(near.sum()), len(near)), settled=bool(np.isfinite(found).all()))


def _generalise(*runs: Run) -> Measured:
    arrived = [bool(np.isfinite(run.iterations_to()).all()) for run in runs]
    each = ", ".join(f"L={depth} {accuracies(run)}" for depth, run in enumerate(runs, start=1))
    return Measured(f"best test accuracy {each}", every(sum(arrived), len(arrived)))

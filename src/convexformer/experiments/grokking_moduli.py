"""The amount of grokking over several moduli: figure 7 of Ergen et al. 2022."""

from __future__ import annotations

from convexformer.data import modular_division
from convexformer.deep import Run, recipe
from convexformer.experiments.deep_measures import SUBSTANTIAL
from convexformer.experiments.deep_study import Measured, TrainedStacks, every, median, steps

MODULI = (73, 97, 113)
QUICK_MODULI = (97, 113)  # the larger the modulus, the sooner all models generalise
# recipes with their iterations in a quick run; a full run has those of the recipes
MODELS = {"convex-1": 400, "convex-2": 400, "softmax-1": 700, "paper-softmax-1": 2500}


def compare_moduli(stacks: TrainedStacks) -> None:
    """Train both families for each modulus, and compare iterations to 99% and the amount of grokking.

    Grokking is the iterations from 99% training to 99% test accuracy. A quick run has two moduli.
    """
    chosen = QUICK_MODULI if stacks.quick else MODULI
    for p in chosen:
        task = modular_division(p)
        for key, quick in MODELS.items():
            stacks.train(_name(key, p), recipe(key).but(f"{recipe(key).label}, mod {p}"), task, quick=quick)
        stacks.certify(_name("convex-1", p), task)
    for opponent, label in (("paper-softmax-1", "of Power et al."), ("softmax-1", "tuned")):
        for depth in (1, 2):
            keys = tuple(_name(key, p) for p in chosen for key in (f"convex-{depth}", opponent))
            against = f"convex, tuned, L={depth}, against softmax {label}, L=1"
            stacks.find(
                "Ergen et al., figure 7a",
                f"substantially fewer iterations (at most half) to 99% test accuracy for every modulus: {against}",
                keys,
                lambda *runs: _halved(runs, chosen, gap=False),
            )
            stacks.find(
                "Ergen et al., figure 7b",
                f"the amount of grokking is substantially smaller (at most half) for every modulus: {against}",
                keys,
                lambda *runs: _halved(runs, chosen, gap=True),
            )


def _name(key: str, p: int) -> str:
    return f"{key} mod {p}"


def _halved(runs: tuple[Run, ...], moduli: tuple[int, ...], gap: bool) -> Measured:
    """Compare the runs in pairs, one for each modulus: ours, theirs."""
    pairs = [
        tuple(each.grokking_gap() if gap else each.iterations_to() for each in runs[k : k + 2])
        for k in range(0, len(runs), 2)
    ]
    wins = [median(ours) * SUBSTANTIAL <= median(theirs) and median(ours) < float("inf") for ours, theirs in pairs]
    text = "; ".join(
        f"p = {p}: {steps(ours)} against {steps(theirs)}" for p, (ours, theirs) in zip(moduli, pairs, strict=True)
    )
    return Measured(text, every(sum(wins), len(wins)))

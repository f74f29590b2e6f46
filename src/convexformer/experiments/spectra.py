"""Singular values of the weights over training: figures 3 and 4 and section 7 of Fisher et al."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
from rich.console import Console

from convexformer.data import SymbolTask, modular_division, periodicity
from convexformer.deep import Run, recipe
from convexformer.experiments import deep_figures as figures
from convexformer.experiments.deep_measures import Spectrum, collapses, grows, shrinks
from convexformer.experiments.deep_study import Measured, TrainedStacks, every, span
from convexformer.experiments.grokking_report import CONVEX, KERNEL, report_recipes
from convexformer.experiments.study import Verdict

POINTS = ("start", "learning", "memorised", "rising", "generalised", "end")
TUNED_ITERATIONS = 600
# nearly twice what the slower model needs to generalise on division; on periodicity the budget of Fisher et al.
REPORT_ITERATIONS = {"division": 40_000, "periodicity": 300_000}
# iterations in a quick run, 0 leaves a model out: division is generalised after about 22,000 and, with the map, 12,000
QUICK_REPORT = {"division": {CONVEX: 25_000, KERNEL: 18_000}, "periodicity": {CONVEX: 0, KERNEL: 0}}
QUICK_TUNED = 400
# iterations between evaluations, and between records of singular values
EVERY = {"tuned": (10, 10), "division": (250, 250), "periodicity": (500, 1000)}
EARLY_ITERATIONS, EARLY_EVERY = (
    5000,
    250,
)  # on periodicity, of a run of its own that resolves how the convex model memorises
PAST = 1.25  # "past generalisation": the end is at this many times the iterations of 99% test accuracy, or later


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

    A quick run has the preset ``report`` alone, one seed, and division alone.
    """
    title = "Spectra of the weights over training"
    stacks = TrainedStacks.begin(
        "spectra", title, output, quick, preset, console, seeds, budget, resume, quick_seeds=1, quick_preset="report"
    )
    division, period = modular_division(97), periodicity(97)
    if "tuned" in stacks.presets or "paper" in stacks.presets:
        _tuned(stacks, "division", division, ("convex-2", "convex-4"))
        _tuned(stacks, "periodicity", period, ("periodicity-convex-2",))
        stacks.certify("division convex-2", division)
    if "report" in stacks.presets:
        recipes = report_recipes()
        for name, task, figure in (("division", division, "3"), ("periodicity", period, "4")):
            for source in (CONVEX, KERNEL):
                stacks.train(
                    f"{name} {source}",
                    recipes[source],
                    task,
                    quick=QUICK_REPORT[name][source],
                    evaluate_every=EVERY[name][0],
                    spectra_every=EVERY[name][1],
                    target=None,
                    iterations=REPORT_ITERATIONS[name],
                )
            early = f"{name} {CONVEX} early"
            if name == "periodicity":
                stacks.train(
                    early,
                    recipes[CONVEX].but(f"{recipes[CONVEX].label}, early"),
                    task,
                    quick=0,
                    evaluate_every=EARLY_EVERY,
                    spectra_every=EARLY_EVERY,
                    target=None,
                    iterations=EARLY_ITERATIONS,
                )
            keys = tuple(f"{name} {key}" for key in (CONVEX, KERNEL))
            if all(key in stacks.runs for key in keys):
                _draw(stacks, keys, ("Z1", "Z2"), f"report_{name}", f"figure {figure} of Fisher et al.: {task.name}")
            if name == "division":
                stacks.certify(keys[0], task)
            convex_claims(
                stacks, f"Fisher et al., figure {figure}", keys[0], early if name == "periodicity" else keys[0]
            )
            kernel_claims(stacks, f"Fisher et al., figure {figure}", keys[1])
            regularised_claim(stacks, f"Fisher et al., figure {figure}", *keys)
    return stacks.finish()


def _tuned(stacks: TrainedStacks, name: str, task: SymbolTask, keys: tuple[str, ...]) -> None:
    for key in keys:
        row, (evaluations, records) = f"{name} {key}", EVERY["tuned"]
        changes = {
            "evaluate_every": evaluations,
            "spectra_every": records,
            "target": None,
            "iterations": TUNED_ITERATIONS,
        }
        stacks.train(row, recipe(key), task, quick=QUICK_TUNED, **changes)
        label, layers = f"{stacks.recipes[row].label}, {task.name}", tuple(stacks.runs[row].history.spectra)
        _draw(stacks, (row,), layers, f"{name}_{key}", label)
        tuned_claim(stacks, row, label, layers)


def tuned_claim(stacks: TrainedStacks, row: str, label: str, layers: tuple[str, ...]) -> None:
    """Claim that a tuned stack generalises without a collapse."""
    stacks.find(
        "this library",
        f"{label}: generalises, and no layer's effective rank falls below half of its start",
        (row,),
        lambda run: _without_collapse(run, layers),
    )


@final
@dataclass(frozen=True)
class Change:
    """Measures whether quantities of a layer change as ``holds`` says between two turning points, on every seed."""

    layer: str
    quantities: tuple[str, ...]
    points: tuple[str, str]
    holds: Callable[[np.ndarray, np.ndarray], np.ndarray]

    def __call__(self, run: Run) -> Measured:
        """Compare the quantities of a run."""
        spectrum, (first, last) = Spectrum(run, self.layer), self.points
        pairs = {name: (spectrum.of(name, first), spectrum.of(name, last)) for name in self.quantities}
        right = np.all([self.holds(*pair) for pair in pairs.values()], axis=0)
        text = "; ".join(f"{self.layer} {name} {_change(*pair)}" for name, pair in pairs.items())
        when = " to ".join(f"{np.median(spectrum.iteration(point)):,.0f}" for point in self.points)
        text += f" from {first} to {last} ({when})"
        return Measured(text, every(int(right.sum()), len(right)), settled=last == "memorised" and _memorised(run))


def convex_claims(stacks: TrainedStacks, source: str, key: str, early: str) -> None:
    """Section 7 of Fisher et al. on the convex model without the kernel map, in order; ``early``: a run of its beginning."""
    claims = {
        "the first layer's singular values grow in magnitude and spread while memorising": Change(
            "Z1", ("size", "spread"), ("start", "memorised"), grows
        ),
        "the second layer's effective rank collapses (below half of its start)": Change(
            "Z2", ("rank",), ("start", "end"), collapses
        ),
        "the second layer's spectral norm jumps, over the median singular value, as training accuracy goes from 10 to 99%": (
            Change("Z2", ("lead",), ("learning", "memorised"), grows)
        ),
        "the second layer's singular values shrink while generalising": Change(
            "Z2", ("size",), ("rising", "generalised"), shrinks
        ),
    }
    for claim, measure in claims.items():
        model = early if measure.points[1] == "memorised" else key
        stacks.find(source, f"convex: {claim}", (model,), measure, whole=measure.points[1] == "end")


def kernel_claims(stacks: TrainedStacks, source: str, key: str) -> None:
    """Section 7 of Fisher et al. on the model with the kernel map, in order."""
    claims: dict[str, Callable[[Run], Measured]] = {}
    for layer, place in (("Z1", "first"), ("Z2", "second")):
        claims |= {
            f"the {place} layer's singular values grow while memorising": Change(
                layer, ("size",), ("start", "memorised"), grows
            ),
            f"the {place} layer's singular values shrink while generalising": Change(
                layer, ("size",), ("rising", "generalised"), shrinks
            ),
            f"the {place} layer's effective rank does not collapse (stays above half of its start)": Change(
                layer, ("rank",), ("start", "end"), lambda start, end: ~collapses(start, end)
            ),
        }
    claims |= {
        "the second layer's distribution is anisotropic at first (effective rank falls while memorising)": Change(
            "Z2", ("rank",), ("start", "memorised"), shrinks
        ),
        "the first layer's singular values grow isotropically while memorising (effective rank stays)": _isotropic,
        "the second layer's effective rank rises after memorising": Change(
            "Z2", ("rank",), ("memorised", "end"), grows
        ),
        "the effective rank of both layers rises as training continues past generalisation": rises_past,
        "generalises (99% test accuracy) without a collapse of the effective rank": lambda run: _without_collapse(
            run, ("Z1", "Z2")
        ),
    }
    for claim, measure in claims.items():
        to_the_end = isinstance(measure, Change) and measure.points[1] == "end"
        stacks.find(source, f"kernel: {claim}", (key,), measure, whole=to_the_end)


def regularised_claim(stacks: TrainedStacks, source: str, convex: str, kernel: str) -> None:
    """Section 7 of Fisher et al.: the random projections of the kernel map act as a spectral regulariser."""
    stacks.find(
        source,
        "kernel: the map regularises the spectra: both layers end at a higher effective rank than without it",
        (convex, kernel),
        _regularised,
        whole=True,
    )


def _regularised(convex: Run, kernel: Run) -> Measured:
    pairs = {
        layer: (Spectrum(convex, layer).rank("end"), Spectrum(kernel, layer).rank("end")) for layer in ("Z1", "Z2")
    }
    right = np.all([grows(*pair) for pair in pairs.values()], axis=0)
    text = "; ".join(
        f"{layer} rank at the end {np.median(without):.3g} without it, {np.median(own):.3g} with it"
        for layer, (without, own) in pairs.items()
    )
    return Measured(text, every(int(right.sum()), len(right)))


def _memorised(run: Run) -> bool:
    return bool(np.isfinite(run.iterations_to(part="train")).all())


def _isotropic(run: Run) -> Measured:
    first = Spectrum(run, "Z1")
    sizes, ranks = ((quantity("start"), quantity("memorised")) for quantity in (first.size, first.rank))
    right = grows(*sizes) & ~shrinks(*ranks)
    text = f"Z1 size {_change(*sizes)}, rank {_change(*ranks)}"
    return Measured(text, every(int(right.sum()), len(right)), settled=_memorised(run))


def rises_past(run: Run) -> Measured:
    """Whether both effective ranks rise from the best test accuracy to the end, 1.25 times as many iterations or more.

    A model whose test accuracy still rises at the end, and never was at 99%, has nothing past generalisation.
    """
    layers = {layer: Spectrum(run, layer) for layer in ("Z1", "Z2")}
    pairs = {layer: (each.rank("generalised"), each.rank("end")) for layer, each in layers.items()}
    right = np.all([grows(*pair) for pair in pairs.values()], axis=0)
    late = np.all([each.iteration("end") >= PAST * each.iteration("generalised") for each in layers.values()])
    text = "; ".join(f"{layer} rank {_change(*pair)}" for layer, pair in pairs.items())
    if not late and np.isfinite(run.iterations_to()).any():
        return Measured(f"{text}; training ended before {PAST} times the iterations to generalise", Verdict.OPEN)
    if not late:  # its test accuracy was still rising, far from 99%
        best = span(run.history.test_accuracy.max(0))
        return Measured(f"{text}; it does not generalise (best test accuracy {best})", Verdict.BEYOND)
    return Measured(text, every(int(right.sum()), len(right)))


def _without_collapse(run: Run, layers: tuple[str, ...]) -> Measured:
    pairs = {layer: tuple(Spectrum(run, layer).rank(point) for point in ("start", "end")) for layer in layers}
    kept = np.all([~collapses(*pair) for pair in pairs.values()], axis=0)
    arrived = np.isfinite(run.iterations_to())
    text = "; ".join(f"{layer}: {_change(*pair)}" for layer, pair in pairs.items())
    text += f"; 99% test accuracy on {int(arrived.sum())} of {len(arrived)} seeds"
    return Measured(text, every(int((kept & arrived).sum()), len(kept)))


def _draw(stacks: TrainedStacks, keys: tuple[str, ...], layers: tuple[str, ...], name: str, caption: str) -> None:
    runs = {stacks.recipes[key].label: stacks.runs[key] for key in keys}
    stacks.study.draw(
        figures.spectra, f"{name}_values.png", f"{caption}: singular values, seed 0", runs, layers, title=caption
    )
    stacks.study.draw(
        figures.ranks, f"{name}_ranks.png", f"{caption}: effective rank and spectral norm", runs, layers, title=caption
    )
    for key in keys:
        run = stacks.runs[key]
        stacks.study.numbers[key] = {layer: _turning_points(run, layer) for layer in layers}


def _turning_points(run: Run, layer: str) -> dict[str, Any]:
    """Return iteration, effective rank, size, spread and lead at every turning point, a number a seed."""
    spectrum = Spectrum(run, layer)
    return {
        point: {
            "iteration": spectrum.iteration(point).tolist(),
            "effective_rank": spectrum.rank(point).tolist(),
            "spectral_norm": spectrum.at(point)[:, 0].tolist(),
            "size": spectrum.size(point).tolist(),
            "spread": spectrum.spread(point).tolist(),
            "lead": spectrum.lead(point).tolist(),
        }
        for point in POINTS
    }


def _change(before: np.ndarray, after: np.ndarray) -> str:
    return f"{np.median(before):.3g} -> {np.median(after):.3g}"

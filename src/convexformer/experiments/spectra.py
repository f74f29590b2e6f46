"""Singular values of the weights over training: figures 3 and 4 of Fisher et al."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from convexformer.data import SymbolTask, modular_division, periodicity
from convexformer.deep import Run, recipe
from convexformer.experiments import deep_figures as figures
from convexformer.experiments.deep_study import TrainedStacks, steps
from convexformer.experiments.study import Verdict

SPECTRA_RECIPES = ("report-convex", "report-kernel")


def run(
    output: Path, *, quick: bool = False, console: Console | None = None, preset: str | None = None
) -> dict[str, Any]:
    """Run the experiment; write figures, summary, ``results.json`` and ``config.json`` to ``output``."""
    stacks = TrainedStacks.begin("spectra", "Spectra of the weights over training", output, quick, preset, console)
    division, period = modular_division(97), periodicity(97)
    if "tuned" in stacks.presets or "paper" in stacks.presets:
        _tuned(stacks, "division", division, ("convex-2", "convex-4"))
        _tuned(stacks, "periodicity", period, ("periodicity-convex-2",))
        stacks.certify("division convex-2", division)
    if "report" in stacks.presets:
        # table 1 of Fisher et al. ends at about 1,500 epochs of 146 batches; its figures go past generalisation
        seconds = 15.0 if stacks.quick else 12.0
        for name, task, figure in (("division", division, "3"), ("periodicity", period, "4")):
            keys = tuple(f"{name} {key}" for key in SPECTRA_RECIPES)
            for key, source in zip(keys, SPECTRA_RECIPES, strict=True):
                stacks.train(
                    key, recipe(source), task, spectra_every=500, target=None, max_time=seconds, iterations=40_000
                )
            _draw(stacks, keys, ("Z1", "Z2"), f"report_{name}", f"figure {figure} of Fisher et al.: {task.name}")
            _claims(stacks, figure, *(stacks.runs[key] for key in keys))
    return stacks.finish()


def _tuned(stacks: TrainedStacks, name: str, task: SymbolTask, keys: tuple[str, ...]) -> None:
    for key in keys:
        changes = {"spectra_every": 10, "target": None, "iterations": 600}
        stacks.train(f"{name} {key}", recipe(key), task, **changes)
        own = stacks.runs[f"{name} {key}"]
        layers = tuple(own.history.spectra)
        _draw(
            stacks, (f"{name} {key}",), layers, f"{name}_{key}", f"{stacks.recipes[f'{name} {key}'].label}, {task.name}"
        )
        _rank_finding(stacks, "this library", f"{stacks.recipes[f'{name} {key}'].label}, {task.name}", own, layers)


def _claims(stacks: TrainedStacks, figure: str, convex: Run, kernel: Run) -> None:
    """The claims of Fisher et al., section 7, in order."""
    source = f"Fisher et al., figure {figure}"
    one, two = (convex.history.effective_rank(layer) for layer in ("Z1", "Z2"))
    stacks.study.find(
        source,
        "convex: the second layer's effective rank collapses",
        f"Z2: {_change(two)}; Z1: {_change(one)}",
        Verdict.YES if np.median(two[-1]) < 0.7 * np.median(two[0]) else Verdict.NO,
    )
    norm = convex.history.spectral_norm("Z2")
    stacks.study.find(
        source,
        "convex: singular values grow while memorising and shrink while generalising",
        f"spectral norm of Z2: start {np.median(norm[0]):.2f}, largest {np.median(norm.max(0)):.2f}, "
        f"end {np.median(norm[-1]):.2f}",
        Verdict.YES if np.median(norm[-1]) < 0.9 * np.median(norm.max(0)) else Verdict.NO,
    )
    k1, k2 = (kernel.history.effective_rank(layer) for layer in ("Z1", "Z2"))
    stacks.study.find(
        source,
        "kernel: generalises without a collapse of the effective rank",
        f"Z1: {_change(k1)}; Z2: {_change(k2)}; 99% test at {steps(kernel.iterations_to())}",
        _kept(k1, k2) if np.isfinite(kernel.iterations_to()).any() else Verdict.OPEN,
    )


def _kept(*layers: np.ndarray) -> Verdict:
    return Verdict.YES if all(np.median(ranks[-1]) > 0.7 * np.median(ranks[0]) for ranks in layers) else Verdict.NO


def _rank_finding(stacks: TrainedStacks, source: str, label: str, run: Run, layers: tuple[str, ...]) -> None:
    changes = {layer: run.history.effective_rank(layer) for layer in layers}
    fell = sum(np.median(ranks[-1]) < 0.7 * np.median(ranks[0]) for ranks in changes.values())
    stacks.study.find(
        source,
        f"{label}: generalisation goes with a fall of the effective rank (by 30% or more)",
        "; ".join(f"{layer}: {_change(ranks)}" for layer, ranks in changes.items())
        + f"; 99% test at {steps(run.iterations_to())}",
        Verdict.YES if fell == len(layers) else Verdict.PARTLY if fell else Verdict.NO,
    )


def _draw(stacks: TrainedStacks, keys: tuple[str, ...], layers: tuple[str, ...], name: str, caption: str) -> None:
    runs = {stacks.recipes[key].label: stacks.runs[key] for key in keys}
    stacks.study.draw(
        figures.spectra, f"{name}_values.png", f"{caption}: singular values, seed 0", runs, layers, title=caption
    )
    stacks.study.draw(
        figures.ranks, f"{name}_ranks.png", f"{caption}: effective rank and spectral norm", runs, layers, title=caption
    )
    for key in keys:
        history = stacks.runs[key].history
        stacks.study.numbers[key] = {
            layer: {
                "iteration": [int(history.spectra_iteration[0]), int(history.spectra_iteration[-1])],
                "effective_rank": [history.effective_rank(layer)[k].tolist() for k in (0, -1)],
                "spectral_norm": [history.spectral_norm(layer)[k].tolist() for k in (0, -1)],
            }
            for layer in layers
        }


def _change(ranks: np.ndarray) -> str:
    return f"{np.median(ranks[0]):.0f} -> {np.median(ranks[-1]):.0f}"

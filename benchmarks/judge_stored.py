"""Judges runs whose curves are gone by the same rules as new ones: `python benchmarks/judge_stored.py`.

The runs of docs/results/{grokking,periodicity,mod15,spectra}.json were made on an H200 before claims had budgets. Their
rows hold iterations to 99%, best and final accuracies, and effective ranks at start and end, seed by seed. Claims that need
no more are judged anew, by the functions of the experiments, and written to the file as its "claims"; all others are left
out. docs/results/spectra_cpu.json has the spectra at every turning point of training; its claims are judged anew from these,
except those on the run of its own that resolves how the convex model memorises.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from rich.console import Console

from convexformer.data.files import write_json
from convexformer.deep import RECIPES, Recipe, Training
from convexformer.experiments import grokking, grokking_paper, grokking_report, mod15, periodicity, spectra
from convexformer.experiments.deep_study import TrainedStacks
from convexformer.experiments.study import Study

RESULTS = Path(__file__).parent.parent / "docs" / "results"


class NotStoredError(Exception):
    """A claim asked for a curve."""


class Ends:
    """Of a test accuracy: its best and its last value."""

    def __init__(self, best: list[float], last: list[float]) -> None:
        self.best, self.last, self.shape = np.array(best), np.array(last), (2, len(best))

    def max(self, axis: int) -> np.ndarray:
        """The best value of every seed."""
        return self.best

    def __getitem__(self, index: Any) -> np.ndarray:
        if not isinstance(index, int) or index != -1:
            raise NotStoredError
        return self.last

    def __array__(self, *_: Any, **__: Any) -> np.ndarray:
        raise NotStoredError


class Stored:
    """The part of a run and of its history that a row of results holds; anything else is not stored."""

    def __init__(self, row: dict[str, Any], ranks: dict[str, Any]) -> None:
        self.row, self.ranks = row, ranks
        self.iteration = np.array([0, row["iterations"]])
        self.spectra_iteration = self.iteration
        self.test_accuracy = Ends(row["best_test_accuracy"], row["final_test_accuracy"])

    def __getattr__(self, name: str) -> Any:
        raise NotStoredError(name)

    @property
    def history(self) -> Stored:
        """The history is this object as well."""
        return self

    def iterations_to(self, accuracy: float = 0.99, part: str = "test") -> np.ndarray:
        """Iterations to 99%, nan where never."""
        return np.array([np.nan if step is None else step for step in self.row[f"iterations_{part}"]], dtype=float)

    def grokking_gap(self) -> np.ndarray:
        """Iterations between the two."""
        return self.iterations_to() - self.iterations_to(part="train")

    def effective_rank(self, layer: str) -> np.ndarray:
        """At start and end."""
        return np.array(self.ranks[layer]["effective_rank"])


class StoredSpectrum:
    """Takes the place of ``Spectrum``: the turning points that the results hold."""

    def __init__(self, run: Stored, layer: str) -> None:
        self.points = run.ranks[layer]

    def of(self, quantity: str, point: str) -> np.ndarray:
        """One of ``rank``, ``size``, ``spread`` and ``lead``."""
        return np.array(self.points[point]["effective_rank" if quantity == "rank" else quantity])

    def iteration(self, point: str) -> np.ndarray:
        """The iterations of a turning point."""
        return np.array(self.points[point]["iteration"])

    def rank(self, point: str) -> np.ndarray:
        """The effective rank."""
        return self.of("rank", point)

    def size(self, point: str) -> np.ndarray:
        """The root mean square of the singular values."""
        return self.of("size", point)


class StoredStacks:
    """Takes the place of ``TrainedStacks``: claims on stored runs are judged, others passed over."""

    def __init__(self, folder: Path, name: str, full: dict[str, int]) -> None:
        self.file = folder / f"{name}.json"
        self.results: dict[str, Any] = json.loads(self.file.read_text())
        study = Study(name, "", self.file.parent, False, Console(quiet=True))
        self.stacks = TrainedStacks(study, (), torch.device("cpu"), len(self.results["config"]["seeds"]))
        self.seeds, self.runs = self.stacks.seeds, self.stacks.runs
        for key, row in self.results["rows"].items():
            self._add(key, row, full)

    def _add(self, key: str, row: dict[str, Any], full: dict[str, int]) -> None:
        settings = self.results["config"]["rows"][key]
        options = {**settings["training"], "betas": tuple(settings["training"]["betas"]), "max_time": None}
        known = RECIPES.get(key.split(" ")[-1])
        recipe = Recipe(known.label if known else settings["label"], settings["family"], Training(**options))
        self.stacks.full[key] = full.get(key, recipe.training.iterations)
        if row["outcome"] == "max_time":
            recipe = recipe.but(iterations=row["iterations"])
        ranks = self.results["numbers"].get(key, {})
        self.stacks.recipes[key], self.stacks.runs[key] = recipe, Stored(row, ranks)  # type: ignore[assignment]

    def find(self, source: str, claim: str, keys: tuple[str, ...], measure: Any, *, whole: bool = False) -> None:
        """Judge a claim if its runs and what it measures are stored."""
        if any(key not in self.runs for key in keys):
            return
        try:
            self.stacks.find(source, claim, keys, measure, whole=whole)
        except NotStoredError:
            return

    def merge(self) -> None:
        """Put the claims in the place of those of the same words, new ones last."""
        judged = {(each.source, each.claim): each.record() for each in self.stacks.study.findings}
        old = self.results["claims"]
        claims = [judged.pop((each["source"], each["claim"]), each) for each in old]
        write_json(self.file, {**self.results, "claims": [*claims, *judged.values()]}, 1)

    def write(self) -> None:
        """Put the claims in the place of older findings."""
        rest = {key: value for key, value in self.results.items() if key not in ("findings", "claims", "untested")}
        claims = [each.record() for each in self.stacks.study.findings]
        for each in claims:
            each["budget"] += ", H200"
            print(f"{self.file.name}: {each['verdict']:14} {each['source']}: {each['claim']}: {each['measured']}")
        write_json(self.file, {**rest, "untested": self.stacks.study.untested, "claims": claims}, 1)


def main(folder: Path = RESULTS) -> None:
    """Judge the five files of a folder."""
    stacks: Any = StoredStacks(folder, "grokking", {})
    grokking.tuned_claims(stacks)
    stacks.runs[grokking_paper.PAST] = stacks.runs["convex-2"]  # the same model, stopped at 99%
    stacks.stacks.recipes[grokking_paper.PAST] = stacks.stacks.recipes["convex-2"]
    stacks.stacks.full[grokking_paper.PAST] = stacks.stacks.full["convex-2"]
    grokking_paper.paper_claims(stacks)
    grokking_paper.printed_claims(stacks)
    grokking_report.report_claims(stacks)
    stacks.write()
    stacks = StoredStacks(folder, "periodicity", {})
    periodicity.tuned_claims(stacks)
    periodicity.report_claims(stacks)
    stacks.write()
    stacks = StoredStacks(folder, "mod15", dict.fromkeys(mod15.RECIPES, mod15.HALF_ITERATIONS))
    mod15.figure_6(stacks)
    mod15.by_share(stacks, mod15.FRACTIONS)
    stacks.write()
    long = {
        f"periodicity {key}": spectra.REPORT_ITERATIONS["periodicity"] for key in ("report-convex", "report-kernel")
    }
    stacks = StoredStacks(folder, "spectra", long)
    for key, run in stacks.runs.items():
        if key.endswith(("report-convex", "report-kernel")):
            source = f"Fisher et al., figure {'3' if key.startswith('division') else '4'}"
            if key.endswith("convex"):
                spectra.convex_claims(stacks, source, key, key)
            else:
                spectra.kernel_claims(stacks, source, key)
                spectra.regularised_claim(stacks, source, key.replace("kernel", "convex"), key)
        else:
            label = f"{stacks.stacks.recipes[key].label}, {run.row['task']}"
            spectra.tuned_claim(stacks, key, label, tuple(run.ranks))
    stacks.write()
    stacks = StoredStacks(folder, "spectra_cpu", {})
    with patch.object(spectra, "Spectrum", StoredSpectrum):
        for name, figure in (("division", 3), ("periodicity", 4)):
            keys, source = [f"{name} report-{kind}" for kind in ("convex", "kernel")], f"Fisher et al., figure {figure}"
            early = keys[0] if name == "division" else f"{keys[0]} early, not stored"
            spectra.convex_claims(stacks, source, keys[0], early)
            spectra.kernel_claims(stacks, source, keys[1])
            spectra.regularised_claim(stacks, source, *keys)
    stacks.merge()


if __name__ == "__main__":
    main()

"""How often recipes reach 99% test accuracy: fresh seeds, several moduli, budgets in iterations.

    python benchmarks/robust.py --recipes convex-1,convex-2,convex-4 --moduli 89,97,113 --seeds 0-19
    python benchmarks/robust.py --recipes dense-1,dense-2 --moduli 97 --seeds 0-4
    python benchmarks/robust.py --recipes periodicity-convex-1 --task periodicity --moduli 97 --seeds 0-4

Each prints a line a recipe and modulus and writes `docs/results/robust.json` (`--json`), where a row replaces the one of the
same recipe, task and seeds. `--set learning_rate=0.005 cooldown=200` and `--shape residual=false` change a recipe for a
comparison; such rows are kept under their changes.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from convexformer import deep
from convexformer.data import SymbolTask, modular_division, periodicity

TASKS = {"division": modular_division, "periodicity": periodicity}
RESULTS = Path(__file__).parents[1] / "docs" / "results" / "robust.json"
SEEDS_AT_ONCE = 5  # memory; and a group stops when its own seeds are done


def measure(recipe: deep.Recipe, task: SymbolTask, seeds: list[int], device: str) -> dict[str, Any]:
    """Train in groups of seeds and join what the groups report."""
    runs = []
    for first in range(0, len(seeds), SEEDS_AT_ONCE):
        model = recipe.model(task, seeds=seeds[first : first + SEEDS_AT_ONCE])
        runs.append(deep.train(model, task, recipe.training, device=device).summary())
    series = ("iterations_train", "iterations_test", "best_test_accuracy", "final_test_accuracy")
    joined = {name: [value for run in runs for value in run[name]] for name in series}
    return {
        "seeds": seeds,
        "budget": recipe.training.iterations,
        "parameters": runs[0]["parameters"],
        "reached": sum(run["reached"] for run in runs),
        **joined,
        "seconds": sum(run["seconds"] for run in runs),
        "device": runs[0]["device"],
    }


def changes(pairs: list[str]) -> dict[str, Any]:
    """Read ``name=value``; a value is JSON, or a word."""
    out = {}
    for pair in pairs:
        name, mark, text = pair.partition("=")
        if not mark:
            raise SystemExit(f"{pair!r} was given; expected name=value, such as learning_rate=0.005")
        try:
            out[name] = json.loads(text)
        except json.JSONDecodeError:
            out[name] = text
    return out


def line(row: dict[str, Any]) -> str:
    """One row in words."""
    found = [step for step in row["iterations_test"] if step is not None]
    took = f"median {np.median(found):g}, worst {max(found)}" if found else "-"
    worst = min(row["best_test_accuracy"])
    changed = "".join(f" {key}={value}" for key, value in {**row["shape"], **row["training"]}.items())
    return (
        f"{row['recipe']:22s}{changed} {row['task']:34s} {row['reached']:2d} of {len(row['seeds'])} seeds at 99% within "
        f"{row['budget']} iterations ({took}); lowest best accuracy {worst:.1%}; {row['seconds']:.0f} s"
    )


def key(row: dict[str, Any]) -> tuple[str, ...]:
    """What makes a row the same measurement."""
    return tuple(json.dumps(row[name], sort_keys=True) for name in ("recipe", "shape", "training", "task", "seeds"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", default="convex-1,convex-2,convex-4", help="comma-separated")
    parser.add_argument("--task", default="division", choices=TASKS)
    parser.add_argument("--moduli", default="89,97,113", help="comma-separated")
    parser.add_argument("--seeds", default="0-19", help="first and last, with a dash between them")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="options of training to change")
    parser.add_argument("--shape", nargs="*", default=[], metavar="NAME=VALUE", help="options of the model to change")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", type=Path, default=RESULTS)
    options = parser.parse_args()
    first, _, last = options.seeds.partition("-")
    seeds = list(range(int(first), int(last or first) + 1))
    training, shape = changes(options.set), changes(options.shape)
    torch.set_num_threads(1)
    for name in options.recipes.split(","):
        recipe = deep.recipe(name).but(shape=shape, **training)
        for p in (int(part) for part in options.moduli.split(",")):
            task = TASKS[options.task](p)
            own = {"recipe": name, "shape": shape, "training": training, "task": task.name}
            row = {**own, "settings": recipe.settings(), **measure(recipe, task, seeds, options.device)}
            print(line(row), flush=True)
            rows = json.loads(options.json.read_text())["rows"] if options.json.exists() else []
            rows = [other for other in rows if key(other) != key(row)] + [row]
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.write_text(json.dumps({"torch": torch.__version__, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()

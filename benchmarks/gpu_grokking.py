"""The sweep behind the preset `tuned`: convex and softmax transformers over grids of the same size, all seeds at once.

    python benchmarks/gpu_grokking.py --json docs/results/grokking_sweep.json     # a GPU: a few minutes
    python benchmarks/gpu_grokking.py --tasks mod15 --device cpu                   # the small task, on a CPU

For each task, family and depth: 3 learning rates x 3 weight decays x 2 shapes = 18 settings, 3 seeds each (100-102; the
experiments report others, 0-4). `--json` appends to an existing file, so that a sweep can be made in parts. A setting's
score is the worst seed's iterations to 99% test accuracy; where a seed never gets there, settings are ranked by how many
do and then by the mean of the best test accuracies.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from pathlib import Path

import numpy as np
import torch

from convexformer import deep
from convexformer.data import modular_division, periodicity

SEEDS = (100, 101, 102)
TASKS = {
    # task, depths, iterations, weight decays, batch size
    "division": (lambda: modular_division(97), (1, 2, 4), 1000, (1.0, 3.0, 6.0), 512),
    "periodicity": (lambda: periodicity(97), (1, 2), 1600, (1.0, 3.0, 6.0), 512),
    "mod15": (lambda: modular_division(15), (1, 2, 4), 4000, (1.0, 3.0, 6.0), None),
}
RATES = {"convex": (5e-3, 1e-2, 2e-2), "softmax": (2e-3, 5e-3, 1e-2)}


def shapes(family: str, depth: int, separate: bool) -> list[dict]:
    """Two shapes a family: for the convex one width at depth 1, normalisation above; for softmax the width."""
    if family == "softmax":
        return [{"width": width, "norm": "pre"} for width in (64, 128)]
    wide = [{"width": 32, "blocks": 16}, {"width": 64, "blocks": 32}]
    if depth == 1:
        return [{**shape, "separate": separate} for shape in wide]
    own = {**wide[int(separate)], "separate": separate}
    return [own, {**own, "normalize": True, "residual": depth > 2}]


def measure(task, family: str, depth: int, shape: dict, training: dict, device: str) -> dict:
    kind = deep.ConvexTransformer if family == "convex" else deep.SoftmaxTransformer
    model = kind(task.n_symbols, task.n_classes, depth=depth, **shape, seeds=SEEDS)
    run = deep.train(model, task, device=device, **training)
    row = run.summary()
    keys = (
        "parameters",
        "iterations_test",
        "iterations_train",
        "reached",
        "best_test_accuracy",
        "iterations",
        "seconds",
    )
    return {"family": family, "depth": depth, **shape, **training, **{key: row[key] for key in keys}}


def score(row: dict) -> tuple:
    """Smaller is better."""
    its = [step for step in row["iterations_test"] if step is not None]
    return (
        -row["reached"],
        max(its) if row["reached"] == len(SEEDS) else 0,
        -float(np.mean(row["best_test_accuracy"])),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", default="division,periodicity", help=f"comma-separated, of {', '.join(TASKS)}")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--families", default="convex,softmax")
    parser.add_argument("--depths", default="", help="only these, comma-separated")
    parser.add_argument("--rates", default="", help="only these learning rates, comma-separated")
    parser.add_argument("--decays", default="", help="only these weight decays, comma-separated")
    parser.add_argument(
        "--budget", type=float, default=1e9, help="seconds for the whole sweep; skipped settings are printed"
    )
    parser.add_argument("--json", type=Path, help="write every setting here")
    options = parser.parse_args()
    torch.set_num_threads(1)
    started = time.perf_counter()
    table = json.loads(options.json.read_text())["settings"] if options.json and options.json.exists() else []
    for name in options.tasks.split(","):
        build, depths, iterations, decays, batch = TASKS[name]
        task = build()
        decays = [float(decay) for decay in options.decays.split(",")] if options.decays else decays
        for depth, family in itertools.product(depths, options.families.split(",")):
            if options.depths and str(depth) not in options.depths.split(","):
                continue
            rates = [float(rate) for rate in options.rates.split(",")] if options.rates else RATES[family]
            rows = []
            for rate, decay, shape in itertools.product(rates, decays, shapes(family, depth, name == "periodicity")):
                if time.perf_counter() - started > options.budget:
                    print(f"left out, budget spent: {name} {family} {depth} {rate} {decay} {shape}", flush=True)
                    continue
                training = {
                    "learning_rate": rate,
                    "weight_decay": decay,
                    "iterations": iterations,
                    "batch_size": batch,
                    "evaluate_every": 10 if batch else 50,
                }
                rows.append({"task": name, **measure(task, family, depth, shape, training, options.device)})
            rows.sort(key=score)
            table += rows
            for row in rows[:3]:
                accuracies = " ".join(f"{value:.3f}" for value in row["best_test_accuracy"])
                print(
                    f"{time.perf_counter() - started:6.1f}s {name:11s} {family:8s} L={depth} lr {row['learning_rate']:g} "
                    f"wd {row['weight_decay']:g} width {row['width']} normalize {row.get('normalize', '-')}: "
                    f"iterations {row['iterations_test']}, best {accuracies}, {row['seconds']:.1f} s",
                    flush=True,
                )
            if options.json:
                options.json.parent.mkdir(parents=True, exist_ok=True)
                options.json.write_text(
                    json.dumps({"device": _device(options.device), "settings": table}, indent=1) + "\n"
                )


def _device(name: str) -> str:
    cuda = torch.cuda.is_available() and name != "cpu"
    return f"{torch.cuda.get_device_name(0) if cuda else 'cpu'}, torch {torch.__version__}"


if __name__ == "__main__":
    main()

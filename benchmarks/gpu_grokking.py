"""The sweep behind the preset `tuned`: convex and softmax transformers over grids of the same size, all seeds at once.

    python benchmarks/gpu_grokking.py --json docs/results/grokking_sweep.json     # a GPU: a few minutes
    python benchmarks/gpu_grokking.py --tasks mod15 --device cpu                   # the small task, on a CPU
    python benchmarks/gpu_grokking.py --tasks division --families dense --depths 2 --rungs 300,600,1000 --device cpu \\
        --json docs/results/grokking_dense_sweep.json                              # equation (12) as printed, on a CPU
    python benchmarks/gpu_grokking.py --tasks division --families dense --depths 1 --rungs 300,600,1200 --device cpu \\
        --json docs/results/grokking_dense_sweep.json
    python benchmarks/gpu_grokking.py --tasks division --families dense --depths 1 --rates 0.04,0.08 --decays 0.1,0.3 \\
        --rungs 400,1200,3600 --device cpu --json docs/results/grokking_dense_sweep.json    # past the corner of that grid

The families: `convex` has gates on blocks of two channels, `dense` the layers of equation (12) as printed (rank-one gates
on all channels), `softmax` is the transformer. For each task, family and depth:
3 learning rates x 3 weight decays x 2 shapes = 18 settings, 3 seeds each (100-102; the
experiments report others, 0-4). `--json` appends to an existing file, so that a sweep can be made in parts. A setting's
score is the worst seed's iterations to 99% test accuracy; where a seed never gets there, settings are ranked by how many
do and then by the mean of the best test accuracies. `--rungs 160,320,640` is successive halving by thirds: every setting
has 160 iterations, the best third (by the same score) goes on to 320, the best third of those to 640; the last budget is
what a setting may take in all, and `iterations` in the file says how many each one had.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
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
RATES = {"convex": (5e-3, 1e-2, 2e-2), "dense": (5e-3, 1e-2, 2e-2), "softmax": (2e-3, 5e-3, 1e-2)}
# depth 1 of the dense family: a first look had its best settings at a high rate and a small decay
DENSE_RATES, DENSE_DECAYS = (1e-2, 2e-2, 4e-2), (0.3, 1.0, 3.0)
KEPT = 3  # one in so many settings goes on to the next rung


def shapes(family: str, depth: int, separate: bool) -> list[dict]:
    """Two shapes a family: for the convex one width at depth 1, normalisation above; for the others the width."""
    if family == "softmax":
        return [{"width": width, "norm": "pre"} for width in (64, 128)]
    if family == "dense":
        sizes = ((8, 128), (12, 128)) if depth == 1 else ((32, 64), (64, 64))
        printed = {"blocks": 1, "rank_one": True, "separate": separate}
        return [{"width": width, "gates": gates, **printed} for width, gates in sizes]
    wide = [{"width": 32, "blocks": 16}, {"width": 64, "blocks": 32}]
    if depth == 1:
        return [{**shape, "separate": separate} for shape in wide]
    own = {**wide[int(separate)], "separate": separate}
    return [own, {**own, "normalize": True, "residual": depth > 2}]


def measure(
    task, family: str, depth: int, shape: dict, training: dict, device: str, checkpoint: Path | None = None
) -> dict:
    kind = deep.SoftmaxTransformer if family == "softmax" else deep.ConvexTransformer
    model = kind(task.n_symbols, task.n_classes, depth=depth, **shape, seeds=SEEDS)
    run = deep.train(model, task, device=device, checkpoint=checkpoint, **training)
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


def halving(task, settings: list[dict], rungs: list[int], device: str, folder: Path) -> list[dict]:
    """Train every setting for the first of the rungs, the best third of them on to the next, and so on; best first.

    ``folder`` keeps the trained models: the next rung, and a sweep that is started again, go on from them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    racing, out = list(enumerate(settings)), []
    for k, budget in enumerate(rungs):
        rows = []
        for index, setting in racing:
            training = {**setting["training"], "iterations": budget}
            own = folder / f"{index}.safetensors"
            rows.append((index, measure(task, **{**setting, "training": training}, device=device, checkpoint=own)))
        rows.sort(key=lambda pair: score(pair[1]))
        kept = len(rows) if k == len(rungs) - 1 else -(-len(rows) // KEPT)
        print(f"rung {budget}: {kept} of {len(rows)} settings stay", flush=True)
        out = [row for _, row in rows] + out[len(rows) :]
        racing = [(index, settings[index]) for index, _ in rows[:kept]]
    return out


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
    parser.add_argument("--rungs", default="", help="iterations of successive halving, rising, comma-separated")
    parser.add_argument("--work", type=Path, help="keep what --rungs trains here; the same command goes on from it")
    parser.add_argument("--json", type=Path, help="write every setting here")
    options = parser.parse_args()
    torch.set_num_threads(1)
    started = time.perf_counter()
    table = json.loads(options.json.read_text())["settings"] if options.json and options.json.exists() else []
    for name in options.tasks.split(","):
        build, depths, iterations, decays, batch = TASKS[name]
        task = build()
        for depth, family in itertools.product(depths, options.families.split(",")):
            if options.depths and str(depth) not in options.depths.split(","):
                continue
            rates, own_decays = (
                (DENSE_RATES, DENSE_DECAYS) if (family, depth) == ("dense", 1) else (RATES[family], decays)
            )
            rates, own_decays = numbers(options.rates, rates), numbers(options.decays, own_decays)
            settings = [
                {
                    "family": family,
                    "depth": depth,
                    "shape": shape,
                    "training": {
                        "learning_rate": rate,
                        "weight_decay": decay,
                        "iterations": iterations,
                        "batch_size": batch,
                        # an evaluation costs as much as several steps
                        "evaluate_every": 20 if options.rungs else 10 if batch else 50,
                    },
                }
                for rate, decay, shape in itertools.product(
                    rates, own_decays, shapes(family, depth, name == "periodicity")
                )
            ]
            if options.rungs:
                rungs = [int(rung) for rung in options.rungs.split(",")]
                with tempfile.TemporaryDirectory() as temporary:
                    folder = Path(options.work or temporary) / f"{name}-{family}-{depth}"
                    rows = halving(task, settings, rungs, options.device, folder)
            else:
                rows = []
                for setting in settings:
                    if time.perf_counter() - started > options.budget:
                        print(f"left out, budget spent: {name} {setting}", flush=True)
                        continue
                    rows.append(measure(task, **setting, device=options.device))
                rows.sort(key=score)
            rows = [{"task": name, **row} for row in rows]
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


def numbers(text: str, otherwise: tuple[float, ...]) -> tuple[float, ...]:
    """Read a comma-separated list; an empty one is ``otherwise``."""
    return tuple(float(part) for part in text.split(",")) if text else otherwise


def _device(name: str) -> str:
    cuda = torch.cuda.is_available() and name != "cpu"
    return f"{torch.cuda.get_device_name(0) if cuda else 'cpu'}, torch {torch.__version__}"


if __name__ == "__main__":
    main()

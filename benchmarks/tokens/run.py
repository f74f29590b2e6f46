"""Token-sparse attention against other group-lasso solvers, one thread each, in one run.

    make bench                                           # everything, about twenty minutes
    make bench-quick                                     # small sizes, under two minutes
    python benchmarks/tokens/run.py --suite tiny --solvers convexformer Adam --output runs/bench

The layout is benchopt's: an objective, datasets, solvers; only ``run`` is timed, and curves come from callbacks or from
tightening a tool's own tolerance. benchopt itself runs every solver in one environment; these tools cannot share one
(adelie needs numpy < 2), so each has a process of its own, in ``--peers`` or in the library's environment, and is driven
through a pipe. Times are CPU seconds. Peers stop by an oracle that knows the optimum, which favours them; ours is the time
to a *certified* relative gap. The optimum is ours to a gap of 1e-9, and nobody may be below its lower bound.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

for library in ("OMP", "MKL", "OPENBLAS", "NUMBA"):
    os.environ[f"{library}_NUM_THREADS"] = "1"

import costs
import report
from datasets import SUITES
from race import Worker, race, reference
from solvers import SOLVERS

SETTINGS = {  # CPU seconds for a tool's first attempts; settings below `patience` are repeated
    "full": {"limit": 75.0, "repeats": 3, "patience": 12.0},
    "quick": {"limit": 2.0, "repeats": 3, "patience": 1.0},
    "tiny": {"limit": 1.0, "repeats": 1, "patience": 1.0},
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", choices=list(SUITES), default="full")
    parser.add_argument("--solvers", nargs="+", choices=list(SOLVERS), default=list(SOLVERS), metavar="NAME")
    parser.add_argument("--problems", nargs="+", type=int, help="places in the suite, from 0; default: all")
    parser.add_argument("--peers", default=".venv-peers/bin/python", help="a Python with the peers installed")
    parser.add_argument("--output", type=Path, default=Path("runs/bench"), help="folder for tokens.json and tokens.png")
    parser.add_argument("--no-costs", action="store_true", help="leave out the cost of a path and the memory")
    parser.add_argument(
        "--publish", type=Path, metavar="DOCS", help="also put table, figure and numbers into this folder"
    )
    a = parser.parse_args()
    a.output.mkdir(parents=True, exist_ok=True)
    pythons = {"own": sys.executable, "peers": a.peers if Path(a.peers).exists() else sys.executable}
    suite = SUITES[a.suite]
    chosen = suite if a.problems is None else [suite[k] for k in a.problems]
    workers = {name: Worker(name, pythons) for name in a.solvers}
    judge = workers.get("convexformer") or Worker("convexformer", pythons)
    results, curves = [], []
    for dataset in chosen:
        print(dataset.name, flush=True)
        objective = dataset.get_data()
        with tempfile.TemporaryDirectory() as folder:
            objective.save(folder)
            optimum = reference(judge, folder, tolerance=1e-9, limit=120.0)
            entries = race(objective, folder, workers, optimum, **SETTINGS[a.suite], log=_say)
        results.append(report.summary(dataset, optimum, entries))
        curves.append({e.solver: points for e in entries if (points := report.curve_points(e, optimum))})
    for worker in {judge, *workers.values()}:
        worker.close()
    out = {"suite": a.suite, "machine": report.machine(), "results": results}
    if not a.no_costs:
        out |= measure_costs(suite, pythons)
    text = report.text(out)
    print("\n" + text + "\n")
    report.figure(results, curves, a.output / "tokens.png")
    (a.output / "tokens.json").write_text(json.dumps(out, indent=2) + "\n")
    print(f"written: {a.output / 'tokens.json'}, {a.output / 'tokens.png'}")
    if a.publish:
        report.publish(text, a.output, a.publish)


def measure_costs(suite, pythons):
    """The path of the first problem, and the memory of the first and of the gated one, also ten times larger."""
    gated = next(dataset for dataset in suite if hasattr(dataset, "g"))
    larger = replace(gated, N=10 * gated.N)  # in the smaller one fixed buffers dominate
    used = [costs.memory(dataset) for dataset in (suite[0], gated, larger)]
    if suite is SUITES["full"]:
        used += [costs.memory(dataset, "adelie", pythons["peers"]) for dataset in (suite[0], gated)]
    return {"path": costs.path_cost(suite[0]), "memory": used}


def _say(line):
    print(line, flush=True)


if __name__ == "__main__":
    main()

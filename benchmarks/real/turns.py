"""When should a solver of a nuclear norm hand over to factors? The histories behind ``solvers/auto.py``'s TURNS.

    python benchmarks/real/turns.py trec.npz cifar.npz --json runs/turns.json    # runs the solvers: some ten minutes
    python benchmarks/real/turns.py --judge runs/turns.json                      # what other rules would have cost

Every problem of the suite ``sizes`` is solved by each solver alone and by the staircase from the point that FISTA or
working sets have reached after some iterations. A rule is judged by its seconds over those of the best solver alone.
"""

from __future__ import annotations

import argparse
import json
import math
import time
import warnings
from itertools import product
from pathlib import Path

import torch

import convexformer as cf
from cases import SUITES, build
from convexformer.solvers import cost
from convexformer.solvers.auto import TURNS
from convexformer.solvers.status import Record
from convexformer.solvers.turn import Turn

POINTS = {"fista": (30, 60, 120, 240), "working_set": (2, 3, 4, 6)}  # iterations after which factors take over
GOAL, LIMIT = 1e-3, 4.0
NEGLIGIBLE = 0.005  # seconds
TRIED = {
    "fista": [Turn(*words) for words in product((30, 60, 120), (20, 50), (1, 2, 3, 4, 6))],
    "working_set": [Turn(*words) for words in product((2, 3), (2,), (0, 0.5, 1, 2, 1e9))],
}


def solved(problem: cf.Problem, solver: str, **options: object) -> tuple[cf.Solution, float]:
    start = time.process_time()
    solution = cf.solve(problem, GOAL, solver=solver, max_time=LIMIT, **options)
    return solution, time.process_time() - start


def measured(problem: cf.Problem, solvers: list[str]) -> dict:
    """Seconds of each solver alone, gaps of those that may hand over, and seconds of a hand-over after some iterations."""
    row: dict = {"alone": {}, "gaps": {}, "handed": {}}
    for name in solvers:
        solved(problem, name, max_iter=2)  # compile, and build what is built once
        solution, seconds = solved(problem, name)
        if seconds < 0.3:
            seconds = min(seconds, solved(problem, name)[1])
        row["alone"][name] = seconds if solution.certificate.meets(GOAL) else 2 * LIMIT
        if name not in POINTS:
            continue
        row["gaps"][name] = [(record.iteration, record.relative_gap) for record in solution.history]
        row["handed"][name] = {}
        for point in POINTS[name]:
            if solution.n_iter > point:
                first, own = solved(problem, name, max_iter=point)
                _, rest = solved(problem, "staircase", warm_start=first)
                row["handed"][name][str(point)] = own + rest
    return row


def run(files: list[str], out: Path) -> None:
    torch.set_num_threads(1)
    rows = []
    for case in SUITES["sizes"](files).cases:
        tokens = case.tokens()
        if case.skip(tokens) is not None:
            continue
        for ratio in (0.1, 0.01, 0.001):
            problem = build(case, tokens, beta_ratio=ratio)
            kind = cost.kind(problem.objective)
            if kind not in TURNS:
                break
            solvers = ["fista", "staircase", *(["working_set"] if "slices" in kind else [])]
            row = {"name": f"{case.name}, {tokens.X.shape[0]}, {ratio:g}", "kind": kind, **measured(problem, solvers)}
            rows.append(row)
            print(row["name"], {name: round(seconds, 3) for name, seconds in row["alone"].items()}, flush=True)
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(json.dumps(rows) + "\n")


def with_turn(row: dict, solver: str, turn: Turn) -> float:
    """Seconds of a solver that hands over by ``turn``, at the points that were measured."""
    gaps = row["gaps"][solver]
    for point, seconds in row["handed"][solver].items():
        records = [Record(iteration, 0.0, 0.0, 0.0, gap) for iteration, gap in gaps if iteration <= int(point)]
        if turn.over(records, 0, GOAL):
            return seconds
    return row["alone"][solver]


def judged(rows: list[dict], solver: str, turn: Turn) -> tuple[int, float, float]:
    """How many problems take more than 1.2 times as long as by the solver alone or the staircase; mean and worst ratio."""
    ratios = []
    for row in rows:
        best, own = min(row["alone"][solver], row["alone"]["staircase"]), with_turn(row, solver, turn)
        ratios.append(own / best if own - best >= NEGLIGIBLE else 1.0)
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    return sum(ratio > 1.2 for ratio in ratios), mean, max(ratios)


def judge(file: Path) -> None:
    rows = json.loads(file.read_text())
    for kind, in_use in TURNS.items():
        own = [row for row in rows if row["kind"] == kind]
        for solver, turn in in_use.items():
            print(f"\n{kind}, {solver}: {len(own)} problems")
            print("  first recent worth   above 1.2   mean  worst")
            for tried in [turn, *(other for other in TRIED[solver] if other != turn)]:
                count, mean, worst = judged(own, solver, tried)
                mark = "  in use" if tried == turn else ""
                print(f"  {tried.first:5} {tried.recent:6} {tried.worth:5g} {count:11} {mean:6.3f} {worst:6.2f}{mark}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", help="token files, npz")
    parser.add_argument("--json", type=Path, default=Path("runs/turns.json"))
    parser.add_argument("--judge", type=Path, help="only judge the histories of this file")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if not options.judge:
        run(options.files, options.json)
    judge(options.judge or options.json)


if __name__ == "__main__":
    main()

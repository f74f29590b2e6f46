"""A process that holds one case and runs one thing at a time on it; commands and answers are lines of JSON.

    python benchmarks/real/worker.py THREADS [cold]

    {"ready": true}                                                  its first line, once all is compiled (unless "cold")
    {"case": {...}}                                                  tokens and beta_max; the time of beta_max is returned
    {"solve": SOLVER, "ratio": r, "tolerance": t, "limit": s}        one cold solve
    {"path": SOLVER, "ratios": [...], "tolerance": t, "limit": s}    warm-started along the ratios, the limit for all
    {"peer": NAME, "ratio": r, "limit": s, "lower_bound": v}         L-BFGS on factors, or Adam on the network
    {"probes": SPEC, "samples": n, "limit": s}                       scikit-learn against our estimators

A fit that does not come back in time is ended by whoever asked, with this process.
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from dataclasses import asdict

THREADS = sys.argv[1] if len(sys.argv) > 1 else "1"
for library in ("OMP", "MKL", "OPENBLAS", "NUMBA"):  # before anything loads a BLAS
    os.environ[f"{library}_NUM_THREADS"] = THREADS

import numpy as np
import peers
import torch
from data import load

import convexformer as cf
from cases import Case, build
from convexformer.gauges import Factored
from convexformer.path import walk
from convexformer.solvers import SOLVERS, cost

torch.set_num_threads(int(THREADS))
REPEAT_BELOW = 0.5  # CPU seconds under which a solve is repeated; the least counts
BUSY = 20  # a limit is one of CPU seconds; wall seconds may be so many times more on a busy machine


class Bench:
    """The case that the process holds."""

    def obey(self, words):
        for name in ("case", "solve", "path", "peer", "probes"):
            if name in words:
                return getattr(self, name)(**words)
        raise ValueError(f"unknown command: {words}")

    def case(self, case):
        self.held = Case(**case)
        self.tokens = self.held.tokens()
        if (reason := self.held.skip(self.tokens)) is not None:
            return {"skipped": reason}
        started = time.process_time()
        problem = build(self.held, self.tokens, beta_ratio=1.0)
        self.beta_max = problem.beta_max
        objective = problem.objective
        serving = [name for name, solver in SOLVERS.items() if solver.requires(objective) is None]
        return {
            "build_seconds": time.process_time() - started,
            "sizes": [*self.tokens.X.shape, objective.n_outputs],
            "weights": list(objective.weight_shape),
            "solvers": serving,
            "factored": isinstance(objective.penalty, Factored),
            "features": features(objective),
        }

    def problem(self, ratio):
        """A problem made anew, so that nothing that the last run kept is free; beta_max is not timed."""
        problem = build(self.held, self.tokens, beta=ratio * self.beta_max)
        problem.beta_max  # noqa: B018
        return problem

    def solve(self, solve, ratio, tolerance, limit):
        best = None
        for _ in range(2):
            run = self._solve(solve, ratio, tolerance, limit)
            if best is None or run["total"] < best["total"]:
                best = run
            if run["total"] > REPEAT_BELOW:
                break
        return best

    def _solve(self, solver, ratio, tolerance, limit):
        problem, curve = self.problem(ratio), []
        wall, cpu = time.perf_counter(), time.process_time()

        def look(record, weights):
            curve.append((time.process_time() - cpu, record.iteration, record.relative_gap))
            return curve[-1][0] > limit

        solution = cf.solve(problem, solver=solver, callback=look, **_bounds(tolerance, limit))
        total, wall = time.process_time() - cpu, time.perf_counter() - wall
        seconds, iterations = {}, {}
        for goal in peers.GOALS:
            if goal <= tolerance:  # the goal that was asked for is met when its certificate is there
                proven = goal == tolerance and solution.certificate.meets(tolerance)
                seconds[f"{goal:g}"], iterations[f"{goal:g}"] = (total, solution.n_iter) if proven else (None, None)
            else:
                first = next(((t, n) for t, n, gap in curve if gap <= goal), (None, None))
                seconds[f"{goal:g}"], iterations[f"{goal:g}"] = first
        return {
            "seconds": seconds,
            "iterations": iterations,
            "total": total,
            "wall": wall,
            "gap": solution.certificate.relative_gap,
            "dual": solution.certificate.dual,
            "status": _status(solution),
            "took": solution.solver,
        }

    def path(self, path, ratios, tolerance, limit):
        problem = build(self.held, self.tokens, beta_ratio=1.0)
        steps, first = [], time.process_time()
        started, late = first, lambda record, weights: time.process_time() - first > limit
        options = {"solver": path, "callback": late, **_bounds(tolerance, limit)}
        for ratio, solution in zip(ratios, walk(problem, np.array(ratios), **options), strict=False):
            now = time.process_time()
            steps.append(
                {
                    "ratio": ratio,
                    "seconds": now - started,
                    "iterations": solution.n_iter,
                    "gap": solution.certificate.relative_gap,
                    "status": _status(solution),
                    "took": solution.solver,
                }
            )
            started = time.process_time()
        return {"steps": steps}

    def peer(self, peer, ratio, limit, lower_bound=None):
        run = {"L-BFGS on factors": peers.factored_lbfgs, "Adam": peers.adam}[peer]
        return run(self.problem(ratio), limit, lower_bound)

    def probes(self, probes, samples, limit):
        tokens = load(probes, samples)
        return {"sizes": [*tokens.X.shape, tokens.n_classes], "rows": peers.probes(tokens, limit)}


def features(objective):
    """The counts of operations that ``auto`` predicts from."""
    return {"kind": cost.kind(objective), "counts": asdict(cost.count(objective))}


def warm_up():
    """Load and compile whatever a first solve loads and compiles."""
    X = np.random.default_rng(0).standard_normal((40, 4, 3))
    for y in (np.arange(40) % 3, X[:, 0, 0], np.sign(X[:, 0, 0])):
        for head in (cf.heads.Attention(), cf.heads.Attention(activation="gated_relu", gates=2), cf.heads.MLP()):
            problem = cf.Problem(head, X, y, beta_ratio=0.1)
            for name, solver in SOLVERS.items():
                if solver.requires(problem.objective) is None:
                    cf.solve(problem, solver=name, tolerance=1e-6, max_time=60)


def _bounds(tolerance, limit):
    return {"tolerance": tolerance, "max_time": BUSY * limit, "max_iter": 10**6}


def _status(solution):
    """Only our own callback interrupts a solve, when its CPU seconds are spent."""
    return "MAX_TIME" if solution.status is cf.Status.INTERRUPTED else solution.status.name


def main():
    answers, sys.stdout = sys.stdout, sys.stderr  # whatever a tool prints must not be taken for an answer
    warnings.simplefilter("ignore")
    if "cold" not in sys.argv:
        warm_up()
    print(json.dumps({"ready": True}), file=answers, flush=True)
    bench = Bench()
    for line in sys.stdin:
        try:
            answer = bench.obey(json.loads(line))
        except (ValueError, TypeError, RuntimeError, MemoryError, ArithmeticError) as error:
            answer = {"failed": f"{type(error).__name__}: {error}"[:300]}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()

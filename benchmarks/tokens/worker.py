"""One tool in a process of its own: reads commands as lines of JSON, answers each with a line of JSON.

    python benchmarks/tokens/worker.py SOLVER

    {"load": FOLDER}                            what Objective.save wrote; prepared and warmed up, not timed
    {"knob": ..., "goal": ..., "limit": ...}    one timed run
    {"drop": true}                              free the data

The process stays alive with its data, so that the runs of several tools can alternate.
"""

from __future__ import annotations

import gc
import importlib.metadata
import json
import os
import platform
import sys

for library in ("OMP", "MKL", "OPENBLAS", "NUMBA", "RAYON", "VECLIB"):  # before anything loads a BLAS
    os.environ[f"{library}_NUM_THREADS"] = "1"

from objective import Objective
from solvers import solver_class
from solvers.base import Clock


class Bench:
    """The tool and the problem that it holds."""

    def __init__(self, kind):
        self.kind = kind
        self.solver = self.objective = None

    def obey(self, words):
        """Carry out one command and return the answer."""
        if "load" in words or "drop" in words:
            self.solver = self.objective = None
            gc.collect()
        if "load" in words:
            # peers copy the design anyway, so the tokens themselves can stay in the file
            self.objective = Objective.load(words["load"], mapped=self.kind.environment == "peers")
            self.solver = self.kind()
            self.solver.set_objective(self.objective)
            self.solver.warm_up()
            return {"ready": True, "versions": versions(self.kind.package)}
        return {} if "drop" in words else self.run(words["knob"], words["goal"], words["limit"])

    def run(self, knob, goal, limit):
        """Time one run; the last point of the curve is what the tool returned, at the whole time it took."""
        self.solver.refresh()
        gc.collect()
        clock = Clock(self.objective, goal, limit)
        self.solver.run(knob, clock)
        seconds, value = clock.seconds, self.objective.value(self.solver.get_result())
        return {
            "seconds": seconds,
            "objective": value,
            "curve": [*clock.curve, (seconds, value)],
            **self.solver.extra(),
        }


def versions(package):
    """Versions of the tool and of its main dependencies."""
    known = {"python": platform.python_version()}
    for name in (package, "numpy", "numba", "torch", "scipy"):
        try:
            known[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return known


def main():
    answers, sys.stdout = sys.stdout, sys.stderr  # a tool's own prints must not be read as an answer
    bench = Bench(solver_class(sys.argv[1]))
    for line in sys.stdin:
        try:
            answer = bench.obey(json.loads(line))
        except ImportError as error:
            answer = {"failed": f"not installed: {error}"}
        except (ValueError, TypeError, RuntimeError, MemoryError, ArithmeticError) as error:
            answer = {"failed": f"{type(error).__name__}: {error}"[:300]}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()

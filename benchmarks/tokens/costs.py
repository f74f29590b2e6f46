"""What a path costs in single fits, and how much memory a fit takes in units of the tokens."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent


def path_cost(dataset, tolerance=1e-4, n_betas=20, beta_min_ratio=0.01):
    """CPU seconds of a path, and of one cold fit at its smallest beta, both from the tokens on; the smaller of two runs."""
    import convexformer as cf

    data = dataset.get_data()

    def single():
        started = time.process_time()
        problem = cf.Problem("attention", data.X, data.y, beta_ratio=beta_min_ratio)
        solution = cf.solve(problem, tolerance=tolerance)
        return time.process_time() - started, solution.solver

    def whole():
        started = time.process_time()
        options = {"n_betas": n_betas, "beta_min_ratio": beta_min_ratio, "tolerance": tolerance}
        path = cf.path("attention", data.X, data.y, **options)
        return time.process_time() - started, max(path.relative_gaps)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        single()  # compiles
        (one, solver), (all_, gap) = (min(run() for _ in range(2)) for run in (single, whole))
    return {
        "problem": dataset.name,
        "tolerance": tolerance,
        "n_betas": n_betas,
        "beta_min_ratio": beta_min_ratio,
        "path_seconds": all_,
        "single_seconds": one,
        "path_in_single_fits": all_ / one,
        "worst_relative_gap": gap,
        "solver": solver,
    }


def memory(dataset, solver="convexformer", python=sys.executable):
    """Peak resident memory of loading the tokens and one fit, in a fresh process, as a multiple of the tokens' bytes."""
    with tempfile.TemporaryDirectory() as folder:
        dataset.get_data().save(folder)
        words = [str(python), str(HERE / "costs.py"), solver, folder]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"problem": dataset.name, "solver": solver, "note": done.stderr.strip().splitlines()[-1]}
    return {"problem": dataset.name, "solver": solver, **json.loads(done.stdout.splitlines()[-1])}


def _measure(solver, folder):
    """In the fresh process: warm up on a small problem, then measure from before the tokens are loaded."""
    from datasets import SUITES
    from objective import Objective
    from solvers import SOLVERS, solver_class
    from solvers.base import Clock

    tool = solver_class(solver)()
    gated = (Path(folder) / "gates.npy").exists()
    small = SUITES["tiny"][2 if gated else 0].get_data()
    knob = tool.knobs[-1]
    ours = [name for name in SOLVERS if solver == "convexformer" and name.startswith(solver)]
    for name in ours or [solver]:  # at another size auto may choose another solver: all of them are loaded and compiled
        _once(solver_class(name)(), small, knob, Clock)
    gc.collect()
    before = _status("VmRSS")
    _reset_peak()
    objective = Objective.load(folder)
    _once(tool, objective, knob, Clock)
    bytes_ = objective.X.nbytes
    print(json.dumps({"tokens_bytes": bytes_, "multiple_of_tokens": (_status("VmHWM") - before) / bytes_}))


def _once(tool, objective, knob, clock):
    tool.set_objective(objective)
    tool.refresh()
    tool.run(knob, clock(_Blind(), -np.inf, np.inf))


class _Blind:
    """A stand-in for the objective: evaluating the real one would count as memory."""

    def value(self, Z):
        return np.inf


def _status(field):
    """A line of this process's memory status, in bytes (Linux)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise OSError(f"no {field} in the process status")


def _reset_peak():
    """Reset the peak to what is resident now (Linux)."""
    Path("/proc/self/clear_refs").write_text("5")


if __name__ == "__main__":
    for library in ("OMP", "MKL", "OPENBLAS", "NUMBA"):
        os.environ[f"{library}_NUM_THREADS"] = "1"
    _measure(*sys.argv[1:])

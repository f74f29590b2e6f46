"""The cost of host syncs on a GPU: iterations that read scalars back against iterations that stay on the device.

    PYTHONPATH=src python benchmarks/gpu_resident.py --json out.json

All three ways are the library's own code. ``asks`` and ``sync_free`` are FISTA with ``sync_free=False`` and ``True``
(convex attention), and the staircase's bursts that read whether a step was accepted at once or one step later (pooled
self-attention). ``recorded`` is ``sync_free`` replayed as a CUDA graph, which the library does up to a size.
Cross-entropy with an intercept, float32. Host syncs are counted by torch (``set_sync_debug_mode``), the share of time in
which the GPU is busy by its profiler.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings

import torch
from gpu_heads import make

import convexformer as cf
from convexformer.solvers import cuda_graph
from convexformer.solvers.fista import fista
from convexformer.solvers.staircase import bursts
from convexformer.weights import Weights

SIZES = [(1000, 16, 32, 10), (5000, 49, 64, 10), (50_000, 49, 64, 100)]


class Count:
    """A stand-in for the monitor that counts iterations and checks nothing."""

    late = due = False

    def __init__(self, iterations: int) -> None:
        self.iterations = iterations

    def __iter__(self):
        return iter(range(self.iterations))

    def check(self, Z, at):
        pass


WAYS = {
    "asks": (False, 0),
    "sync_free": (True, 0),
    "recorded": (True, 1 << 40),
}  # sync_free, and the largest problem (numbers) that is captured as a graph


def fista_run(problem, iterations, sync_free):
    fista(problem.objective, Weights(problem.operator.zeros()), Count(iterations), sync_free=sync_free)


def burst_run(start, iterations, sync_free):
    objective, point = start
    bursts.burst(objective, point, iter(range(iterations)), 0.0, iterations + 1, behind=int(sync_free))


def busy_share(run) -> float:
    """Kernel time over wall time."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        torch.cuda.synchronize()
        started = time.perf_counter()
        run()
        torch.cuda.synchronize()
        wall = time.perf_counter() - started
    return sum(event.self_device_time_total for event in profile.key_averages()) / 1e6 / wall


def reads(run) -> int:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        run()
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(w.message) for w in caught)


def milliseconds(run, iterations, repeat=3) -> float:
    best = float("inf")
    for _ in range(repeat):
        torch.cuda.synchronize()
        started = time.perf_counter()
        run()
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - started)
    return 1000 * best / iterations


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=40)
    parser.add_argument("--json")
    a = parser.parse_args()
    warnings.simplefilter("ignore")
    rows = []
    for size in SIZES:
        X, y = make(*size, "cuda")
        for name, run in (("attention", fista_run), ("self_attention", burst_run)):
            problem = cf.Problem(name, X, y, beta_ratio=0.1, intercept=True, device="cuda", dtype=torch.float32)
            with torch.no_grad():
                if run is burst_run:
                    Z = cf.solve(problem, tolerance=1e-2, solver="staircase").weights.Z
                    objective = problem.objective.factored()
                    problem = (objective, bursts.point_at(objective, Z, objective.apply(Z), None))
                row = {"size": size, "head": name}
                for way, (sync_free, limit) in WAYS.items():
                    cuda_graph.GRAPH_DATA = limit
                    again = lambda sync_free=sync_free: run(problem, a.iterations, sync_free)  # noqa: B023, E731
                    again()
                    row[way] = {
                        "ms": milliseconds(again, a.iterations),
                        "reads": reads(again) / a.iterations,
                        "busy": busy_share(again),
                    }
            rows.append(row)
            for way in WAYS:
                ms, read, busy = row[way].values()
                print(
                    f"{name:15s} {size!s:22s} {way:9s} {ms:7.3f} ms, {read:5.2f} reads per iteration, busy {busy:.0%}",
                    flush=True,
                )
    if a.json:
        with open(a.json, "w") as file:
            json.dump(rows, file, indent=2)


if __name__ == "__main__":
    main()

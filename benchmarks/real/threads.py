"""Do iterations gain by a second thread? Why sweeps with a Hessian run on one (``WorkingSetStep.single_threaded``).

    python benchmarks/real/threads.py digits tokens.npz ... [--threads 1 2] [--heads attention mlp]

Files as in ``benchmarks/probes.py``. Wall-clock and CPU seconds of a cold fit to a certified 1e-3 on so many threads of
torch and the BLAS; what a solver limits by itself stays limited. To see the sweeps on two threads, set
``ProxNewtonDescent.single_threaded`` to False (``--sweeps``).
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from pathlib import Path

import numpy as np

import convexformer as cf
from cases import HEADS
from convexformer.solvers.working_set.prox_newton import ProxNewtonDescent
from convexformer.threads import limited_threads

sys.path.insert(0, str(Path(__file__).parents[1]))
from probes import load

RATIOS = (0.1, 0.01)


def seconds(problem: cf.Problem, threads: int, limit: float) -> str:
    """A fit on so many threads."""
    wall, cpu = time.perf_counter(), time.process_time()
    with limited_threads(threads):
        found = cf.solve(problem, tolerance=1e-3, max_time=limit)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return f"{wall:.2f} s, CPU {cpu:.2f} s" + ("" if found.certificate.meets(1e-3) else " (late)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="+")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--heads", nargs="+", choices=list(HEADS), default=["attention"])
    parser.add_argument("--limit", type=float, default=60.0)
    parser.add_argument("--sweeps", action="store_true", help="let sweeps use all threads, too")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    ProxNewtonDescent.single_threaded = not options.sweeps
    rng = np.random.default_rng(0)
    cf.solve(cf.Problem("attention", rng.standard_normal((60, 4, 3)), np.arange(60) % 7, beta_ratio=0.1))  # compile
    for name in options.data:
        X, y, mask, *_ = load(name)
        for head in options.heads:
            X_head = X[..., : HEADS[head].width]
            for ratio in RATIOS:
                print(f"{Path(name).stem}, {head}, {ratio:g}:", end="", flush=True)
                for threads in options.threads:
                    problem = cf.Problem(HEADS[head].make(), X_head, y, mask=mask, beta_ratio=ratio, intercept=True)
                    problem.beta_max  # noqa: B018
                    print(f"  {threads} threads {seconds(problem, threads, options.limit)}", end="", flush=True)
                print()


if __name__ == "__main__":
    main()

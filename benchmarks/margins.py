"""Attention SVMs against CVXPY's SCS and CLARABEL, in the same run, on one thread.

    python benchmarks/margins.py            # (50, 10, 40) and (200, 20, 100), a few minutes
    python benchmarks/margins.py --quick    # the first alone, SCS alone

    python benchmarks/margins.py --general  # ours alone, on ill-conditioned data: sample_data("general"), (200, 20, 100)

Data: unit tokens and queries with Gaussian directions, a Gaussian head, random labels. Ours: relative gap 1e-6 for the
small size and 1e-4 for the large one, certified. SCS and CLARABEL: their defaults; what counts for them is the solver's
own setup and solve, not CVXPY's compilation (printed apart), and the value of their point scaled to feasibility, as
ours is. A status other than ``optimal`` is a failure; so is running out of the time or memory given.
"""

from __future__ import annotations

import os

for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS"):
    os.environ.setdefault(name, "1")

import argparse
import json
import multiprocessing
import resource
import statistics
import time

import numpy as np
import torch

from convexformer.margin import AttentionSVM, sample_data

Data = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def draw(n: int, L: int, d: int, seed: int = 0) -> Data:
    rng = np.random.default_rng(seed)
    X, z = rng.standard_normal((n, L, d)), rng.standard_normal((n, d))
    X /= np.linalg.norm(X, axis=2, keepdims=True)
    z /= np.linalg.norm(z, axis=1, keepdims=True)
    return X, z, rng.choice([-1.0, 1.0], n), rng.standard_normal(d)


def rows_of(data: Data) -> np.ndarray:
    """The constraints, ``(n (L-1), d^2)``: ``vec((x_opt - x_l) z^T)``."""
    X, z, y, v = data
    best = (y[:, None] * (X @ v)).argmax(1)
    out = []
    for i, tokens in enumerate(X):
        p = tokens[best[i]] - np.delete(tokens, best[i], axis=0)
        out.append((p[:, :, None] * z[i]).reshape(len(p), -1))
    return np.concatenate(out)


def ours(data: Data, tolerance: float, repeats: int) -> dict:
    AttentionSVM("nuclear", tolerance=tolerance).fit(*data)  # warm up
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        svm = AttentionSVM("nuclear", tolerance=tolerance).fit(*data)
        seconds.append(time.perf_counter() - started)
    proof = svm.certificate_
    return {
        "seconds": statistics.median(seconds),
        "value": proof.primal,
        "relative_gap": proof.relative_gap,
        "kind": proof.kind,
        "rank": svm.rank_,
    }


def cvxpy_child(pipe, data: Data, solver: str, memory: int) -> None:
    """Solve in a process of its own, so that running out of memory or time ends it alone."""
    resource.setrlimit(resource.RLIMIT_AS, (memory << 30, memory << 30))
    import cvxpy as cp

    try:
        A, d = rows_of(data), data[1].shape[1]
        W = cp.Variable((d, d))
        problem = cp.Problem(cp.Minimize(cp.normNuc(W)), [A @ cp.vec(W, order="C") >= 1])
        started = time.perf_counter()
        problem.solve(solver=solver)
        total = time.perf_counter() - started
        stats = problem.solver_stats
        own = (stats.solve_time or 0.0) + (stats.setup_time or 0.0)
        least = float((A @ W.value.reshape(-1)).min())
        value = float(np.linalg.svd(W.value, compute_uv=False).sum()) / least if least > 0 else float("inf")
        pipe.send({"status": problem.status, "seconds": own, "with_compilation": total, "value": value})
    except MemoryError:
        pipe.send({"status": "out of memory"})
    except Exception as error:  # whatever a solver raises is its result here
        pipe.send({"status": f"{type(error).__name__}: {str(error)[:80]}"})


def theirs(data: Data, solver: str, limit: float, memory: int) -> dict:
    context = multiprocessing.get_context("spawn")
    mine, other = context.Pipe()
    process = context.Process(target=cvxpy_child, args=(other, data, solver, memory))
    process.start()
    other.close()
    try:
        result = mine.recv() if mine.poll(limit) else {"status": f"no answer in {limit:.0f} s"}
    except EOFError:
        result = {"status": "killed, out of memory"}
    process.kill()
    process.join()
    return result


def ill_conditioned(seeds: int) -> list[dict]:
    """Ours on tokens whose part along the head is a hundred times the rest; drawn as they come."""
    shape, results = (200, 20, 100), []
    for seed in range(seeds):
        best = ours(sample_data("general", *shape, seed=seed, clear=False), 1e-4, 3)
        results.append({"shape": shape, "seed": seed, "tolerance": 1e-4, "ours": best})
        print(
            f"general {shape}, seed {seed}: {best['seconds']:.2f} s, nuclear norm {best['value']:.6f}, relative gap "
            f"{best['relative_gap']:.1e} ({best['kind']}), rank {best['rank']}",
            flush=True,
        )
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="(50, 10, 40) and SCS alone")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds that SCS and CLARABEL get for each problem")
    parser.add_argument("--memory", type=int, default=12, help="GiB of address space that they get")
    parser.add_argument("--json", help="also write the numbers to this file")
    parser.add_argument("--general", action="store_true", help="ours alone, on ill-conditioned data")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = ill_conditioned(5) if options.general else []
    for shape, tolerance, repeats in (((50, 10, 40), 1e-6, 7), ((200, 20, 100), 1e-4, 3))[
        : 0 if options.general else 1 if options.quick else 2
    ]:
        data = draw(*shape)
        best = ours(data, tolerance, repeats)
        print(
            f"(n, L, d) = {shape}: ours {best['seconds']:.3f} s, nuclear norm {best['value']:.6f}, relative gap "
            f"{best['relative_gap']:.1e} ({best['kind']}), rank {best['rank']}",
            flush=True,
        )
        entry = {"shape": shape, "tolerance": tolerance, "ours": best}
        for solver in ("SCS",) if options.quick else ("SCS", "CLARABEL"):
            peer = theirs(data, solver, options.limit, options.memory)
            entry[solver] = peer
            if peer["status"] == "optimal":
                ratio = peer["seconds"] / best["seconds"]
                entry[solver]["ratio"] = ratio
                print(
                    f"    {solver:8s} {peer['seconds']:.2f} s ({peer['with_compilation']:.2f} s with CVXPY), "
                    f"{peer['value'] / best['value'] - 1:+.1e} from ours: {ratio:.1f}x slower",
                    flush=True,
                )
            else:
                print(
                    f"    {solver:8s} fails: {peer['status']} ({options.memory} GiB, {options.limit:.0f} s)", flush=True
                )
        results.append(entry)
    if options.json:
        with open(options.json, "w") as stream:
            json.dump(results, stream, indent=2)


if __name__ == "__main__":
    main()

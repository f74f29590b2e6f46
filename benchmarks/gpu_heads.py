"""Certified heads at the size of Sahiner et al. on one GPU: pooled cross-entropy, N=50,000, s=196, d=100, c=100.

    PYTHONPATH=src python benchmarks/gpu_heads.py --json out.json
    PYTHONPATH=src python benchmarks/gpu_heads.py --N 500 --s 16 --d 16 --c 10 --device cpu     # a smoke run

Data is made on the device: token means and covariances depend on the class. A cold solve counts everything from the
tokens on: building the operator, beta_max, the iterations, the float64 certificate.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings

import torch

import convexformer as cf

HEADS = {
    "self_attention": lambda: cf.heads.SelfAttention(),
    "mlp_mixer": lambda: cf.heads.MLPMixer(),
    "mlp, gated": lambda: cf.heads.MLP(activation="gated_relu", gates=16),
    "fno": lambda: cf.heads.FNO(),
}


def make(N, s, d, c, device, seed=0):
    g = torch.Generator(device=device).manual_seed(seed)
    randn = lambda *shape: torch.randn(*shape, generator=g, device=device)  # noqa: E731
    mean, factor = 0.3 * randn(c, d), randn(c, 6, d) / d**0.5
    y = torch.randint(0, c, (N,), generator=g, device=device)
    X = torch.empty(N, s, d, device=device)
    for start in range(0, N, 2000):
        rows = slice(start, min(start + 2000, N))
        k = y[rows]
        x = 0.5 * randn(len(k), s, d) + mean[k][:, None] + 1.5 * randn(len(k), s, 6) @ factor[k]
        X[rows] = x / x.norm(dim=(1, 2), keepdim=True)
    return X, y


def sync(device):
    if device == "cuda":
        torch.cuda.synchronize()


def run(name, X, y, ratio, tolerance, device):
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated() if device == "cuda" else 0
    sync(device)
    started = time.perf_counter()
    problem = cf.Problem(HEADS[name](), X, y, beta_ratio=ratio, device=device, dtype=torch.float32)
    problem.operator  # noqa: B018
    sync(device)
    built = time.perf_counter()
    solution = cf.solve(problem, tolerance=tolerance)
    sync(device)
    ended = time.perf_counter()
    proof = solution.certificate
    accuracy = float((solution.predict(X).argmax(1) == y).double().mean())
    return {
        "head": name,
        "solver": solution.solver,
        "status": solution.status.name,
        "build_and_beta_max_s": built - started,
        "solve_s": ended - built,
        "total_s": ended - started,
        "solver_s": solution.history[-1].seconds - solution.history[0].seconds,
        "iterations": solution.n_iter,
        "relative_gap": proof.relative_gap,
        "kind": proof.kind,
        "terms": getattr(solution.weights.Z, "n_terms", None),
        "train_accuracy": accuracy,
        "peak_GB_beyond_tokens": (torch.cuda.max_memory_allocated() - held) / 1e9 if device == "cuda" else None,
        "history": [(r.iteration, round(r.seconds, 3), r.relative_gap) for r in solution.history][-12:],
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for flag, default in (("--N", 50_000), ("--s", 196), ("--d", 100), ("--c", 100)):
        parser.add_argument(flag, type=int, default=default)
    parser.add_argument("--ratio", type=float, default=0.1)
    parser.add_argument("--tolerance", type=float, default=1e-4)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--heads", nargs="*", default=list(HEADS))
    parser.add_argument("--repeat", type=int, default=2, help="the first run of a process also loads the kernels")
    parser.add_argument("--json")
    a = parser.parse_args()
    warnings.simplefilter("ignore")
    X, y = make(a.N, a.s, a.d, a.c, a.device)
    print(f"tokens {tuple(X.shape)}, {X.numel() * 4 / 1e9:.2f} GB", flush=True)
    rows = []
    for name in a.heads:
        for turn in range(a.repeat):
            row = run(name, X, y, a.ratio, a.tolerance, a.device)
            row["turn"] = turn
            rows.append(row)
            print(
                {k: (round(v, 4) if isinstance(v, float) and k != "relative_gap" else v) for k, v in row.items()},
                flush=True,
            )
    if a.json:
        with open(a.json, "w") as file:
            json.dump({"config": vars(a), "rows": rows}, file, indent=2)


if __name__ == "__main__":
    main()

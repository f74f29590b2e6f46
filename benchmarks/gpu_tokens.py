"""Token-sparse attention on one GPU: squared, softmax and gated problems that are too large for a CPU.

    PYTHONPATH=src python benchmarks/gpu_tokens.py --json out.json
    PYTHONPATH=src python benchmarks/gpu_tokens.py --shrink 50 --device cpu     # a smoke run

Data is made on the device (autoregressive tokens, a tenth of them carry the signal). Seconds are those of a solve after
a first, uncounted one, up to a float64 certificate; the operator and beta_max are built before, as for every peer.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings

import torch

import convexformer as cf
from convexformer.gauges import Factored

PROBLEMS = {
    "attention, squared": {"N": 50_000, "s": 196, "d": 128, "c": 1, "ratio": 0.1},
    "attention, squared, beta .01": {"N": 50_000, "s": 196, "d": 128, "c": 1, "ratio": 0.01},
    "attention, softmax": {"N": 50_000, "s": 196, "d": 64, "c": 10, "ratio": 0.1},
    "attention l2, softmax": {"N": 50_000, "s": 64, "d": 64, "c": 10, "ratio": 0.1, "decay": "l2"},
    "gated attention, squared": {"N": 20_000, "s": 64, "d": 64, "c": 1, "ratio": 0.1, "gates": 16},
}


def make(N, s, d, c, device, seed=0):
    g = torch.Generator(device=device).manual_seed(seed)
    X = torch.randn(N, s, d, generator=g, device=device)
    for k in range(1, s):
        X[:, k] = 0.7 * X[:, k - 1] + 0.51**0.5 * X[:, k]
    F = torch.zeros(N, c, device=device)
    for k in torch.randperm(s, generator=g, device=device)[: max(3, s // 10)].tolist():
        F += X[:, k] @ torch.randn(d, c, generator=g, device=device)
    F = F / F.std()
    if c == 1:
        return X, F[:, 0] + 0.3 * torch.randn(N, generator=g, device=device)
    noise = -torch.log(-torch.log(torch.rand(N, c, generator=g, device=device).clamp(1e-12, 1 - 1e-7)))
    return X, (3 * F + noise).argmax(1)


def seconds(work, device):
    if device == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    out = work()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started, out


def run(name, solvers, tolerance, shrink, device):
    spec = dict(PROBLEMS[name])
    N, s, d, c = max(200, spec["N"] // shrink), spec["s"], spec["d"], spec["c"]
    X, Y = make(N, s, d, c, device)
    gated = {"activation": "gated_relu", "gates": spec["gates"]} if "gates" in spec else {}
    head = cf.heads.Attention(decay=spec.get("decay", "l1"), **gated)
    for solver in solvers:
        problem = cf.Problem(head, X, Y, beta_ratio=spec["ratio"], device=device, dtype=torch.float32)
        if solver == "staircase" and not isinstance(problem.penalty, Factored):
            continue
        problem.operator  # noqa: B018
        times = []
        for _ in range(2):
            if device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            took, solution = seconds(lambda p=problem, name=solver: cf.solve(p, tolerance, name, max_time=60), device)
            times.append(took)
        peak = torch.cuda.max_memory_allocated() if device == "cuda" else 0
        row = {
            "problem": name,
            "shape": [N, s, d, c],
            "solver": f"{solver} ({solution.solver})" if solver == "auto" else solver,
            "seconds": times[-1],
            "first": times[0],
            "relative_gap": solution.certificate.relative_gap,
            "iterations": solution.n_iter,
            "active_tokens": int((solution.token_norms() > 0).sum()),
            "peak_over_tokens": peak / (X.numel() * X.element_size()),
        }
        print(
            f"{name:30s} {row['shape']!s:24s} {row['solver']:22s} {row['seconds']:7.2f} s  gap {row['relative_gap']:.1e}  "
            f"{row['iterations']:5d} iterations  {row['active_tokens']:3d} tokens  memory {row['peak_over_tokens']:.1f} x",
            flush=True,
        )
        yield row


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tolerance", type=float, default=1e-4)
    parser.add_argument("--shrink", type=int, default=1)
    parser.add_argument("--solvers", default="auto,fista,working_set,staircase")
    parser.add_argument("--only", default="")
    parser.add_argument("--json")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    rows = []
    for name in PROBLEMS:
        if options.only in name:
            rows += run(name, options.solvers.split(","), options.tolerance, options.shrink, options.device)
    if options.json:
        machine = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
        with open(options.json, "w") as file:
            json.dump({"machine": machine, "torch": torch.__version__, "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()

"""How the cost grows: seconds to a certified relative gap of 1e-4 against N and against d, as a figure.

    PYTHONPATH=src python benchmarks/growth.py --device cuda --output docs/images/growth.png

Pooled linear self-attention, cross-entropy, beta = 0.1 beta_max; the best of three solves, each from the tokens on.
"""

from __future__ import annotations

import argparse
import json
import warnings
from pathlib import Path

import numpy as np
from gpu_heads import make, run
from matplotlib.figure import Figure

import convexformer as cf


def measure(sizes, c, device):
    rows = []
    for N, s, d in sizes:
        X, y = make(N, s, d, c, device)
        options = argparse.Namespace(ratio=0.1, tolerance=1e-4, max_time=None, device=device)
        runs = [run(cf.heads.SelfAttention(), X, y, options) for _ in range(3)]
        best = min(runs, key=lambda row: row["total_s"])
        kept = {k: best[k] for k in ("total_s", "iterations", "relative_gap", "status")}
        iteration = best["solver_s"] / max(best["iterations"], 1)
        rows.append({"N": N, "s": s, "d": d, "c": c, "iteration_s": iteration, **kept})
        print(rows[-1], flush=True)
        del X, y
    return rows


def slope(rows, axis, what):
    x, y = (np.log([row[key] for row in rows]) for key in (axis, what))
    return float(np.polyfit(x, y, 1)[0])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--c", type=int, default=100)
    parser.add_argument("--N", type=int, nargs=3, default=[25_000, 100_000, 400_000])
    parser.add_argument("--d", type=int, nargs=3, default=[32, 64, 128])
    parser.add_argument("--s", type=int, default=49)
    parser.add_argument("--output", type=Path, default=Path("growth.png"))
    a = parser.parse_args()
    warnings.simplefilter("ignore")
    by_N = measure([(N, a.s, a.d[1]) for N in a.N], a.c, a.device)
    by_d = measure([(a.N[1], a.s, d) for d in a.d], a.c, a.device)
    slopes = {
        f"{what} in {key}": slope(rows, key, what)
        for key, rows in (("N", by_N), ("d", by_d))
        for what in ("total_s", "iteration_s")
    }
    print({"slopes in log-log": slopes})
    figure = Figure(figsize=(8.4, 3.4), layout="constrained")
    for axis, (key, rows) in zip(figure.subplots(1, 2), (("N", by_N), ("d", by_d)), strict=True):
        x = [row[key] for row in rows]
        for what, label in (("total_s", "whole solve"), ("iteration_s", "one iteration")):
            y = [row[what] for row in rows]
            axis.loglog(x, y, "o-", label=f"{label}, slope {slopes[f'{what} in {key}']:.2f}")
        power = 1 if key == "N" else 2
        axis.loglog(x, [y[0] * (v / x[0]) ** power for v in x], "k:", label=f"slope {power}")
        axis.set_xticks(x, [f"{v:,}" for v in x])
        axis.minorticks_off()
        axis.set_xlabel(key)
        axis.set_ylabel("seconds")
        axis.legend(fontsize=8)
    a.output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(a.output, dpi=150)
    a.output.with_suffix(".json").write_text(
        json.dumps({"by_N": by_N, "by_d": by_d, "slopes": slopes}, indent=2) + "\n"
    )


if __name__ == "__main__":
    main()

"""What a step of a warm-started path costs on a GPU, down to beta_ratio 1e-3.

    PYTHONPATH=src python benchmarks/gpu_path.py tokens.npz ... [--device cuda] [--json out.json]

Files as in ``benchmarks/probes.py``. Token heads and nuclear heads with cross-entropy, each step certified to 1e-3; the
path is walked twice, the second walk is reported (the first loads kernels). A step is an interval of ``walk``: from the
last solution on, its certificate included. ``--solvers`` compares others with ``auto``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import torch

import convexformer as cf
from convexformer.path import walk

sys.path.insert(0, str(Path(__file__).parent))
from probes import load

RATIOS = (0.1, 0.03, 0.01, 0.003, 0.001)
HEADS = {
    "attention": lambda: cf.heads.Attention(),
    "attention l2": lambda: cf.heads.Attention(decay="l2"),
    "mlp": lambda: cf.heads.MLP(),
    "mlp, gated": lambda: cf.heads.MLP("gated_relu", gates=4),
    "self_attention": lambda: cf.heads.SelfAttention(),
}


def steps(problem, solver, limit, device):
    """Seconds, iterations and gap of each step of a path."""
    rows, started = [], time.perf_counter()
    path = walk(problem, np.array(RATIOS), tolerance=1e-3, solver=solver, max_time=limit)
    for ratio, solution in zip(RATIOS, path, strict=False):
        if device == "cuda":
            torch.cuda.synchronize()
        now = time.perf_counter()
        gap = solution.certificate.relative_gap
        rows.append(
            {
                "ratio": ratio,
                "seconds": now - started,
                "iterations": solution.n_iter,
                "gap": gap,
                "solver": solution.solver,
            }
        )
        started = now
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="+")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", nargs="*", choices=list(HEADS), default=list(HEADS))
    parser.add_argument("--solvers", nargs="*", default=["auto"])
    parser.add_argument("--limit", type=float, default=20.0, help="seconds of a step's solve")
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    table = []
    columns = ["set", "N, s, d, classes", "head", "solver", *(f"{r:g}" for r in RATIOS), "last / first"]
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    for name in options.data:
        X, y, mask, *_ = load(name)
        for head, solver in itertools.product(options.only, options.solvers):
            for _ in range(options.repeat):
                problem = cf.Problem(HEADS[head](), X, y, mask=mask, beta_ratio=1.0, device=options.device)
                problem.beta_max  # noqa: B018
                rows = steps(problem, solver, options.limit, options.device)
            sizes = [*X.shape, len(np.unique(y))]
            table.append({"set": Path(name).stem, "sizes": sizes, "head": head, "solver": solver, "steps": rows})
            cells = [f"{row['seconds']:.2f} s" + ("" if row["gap"] <= 1e-3 else "!") for row in rows]
            last = f"{rows[-1]['seconds'] / rows[0]['seconds']:.1f}" if len(rows) == len(RATIOS) else "-"
            print(f"| {Path(name).stem} | {sizes} | {head} | {solver} | {' | '.join(cells)} | {last} |", flush=True)
            if options.json:
                options.json.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()

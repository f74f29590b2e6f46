"""Gated Fourier heads: dense filters (FISTA) or factors (the staircase)? What ``AutoOptions.few_filters`` was set by.

    OMP_NUM_THREADS=1 python benchmarks/real/filters.py            # some two minutes

Gaussian tokens whose classes depend on their mean; CPU seconds to a certified 1e-3, everything but the tokens counted.
"""

from __future__ import annotations

import math
import time
import warnings

import torch

import convexformer as cf

SIZES = [  # blocks of block FNO (1: FNO), N, s, d, c, gates
    (1, 150, 16, 6, 10, 4),
    (1, 300, 16, 12, 10, 4),
    (1, 300, 16, 32, 5, 8),
    (2, 300, 32, 16, 10, 8),
    (1, 600, 32, 32, 10, 8),
    (2, 600, 32, 32, 10, 8),
]
RATIOS = (0.3, 0.1, 0.03)
LIMIT = 20.0


def tokens(N: int, s: int, d: int, c: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens, and classes that are linear in their mean up to noise."""
    generator = torch.Generator().manual_seed(0)
    X = torch.randn((N, s, d), generator=generator, dtype=torch.float64)
    W = torch.randn((d, c), generator=generator, dtype=torch.float64)
    noise = 0.3 * torch.randn((N, c), generator=generator, dtype=torch.float64)
    return X, (4 * X.mean(1) @ W + noise).argmax(1)


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for blocks, N, s, d, c, gates in SIZES:
        X, y = tokens(N, s, d, c)
        options = {"activation": "gated_relu", "gates": gates}
        head = cf.heads.FNO(**options) if blocks == 1 else cf.heads.BlockFNO(blocks=blocks, **options)
        for ratio in RATIOS:
            seconds = {}
            for solver in ("fista", "staircase", "auto"):
                start = time.process_time()
                problem = cf.Problem(head, X, y, loss="cross_entropy", beta_ratio=ratio)
                found = cf.solve(problem, 1e-3, solver=solver, max_time=LIMIT)
                late = "" if found.certificate.meets(1e-3) else " (late)"
                seconds[solver] = f"{solver} {time.process_time() - start:.2f} s{late}"
            size = N * math.prod(problem.objective.weight_shape)
            words = f"{head.name}, {(N, s, d, c)}, {gates} gates, rows x weights {size:.1e}, beta {ratio:g}"
            print(f"{words}: {', '.join(seconds.values())}", flush=True)


if __name__ == "__main__":
    main()

"""Fastfood against a dense Gaussian projection of the same size, in the same run, on one thread; and the kernel's error.

    python benchmarks/fastfood.py --json docs/results/fastfood.json

Time: the projection ``V x`` of 512 tokens in float32, the median of repeats; the dense one is a product with a stored
``D x d`` matrix, d = D. Error: root mean square over pairs of 64 unit-scale tokens in 16 dimensions, 20 draws, sigma 4.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from convexformer.features import Fastfood


def seconds(call: Callable[[], object], repeats: int) -> float:
    call()  # warm up
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def cost(size: int, tokens: int = 512, repeats: int = 7) -> dict:
    X = torch.randn(tokens, size)
    food, dense = Fastfood("positive", size).build(size), torch.randn(size, size)
    with torch.no_grad():
        fast, slow = seconds(lambda: food.project(X), repeats), seconds(lambda: X @ dense, repeats)
    return {"D": size, "fastfood_ms": 1e3 * fast, "dense_ms": 1e3 * slow, "ratio": slow / fast}


def error(kind: str, features: int, draws: int = 20) -> dict:
    X = torch.randn(64, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    exact = (-torch.cdist(X, X).square() / 32).exp()
    total = 0.0
    for seed in range(draws):
        phi = Fastfood(kind, features, sigma=4.0, seed=seed)(X)
        total += float((phi @ phi.T - exact).square().mean())
    return {"kind": kind, "features": features, "rms_error": (total / draws) ** 0.5}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    costs = [cost(size) for size in (256, 512, 1024, 2048, 4096, 8192)]
    for row in costs:
        print(
            f"D = d = {row['D']:5d}: {row['fastfood_ms']:7.2f} ms, dense {row['dense_ms']:7.2f} ms, {row['ratio']:.1f}x"
        )
    errors = [error(kind, features) for kind in ("gaussian", "positive") for features in (64, 256, 1024, 4096)]
    for row in errors:
        print(f"{row['kind']:9s} {row['features']:5d} features: kernel error {row['rms_error']:.4f}")
    if options.json:
        options.json.write_text(json.dumps({"cost": costs, "error": errors}, indent=1) + "\n")


if __name__ == "__main__":
    main()

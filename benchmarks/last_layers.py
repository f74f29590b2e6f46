"""Last layers of the tuned stacks of division mod 97, group penalty, on a CPU: `python benchmarks/last_layers.py`.

Trains a stack of each depth (one seed, ten seconds or so), freezes it, and prints how long the last layer takes to a
certified relative gap of 1e-3 and of 1e-4.
"""

from __future__ import annotations

import time
import warnings

import torch

from convexformer import deep
from convexformer.data import modular_division

ITERATIONS = 300  # past 99% test accuracy
TOLERANCES = (1e-3, 1e-4)


def main() -> None:
    """Train, certify, print."""
    torch.set_num_threads(1)
    task = modular_division(97)
    for name in ("convex-1", "convex-2"):
        chosen = deep.recipe(name).but(iterations=ITERATIONS, target=None)
        run = deep.train(chosen.model(task, seeds=[0]), task, chosen.training, device="cpu")
        for tolerance in TOLERANCES:
            wall, cpu = time.perf_counter(), time.process_time()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                (layer,) = deep.certify_last_layer(
                    run.model, task, penalty="group", tolerance=tolerance, max_time=120.0
                )
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            proof = layer.certificate
            print(
                f"{chosen.label}: to {tolerance:.0e} {wall:.0f} s ({cpu:.0f} s of the processor), gap "
                f"{proof.relative_gap:.1e} ({proof.kind}), {layer.solution.n_iter} iterations, "
                f"test accuracy {layer.test_accuracy:.1%}, weights {tuple(layer.solution.dense().shape)}",
                flush=True,
            )


if __name__ == "__main__":
    main()

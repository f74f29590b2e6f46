"""What a training step of one model costs, and the part of it that a random-feature map takes: table 1 of Fisher et al."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from convexformer.data import SymbolTask
from convexformer.deep import Recipe
from convexformer.deep.batches import Split
from convexformer.deep.stepper import Stepper
from convexformer.features import Fastfood
from convexformer.threads import few_threads

STEPS = 100  # timed at once
REPEATS = 3  # the smallest is taken
LAYERS = 2  # of the model of Fisher et al.; the first reads every token, the second one vector


def seconds_a_step(recipe: Recipe, task: SymbolTask, device: torch.device) -> float:
    """Return the seconds of one training step of one model, without evaluations."""
    model = recipe.model(task, seeds=1).to(device)
    split = Split.of(task, recipe.training.train_fraction, model)
    stepper = Stepper(model, split, recipe.training, STEPS)
    with few_threads(split.train[0]):
        return _best(lambda k: stepper.take(k * STEPS, STEPS), device) / STEPS


def kernel_map_costs(recipe: Recipe, task: SymbolTask, device: torch.device) -> dict[str, float]:
    """Return the seconds a step that the maps of both layers take, forward and backward: as a dense matrix, as a transform.

    Training multiplies by the matrix of the map, which is faster at these sizes; the transform is what Fisher et al. count
    on, O(d log d) a token.
    """
    width, batch = int(recipe.shape.get("width", 128)), recipe.training.batch_size or len(task)
    fastfood = Fastfood("chi", sigma=float(recipe.shape.get("sigma", 1.0))).build(width).to(device)
    V = fastfood.matrix().float().to(device)
    tokens = [torch.randn(batch * n, width, device=device) for n in (task.n_tokens, 1)]

    def both(apply: Callable[[Tensor], Tensor]) -> float:
        def steps(_: int) -> None:
            for _ in range(STEPS):
                for X in tokens:
                    out = apply(X.requires_grad_())
                    torch.autograd.grad(out, X, torch.ones_like(out))

        with few_threads(tokens[0]):
            return _best(steps, device) / STEPS

    return {"dense": both(lambda X: X @ V.mT), "transform": both(fastfood.project)}


def _best(run: Callable[[int], object], device: torch.device) -> float:
    """Return the smallest seconds of a few repeats, after one that is not timed."""
    seconds = []
    for k in range(REPEATS + 1):
        started = time.perf_counter()
        run(k)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - started)
    return min(seconds[1:])

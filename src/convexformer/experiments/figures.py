"""The figures of the demo."""

from __future__ import annotations

import math
from pathlib import Path as FilePath

import numpy as np
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure

from convexformer.data import digits
from convexformer.path import Path
from convexformer.solution import Solution


def token_map(path: Path, best: int, file: FilePath) -> FilePath:
    """Draw which patches of the 8x8 image carry weight: at a sparse beta and at the chosen one, beside the mean image."""
    norms = path.token_norms.numpy()
    active = (norms > 1e-6 * norms.max(1, keepdims=True).clip(1e-300)).sum(1)
    sparse = int(np.argmax(active >= max(1, norms.shape[1] // 3)))
    figure = Figure(figsize=(9.2, 3.6), layout="constrained")
    axes = figure.subplots(1, 3)
    X, _ = digits(patch=1, positions=False)
    axes[0].imshow(X.mean(0).reshape(8, 8).numpy(), cmap="gray_r")
    axes[0].set_title("mean digit")
    side = math.isqrt(norms.shape[1])
    scale = PowerNorm(0.5, vmin=0, vmax=norms[[sparse, best]].max())  # one scale for both panels
    for axis, index in zip(axes[1:], (sparse, best), strict=True):
        image = np.kron(norms[index].reshape(side, side), np.ones((8 // side, 8 // side)))
        shown = axis.imshow(image, cmap="viridis", norm=scale)
        axis.set_title(
            f"beta = {path.betas[index] / path.beta_max:.3g} beta_max\n{active[index]} of {side * side} tokens"
        )
    figure.colorbar(shown, ax=axes[1:], shrink=0.8, label="token norm, square-root scale")
    for axis in axes:
        axis.set_xticks([])
        axis.set_yticks([])
    figure.savefig(file, dpi=150)
    return file


def block_norms(solution: Solution, file: FilePath) -> FilePath:
    """Draw how much of each map the program of ``head="auto"`` uses."""
    axes = solution.plot_blocks()
    axes.set_title("head='auto': maps in use", loc="left")
    axes.figure.savefig(file, dpi=150)
    return file


def path_curves(stories: dict[str, tuple[Path, list[float]]], levels: dict[str, float], file: FilePath) -> FilePath:
    """Draw test accuracy along the path, with ``levels`` of models without one, and the tokens that heads use."""
    figure = Figure(figsize=(9.2, 4.1), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name, (path, accuracies) in stories.items():
        ratios = np.array(path.betas) / path.beta_max
        (line,) = left.plot(ratios, accuracies, ".-", label=name, linewidth=1.2)
        if path.solutions[0].token_norms() is not None:
            norms = path.token_norms.numpy()
            groups = (norms > 1e-6 * norms.max(1, keepdims=True).clip(1e-300)).sum(1)
            right.plot(ratios, groups, ".-", color=line.get_color(), label=name, linewidth=1.2)
    for (name, level), style in zip(levels.items(), ("-", "--", ":"), strict=False):
        left.axhline(level, color="black", linestyle=style, linewidth=1.2, label=name)
    left.text(
        *(0.97, 0.03), "linear, mlp and logistic (mean token) see\nthe mean token only: the same model",
        transform=left.transAxes, ha="right", va="bottom", fontsize=8, color="0.3",
    )  # fmt: skip
    left.set_ylabel("test accuracy")
    right.set_ylabel("active tokens of 16")
    for axis in (left, right):
        axis.set_xscale("log")
        axis.invert_xaxis()
        axis.set_xlabel("beta / beta_max")
        axis.grid(alpha=0.3)
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize=8)
    figure.savefig(file, dpi=150)
    return file


def convergence(
    solution: Solution, curves: dict[str, list[float]], file: FilePath, seconds: dict[str, float] | None = None
) -> FilePath:
    """Draw primal and dual closing in on the optimum, and how far above it Adam stays, over iterations and seconds.

    ``seconds`` has the time of each of Adam's curves, the sweep over learning rates included.
    """
    figure = Figure(figsize=(12.4, 3.7), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    history, optimum = solution.history, solution.objective
    steps, times = [record.iteration for record in history], [record.seconds for record in history]
    left.plot(steps, [record.primal for record in history], label="primal (objective)")
    left.plot(steps, [record.dual for record in history], label="dual (lower bound)")
    left.fill_between(steps, [r.primal for r in history], [r.dual for r in history], alpha=0.2)
    left.set_xlabel(f"iteration of {solution.solver or 'the solver'}, from zero")
    left.set_ylabel("objective")
    left.set_title("the optimum lies in the shaded band")
    if min(record.dual for record in history) > 0:
        left.set_yscale("log")
    left.legend()
    gaps = [max(record.relative_gap, 1e-12) for record in history]
    middle.plot(steps, gaps, "k", label="certified gap, convexformer")
    right.plot(times, gaps, "k")
    for name, curve in curves.items():
        excess = np.maximum(np.array(curve) / optimum - 1, 1e-12)
        (line,) = middle.plot(np.arange(1, len(curve) + 1), excess, linewidth=1, label=f"excess of {name}")
        if seconds is not None:
            right.plot(np.linspace(0, seconds[name], len(curve)), excess, linewidth=1, color=line.get_color())
    for axis in (middle, right):
        axis.set_yscale("log")
        axis.set_ylabel("relative to the optimum")
    middle.set_xscale("symlog", linthresh=10)
    middle.set_xlim(left=0)
    middle.set_xlabel("iteration, each of its own kind")
    middle.legend(fontsize=8, loc="lower right")
    right.set_xlabel("seconds" if seconds is None else "seconds; Adam's with its sweep of learning rates")
    if seconds is not None:
        right.set_xscale("symlog", linthresh=max(times[-1], 1e-3))
        right.set_xlim(left=0)
    figure.savefig(file, dpi=150)
    return file

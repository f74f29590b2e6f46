"""The figures of the student-teacher study: curves against seconds, and attention maps beside the teacher's."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from convexformer.experiments.student_teacher_runs import CONVEX, Run

COLOURS = ("black", "tab:orange", "tab:purple", "tab:blue", "tab:green")


def curves(runs: dict[str, list[Run]], at_zero: float, bound: float, beta: float, file: Path) -> Path:
    """Draw objective and test loss against seconds, a thin line for each seed, all at the same beta (figure 2)."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for (student, own), colour in zip(runs.items(), COLOURS, strict=False):
        for k, run in enumerate(own):
            points = np.array([point for point in run.curve if point[0] > 0])
            label = student if k == 0 else None
            style = {"color": colour, "linewidth": 2.0 if student == CONVEX else 1.0, "label": label}
            left.plot(points[:, 0], points[:, 1] / at_zero, **style)
            right.plot(points[:, 0], points[:, 2], **style)
    left.axhline(bound / at_zero, color="0.5", linestyle=":", label="certified lower bound\nof convex and alternative")
    left.set_ylabel("objective / loss of zero")
    right.set_ylabel("test loss")
    for axis in (left, right):
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.set_xlabel("seconds")
        axis.grid(alpha=0.3)
    left.set_title(f"training objective at beta = {beta:.3g}")
    right.set_title("half the mean square error on test tokens")
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8)
    figure.savefig(file, dpi=150)
    return file


def maps(shown: dict[str, np.ndarray], notes: dict[str, str], file: Path) -> Path:
    """Draw attention maps side by side, on one logarithmic scale (figure 3)."""
    figure = Figure(figsize=(2.9 * len(shown), 3.4), layout="constrained")
    axes = figure.subplots(1, len(shown), squeeze=False)[0]
    for axis, (name, values) in zip(axes, shown.items(), strict=True):
        image = axis.imshow(np.log10(np.maximum(values, 1e-4)), vmin=-4, vmax=0, cmap="viridis")
        axis.set_title(f"{name}\n{notes.get(name, '')}", fontsize=8)
        axis.set_xlabel("token attended to", fontsize=8)
    axes[0].set_ylabel("output token", fontsize=8)
    figure.colorbar(image, ax=axes, shrink=0.8, label="log10 attention (floor 1e-4)")
    figure.savefig(file, dpi=150)
    return file

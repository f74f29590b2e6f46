"""The figure of a path, in the manner of glmnet: token norms against beta, and the certified gap of every point."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from convexformer.path.storage import active_tokens

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from convexformer.path.walk import Path


def draw_path(path: Path, n_labels: int = 8, token_names: Sequence[Any] | None = None) -> Figure:
    """Token norms against beta with the number of active tokens on top, above the certified gap; see ``Path.plot``."""
    from matplotlib.figure import Figure

    positional = path.solutions[0].token_norms() is not None
    figure = Figure(figsize=(7.0, 5.4 if positional else 2.6), layout="constrained")
    panels = figure.subplots(1 + positional, 1, sharex=True, squeeze=False, height_ratios=[3.2, 1][1 - positional :])[
        :, 0
    ]
    ratios = np.array(path.betas) / max(path.betas[0], path.beta_max)
    if positional:
        _draw_tokens(panels[0], path, ratios, n_labels, token_names)
    bottom = panels[-1]
    bottom.plot(ratios, np.maximum(path.relative_gaps, 1e-16), "k.-", linewidth=1)
    if path.tolerance is not None:
        bottom.axhline(path.tolerance, color="#d55e00", linewidth=1, linestyle="--")
        bottom.annotate(
            f"tolerance {path.tolerance:.0e}",
            (0.995, path.tolerance),
            xycoords=("axes fraction", "data"),
            xytext=(0, 2),
            textcoords="offset points",
            ha="right",
            va="bottom",
            fontsize=8,
            color="#d55e00",
        )
    bottom.margins(y=0.3)
    bottom.set_yscale("log")
    bottom.set_ylabel("certified gap")
    bottom.set_xscale("log")
    bottom.set_xlabel("beta / beta_max")
    bottom.grid(alpha=0.25)
    if len(ratios) > 1:
        bottom.set_xlim(ratios[0] * 1.03, ratios[-1] * (ratios[-1] / ratios[0]) ** 0.02)
    return figure


def _draw_tokens(axis: Any, path: Path, ratios: np.ndarray, n_labels: int, names: Sequence[Any] | None) -> None:
    norms = path.token_norms.numpy()
    if names is not None and len(names) != norms.shape[1]:
        raise ValueError(
            f"token_names has {len(names)} names; this path has {norms.shape[1]} tokens. Pass one for each."
        )
    order = np.argsort(-norms[-1], kind="stable")
    labelled = [int(k) for k in order[:n_labels] if norms[-1, k] > 0]
    for k in reversed(order.tolist()):  # the largest is drawn last, on top
        shown = k in labelled
        colour = f"C{labelled.index(k) % 10}" if shown else "0.75"
        axis.plot(ratios, norms[:, k], color=colour, linewidth=1.6 if shown else 0.8, zorder=3 if shown else 2)
    heights = _spread(norms[-1, labelled], gap=0.045 * max(float(norms.max()), 1e-300))
    for place, (k, height) in enumerate(zip(labelled, heights, strict=True)):
        text = f"token {k}" if names is None else str(names[k])
        axis.annotate(
            text,
            (1.01, height),
            xycoords=("axes fraction", "data"),
            va="center",
            fontsize=8,
            color=f"C{place % 10}",
            annotation_clip=False,
        )
    axis.set_ylabel("norm of each token's weights")
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.25)
    counts = active_tokens(path.token_norms).numpy()
    marks = np.unique(np.linspace(0, len(ratios) - 1, min(9, len(ratios))).round().astype(int))
    for k in marks:
        axis.annotate(str(counts[k]), (ratios[k], 1.02), xycoords=("data", "axes fraction"), ha="center", fontsize=9)
    axis.set_title(f"active tokens of {norms.shape[1]}", fontsize=10, pad=20)


def _spread(heights: np.ndarray, gap: float) -> np.ndarray:
    """Move labels, given from the highest down, apart by at least ``gap``, and none below zero."""
    placed: list[float] = []
    for k, height in enumerate(heights):
        room = gap * (len(heights) - 1 - k)  # what the labels below need
        placed.append(max(min(float(height), placed[-1] - gap) if placed else float(height), room))
    for k in range(len(placed) - 2, -1, -1):
        placed[k] = max(placed[k], placed[k + 1] + gap)
    return np.array(placed)

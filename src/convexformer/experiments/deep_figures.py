"""The figures of the experiments on trained stacks: learning curves, iterations to 99%, singular values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from convexformer.deep import History, Run

GUIDE_COLOUR = "0.55"  # grey of reference lines


def learning(runs: dict[str, Run], file: Path, title: str = "", chance: float | None = None) -> Path:
    """Draw train and test accuracy and test loss against iterations: the median over seeds, with the range as a band."""
    figure = Figure(figsize=(11.5, 4.1), layout="constrained")
    axes = figure.subplots(1, 3)
    names = (("train_accuracy", "train accuracy"), ("test_accuracy", "test accuracy"), ("test_loss", "test loss"))
    for axis, (series, name) in zip(axes, names, strict=True):
        for k, (label, run) in enumerate(runs.items()):
            _band(axis, run.history, series, colour(k), label)
        axis.set_title(name)
        axis.set_xscale("log")
        axis.set_xlabel("iteration")
        axis.grid(alpha=0.3)
    for axis in axes[:2]:
        axis.set_ylim(-0.03, 1.03)
        axis.axhline(0.99, color=GUIDE_COLOUR, linewidth=0.8, linestyle=":")
        axis.yaxis.set_major_formatter(PercentFormatter(1.0))
    if chance is not None:
        axes[1].axhline(chance, color=GUIDE_COLOUR, linewidth=0.8, linestyle="--")
    axes[2].set_yscale("log")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8)
    if title:
        figure.suptitle(title)
    figure.savefig(file, dpi=150)
    return file


def iterations(rows: list[dict[str, Any]], file: Path, title: str = "") -> Path:
    """Draw iterations to 99% train and test accuracy, and their difference, from rows of ``results.json``.

    Bars are medians, dots seeds (figure 7 of Ergen et al. 2022).
    """
    figure = Figure(figsize=(9.6, 1.0 + 0.42 * len(rows)), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    places = np.arange(len(rows))[::-1]
    left.set_xscale("log")
    right.set_xscale("symlog", linthresh=10)
    for place, row in zip(places, rows, strict=True):
        _bar(left, place + 0.2, row["iterations_train"], "tab:orange", row["iterations"])
        _bar(left, place - 0.2, row["iterations_test"], "tab:blue", row["iterations"])
        _bar(right, place, row["grokking_gap"], "tab:green", row["iterations"])
    left.set_yticks(places, [row["label"] for row in rows], fontsize=8)
    left.set_ylim(-0.7, len(rows) - 0.3)
    left.set_title("iterations to 99%: train (orange), test (blue)", fontsize=10)
    right.set_title("grokking: iterations from train to test", fontsize=10)
    for axis, low in ((left, 10), (right, 0)):
        axis.grid(alpha=0.3, axis="x")
        axis.set_xlim(low, axis.get_xlim()[1] * 8)
    if title:
        figure.suptitle(title, fontsize=11)
    figure.savefig(file, dpi=150)
    return file


def spectra(runs: dict[str, Run], layers: tuple[str, ...], file: Path, title: str = "") -> Path:
    """Draw the singular values of layers over training, seed 0, below the accuracies (figures 3 and 4 of Fisher et al.)."""
    rows, columns = len(layers) + 1, len(runs)
    figure = Figure(figsize=(4.6 * columns, 2.5 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, sharex="col")
    for column, (label, run) in enumerate(runs.items()):
        history = run.history
        top = axes[0][column]
        for series, name, line in (("train_accuracy", "train", "tab:orange"), ("test_accuracy", "test", "tab:blue")):
            top.plot(history.iteration[1:], getattr(history, series)[1:, 0], color=line, label=name, linewidth=1.2)
        top.set_title(label, fontsize=10)
        top.set_ylabel("accuracy")
        top.yaxis.set_major_formatter(PercentFormatter(1.0))
        top.legend(fontsize=8, loc="lower right")
        for row, layer in enumerate(layers, start=1):
            _fan(axes[row][column], history, layer)
        axes[-1][column].set_xlabel("iteration")
        axes[-1][column].set_xscale("log")
    if title:
        figure.suptitle(title, fontsize=11)
    figure.savefig(file, dpi=150)
    return file


def ranks(runs: dict[str, Run], layers: tuple[str, ...], file: Path, title: str = "") -> Path:
    """Draw effective rank and spectral norm of layers over training: median over seeds, with the range as a band."""
    figure = Figure(figsize=(4.4 * len(layers), 6.2), layout="constrained")
    axes = figure.subplots(2, len(layers), squeeze=False, sharex=True)
    for column, layer in enumerate(layers):
        for k, (label, run) in enumerate(runs.items()):
            history = run.history
            steps = _clock(history)
            for axis, values in zip(
                axes[:, column], (history.effective_rank(layer), history.spectral_norm(layer)), strict=True
            ):
                axis.plot(steps, np.median(values, 1), color=colour(k), label=label, linewidth=1.3)
                axis.fill_between(steps, values.min(1), values.max(1), color=colour(k), alpha=0.15, linewidth=0)
                arrived = run.iterations_to()
                if np.isfinite(arrived).any():
                    axis.axvline(float(np.nanmedian(arrived)), color=colour(k), linewidth=0.9, linestyle=":")
        axes[0][column].set_title(f"{layer}: effective rank")
        axes[1][column].set_title(f"{layer}: spectral norm")
        axes[1][column].set_xlabel("iteration (dotted: 99% test accuracy)")
        axes[1][column].set_yscale("log")
    for axis in axes.flat:
        axis.set_xscale("log")
        axis.grid(alpha=0.3)
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8)
    if title:
        figure.suptitle(title, fontsize=11)
    figure.savefig(file, dpi=150)
    return file


def fractions(curves: dict[str, dict[float, np.ndarray]], file: Path, title: str = "") -> Path:
    """Draw the best test accuracy of each seed against the share of training data."""
    figure = Figure(figsize=(6.6, 4.2), layout="constrained")
    axis = figure.subplots()
    for k, (label, points) in enumerate(curves.items()):
        shares = sorted(points)
        axis.plot(shares, [np.median(points[share]) for share in shares], color=colour(k), label=label, linewidth=1.3)
        for share in shares:
            axis.plot([share] * len(points[share]), points[share], ".", color=colour(k), markersize=5, alpha=0.6)
    axis.set_xlabel("share of the pairs used for training")
    axis.set_ylabel("best test accuracy (line: median, dots: seeds)")
    axis.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axis.set_xticks(sorted({share for points in curves.values() for share in points}))
    axis.yaxis.set_major_formatter(PercentFormatter(1.0))
    axis.axhline(0.99, color=GUIDE_COLOUR, linewidth=0.8, linestyle=":")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    if title:
        axis.set_title(title, fontsize=10)
    figure.savefig(file, dpi=150)
    return file


def colour(k: int) -> str:
    """Return the k-th colour."""
    return f"C{k % 10}"


def _band(axis: Axes, history: History, series: str, line: str, label: str) -> None:
    values = getattr(history, series)[1:]
    steps = history.iteration[1:]
    axis.plot(steps, np.median(values, 1), color=line, label=label, linewidth=1.3)
    axis.fill_between(steps, values.min(1), values.max(1), color=line, alpha=0.15, linewidth=0)


def _bar(axis: Axes, place: float, values: list[float | None], shade: str, trained: int) -> None:
    """Draw the median as a bar and the seeds as dots; write "never" where no seed reached the goal."""
    there = [value for value in values if value is not None]
    if not there:
        where = axis.get_yaxis_transform()  # x in shares of the axis
        axis.text(0.01, place, f"never in {trained:,}", va="center", fontsize=7, color=shade, transform=where)
        return
    middle = float(np.median(there))
    axis.barh(place, middle, height=0.36, color=shade, alpha=0.75)
    axis.plot(there, np.full(len(there), place), "k.", markersize=3)
    share = "" if len(there) == len(values) else f" ({len(there)} of {len(values)})"
    axis.text(max(*there, 10) * 1.2, place, f"{middle:,.0f}{share}", va="center", fontsize=7)


def _clock(history: History) -> np.ndarray:
    """Return the iterations of the recorded spectra; iteration 0 becomes half the first step, for a log axis."""
    steps = history.spectra_iteration
    return np.maximum(steps, steps[1] / 2 if len(steps) > 1 else 1)


def _fan(axis: Axes, history: History, layer: str) -> None:
    """Draw every singular value as a line, dark for the large ones, and the effective rank in red."""
    values = history.spectra[layer][:, 0]  # (K, r) of seed 0
    steps = _clock(history)
    count = values.shape[1]
    for k in range(0, count, max(1, count // 48)):
        axis.plot(steps, values[:, k], color=str(0.1 + 0.7 * k / count), linewidth=0.6)
    axis.set_ylabel(f"singular values of {layer}", fontsize=8)
    twin = axis.twinx()
    twin.plot(steps, history.effective_rank(layer)[:, 0], color="tab:red", linewidth=1.3)
    twin.set_ylim(0, None)
    twin.set_ylabel("effective rank", color="tab:red", fontsize=8)
    twin.tick_params(axis="y", labelcolor="tab:red", labelsize=8)

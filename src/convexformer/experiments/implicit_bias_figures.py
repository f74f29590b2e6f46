"""The figures of the implicit-bias experiment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from convexformer.margin import AttentionSVM, Flow

LOG_T = "log of physical time, log t"
BLUE, ORANGE, GREEN, GREY = "tab:blue", "tab:orange", "tab:green", "0.55"


def overview(runs: list[tuple[str, Flow, AttentionSVM]], file: Path) -> Path:
    """Draw the direction error of every parametrization to its own SVM against the log of time."""
    figure = Figure(figsize=(6.6, 4.0), layout="constrained")
    axis = figure.subplots()
    for colour, (name, flow, svm) in zip((GREEN, BLUE, ORANGE, "tab:purple"), runs, strict=False):
        _bundle(axis, flow.log_time, flow.distance_to(svm, along=True), colour, name)
    axis.set_ylabel("relative distance of W / margin to the SVM")
    axis.set_title("where training ends up: each parametrization and its SVM")
    _logarithmic((axis,))
    axis.axvline(np.log(1e4), color=GREY, linewidth=1)
    axis.text(np.log(1e4) * 1.15, axis.get_ylim()[0] * 1.3, r"$t = 10^4$", color=GREY, fontsize=8)
    axis.legend(fontsize=8)
    return _save(figure, file)


def diagonal(flow: Flow, svm: AttentionSVM, draws: list[tuple[float, Flow, AttentionSVM]], file: Path) -> Path:
    """Draw the direction error of theorem 4.1, the approximate KKT residuals, and draws of every slack."""
    figure = Figure(figsize=(11.5, 3.6), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    t = flow.log_time
    left.plot(t, flow.distance_to(svm, along=True), color=BLUE, label="direction to l1-SVM")
    left.plot(t, flow.suboptimality(svm, along=True), color=BLUE, linestyle="--", label=r"$|b|_1$ / margin, excess")
    left.set_title("theorem 4.1, diagonal K and Q")
    left.set_ylabel("relative error")
    for kkt, style, name in ((flow.kkt, "-", "paper's multipliers"), (flow.recent_kkt, "--", "recent pulls")):
        middle.plot(t, kkt.stationarity, color=ORANGE, linestyle=style, label=f"C1 stationarity, {name}")
        middle.plot(t, kkt.complementarity, color=GREEN, linestyle=style, label=f"C3 slackness, {name}")
    middle.set_title("approximate KKT residuals")
    colours = _shades(len(draws))
    for colour, (slack, walk, own) in zip(colours, sorted(draws, key=lambda draw: draw[0]), strict=True):
        right.plot(walk.log_time, walk.distance_to(own, along=True), color=colour, linewidth=1, label=f"{slack:.2f}")
    right.set_title("draws as they come, by dual slack")
    _logarithmic((left, middle, right))
    left.axvline(np.log(1e4), color=GREY, linewidth=1)
    left.text(np.log(1e4) * 1.3, left.get_ylim()[0] * 1.3, r"$t = 10^4$", color=GREY, fontsize=8)
    left.legend(fontsize=8)
    middle.legend(fontsize=7)
    right.legend(fontsize=7, title="smallest slack", title_fontsize=7, ncols=2)
    return _save(figure, file)


def lemma(flow: Flow, same: np.ndarray, apart: np.ndarray, file: Path) -> Path:
    """Draw the difference of the two parametrizations of lemma 4.1, with its condition and without."""
    figure = Figure(figsize=(6.2, 3.6), layout="constrained")
    axis = figure.subplots()
    axis.plot(flow.log_time, np.maximum(same, 1e-17), color=BLUE, label=r"$k^2 + q^2 = p^2 + m^2$ at the start")
    axis.plot(flow.log_time, np.maximum(apart, 1e-17), color=ORANGE, label="half the p and m: condition (4) fails")
    axis.axhline(np.finfo(float).eps, color=GREY, linewidth=1, linestyle=":")
    axis.set_ylabel("relative difference of the weights")
    axis.set_title(r"lemma 4.1: $k q$ against $(p^2 - m^2)/2$")
    _logarithmic((axis,))
    axis.legend(fontsize=8)
    return _save(figure, file)


def general(separate: Flow, combined: Flow, nuclear: AttentionSVM, frobenius: AttentionSVM, file: Path) -> Path:
    """Draw the distance of both flows to both SVMs, and the nuclear norm they pay for a margin of one."""
    figure = Figure(figsize=(11.5, 3.6), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    for axis, flow, name in ((left, separate, "separate K, Q"), (middle, combined, "combined W")):
        for svm, colour, label in ((nuclear, BLUE, "nuclear SVM"), (frobenius, ORANGE, "Frobenius SVM")):
            _bundle(axis, flow.log_time, flow.distance_to(svm, along=True), colour, f"to the {label}")
        axis.set_title(f"{name}: direction error")
        axis.set_ylabel("relative distance")
    with np.errstate(divide="ignore", invalid="ignore"):
        for flow, colour, name in ((separate, BLUE, "separate K, Q"), (combined, ORANGE, "combined W")):
            price = np.where(flow.margin > 0, flow.nuclear_norm / flow.margin, np.nan)
            _bundle(right, flow.log_time, price / nuclear.objective_, colour, name)
    theirs = np.linalg.svd(frobenius.W_, compute_uv=False).sum() / nuclear.objective_
    right.axhline(1, color=BLUE, linestyle=":", linewidth=1)
    right.axhline(theirs, color=ORANGE, linestyle=":", linewidth=1)
    right.set_title("nuclear norm / margin, optimum = 1")
    _logarithmic((left, middle, right))
    right.set_yscale("linear")
    right.set_ylim(1 - 0.15 * (theirs - 1), 1 + 2 * (theirs - 1))
    for axis in (left, middle, right):
        axis.legend(fontsize=8)
    return _save(figure, file)


def spectrum(separate: Flow, combined: Flow, nuclear: AttentionSVM, frobenius: AttentionSVM, file: Path) -> Path:
    """Draw singular values relative to the largest, and the ratio of the two norms, whose square bounds the rank."""
    figure = Figure(figsize=(11.5, 3.6), layout="constrained")
    axes = figure.subplots(1, 3)
    for axis, flow, svm, name in (
        (axes[0], separate, nuclear, "separate K, Q"),
        (axes[1], combined, frobenius, "combined W"),
    ):
        values = flow.singular_values if flow.singular_values.ndim == 2 else flow.singular_values[:, 0]
        time = flow.log_time if flow.log_time.ndim == 1 else flow.log_time[:, 0]
        with np.errstate(divide="ignore", invalid="ignore"):
            shares = values / values[:, :1]
        target = np.linalg.svd(svm.W_, compute_uv=False)
        for j in range(values.shape[1]):
            axis.plot(
                time,
                np.where(shares[:, j] > 1e-13, shares[:, j], np.nan),
                color=f"C{j}",
                label=rf"$\sigma_{j + 1}/\sigma_1$",
            )
            if target[j] > 1e-9 * target[0]:
                axis.axhline(target[j] / target[0], color=f"C{j}", linestyle=":", linewidth=1)
        axis.set_title(f"{name}: singular values")
    with np.errstate(divide="ignore", invalid="ignore"):
        for flow, colour, name in ((separate, BLUE, "separate K, Q"), (combined, ORANGE, "combined W")):
            _bundle(axes[2], flow.log_time, flow.nuclear_norm / flow.frobenius_norm, colour, name)
    for svm, colour in ((nuclear, BLUE), (frobenius, ORANGE)):
        values = np.linalg.svd(svm.W_, compute_uv=False)
        axes[2].axhline(values.sum() / np.linalg.norm(values), color=colour, linestyle=":", linewidth=1)
    axes[2].set_title("nuclear / Frobenius norm")
    _logarithmic(axes)
    axes[2].set_yscale("linear")
    axes[2].set_ylim(
        0.98, 1.15 * max(float(line.get_ydata()[-1]) for line in axes[2].get_lines() if len(line.get_ydata()))
    )
    for axis in axes:
        axis.plot([], [], color=GREY, linestyle=":", label="SVM")
        axis.legend(fontsize=8)
    return _save(figure, file)


def rates(pairs: list[tuple[Flow, AttentionSVM]], file: Path) -> Path:
    """Draw the growth of the margin in normalised time against the rate that the SVM's margin predicts."""
    figure = Figure(figsize=(8.6, 3.6), layout="constrained")
    axes = figure.subplots(1, len(pairs))
    for axis, (flow, svm) in zip(axes, pairs, strict=True):
        with np.errstate(divide="ignore", invalid="ignore"):
            height = np.log(flow.margin) if flow.exponential else flow.margin
            slopes = np.diff(height, axis=0) / np.diff(flow.times, axis=0)
        _bundle(axis, flow.log_time[1:], slopes / flow.expected_rate(svm), BLUE, "measured")
        axis.axhline(1, color=ORANGE, linestyle="--", linewidth=1, label="predicted")
        kind = r"$d\,\ln\mu/d\tau$ over $2/\|W^*\|_*$" if flow.exponential else r"$d\mu/d\tau$ over $1/\|W_F\|_F^2$"
        axis.set_title(f"{'separate K, Q' if flow.exponential else 'combined W'}: {kind}")
        axis.set_ylim(0.9, 1.1)
        axis.set_xscale("log")
        axis.set_xlim(1, None)
        axis.set_xlabel(LOG_T)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    axes[0].set_ylabel("rate / prediction")
    return _save(figure, file)


def aligned(flow: Flow, random: Flow, svm: AttentionSVM, file: Path) -> Path:
    """Draw theorem 5.1's convergence and lemma 5.1's alignment, beside a start that is not aligned."""
    figure = Figure(figsize=(8.6, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot(flow.log_time, flow.distance_to(svm, along=True), color=BLUE, label="direction")
    left.plot(flow.log_time, flow.suboptimality(svm, along=True), color=BLUE, linestyle="--", label="objective, excess")
    left.set_title("theorem 5.1: aligned start, to the nuclear SVM")
    left.set_ylabel("relative error")
    right.plot(flow.log_time, np.maximum(flow.misalignment, 1e-17), color=BLUE, label="aligned start")
    right.plot(random.log_time, random.misalignment, color=ORANGE, label="random start")
    right.set_title("lemma 5.1: sine of the misalignment")
    _logarithmic((left, right))
    left.legend(fontsize=8)
    right.legend(fontsize=8)
    return _save(figure, file)


def counterexample(flow: Flow, right_flow: Flow, scales: np.ndarray, file: Path) -> Path:
    """Draw both sequences' margins, without assumption 3 and with it."""
    figure = Figure(figsize=(8.6, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for r, style in zip(range(len(scales)), ("-", "--", ":"), strict=False):
        for i, colour in ((0, BLUE), (1, ORANGE)):
            label = f"sequence {i + 1}, w0 = {scales[r]:g}"
            left.plot(flow.log_time[:, r], flow.margins[:, r, i, 0], color=colour, linestyle=style, label=label)
    left.set_title("assumption 3 fails: a wrong token")
    for i, colour in ((0, BLUE), (1, ORANGE)):
        right.plot(right_flow.log_time, right_flow.margins[:, i, 0], color=colour, label=f"sequence {i + 1}, w0 = 0.5")
    right.set_title("same tokens, scores that satisfy it")
    for axis in (left, right):
        axis.set_yscale("symlog", linthresh=0.1)
        axis.set_yticks([sign * 10.0**power for sign in (-1, 1) for power in (0, 3, 6, 9)] + [0])
        axis.set_xscale("log")
        axis.set_xlim(0.5, None)
        axis.axhline(0, color=GREY, linewidth=1)
        axis.set_xlabel(LOG_T)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7)
    left.set_ylabel("margin of the optimal token")
    return _save(figure, file)


def _bundle(axis: Axes, x: Any, y: Any, colour: str, label: str) -> None:
    """Draw one curve, or all of a batch in the same colour."""
    x, y = np.asarray(x), np.asarray(y)
    if y.ndim == 1:
        axis.plot(x, y, color=colour, label=label)
        return
    for r in range(y.shape[1]):
        axis.plot(x[:, r], y[:, r], color=colour, linewidth=0.7, alpha=0.6)
    axis.plot([], [], color=colour, label=label)


def _logarithmic(axes: Any) -> None:
    """Make both axes logarithmic, with time from one on and y limits for the visible part of the curves."""
    for axis in axes:
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.set_xlim(1, None)
        heights = [
            line.get_ydata()[np.asarray(line.get_xdata()) >= 1]
            for line in axis.get_lines()
            if len(line.get_xdata()) > 2
        ]
        seen = np.concatenate([np.asarray(part, dtype=float) for part in heights]) if heights else np.ones(1)
        seen = seen[np.isfinite(seen) & (seen > 0)]
        if len(seen):
            axis.set_ylim(seen.min() / 2, seen.max() * 2)
        axis.set_xlabel(LOG_T)
        axis.grid(alpha=0.3)


def _shades(count: int) -> list[Any]:
    from matplotlib import colormaps

    return [colormaps["viridis"](x) for x in np.linspace(0, 0.9, count)]


def _save(figure: Figure, file: Path) -> Path:
    figure.savefig(file, dpi=110)
    return file

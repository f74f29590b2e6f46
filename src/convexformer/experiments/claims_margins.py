"""Checks of Sheen et al. that need no experiment of their own: small flows and attention SVMs."""

from __future__ import annotations

import numpy as np

from convexformer.experiments.deep_study import Measured
from convexformer.experiments.study import Verdict
from convexformer.margin import (
    AttentionSVM,
    NotSeparableError,
    aligned_init,
    check_assumptions,
    gradient_flow,
    sample_data,
)


def gaussian_separability() -> Measured:
    """Gaussian tokens of n sequences of length L are separable when d is larger than both, in ten draws each."""
    n, L = 8, 6
    shares = {}
    for d in (2, 16):
        separable = 0
        for seed in range(10):
            rng = np.random.default_rng(seed)
            X, z = rng.standard_normal((n, L, d)), rng.standard_normal((n, d))
            try:
                AttentionSVM("frobenius", tolerance=1e-4).fit(X, z, rng.choice([-1.0, 1.0], n), rng.standard_normal(d))
                separable += 1
            except NotSeparableError:
                continue
        shares[d] = separable
    text = ", ".join(f"{count} of 10 at d = {d}" for d, count in shares.items()) + f" (n = {n}, L = {L})"
    return Measured(f"separable: {text}", Verdict.YES if shares[16] == 10 else Verdict.NO)


def loss_above_infimum(kind: str) -> Measured:
    """The loss along the flow, diagonal or from an aligned start: above its infimum, and ever closer."""
    data = sample_data(kind)
    if kind == "diagonal":
        flow = gradient_flow(*data, parametrization="diagonal", log_time=20.0, records=30)
    else:
        flow = gradient_flow(*data, parametrization="separate", init=aligned_init(*data), log_time=20.0, records=30)
    infimum = flow.data.infimum
    excess = np.asarray(flow.loss) - infimum
    falls = bool((np.diff(excess) <= 1e-12).all())
    text = f"excess {excess[0]:.1e} at the start, {excess[-1]:.1e} at log t = {flow.log_time[-1]:.0f}, infimum {infimum:.1e}"
    holds = excess.min() > 0 and falls and excess[-1] <= 1e-3 * excess[0]
    return Measured(text, Verdict.YES if holds else Verdict.NO)


def norm_diverges() -> Measured:
    """The norm of diagonal weights at ever later times."""
    flow = gradient_flow(*sample_data("diagonal"), parametrization="diagonal", log_time=1e6, records=30)
    norms = np.linalg.norm(np.asarray(flow.W).reshape(len(flow.log_time), -1), axis=1)
    grows = bool((np.diff(norms[norms > 1]) > 0).all())
    text = f"norm {norms[-1]:.1e} at log t = {flow.log_time[-1]:.0e}, growing all along: {'yes' if grows else 'no'}"
    return Measured(text, Verdict.YES if grows and norms[-1] > 1e3 else Verdict.NO)


def score_gap_suffices() -> Measured:
    """Assumption 3 at zero weights for growing gaps between the scores."""
    X, z, y, v = sample_data("diagonal")
    scores = y[:, None] * (X @ v)
    held = []
    for factor in (0.1, 0.5, 1.0, 2.0):
        moved = X + (y[:, None] * (factor - 1) * scores)[..., None] * v / (v @ v)
        held.append((factor, check_assumptions(moved, z, y, v)[3].holds))
    text = ", ".join(f"{factor:g}: {'holds' if holds else 'fails'}" for factor, holds in held)
    order = [holds for _, holds in held]
    return Measured(f"gaps scaled by {text}", Verdict.YES if order == sorted(order) and order[-1] else Verdict.NO)


def closed_form() -> Measured:
    """``b = w0^2 sinh(2 * accumulated pulls)``: the same for every start of one flow, by its invariant ``w+ w- = w0^2``."""
    data = sample_data("diagonal")
    flow = gradient_flow(*data, parametrization="reparametrized", init=0.7, log_time=30.0, records=20)
    plus, minus = (np.asarray(flow.factors[name]) for name in ("plus", "minus"))
    product = float(np.abs(plus * minus / 0.49 - 1).max())
    q = np.log(plus / minus)
    weights = np.diagonal(np.asarray(flow.W), axis1=1, axis2=2)
    error = float(np.abs(0.49 * np.sinh(q) - weights).max() / np.abs(weights).max())
    text = f"invariant w+ w- = w0^2 to {product:.0e}; weights off by {error:.0e} of the largest"
    return Measured(text, Verdict.YES if error <= 1e-6 and product <= 1e-6 else Verdict.NO)


def approximate_conditions() -> Measured:
    """Optimality conditions of the l1-SVM along the flow, with the multipliers of the proof of theorem 4.1."""
    flow = gradient_flow(*sample_data("diagonal"), parametrization="diagonal", log_time=1e6, records=40)
    early = len(flow.log_time) // 2
    residuals = {
        name: (float(np.asarray(values)[early]), float(np.asarray(values)[-1]))
        for name, values in (("stationarity", flow.kkt.stationarity), ("complementarity", flow.kkt.complementarity))
    }
    text = ", ".join(f"{name} {first:.3f} -> {last:.3f}" for name, (first, last) in residuals.items())
    text += f" from log t = {flow.log_time[early]:.0e} to {flow.log_time[-1]:.0e}"
    falls = all(last < first or last < 1e-3 for first, last in residuals.values())
    return Measured(text, Verdict.YES if falls else Verdict.NO)


def sparse_direction() -> Measured:
    """Entries of the diagonal flow's direction above 1% of the largest, and the nonzero ones of the l1-SVM."""
    data = sample_data("diagonal")
    flow = gradient_flow(*data, parametrization="diagonal", log_time=1e6, records=30)
    sizes = [
        np.abs(np.diagonal(W)) for W in (np.asarray(flow.W)[-1], np.asarray(AttentionSVM("diagonal").fit(*data).W_))
    ]
    flowed, solved = (each > bar * each.max() for each, bar in zip(sizes, (1e-2, 1e-9), strict=True))
    text = (
        f"{flowed.sum()} of {len(flowed)} entries above 1% of the largest at log t = 1e6; the l1-SVM has {solved.sum()}"
    )
    return Measured(text, Verdict.YES if (flowed == solved).all() and solved.sum() < len(solved) else Verdict.NO)


def zero_entries_stay() -> Measured:
    """Equation (5) asks for no zero among the entries of ``w0``: the flow leaves such an entry at zero."""
    data = sample_data("diagonal")
    start = np.full(data[0].shape[-1], 0.5)
    start[0] = 0.0  # the l1-SVM uses this entry
    flow = gradient_flow(*data, parametrization="reparametrized", init=(start, start.copy()), log_time=30.0, records=10)
    weights = np.abs(np.diagonal(np.asarray(flow.W)[-1]))
    needed = abs(np.asarray(AttentionSVM("diagonal").fit(*data).W_)[0, 0])
    text = (
        f"entry started at 0: {weights[0]:.0e} at log t = 30 (the others up to {weights[1:].max():.1f}; in the l1-SVM "
        f"{needed:.2f})"
    )
    return Measured(text, Verdict.YES if weights[0] == 0 and needed > 0 else Verdict.NO)

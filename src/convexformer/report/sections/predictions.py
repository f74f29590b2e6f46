"""Predictions on the test data: confusion matrix and reliability of a classifier, scatter of a regressor."""

from __future__ import annotations

import numpy as np

from convexformer.report.blocks import Block, Facts, Figure, Note, Omission, Section, Table
from convexformer.report.charts import FIRST, MUTED, Spec, axis, chart, confusion, hint, line
from convexformer.report.evidence import Evidence
from convexformer.report.text import count, number, percent

MATRIX = 30  # classes up to which the whole matrix is drawn
NUMBERS = 14  # classes up to which the counts are written into it
PAIRS = 8  # pairs of classes in the list of confusions
BINS = 10  # of the reliability curve
POINTS = 2000  # of the scatter

NO_TEST = "there is no test data with targets (X_test and y_test, --data)."


def confusion_matrix(evidence: Evidence) -> Section | Omission:
    """Return the confusion matrix, or the most frequent confusions of many classes."""
    title = "Confusion matrix"
    if not evidence.classifies:
        return Omission(title, "the model is a regressor.")
    if evidence.tokens is None or evidence.y is None:
        return Omission(title, NO_TEST)
    classes = evidence.model.classes_
    known = np.isin(evidence.y, classes)
    true = np.searchsorted(classes, evidence.y[known])
    predicted = np.searchsorted(classes, evidence.predicted[known])
    n = len(classes)
    matrix = np.bincount(true * n + predicted, minlength=n * n).reshape(n, n)
    blocks: list[Block] = []
    if n <= MATRIX:
        blocks.append(_matrix(evidence, matrix))
    else:
        blocks.append(Note(f"{n} classes are too many for a matrix; the list has the pairs that are confused most."))
    off = matrix * (1 - np.eye(n, dtype=int))
    order = [int(k) for k in np.argsort(-off, axis=None, kind="stable")[:PAIRS] if off.flat[k] > 0]
    names = evidence.classes
    if order:
        rows = [
            [names[k // n], names[k % n], str(off.flat[k]), percent(off.flat[k] / max(1, matrix[k // n].sum()))]
            for k in order
        ]
        columns = ["true", "predicted", "samples", "of the true class"]
        blocks.append(Table("The most frequent confusions.", columns, rows, frozenset({2, 3})))
    if not known.all():
        blocks.append(
            Note(f"{count(int((~known).sum()), 'sample')} of classes unknown to the model are left out here.")
        )
    right = int(np.trace(matrix))
    total = int(matrix.sum())
    lead = f"{right:,} of {count(total, 'test sample')} are classified correctly ({percent(right / max(1, total))})."
    return Section("confusion", title, lead, blocks)


def _matrix(evidence: Evidence, matrix: np.ndarray) -> Figure:
    names, n = evidence.classes, len(evidence.classes)
    share = matrix / np.maximum(matrix.sum(1, keepdims=True), 1)
    rows = [
        {
            "true": i,
            "predicted": j,
            "count": int(matrix[i, j]),
            "share": round(float(share[i, j]), 4),
            "name": names[i],
            "other": names[j],
        }
        for i in range(n)
        for j in range(n)
    ]
    worst = int(np.argmin(np.where(matrix.sum(1) > 0, np.diag(share), np.inf)))
    return Figure(
        "confusion-chart",
        "True against predicted class",
        f"A matrix of {n} by {n} classes, a row for each true class. The class recognised least is {names[worst]}, "
        f"{percent(float(share[worst, worst]))} of its samples.",
        confusion(rows, names, numbers=n <= NUMBERS),
        Table(
            "Samples by true class (rows) and predicted class (columns).",
            ["true", *names],
            [[names[i], *(str(v) for v in matrix[i])] for i in range(n)],
            frozenset(range(1, n + 1)),
        ),
    )


def reliability(evidence: Evidence) -> Section | Omission:
    """Return how often predictions of a given confidence are right, and the expected calibration error."""
    title = "Reliability"
    if not evidence.classifies:
        return Omission(title, "the model is a regressor, which states no probabilities.")
    if evidence.tokens is None or evidence.y is None:
        return Omission(title, NO_TEST)
    p = evidence.probabilities
    if p is None:
        return Omission(title, f"the loss {evidence.model.loss!r} has margins, not probabilities.")
    confidence, right = p.max(1), evidence.predicted == evidence.y
    edges = np.linspace(0, 1, BINS + 1)
    index = np.clip(np.digitize(confidence, edges) - 1, 0, BINS - 1)
    rows, cells, error = [], [], 0.0
    for b in range(BINS):
        inside = index == b
        if not inside.any():
            continue
        stated, true = float(confidence[inside].mean()), float(right[inside].mean())
        error += inside.mean() * abs(stated - true)
        samples = int(inside.sum())
        rows.append({"stated": stated, "true": true, "count": samples, "low": edges[b], "high": edges[b + 1]})
        cells.append([f"{edges[b]:.1f} to {edges[b + 1]:.1f}", percent(stated), percent(true), f"{samples:,}"])
    known = np.isin(evidence.y, evidence.model.classes_)
    codes = np.searchsorted(evidence.model.classes_, evidence.y[known])
    likelihood = float(-np.log(np.maximum(p[known, codes], 1e-300)).mean()) if known.any() else float("nan")
    x = axis(
        "stated probability of the predicted class",
        "stated",
        scale={"domain": [0, 1]},
        axis={"format": "%", "tickCount": 5},
    )
    y = axis("share that is right", "true", scale={"domain": [0, 1]}, axis={"format": "%", "tickCount": 5})
    curve = line(x, y, FIRST, points=False)
    dots = {
        "mark": {"type": "point", "filled": True, "fill": FIRST, "opacity": 1},
        "encoding": {
            "x": x,
            "y": y,
            "size": {"field": "count", "type": "quantitative", "legend": None, "scale": {"range": [30, 260]}},
            "tooltip": hint(stated="stated", true="right", count="samples"),
        },
    }
    diagonal = {
        "data": {"values": [{"stated": 0, "true": 0}, {"stated": 1, "true": 1}]},
        "mark": {"type": "line", "stroke": MUTED, "strokeDash": [4, 4], "strokeWidth": 1},
        "encoding": {"x": x, "y": y},
    }
    figure = Figure(
        "reliability-chart",
        "Stated and true probability",
        f"Predictions in {len(rows)} groups of similar confidence: the share that is right against the probability stated; "
        f"a larger point is a larger group. On the dashed diagonal the two agree; they are {percent(error)} apart "
        "on average.",
        {**chart(rows, [diagonal, curve, dots], 340), "width": 340, "autosize": "pad"},
        Table(
            "Confidence and accuracy by group.",
            ["confidence", "stated, mean", "right", "samples"],
            cells,
            frozenset({1, 2, 3}),
        ),
    )
    facts = Facts(
        [
            ("expected calibration error", percent(error)),
            ("mean confidence", percent(float(confidence.mean()))),
            ("accuracy", percent(float(right.mean()))),
            ("mean negative log-likelihood", number(likelihood)),
        ]
    )
    lead = "Above the diagonal the model is more often right than it says, below it is too sure of itself."
    return Section("reliability", title, lead, [facts, figure])


def fit_quality(evidence: Evidence) -> Section | Omission | None:
    """Return predicted against true values of a regressor; None for a classifier, which has the confusion matrix."""
    title = "Predicted and true values"
    if evidence.classifies:
        return None
    if evidence.tokens is None or evidence.y is None:
        return Omission(title, NO_TEST)
    true, predicted = evidence.y.reshape(-1), np.asarray(evidence.predicted, dtype=np.float64).reshape(-1)
    if len(true) != len(predicted):
        return Omission(title, "targets and predictions have different shapes.")
    shown = np.arange(len(true))
    if len(true) > POINTS:
        shown = np.sort(np.random.default_rng(0).choice(len(true), POINTS, replace=False))
    rows = [{"true": float(true[i]), "predicted": float(predicted[i])} for i in shown]
    ends = [float(min(true.min(), predicted.min())), float(max(true.max(), predicted.max()))]
    scale: Spec = {"scale": {"zero": False}}
    x, y = axis("true", "true", **scale), axis("predicted", "predicted", **scale)
    dots = {
        "mark": {"type": "point", "filled": True, "fill": FIRST, "opacity": 0.5, "size": 22},
        "encoding": {"x": x, "y": y, "tooltip": hint(true="true", predicted="predicted")},
    }
    diagonal = {
        "data": {"values": [{"true": end, "predicted": end} for end in ends]},
        "mark": {"type": "line", "stroke": MUTED, "strokeDash": [4, 4], "strokeWidth": 1},
        "encoding": {"x": x, "y": y},
    }
    residual = predicted - true
    cells = [
        [number(float(q), 2), number(float(np.quantile(residual, q)), 4)]
        for q in (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)
    ]
    figure = Figure(
        "scatter",
        "Predicted against true",
        f"{count(len(shown), 'point')}, one a target; on the dashed diagonal predictions are exact. R² is "
        f"{number(evidence.score)}.",
        chart(rows, [diagonal, dots], 320),
        Table("Quantiles of the residual, predicted minus true.", ["quantile", "residual"], cells, frozenset({0, 1})),
    )
    blocks: list[Block] = [figure]
    if len(shown) < len(true):
        blocks.append(Note(f"{POINTS:,} of {len(true):,} points, drawn at random, are shown."))
    root, median = float(np.sqrt(np.mean(residual**2))), float(np.median(np.abs(residual)))
    lead = f"Root mean squared error {number(root)}, median absolute error {number(median)}."
    return Section("scatter-section", title, lead, blocks)

"""The path of betas, with a slider: scores, gaps and weights of tokens from ``beta_max`` down."""

from __future__ import annotations

import numpy as np

from convexformer.report.blocks import Block, Figure, Note, Omission, Section, Slider, Table
from convexformer.report.charts import FIRST, INK, Spec, axis, chart, heat_map, hint, line, log_axis, named_lines
from convexformer.report.evidence import BetaPath, Evidence
from convexformer.report.gather import beta_ratio, fold_name, test_name
from convexformer.report.text import count, number, sentence

LINES = 48  # tokens that are drawn, the largest
ZERO = 1e-9  # weights below this share of the largest are those of tokens that are not in use


def betas(evidence: Evidence) -> Section | Omission:
    """Return the charts along the path and the slider that moves through it."""
    path = evidence.beta_path
    if path is None or len(path.ratios) < 2:
        return Omission("Beta path", evidence.no_path or "fewer than two betas were solved.")
    at = int(np.argmin(np.abs(np.log(path.ratios / beta_ratio(evidence.model)))))
    blocks: list[Block] = [_slider(evidence, path, at)]
    if path.cv_scores is not None or path.test_scores is not None:
        blocks.append(_scores(evidence, path, at))
    if path.norms is not None:
        blocks.append(_tokens(evidence, path, at))
        if evidence.token_grid is not None:
            blocks.append(_map(evidence, path, at))
        if path.norms.shape[1] > LINES:
            blocks.append(Note(f"Curves of the {LINES} largest of {path.norms.shape[1]:,} tokens are shown."))
    if path.stopped:
        blocks.append(Note(f"The path ended early ({path.stopped}) after {count(len(path.ratios), 'beta')}."))
    top = (
        "From the largest beta, at which all weights are zero,"
        if path.ratios[0] > 0.999
        else "From the largest beta tried"
    )
    lead = (
        f"{top} to the smallest: less penalty, larger weights. Source: {path.source}. The slider stands at the beta nearest "
        "to that of the fit."
    )
    return Section("betas", "Beta path", lead, blocks)


def active(path: BetaPath) -> np.ndarray:
    """``(n_betas,)`` how many tokens have weights that are not zero."""
    assert path.norms is not None
    return (path.norms > ZERO * np.maximum(path.norms.max(1, keepdims=True), 1e-300)).sum(1)


def _slider(evidence: Evidence, path: BetaPath, at: int) -> Slider:
    columns: dict[str, list[str]] = {
        "beta / beta_max": [number(r, 3) for r in path.ratios],
        "beta": [number(r * evidence.model.beta_max_, 4) for r in path.ratios],
    }
    if path.test_scores is not None:
        columns[f"test {test_name(evidence.model)}"] = [number(v) for v in path.test_scores]
    if path.cv_scores is not None:
        columns[f"{fold_name(evidence.model)}, folds"] = [number(v) for v in path.cv_scores]
    if path.norms is not None:
        columns["tokens in use"] = [f"{n} of {path.norms.shape[1]}" for n in active(path)]
    columns["certified gap"] = [number(v, 2) for v in path.gaps]
    steps = [list(step) for step in zip(*columns.values(), strict=True)]
    return Slider("beta, from the largest to the smallest", list(columns), steps, at)


def _x() -> Spec:
    return log_axis("beta / beta_max", "ratio", grid=False, reverse=True)


def _rule() -> Spec:
    """The line at the slider."""
    return {
        "transform": [{"filter": "datum.k === at"}],
        "mark": {"type": "rule", "stroke": INK, "strokeWidth": 1.5, "strokeDash": [2, 3]},
        "encoding": {"x": _x()},
    }


def _scores(evidence: Evidence, path: BetaPath, at: int) -> Figure:
    name = test_name(evidence.model) if path.cv_scores is None else fold_name(evidence.model)
    tested = path.test_scores if name == test_name(evidence.model) else None  # one axis, one kind of score
    n = len(path.ratios)
    rows = [{"k": k, "ratio": float(path.ratios[k])} for k in range(n)]
    layers: list[Spec] = []
    ys: dict[str, Spec] = {}
    columns = ["beta / beta_max"]
    table = [[number(r, 3)] for r in path.ratios]
    scale: Spec = {"scale": {"zero": False}}
    words: list[str] = []
    if path.cv_scores is not None and path.cv_spread is not None:
        for row, mean, spread in zip(rows, path.cv_scores, path.cv_spread, strict=True):
            row.update(cv=float(mean), low=float(mean - spread), high=float(mean + spread))
        band = {"x": _x(), "y": axis(name, "low", **scale), "y2": {"field": "high"}}
        layers.append({"mark": {"type": "area", "fill": FIRST, "fillOpacity": 0.14}, "encoding": band})
        ys["mean of the folds"] = axis(name, "cv", **scale)
        columns.append(f"{name}, mean of folds")
        for cells, mean in zip(table, path.cv_scores, strict=True):
            cells.append(number(mean))
        words.append(
            f"by cross-validation it is at most {number(float(path.cv_scores.max()))}; the band is its spread over folds"
        )
    if tested is not None:
        for row, value in zip(rows, tested, strict=True):
            row["test"] = float(value)
        ys["test data"] = axis(name, "test", **scale)
        columns.append(f"test {name}")
        for cells, value in zip(table, tested, strict=True):
            cells.append(number(value))
        words.append(f"on the test data it is at most {number(float(tested.max()))}")
    layers.extend(named_lines(_x(), ys, points=True))
    for layer in layers:
        layer["encoding"]["tooltip"] = hint(ratio="beta / beta_max", test="test", cv="folds")
    return Figure(
        "path-scores",
        f"{sentence(name)} along the path",
        f"{sentence(name)} against beta: {'; '.join(words)}.",
        chart(rows, [*layers, _rule()], 220, at=at),
        Table("Scores along the path.", columns, table, frozenset(range(len(columns)))),
        follows_slider=True,
    )


def _tokens(evidence: Evidence, path: BetaPath, at: int) -> Figure:
    assert path.norms is not None
    order = np.argsort(-path.norms.max(0), kind="stable")[:LINES]
    rows = [
        {"k": k, "ratio": float(path.ratios[k]), "token": int(t), "norm": float(path.norms[k, t])}
        for t in order
        for k in range(len(path.ratios))
    ]
    curve = line(_x(), axis("norm of the weights", "norm"), FIRST, points=False, strokeWidth=1.3, strokeOpacity=0.55)
    curve["encoding"].update(
        detail={"field": "token"}, tooltip=hint(token="token", norm="norm", ratio="beta / beta_max")
    )
    counts = active(path)
    rule = _rule()
    rule["transform"] = [{"filter": f"datum.k === at && datum.token === {int(order[0])}"}]
    return Figure(
        "path-tokens",
        "Weights of the tokens",
        f"One curve a token: the norm of its weights against beta. {counts[0]} of {path.norms.shape[1]} tokens are in use "
        f"at the largest beta, {counts[-1]} at the smallest.",
        chart(rows, [curve, rule], 240, at=at),
        Table(
            "Norms of the weights of the largest tokens along the path.",
            ["beta / beta_max", *(f"token {t}" for t in order[:12])],
            [[number(r, 3), *(number(path.norms[k, t], 3) for t in order[:12])] for k, r in enumerate(path.ratios)],
            frozenset(range(13)),
        ),
        follows_slider=True,
    )


def _map(evidence: Evidence, path: BetaPath, at: int) -> Figure:
    assert path.norms is not None
    assert evidence.token_grid is not None
    h, w = evidence.token_grid
    first = evidence.class_token
    rows = [
        {"k": k, "row": t // w, "col": t % w, "token": t + first, "value": float(path.norms[k, t + first])}
        for k in range(len(path.ratios))
        for t in range(h * w)
    ]
    grid = path.norms[at, first : first + h * w].reshape(h, w)
    return Figure(
        "path-map",
        "Tokens in use, at the slider",
        f"A grid of {h} rows and {w} columns: the norm of each token's weights at the slider's beta, relative to the "
        "largest there.",
        heat_map(rows, (h, w), "norm", at=at),
        Table(
            "Norms of the weights by row and column, at the beta of the fit.",
            ["row", *(f"column {c + 1}" for c in range(w))],
            [[str(r + 1), *(number(float(v), 3) for v in grid[r])] for r in range(h)],
            frozenset(range(w + 1)),
        ),
        follows_slider=True,
    )

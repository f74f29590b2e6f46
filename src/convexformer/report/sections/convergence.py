"""Convergence: primal and dual values against the iterations, and the relative gap between them."""

from __future__ import annotations

import math

import numpy as np

from convexformer.report.blocks import Block, Facts, Figure, Note, Omission, Section, Table
from convexformer.report.charts import FIRST, MUTED, Spec, axis, chart, hint, line, log_axis, named_lines
from convexformer.report.evidence import Evidence
from convexformer.report.text import DASH, finite, number, seconds
from convexformer.solvers.status import Record

RECORDS = 300  # that are drawn
SMALLEST = 1e-16


def convergence(evidence: Evidence) -> Section | Omission:
    """Return the two charts of a history."""
    history = evidence.model.solution_.history
    if not history:
        return Omission("Convergence", "the model was saved without the history of its solve.")
    if len(history) == 1:
        return _single_check(evidence)
    shown = thinned(history)
    rows = [
        {
            "iteration": record.iteration,
            "primal": finite(record.primal),
            "dual": finite(record.dual),
            "gap": max(record.relative_gap, SMALLEST) if math.isfinite(record.relative_gap) else None,
        }
        for record in shown
    ]
    table = Table(
        "Gap checks of the solve.",
        ["iteration", "time", "primal", "dual", "relative gap", "solver"],
        [
            [
                f"{r.iteration:,}",
                seconds(r.seconds),
                number(r.primal, 7),
                number(r.dual, 7),
                number(r.relative_gap, 3),
                r.solver or DASH,
            ]
            for r in shown
        ],
        frozenset(range(5)),
    )
    solution = evidence.model.solution_
    few = len(rows) <= 40
    x = axis(
        "iteration",
        "iteration",
        scale={"nice": False, "zero": False, "padding": 6},
        axis={"tickMinStep": 1, "grid": False},
    )
    y: Spec = {"scale": {"zero": False, "domain": _domain(shown)}}
    tip = hint(iteration="iteration", primal="primal", dual="dual")
    band = {
        "transform": [{"filter": "datum.dual !== null"}],
        "mark": {"type": "area", "fill": FIRST, "fillOpacity": 0.12, "clip": True},
        "encoding": {"x": x, "y": axis("objective", "primal", **y), "y2": {"field": "dual"}},
    }
    ys = {"primal": axis("objective", "primal", **y), "dual": axis("objective", "dual", **y)}
    curves = named_lines(x, ys, few)
    for layer in curves:
        layer["encoding"]["tooltip"] = tip
        layer["mark"]["clip"] = True  # early dual values may be far below
    gap = line(x, log_axis("relative gap", "gap"), FIRST, few)
    gap["encoding"]["tooltip"] = hint(iteration="iteration", gap="relative gap")
    goal = {
        "mark": {"type": "rule", "stroke": MUTED, "strokeDash": [4, 4]},
        "encoding": {"y": {"datum": evidence.model.tolerance}},
    }
    proof = solution.certificate
    blocks: list[Block] = [
        Figure(
            "primal-dual",
            "Primal and dual value",
            f"Primal value (the objective) falling from {number(shown[0].primal, 5)} to {number(proof.primal, 5)}, dual "
            f"value (the lower bound) of {number(proof.dual, 5)}; the optimum lies in the band between.",
            chart(rows, [band, *curves], 240),
            table,
        ),
        Figure(
            "gap",
            "Relative gap",
            f"The relative gap falling to {number(proof.relative_gap, 3)} in {solution.n_iter:,} iterations; the dashed "
            f"line is the tolerance, {number(evidence.model.tolerance, 2)}.",
            chart(rows, [goal, gap], 200),
            table,
        ),
    ]
    if len(shown) < len(history):
        blocks.append(Note(f"{len(shown):,} of {len(history):,} gap checks are shown."))
    lead = (
        "The primal value is the training objective; the dual value is a lower bound on its minimum over all weights. The "
        f"solver ({solution.solver or 'unknown'}) ended because {solution.status}."
    )
    return Section("convergence", "Convergence", lead, blocks)


def _single_check(evidence: Evidence) -> Section:
    """Return the one check there was: a curve needs two."""
    solution, proof = evidence.model.solution_, evidence.model.certificate_
    facts = Facts(
        [
            ("primal, the objective", number(proof.primal, 7)),
            ("dual, the lower bound", number(proof.dual, 7)),
            ("relative gap", number(proof.relative_gap, 3)),
            ("tolerance", number(evidence.model.tolerance, 3)),
            ("iterations", f"{solution.n_iter:,}"),
            ("time", seconds(solution.seconds)),
        ]
    )
    lead = (
        f"The solver ({solution.solver or 'unknown'}) checked the gap once, at its end, so there is no curve to draw. "
        f"It ended because {solution.status}."
    )
    return Section("convergence", "Convergence", lead, [facts])


def thinned(history: tuple[Record, ...]) -> list[Record]:
    """Return at most ``RECORDS`` of the history, the first and the last among them."""
    if len(history) <= RECORDS:
        return list(history)
    index = np.unique(np.linspace(0, len(history) - 1, RECORDS).round().astype(int))
    return [history[int(k)] for k in index]


def _domain(history: list[Record]) -> list[float]:
    """Return the range of the chart: all primal values, and dual values not far below, early ones being very low."""
    primal = [r.primal for r in history if math.isfinite(r.primal)]
    best, top = min(primal), max(primal)
    lowest = best - 3 * max(top - best, 1e-3 * abs(best))
    last = history[-1].dual
    dual = [r.dual for r in history if math.isfinite(r.dual) and (r.dual >= lowest or r.dual == last)]
    low = min([*dual, best])
    room = 0.05 * max(top - low, 1e-9 * max(abs(top), 1e-300))
    return [low - room, top + room]

"""The weights: which blocks of a portfolio are in use, and the spectrum of ``Z``."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from convexformer.heads.combined import Sum
from convexformer.operators import LowRank
from convexformer.report.blocks import Block, Figure, Note, Omission, Section, Table
from convexformer.report.charts import FIRST, Spec, axis, bars, chart, hint, log_axis
from convexformer.report.evidence import Evidence
from convexformer.report.text import DASH, clean, number, shape
from convexformer.solution import Solution

LARGEST = 1 << 24  # entries of a matrix whose singular values are computed
SHOWN = 200  # singular values that are drawn
ZERO = 1e-10  # relative to the largest: the rank counts those above


def blocks(evidence: Evidence) -> Section | Omission:
    """Return the block norms of a sum of heads."""
    solution = evidence.model.solution_
    if not isinstance(solution.head, Sum):
        return Omission("Blocks of the portfolio", f"the {solution.head.name} head is one head, not a sum of blocks.")
    norms = sorted(((clean(name, 60), value) for name, value in solution.block_norms.items()), key=lambda p: -p[1])
    total = sum(value for _, value in norms)
    used = [name for name, value in norms if value > 0]
    figure = Figure(
        "block-norms",
        "Penalty of each block",
        f"{len(used)} of {len(norms)} blocks are in use"
        + (f"; the largest is {used[0]}, with {100 * norms[0][1] / total:.0f}% of the penalty." if used else "."),
        bars([{"name": name, "value": value} for name, value in norms], "penalty"),
        Table(
            "Penalty of each block.",
            ["block", "penalty", "share"],
            [[n, number(v, 4), f"{100 * v / total:.1f}%" if total > 0 else DASH] for n, v in norms],
            frozenset({1, 2}),
        ),
    )
    lead = (
        "One convex program chose among these maps of the tokens. A block whose penalty is zero is not used: its weights "
        "are exactly zero at the optimum, not merely small."
    )
    return Section("blocks", "Blocks of the portfolio", lead, [figure])


def spectrum(evidence: Evidence) -> Section | Omission:
    """Return the singular values of the weights, those of each block for a sum."""
    solution = evidence.model.solution_
    found = {name: values for name, values in _spectra(solution) if values is not None}
    if not found:
        return Omission("Spectrum of the weights", f"a matrix of weights has more than {LARGEST:,} entries.")
    top = max(float(values[0]) if len(values) else 0.0 for values in found.values())
    if top <= 0:
        return Omission("Spectrum of the weights", "all weights are zero.")
    rows, cells, ranks = [], [], {}
    for name, values in found.items():
        ranks[name] = int((values > ZERO * top).sum())
        for k, value in enumerate(values[: min(SHOWN, ranks[name])].tolist()):
            rows.append({"name": name, "index": k + 1, "value": value})
            cells.append([name, str(k + 1), number(value, 4)])
    many = len(found) > 1
    encoding: Spec = {
        "x": axis("index", "index", scale={"nice": False, "zero": False}, axis={"tickMinStep": 1}),
        "y": log_axis("singular value", "value"),
        "tooltip": hint(name="", index="index", value="singular value"),
    }
    if many:
        used = [name for name, rank in ranks.items() if rank]
        colours = [f"var(--series-{k % 8 + 1})" for k in range(len(used))]
        colour: Spec = {"field": "name", "type": "nominal", "sort": None, "title": None}
        encoding["color"] = {
            **colour,
            "scale": {"domain": used, "range": colours},
            "legend": {"orient": "bottom", "columns": 3, "labelLimit": 220},
        }
    mark: dict[str, object] = {"type": "line", "strokeWidth": 1.5, "point": {"filled": True, "size": 30}}
    if not many:
        mark.update(stroke=FIRST, point={"filled": True, "size": 30, "fill": FIRST, "stroke": FIRST})
    figure = Figure(
        "spectrum-chart",
        "Singular values",
        "Singular values of the weights, largest first, on a log scale: "
        + ", ".join(f"{name} has rank {rank}" for name, rank in ranks.items())
        + ".",
        chart(rows, [{"mark": mark, "encoding": encoding}], 240),
        Table("Singular values.", ["matrix", "index", "singular value"], cells[:400], frozenset({1, 2})),
    )
    more: list[Block] = [figure]
    if any(rank > SHOWN for rank in ranks.values()):
        more.append(Note(f"The {SHOWN} largest singular values of each matrix are shown."))
    lead = "How many directions the weights use. "
    if many:
        lead += "Each block has a column for each output; kernels are given by their coefficients of training samples."
    else:
        lead += f"The matrix is that of the convex program, Z, of shape {shape(solution.weights.shape)}."
    return Section("spectrum", "Spectrum of the weights", lead, more)


def _spectra(solution: Solution) -> Iterator[tuple[str, Tensor | None]]:
    if isinstance(solution.head, Sum):
        parts = solution.head.recover(solution.weights, solution.layout).networks()
        for name, part in zip(solution.head.labels(), parts, strict=True):
            lifted = part.lift()
            yield clean(name, 60), _singular(lifted.form if isinstance(lifted.form, LowRank) else lifted.dense())
        return
    form = solution.weights.form
    yield "Z", _singular(form if isinstance(form, LowRank) else form.dense())


def _singular(Z: Tensor | LowRank) -> Tensor | None:
    """Return singular values in float64, descending; None for a matrix that is too large.

    Factors are reduced by QR: ``U V^T`` has the singular values of ``R_U R_V^T``. Blocks (gates) are taken together.
    """
    if isinstance(Z, LowRank):
        found, start = [], 0
        for n in Z.counts:
            U, V = Z.U[start : start + n].double().cpu(), Z.V[start : start + n].double().cpu()
            found.append(torch.linalg.svdvals(torch.linalg.qr(U.T).R @ torch.linalg.qr(V.T).R.T))
            start += n
        return torch.cat(found).sort(descending=True).values
    if Z.numel() > LARGEST:
        return None
    return torch.linalg.svdvals(Z.detach().double().cpu().reshape(-1, Z.shape[-1] if Z.ndim > 1 else 1))

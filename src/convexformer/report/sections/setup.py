"""How the model was made: its options, sizes, and the versions of the software."""

from __future__ import annotations

from typing import Any

import numpy
import torch

from convexformer.heads.base import Head
from convexformer.io import environment
from convexformer.report.blocks import Block, Facts, Section, Table
from convexformer.report.evidence import Evidence
from convexformer.report.text import DASH, clean, count, number, seconds, shape


def versions() -> dict[str, str]:
    """Return the versions of the software at work."""
    from convexformer import __version__  # the package is complete only when this module has been imported

    return {"convexformer": __version__, **environment()}


def setup(evidence: Evidence) -> Section:
    """Return options, certificate, sizes and versions."""
    model, solution = evidence.model, evidence.model.solution_
    proof = solution.certificate
    params = [
        (name, _value(value))
        for name, value in sorted(model.get_params(deep=False).items())
        if value is not None and name != "verbose"
    ]
    fitted, now = evidence.environment, versions()
    rows = [[name, clean(fitted.get(name, DASH)), version] for name, version in now.items()]
    s, d = model.token_shape_
    facts: list[tuple[str, str]] = [
        ("objective", number(proof.primal, 8)),
        ("lower bound on the minimum", number(proof.dual, 8)),
        ("relative gap", number(proof.relative_gap, 3)),
        ("certificate", proof.kind if proof.kind != "none" else f"none: {clean(proof.reason)}"),
        ("beta", f"{number(model.beta_, 6)} (beta_max {number(model.beta_max_, 6)})"),
        ("loss", solution.loss.name),
        (
            "solver",
            f"{solution.solver or 'unknown'}, {count(solution.n_iter, 'iteration')}, {seconds(solution.seconds)}",
        ),
        ("tokens of a sample", f"{s} of size {d}"),
        ("weights", shape(solution.weights.shape)),
    ]
    for name, value in proof.kkt.items():
        facts.append((f"residual: {clean(name, 60)}", number(value, 2)))
    blocks: list[Block] = [
        Facts(facts),
        Facts(params),
        Table("Versions.", ["package", "of the fit", "of this page"], rows),
    ]
    return Section("setup", "Configuration and versions", "Enough to fit the model again.", blocks)


def _value(value: Any) -> str:
    if isinstance(value, Head):
        return clean(value.label(), 120)
    if isinstance(value, (torch.Tensor, numpy.ndarray)):
        return f"array of shape {tuple(value.shape)}"
    return clean(repr(value) if isinstance(value, str) else value, 200)

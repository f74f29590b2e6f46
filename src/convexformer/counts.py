"""How large a model is: weights and operations of a forward pass, of a convex program and of the networks beside it.

Ergen et al. (2022) count both for attention in their table 2; Sahiner et al. (2022) list the weights of their convex heads
in appendix B. What they print is beside what the programs have, where the two differ.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

from convexformer.heads.attention import Attention
from convexformer.heads.base import Head, Layout, resolve_head

WEIGHTS_PER_TOKEN = ("attention", "mlp_mixer")
"""Heads whose weights belong to output positions: with an output per token each weight is used once, not once a token."""


@final
@dataclass(frozen=True)
class ModelCost:
    """Weights, and floating-point operations of a forward pass of one sample, an addition and a multiplication each."""

    model: str
    parameters: int
    flops: int
    formula: str
    """Multiply-adds, half the operations."""
    printed: str = ""
    """As table 2 of Ergen et al. has it, where that differs."""


@final
@dataclass(frozen=True)
class CostTable:
    """The costs of the models of one head at one size; printed as a Markdown table."""

    title: str
    rows: tuple[ModelCost, ...]

    def __getitem__(self, model: str) -> ModelCost:
        """Return the row of a model: ``"convex"``, ``"alternative"``, ``"standard"`` or ``"factors"``."""
        return {row.model: row for row in self.rows}[model]

    def __str__(self) -> str:
        header = ("model", "parameters", "FLOPs", "multiply-adds", "as printed")
        cells = [(row.model, f"{row.parameters:,}", f"{row.flops:,}", row.formula, row.printed) for row in self.rows]
        lines = [header, ("---",) * len(header), *cells]
        return "\n".join([self.title, "", *("| " + " | ".join(line) + " |" for line in lines)])


def cost(head: str | Head, s: int, d: int, c: int = 1, heads: int = 1, per_token: bool = False) -> CostTable:
    """Count weights and operations of a head on ``s`` tokens of size ``d`` with ``c`` outputs, pooled or per token.

    ``heads`` is the number of heads h of the ordinary networks; a gated head has its number of gates times as many
    convex weights. For attention: the convex program, the alternative attention that it is equivalent to with enough heads,
    and standard self-attention. For other heads: the convex program and its factors.
    """
    for name, value in (("s", s), ("d", d), ("c", c), ("heads", heads)):
        if value < 1:
            raise ValueError(f"{name}={value} was given; expected a positive whole number.")
    head = resolve_head(head)
    layout = Layout(s, d, c, per_token=per_token)
    head.check(layout)
    weights = math.prod(head.weight_shape(layout))
    kind = "an output per token" if per_token else "pooled"
    if per_token and isinstance(head, Attention):
        kind += f", stochastic = {head.stochastic!r}"
    title = f"{head.label()}, {kind}: s = {s}, d = {d}, c = {c}, h = {heads}"
    shared = per_token and head.name not in WEIGHTS_PER_TOKEN
    once = weights * (s if shared else 1)
    convex = ModelCost("convex", weights, 2 * once, f"weights{' s' if shared else ''}")
    if isinstance(head, Attention):
        return CostTable(title, (convex, _alternative(head, layout, heads), _standard(layout, heads)))
    factors = _factors(head, layout, heads)
    return CostTable(title, (convex,) if factors is None else (convex, factors))


def _alternative(head: Attention, layout: Layout, h: int) -> ModelCost:
    """Attention with weights in the simplex: (9) of Ergen et al., or (34) with an output per token."""
    s, d, c = layout.n_tokens, layout.width, layout.n_outputs
    if not layout.per_token:
        return ModelCost(
            "alternative", h * (s + d + c), 2 * h * (s * d + s + c), "h (s d + s + c)", "O(s d + c): h is missing"
        )
    if head.stochastic == "independent":
        return ModelCost(
            "alternative", h * (s + d + s * c), 2 * h * (s * d + s + s * c), "h (s d + s + s c)", "not in the table"
        )
    macs = h * (s * d + s * s + s * c)
    return ModelCost("alternative", h * (s * s + d + c), 2 * macs, "h (s d + s^2 + s c)", "not in the table")


def _standard(layout: Layout, h: int) -> ModelCost:
    """Standard self-attention, (3) of Ergen et al., with ``d x d`` queries, keys and values in each head."""
    s, d, c = layout.n_tokens, layout.width, layout.n_outputs
    macs = h * (3 * s * d * d + 2 * s * s * d + s * d * c)
    return ModelCost(
        "standard",
        h * (3 * d * d + d * c),
        2 * macs,
        "h (3 s d^2 + 2 s^2 d + s d c)",
        "O(s^2 d h + s d h c): the projections h s d^2 are missing",
    )


def _factors(head: Head, layout: Layout, h: int) -> ModelCost | None:
    """The nonconvex networks of Sahiner et al.: two factors a head."""
    s, d, c = layout.n_tokens, layout.width, layout.n_outputs
    per_token = s if layout.per_token else 1
    found = {
        "self_attention": (
            h * (d * d + d * c),
            h * (s * d * d + 2 * s * s * d + per_token * d * c),
            "h (s d^2 + 2 s^2 d + d c)",
        ),
        "mlp_mixer": (h * (s * s + d * c), h * (s * s * d + s * d * c), "h (s^2 d + s d c)"),
        "fno": (h * (s * d + c), h * (s * s * d + per_token * c), "h (s^2 d + c)"),
        "mlp": (h * (d + c), h * (s * d + per_token * c), "h (s d + c)"),
    }.get(head.name)
    return None if found is None else ModelCost("factors", found[0], 2 * found[1], found[2])

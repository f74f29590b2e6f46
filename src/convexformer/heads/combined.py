"""Several heads side by side: skip connections, mixtures, and the program that chooses among them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import Tensor, nn

from convexformer.data import TokenDataset
from convexformer.data.stores import Tokens
from convexformer.gauges import Penalty, ScaledPenalty, SumPenalty
from convexformer.heads.base import HEADS, Head, Layout, Program, resolve_head
from convexformer.heads.feature import Feature, Kernel
from convexformer.heads.gating import mismatch
from convexformer.networks import Network, SumNetwork
from convexformer.networks.combined import side_by_side
from convexformer.operators import Operator, SumOperator
from convexformer.weights import LowRank, Operand, Weights

PROBES = 8  # random targets whose beta_max the learned weights make equal


@final
@dataclass(frozen=True, eq=False)
class Sum(Head):
    """Outputs added, gauges added: ``min sum_i L(sum_k A_k(Z_k), y_i) + beta sum_k s_k g_k(Z_k)``. Convex and certified.

    ``heads`` are head objects or names. ``Z`` is the flattened weights of the parts, one after the other.

    ``weights="equal"``: ``s_k = 1``. ``"learned"``: which parts help, and how much, is part of the program. With unsquared
    norms ``g_k`` (``decay="frobenius"``; every gauge of the papers is one) parts that do not help come out exactly zero:
    multiple kernel learning (Bach, Lanckriet and Jordan 2004). ``s_k`` then makes the parts comparable: it is the mean
    ``beta_max`` that the part alone has for random targets, Gaussian residuals, so that scales of features do not matter.
    Numbers are taken as they are.

    Parameters
    ----------
    heads : sequence of Head or str
        The parts, at least one.
    weights : {"equal", "learned"} or sequence of float
        The factors ``s_k`` of the gauges, as above.
    """

    heads: Any = None
    weights: Any = "equal"

    name = "sum"
    per_token = True

    def __post_init__(self) -> None:
        if not isinstance(self.heads, (list, tuple)) or not self.heads:
            raise ValueError(f"heads={self.heads!r} was given; expected a list of heads: Sum(['mlp', 'fno']).")
        object.__setattr__(self, "heads", tuple(resolve_head(head) for head in self.heads))
        if alone := [head.name for head in self.heads if not head.combines]:
            raise ValueError(
                f"heads with activation='relu' cannot be part of a sum: {', '.join(alone)}. Their weights are neurons, "
                "those of a sum one tensor. Use activation='gated_relu' there."
            )
        if isinstance(self.weights, str):
            if self.weights not in ("equal", "learned"):
                raise ValueError(f"weights={self.weights!r} was given; expected 'equal', 'learned' or a number a head.")
            return
        numbers = tuple(float(s) for s in self.weights)
        if len(numbers) != len(self.heads) or not all(math.isfinite(s) and s > 0 for s in numbers):
            raise ValueError(f"weights={self.weights!r} was given; expected a positive number for each head.")
        object.__setattr__(self, "weights", numbers)

    @property
    def masks(self) -> bool:  # type: ignore[override]
        """True if every part takes masks."""
        return all(head.masks for head in self.heads)

    @property
    def rebuilds(self) -> bool:  # type: ignore[override]
        """Whether every part does."""
        return all(head.rebuilds for head in self.heads)

    @property
    def positional(self) -> bool:  # type: ignore[override]
        """Positions matter where they do for some part."""
        return any(head.positional for head in self.heads)

    def config(self) -> dict[str, Any]:
        """Return the parts and their weights."""
        return {"heads": self.heads, "weights": self.weights}

    def check(self, layout: Layout) -> None:
        """Check every part."""
        for head in self.heads:
            head.check(layout)

    def traits(self, layout: Layout) -> dict[str, object]:
        """Return the identities of the parts."""
        scales = {} if self.weights == "equal" else {"weights": [f"{s:.6g}" for s in self._scales()]}
        return {"parts": [head.identity(layout) for head in self.heads], **scales}

    def fitted(self, tokens: Tokens) -> Sum:
        """Fit every part, and find the weights that make them comparable."""
        parts = tuple(head.fitted(tokens) for head in self.heads)
        if self.weights != "learned":
            return self if all(a is b for a, b in zip(parts, self.heads, strict=True)) else replace(self, heads=parts)
        return Sum(parts, tuple(_random_beta_max(head, tokens) for head in parts))

    def program(self, tokens: TokenDataset, layout: Layout) -> Program:
        """Add the outputs, add the penalties."""
        return self.program_on(tokens, layout)

    def program_on(self, tokens: Tokens, layout: Layout) -> Program:
        """The same on tokens in memory or on disk: each part sees to itself."""
        programs = [head.program_on(tokens, layout) for head in self.heads]
        operators, penalties = [p.operator for p in programs], [p.penalty for p in programs]
        return Program(SumOperator(operators), self._penalty(penalties, [op.weight_shape for op in operators]))

    def operator(self, tokens: TokenDataset, layout: Layout) -> Operator:
        """Add the outputs."""
        return SumOperator([head.operator(tokens, layout) for head in self.heads])

    def outputs(self, tokens: TokenDataset, layout: Layout, Z: Operand) -> Tensor:
        """Add the outputs of the parts in use: the maps of others need not be evaluated."""
        dense = Z.dense(math.inf) if isinstance(Z, LowRank) else Z
        assert isinstance(dense, Tensor)
        pairs = list(zip(self.heads, self._split(dense, layout), strict=True))
        used = [(head, piece) for head, piece in pairs if bool(piece.any())] or pairs[:1]
        return torch.stack([head.outputs(tokens, layout, piece) for head, piece in used]).sum(0)

    def penalty(self, tokens: TokenDataset, layout: Layout) -> Penalty:
        """Add the penalties."""
        return self._penalty([head.penalty(tokens, layout) for head in self.heads], self._shapes(layout))

    def _penalty(self, parts: list[Penalty], shapes: list[tuple[int, ...]]) -> SumPenalty:
        if self.weights != "equal":
            parts = [ScaledPenalty(part, s) for part, s in zip(parts, self._scales(), strict=True)]
        return SumPenalty(parts, shapes)

    def recover(self, weights: Weights, layout: Layout) -> SumNetwork:
        """Recover each part; the bias is common."""
        parts: list[Network] = [
            head.recover(Weights(piece), layout)
            for head, piece in zip(self.heads, self._split(weights.dense(), layout), strict=True)
        ]
        return SumNetwork(parts, weights.intercept, torch.tensor(self._scales(), dtype=torch.float64))

    def lift(self, network: nn.Module, layout: Layout) -> Weights:
        """Lift each part and put the results side by side; biases of the parts add to that of the sum."""
        if not isinstance(network, SumNetwork) or len(network.parts) != len(self.heads):
            raise mismatch(self.name, f"{len(self.heads)} parts", f"it is a {type(network).__name__}")
        lifted = [head.lift(part, layout) for head, part in zip(self.heads, network.parts, strict=True)]
        return side_by_side(lifted, network.bias)

    def random_network(self, layout: Layout, n_heads: int, seed: int = 0, bias: bool = False) -> SumNetwork:
        """Return a random network of each part, a start for gradient training."""
        parts = [head.random_network(layout, n_heads, seed + k) for k, head in enumerate(self.heads)]
        return SumNetwork(parts, torch.zeros(layout.n_outputs, dtype=torch.float64) if bias else None)

    def block_norms(self, weights: Weights, layout: Layout) -> dict[str, float]:
        """Return the penalty ``s_k g_k(Z_k)`` of each part, by its description; zero where the part is not used."""
        norms = [
            s * float(head.recover(Weights(piece), layout).decay().detach()) if bool(piece.any()) else 0.0
            for s, head, piece in zip(self._scales(), self.heads, self._split(weights.dense(), layout), strict=True)
        ]
        return dict(zip(self.labels(), norms, strict=True))

    def labels(self) -> list[str]:
        """Return a short, unique name of each part."""
        names = [head.label() for head in self.heads]
        return [name if names.count(name) == 1 else f"{name} #{k}" for k, name in enumerate(names)]

    def _scales(self) -> list[float]:
        if self.weights == "learned":
            raise ValueError("the weights of this sum are learned from tokens: pass it to a Problem, or call fitted.")
        return [1.0] * len(self.heads) if self.weights == "equal" else list(self.weights)

    def _shapes(self, layout: Layout) -> list[tuple[int, ...]]:
        return [head.weight_shape(layout) for head in self.heads]

    def _split(self, Z: Tensor, layout: Layout) -> list[Tensor]:
        shapes = self._shapes(layout)
        pieces = Z.split([torch.Size(shape).numel() for shape in shapes])
        return [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]


def _random_beta_max(head: Head, tokens: Tokens) -> float:
    """Return the polar of a part at Gaussian residuals of mean zero, one output, ``sqrt(N)`` long, on the average."""
    if isinstance(head, (Feature, Kernel)) and head.decay != "nuclear":
        return 1.0  # their features have a mean squared norm of one, which is that value
    operator, penalty = head.program_on(tokens, Layout(tokens.n_tokens, tokens.width, 1))
    draw = torch.randn((PROBES, tokens.n_samples, 1), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    draw -= draw.mean(1, keepdim=True)
    found = [penalty.critical_beta(operator.dual_matrix(V.to(operator.like)), lambda: 1.0).value for V in draw]
    size = sum(found) / len(found) / math.sqrt(tokens.n_samples)
    return size if math.isfinite(size) and size > 0 else 1.0


HEADS.register("sum", Sum)

"""Several heads side by side: skip connections and mixtures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from convexformer.data import TokenDataset
from convexformer.gauges import Penalty, SumPenalty
from convexformer.heads.base import HEADS, Head, Layout, resolve_head
from convexformer.heads.gating import mismatch
from convexformer.networks import Network, SumNetwork
from convexformer.networks.combined import side_by_side
from convexformer.operators import Operator, SumOperator
from convexformer.weights import Weights


@final
@dataclass(frozen=True, eq=False)
class Sum(Head):
    """Outputs added, gauges added: ``min sum_i L(sum_k A_k(Z_k), y_i) + beta sum_k g_k(Z_k)``. Convex and certified.

    ``heads`` are head objects or names. ``Z`` is the flattened weights of the parts, one after the other; dense, so this
    is for heads of moderate size.
    """

    heads: Any = None

    name = "sum"
    per_token = True
    positional = True

    def __post_init__(self) -> None:
        if not isinstance(self.heads, (list, tuple)) or not self.heads:
            raise ValueError(f"heads={self.heads!r} was given; expected a list of heads: Sum(['mlp', 'fno']).")
        object.__setattr__(self, "heads", tuple(resolve_head(head) for head in self.heads))

    @property
    def masks(self) -> bool:  # type: ignore[override]
        """True if every part takes masks."""
        return all(head.masks for head in self.heads)

    def config(self) -> dict[str, Any]:
        """Return the parts."""
        return {"heads": self.heads}

    def check(self, layout: Layout) -> None:
        """Check every part."""
        for head in self.heads:
            head.check(layout)

    def traits(self, layout: Layout) -> dict[str, object]:
        """Return the identities of the parts."""
        return {"parts": [head.identity(layout) for head in self.heads]}

    def operator(self, tokens: TokenDataset, layout: Layout) -> Operator:
        """Add the outputs."""
        return SumOperator([head.operator(tokens, layout) for head in self.heads])

    def penalty(self, tokens: TokenDataset, layout: Layout) -> Penalty:
        """Add the penalties."""
        return SumPenalty([head.penalty(tokens, layout) for head in self.heads], self._shapes(layout))

    def recover(self, weights: Weights, layout: Layout) -> SumNetwork:
        """Recover each part; the bias is common."""
        parts: list[Network] = [
            head.recover(Weights(piece), layout)
            for head, piece in zip(self.heads, self._split(weights.dense(), layout), strict=True)
        ]
        return SumNetwork(parts, weights.intercept)

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

    def _shapes(self, layout: Layout) -> list[tuple[int, ...]]:
        """Weight shapes of the parts, from a sample of zeros: shapes never depend on the data."""
        probe = TokenDataset(torch.zeros((1, layout.n_tokens, layout.width), dtype=torch.float64))
        return [head.operator(probe, layout).weight_shape for head in self.heads]

    def _split(self, Z: Tensor, layout: Layout) -> list[Tensor]:
        shapes = self._shapes(layout)
        pieces = Z.split([torch.Size(shape).numel() for shape in shapes])
        return [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]


HEADS.register("sum", Sum)

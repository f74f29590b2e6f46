"""The baseline: logistic or ridge regression on the mean token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

import torch
from torch import nn

from convexformer.data import TokenDataset
from convexformer.gauges import Penalty, Ridge
from convexformer.heads.base import HEADS, Head, Layout
from convexformer.heads.gating import mismatch, random_factors
from convexformer.networks import LinearNetwork
from convexformer.operators import DenseOperator, Operator
from convexformer.weights import Weights


@final
@dataclass(frozen=True, eq=False)
class Linear(Head):
    """``min_Z sum_i L(mean token_i Z, y_i) + beta/2 ||Z||_F^2``: the linear probe of the papers, certified as well.

    Weights: ``Z: (d, c)``. With a ridge ``Z = 0`` is never optimal; ``beta_max`` is the curvature of the loss.
    """

    name = "linear"
    streams = True
    per_token = False
    positional = False

    def config(self) -> dict[str, Any]:
        """No arguments."""
        return {}

    def operator(self, tokens: TokenDataset, layout: Layout) -> Operator:
        """Mean tokens."""
        return DenseOperator(tokens.mean_token, (layout.width,), layout.n_outputs)

    def penalty(self, tokens: TokenDataset, layout: Layout) -> Penalty:
        """Ridge."""
        return Ridge()

    def recover(self, weights: Weights, layout: Layout) -> LinearNetwork:
        """Return the same matrix."""
        return LinearNetwork(weights.dense(), weights.intercept, squeeze=layout.squeeze)

    def random_network(self, layout: Layout, n_heads: int, seed: int = 0, bias: bool = False) -> LinearNetwork:
        """Return a random matrix, a start for gradient training; there are no heads to count."""
        (weight,) = random_factors([(layout.n_outputs,)], layout.width, seed)
        return LinearNetwork(
            weight, torch.zeros(layout.n_outputs, dtype=torch.float64) if bias else None, squeeze=layout.squeeze
        )

    def lift(self, network: nn.Module, layout: Layout) -> Weights:
        """Return the same matrix, after checking sizes."""
        if not isinstance(network, LinearNetwork):
            raise mismatch(self.name, "ridge", f"it is a {type(network).__name__}, not a LinearNetwork")
        if tuple(network.weight.shape) != (layout.width, layout.n_outputs):
            raise mismatch(self.name, "ridge", f"its sizes (d, c) are {tuple(network.weight.shape)}")
        return network.lift()


HEADS.register("linear", Linear)

"""A network behind a fixed standardisation, so that it takes raw tokens."""

from __future__ import annotations

from typing import Any, final

from torch import Tensor

from convexformer.networks.base import Network, TokenNetwork
from convexformer.weights import Weights


@final
class StandardizedNetwork(TokenNetwork):
    """``network((X - mean) / scale)``; masked tokens stay zero. ``mean, scale: (d,)``."""

    mean: Tensor
    scale: Tensor

    def __init__(self, network: Network, mean: Tensor, scale: Tensor) -> None:
        super().__init__()
        self.network = network
        self.register_buffer("mean", mean.detach().clone())
        self.register_buffer("scale", scale.detach().clone())

    def forward(self, X: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the network's outputs on standardised tokens."""
        tokens = self.tokens(X, mask, length=self.token_size[0])
        mean, scale = self.mean.to(tokens.X.dtype), self.scale.to(tokens.X.dtype)
        tokens = tokens.standardized(mean, scale)
        return self.network(tokens.X, tokens.mask)

    def decay(self) -> Tensor:
        """Return the weight decay of the inner network."""
        return self.network.decay()

    def lift(self) -> Weights:
        """Return the lift of the inner network, a point of the program on standardised tokens."""
        return self.network.lift()

    @property
    def token_size(self) -> tuple[int | None, int]:
        """That of the network inside."""
        return self.network.token_size

    def config(self) -> dict[str, Any]:
        """No options of its own."""
        return {}

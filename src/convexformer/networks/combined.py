"""Networks whose outputs add up."""

from __future__ import annotations

from typing import Any, cast, final

import torch
from torch import Tensor, nn

from convexformer.networks.base import Network, TokenNetwork, optional
from convexformer.weights import Weights


@final
class SumNetwork(TokenNetwork):
    """``f(X) = sum_k f_k(X) + bias``, zero at masked tokens; weight decays are added, ``sum_k scales_k decay_k``."""

    scales: Tensor

    def __init__(self, parts: list[Network], bias: Tensor | None = None, scales: Tensor | None = None) -> None:
        super().__init__()
        scales = torch.ones(len(parts), dtype=torch.float64) if scales is None else scales
        self.register_buffer("scales", scales.detach().clone())
        self.parts = nn.ModuleList(parts)
        self.bias = optional(bias)

    def forward(self, X: Tensor, mask: Tensor | None = None) -> Tensor:
        """Add the outputs."""
        tokens = self.tokens(X, mask, length=self.token_size[0])
        outputs = torch.stack([part(tokens.X, tokens.mask) for part in self.parts]).sum(0)
        if self.bias is None:
            return outputs
        outputs = outputs + (self.bias if outputs.ndim > 1 else self.bias[0])
        return (
            outputs if outputs.ndim < 3 or tokens.mask is None else outputs * tokens.mask[..., None].to(outputs.dtype)
        )

    def decay(self) -> Tensor:
        """Add the weight decays, each times its scale."""
        decays = torch.stack([part.decay() for part in self.networks()])
        return (self.scales.to(decays) * decays).sum()

    def lift(self) -> Weights:
        """Put the flattened lifts side by side; biases of the parts add to that of the sum."""
        return side_by_side([part.lift() for part in self.networks()], self.bias)

    def networks(self) -> list[Network]:
        """Return the parts."""
        return [cast(Network, part) for part in self.parts]

    @property
    def token_size(self) -> tuple[int | None, int]:
        """``(s, d)``: a part that needs a number of tokens decides it."""
        sizes = [part.token_size for part in self.networks()]
        return next((s for s, _ in sizes if s is not None), None), sizes[0][1]

    def config(self) -> dict[str, Any]:
        """No options."""
        return {}


def side_by_side(parts: list[Weights], bias: Tensor | None) -> Weights:
    """Return the flattened ``Z`` of the parts one after the other; the intercept is the sum of all biases, theirs too."""
    Z = torch.cat([part.dense().flatten() for part in parts])
    biases = [b for b in (bias, *(part.intercept for part in parts)) if b is not None]
    return Weights(Z, torch.stack([b.detach() for b in biases]).sum(0) if biases else None)

"""Networks whose outputs add up."""

from __future__ import annotations

from typing import Any, cast, final

import torch
from torch import Tensor, nn

from convexformer.networks.base import Network, TokenNetwork, optional
from convexformer.weights import Weights


@final
class SumNetwork(TokenNetwork):
    """``f(X) = sum_k f_k(X) + bias``, zero at masked tokens; weight decays are added."""

    def __init__(self, parts: list[Network], bias: Tensor | None = None) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self.bias = optional(bias)

    def forward(self, X: Tensor, mask: Tensor | None = None) -> Tensor:
        """Add the outputs."""
        tokens = self.tokens(X, mask)
        inner = self.inner_mask(tokens, X, mask)
        outputs = torch.stack([part(tokens.X, inner) for part in self.parts]).sum(0)
        if self.bias is None:
            return outputs
        outputs = outputs + (self.bias if outputs.ndim > 1 else self.bias[0])
        return outputs if outputs.ndim < 3 or tokens.mask is None else outputs * tokens.mask[..., None]

    def decay(self) -> Tensor:
        """Add the weight decays."""
        return torch.stack([part.decay() for part in self._networks()]).sum()

    def lift(self) -> Weights:
        """Put the flattened lifts side by side; biases of the parts add to that of the sum."""
        return side_by_side([part.lift() for part in self._networks()], self.bias)

    def _networks(self) -> list[Network]:
        return [cast(Network, part) for part in self.parts]

    def config(self) -> dict[str, Any]:
        """No options."""
        return {}


def side_by_side(parts: list[Weights], bias: Tensor | None) -> Weights:
    """Return the flattened ``Z`` of the parts one after the other; the intercept is the sum of all biases, theirs too."""
    Z = torch.cat([part.dense().flatten() for part in parts])
    biases = [b for b in (bias, *(part.intercept for part in parts)) if b is not None]
    return Weights(Z, torch.stack([b.detach() for b in biases]).sum(0) if biases else None)

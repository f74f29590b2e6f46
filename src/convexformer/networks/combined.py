"""Networks whose outputs add up."""

from __future__ import annotations

from typing import Any, cast, final

import torch
from torch import Tensor, nn

from convexformer.architecture import Network, Weights
from convexformer.networks.base import optional


@final
class SumNetwork(Network):
    """``f(X) = sum_k f_k(X) + bias``; weight decay adds up too."""

    def __init__(self, parts: list[Network], bias: Tensor | None = None) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self.bias = optional(bias)

    def forward(self, X: Tensor, mask: Tensor | None = None) -> Tensor:
        """Add the outputs."""
        outputs = torch.stack([part(X, mask) for part in self.parts]).sum(0)
        if self.bias is None:
            return outputs
        return outputs + (self.bias if outputs.ndim > 1 else self.bias[0])

    def decay(self) -> Tensor:
        """Add the weight decays."""
        return torch.stack([part.decay() for part in self._networks()]).sum()

    def lift(self) -> Weights:
        """Put the flattened lifts side by side."""
        flat = []
        for part in self._networks():
            Z = part.lift().Z
            flat.append((Z if isinstance(Z, Tensor) else Z.dense()).flatten())
        return Weights(torch.cat(flat), None if self.bias is None else self.bias.detach().clone())

    def _networks(self) -> list[Network]:
        return [cast(Network, part) for part in self.parts]

    def config(self) -> dict[str, Any]:
        """No options."""
        return {}

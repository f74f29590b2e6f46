"""What the networks share: reading tokens in their own dtype, and fixed gates kept as buffers."""

from __future__ import annotations

import torch
from torch import Tensor

from convexformer.architecture import Network
from convexformer.data import TokenDataset


class TokenNetwork(Network):
    """A network on tokens; casts what it is given to its own device and dtype."""

    def tokens(self, X: Tensor, mask: Tensor | None, length: int | None = None) -> TokenDataset:
        """Validate and cast; differentiable in the weights, not in the tokens."""
        like = next(self.parameters())
        return TokenDataset.of(X, mask, device=like.device, dtype=like.dtype, length=length)


def owned(values: Tensor) -> torch.nn.Parameter:
    """Return a copy of the values as a parameter."""
    return torch.nn.Parameter(values.detach().clone())


def optional(values: Tensor | None) -> torch.nn.Parameter | None:
    """Return a copy as a parameter, or None where there is nothing."""
    return None if values is None else owned(values)


def fixed(values: Tensor | None) -> Tensor | None:
    """Return a copy that is not trained, or None where there is nothing."""
    return None if values is None else values.detach().clone()

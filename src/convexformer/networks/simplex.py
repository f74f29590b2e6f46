"""Keeping attention weights in the simplex while ordinary optimisers train them."""

from __future__ import annotations

from typing import TypeAlias, TypeVar, final

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from convexformer.networks.attention import AttentionNetwork
from convexformer.networks.token_attention import PositionAttentionNetwork, StochasticAttentionNetwork

SimplexNetwork: TypeAlias = AttentionNetwork | PositionAttentionNetwork | StochasticAttentionNetwork
"""The networks whose ``w1`` has rows in the simplex."""
T = TypeVar("T", bound=SimplexNetwork)


@final
class Softmax(nn.Module):
    """A parametrisation: rows are the softmax of free parameters."""

    def forward(self, free: Tensor) -> Tensor:
        """Return rows in the simplex."""
        return free.softmax(-1)

    def right_inverse(self, rows: Tensor) -> Tensor:
        """Return free parameters whose softmax is (nearly) ``rows``."""
        return rows.clamp_min(1e-12).log()


def train_in_simplex(network: T) -> T:
    """Make ``w1`` the softmax of free parameters, so that unconstrained optimisers keep ``w1`` in the simplex."""
    parametrize.register_parametrization(network, "w1", Softmax())
    return network


def random_simplex(rows: int, size: int, generator: torch.Generator) -> Tensor:
    """``(rows, size)`` float64 rows in the simplex, near uniform."""
    return torch.randn((rows, size), generator=generator, dtype=torch.float64).softmax(-1)

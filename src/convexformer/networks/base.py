"""Base classes of the networks: tokens are cast to the network's dtype, fixed gates are buffers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from convexformer.data import TokenDataset
from convexformer.operators import Neurons
from convexformer.weights import Weights


class Network(nn.Module, ABC):
    """An ordinary network: the nonconvex model of a paper, with the weights that a solution maps to."""

    @abstractmethod
    def forward(self, X: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return outputs for tokens ``X: (N, s, d)``."""

    @abstractmethod
    def decay(self) -> Tensor:
        """Return the weight-decay term of the paper: ``loss + beta * decay()`` is the nonconvex objective."""

    @abstractmethod
    def lift(self) -> Weights:
        """Return the point of the convex program with the same outputs and no larger objective."""

    @abstractmethod
    def config(self) -> dict[str, Any]:
        """Return what is needed, besides the state dict, to build this network again."""


class TokenNetwork(Network):
    """A network on tokens; casts its input to its own device and dtype, half precision included."""

    def tokens(self, X: Tensor, mask: Tensor | None, length: int | None = None) -> TokenDataset:
        """Validate and cast; differentiable in the weights, and in ``X`` if it requires a gradient."""
        like = next(self.parameters())
        at_least_single = torch.promote_types(like.dtype, torch.float32)
        found = TokenDataset.of(X, mask, device=like.device, dtype=at_least_single, length=length)
        tokens = found.X
        if isinstance(X, Tensor) and X.requires_grad:
            live = X.reshape(len(X), -1, X.shape[-1]).to(like.device)  # (N, p) is one token per sample
            live = pad(live, (0, 0, 0, found.n_tokens - live.shape[1]))
            tokens = live if found.mask is None else torch.where(found.mask[..., None], live, live.new_zeros(()))
        return TokenDataset(tokens.to(like.dtype), found.mask)

    def inner_mask(self, tokens: TokenDataset, X: Any, mask: Any) -> Tensor | None:
        """Return the mask for an inner network; an all-true mask tells it that the caller did pass one."""
        if tokens.mask is None and (mask is not None or isinstance(X, (list, tuple))):
            return torch.ones(tokens.X.shape[:2], dtype=torch.bool, device=tokens.X.device)
        return tokens.mask


class FactorNetwork(TokenNetwork):
    """Base of networks with two weight factors: ``w1``, ``w2``, fixed gates, pooling, and ordinary weight decay.

    ``relu``: hidden values pass through a ReLU. Without it and without gates the network is linear.
    """

    gates: Tensor | None
    gate_index: Tensor | None

    def __init__(
        self,
        w1: Tensor,
        w2: Tensor,
        bias: Tensor | None = None,
        *,
        gates: Tensor | None = None,
        gate_index: Tensor | None = None,
        relu: bool = False,
        per_token: bool = False,
        squeeze: bool = False,
    ) -> None:
        super().__init__()
        if relu and gates is not None:
            raise ValueError("a network has fixed gates or ReLU neurons, not both: relu=True and gates were given.")
        self.w1, self.w2, self.bias = owned(w1), owned(w2), optional(bias)
        self.relu, self.per_token, self.squeeze = relu, per_token, squeeze
        self.register_buffer("gates", fixed(gates))
        self.register_buffer("gate_index", fixed(gate_index))

    def finish(self, outputs: Tensor, mask: Tensor | None) -> Tensor:
        """Add the bias, to real tokens only, and give the outputs the shape of the targets."""
        if self.bias is not None:
            outputs = outputs + self.bias
        if self.per_token and mask is not None:
            outputs = outputs * mask[..., None]
        return outputs.squeeze(-1) if self.squeeze else outputs

    def decay(self) -> Tensor:
        """``1/2 sum_j (||w1_j||^2 + ||w2_j||^2)``: ordinary weight decay."""
        return 0.5 * (self.w1.square().sum() + self.w2.square().sum())

    def own_bias(self) -> Tensor | None:
        """Return a copy of the bias."""
        return fixed(self.bias)

    def config(self) -> dict[str, Any]:
        """Return the options."""
        return {"relu": self.relu, "per_token": self.per_token, "squeeze": self.squeeze}

    def neurons(self, U: Tensor, V: Tensor, block: Tensor | None = None, n_blocks: int = 1) -> Weights:
        """Return ReLU neurons as weights of the exact program; ``U: (h, p)``, ``V: (h, q)``."""
        return neuron_weights(U.detach(), V.detach(), block, n_blocks, self.own_bias())


def neuron_weights(U: Tensor, V: Tensor, block: Tensor | None, n_blocks: int, bias: Tensor | None) -> Weights:
    """Return neurons, in blocks where there are some, and the bias as weights."""
    where = torch.zeros(len(U), dtype=torch.int64, device=U.device) if block is None else block
    return Weights(Neurons(U.clone(), V.clone(), where.clone(), (n_blocks, U.shape[1], V.shape[1])), bias)


def owned(values: Tensor) -> torch.nn.Parameter:
    """Return a copy of the values as a parameter."""
    return torch.nn.Parameter(values.detach().clone())


def optional(values: Tensor | None) -> torch.nn.Parameter | None:
    """Return a copy as a parameter; None for None."""
    return None if values is None else owned(values)


def fixed(values: Tensor | None) -> Tensor | None:
    """Return a copy that is not trained; None for None."""
    return None if values is None else values.detach().clone()

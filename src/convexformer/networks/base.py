"""Base classes of the networks: tensors in, tensors out, in the network's own dtype; fixed gates are buffers."""

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
    """An ordinary network: the nonconvex model of a paper, with the weights that a solution maps to.

    ``forward`` only computes: on tensors it looks at shapes, never at values, and does not wait for a device. So it can be
    traced (``torch.export``, ``torch.compile(fullgraph=True)``, ONNX), mapped (``torch.func.vmap``) and given a batch of
    no samples. What a user passes is validated where users pass it: by estimators and by ``Solution.predict``.
    """

    @abstractmethod
    def forward(self, X: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return outputs for tokens ``X: (N, s, d)``; ``mask: (N, s)`` is True (or 1) where a token is real."""

    @abstractmethod
    def decay(self) -> Tensor:
        """Return the weight-decay term of the paper: ``loss + beta * decay()`` is the nonconvex objective."""

    @abstractmethod
    def lift(self) -> Weights:
        """Return the point of the convex program with the same outputs and no larger objective."""

    @abstractmethod
    def config(self) -> dict[str, Any]:
        """Return what is needed, besides the state dict, to build this network again."""

    @property
    def token_size(self) -> tuple[int | None, int]:
        """``(s, d)``: the number of tokens, None where any number will do, and their size; an export asks for it."""
        raise NotImplementedError(f"{type(self).__name__} does not say the sizes of its tokens: define token_size.")

    def keep(self, name: str, values: Tensor | None) -> None:
        """Make a copy of the values a buffer; None is a plain attribute: ``torch.export`` stumbles over empty buffers."""
        if values is None:
            setattr(self, name, None)
        else:
            self.register_buffer(name, fixed(values))

    def extra_repr(self) -> str:
        """Shapes of parameters and buffers, and the options."""
        own = [*self._parameters.items(), *self._buffers.items()]
        shapes = [f"{name}={tuple(values.shape)}" for name, values in own if values is not None]
        options = [f"{k}={v!r}" for k, v in self.config().items() if not isinstance(v, nn.Module)]
        return ", ".join([*shapes, *options])


class TokenNetwork(Network):
    """A network on tokens; casts its input to its own device and dtype, half precision included."""

    def tokens(self, X: Tensor, mask: Tensor | None, length: int | None = None) -> TokenDataset:
        """Cast tensors to the network's device and dtype, set masked tokens to zero, pad to ``length`` tokens.

        A table ``(N, p)`` is one token a sample. Arrays and ragged lists are read and validated; tensors are not.
        """
        like = next(self.parameters())
        if not isinstance(X, Tensor):
            at_least_single = torch.promote_types(like.dtype, torch.float32)
            found = TokenDataset.of(X, mask, device=like.device, dtype=at_least_single, length=length)
            return TokenDataset(found.X.to(like.dtype), found.mask)
        X = (X[:, None] if X.ndim == 2 else X).to(like)
        if mask is None:
            return TokenDataset(X)
        real = torch.as_tensor(mask, device=like.device) != 0
        X = torch.where(real[..., None], X, X.new_zeros(()))  # padding may hold anything, NaN included
        if length is not None and X.shape[1] < length:
            missing = length - X.shape[1]
            X, real = pad(X, (0, 0, 0, missing)), pad(real, (0, missing))
        return TokenDataset(X, real)


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
        self.keep("gates", gates)
        self.keep("gate_index", gate_index)

    def finish(self, outputs: Tensor, mask: Tensor | None) -> Tensor:
        """Add the bias, to real tokens only, and give the outputs the shape of the targets."""
        if self.bias is not None:
            outputs = outputs + self.bias
        if self.per_token and mask is not None:
            outputs = outputs * mask[..., None].to(outputs.dtype)
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

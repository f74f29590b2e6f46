"""Interface of heads: an operator plus a penalty, and the maps to and from an ordinary network."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, final

import torch
from torch import Tensor, nn

from convexformer.data import TokenDataset
from convexformer.data.fingerprint import fingerprint
from convexformer.data.stores import Tokens, TokenStream
from convexformer.gauges import Penalty
from convexformer.networks.base import Network
from convexformer.operators import Operator
from convexformer.operators.streamed import streamed
from convexformer.registry import Registry, unknown
from convexformer.weights import Operand, Weights, apply_weights


@final
@dataclass(frozen=True)
class Layout:
    """The sizes of a problem, fixed when it is built: what a head needs besides the tokens themselves."""

    n_tokens: int
    width: int
    n_outputs: int
    per_token: bool = False
    squeeze: bool = False
    """Targets were ``(N,)``, so outputs are ``(N,)`` as well."""

    def shape(self, outputs: Tensor, tokens: Tokens) -> Tensor:
        """Give rows of outputs ``(R, c)`` the shape of the targets; masked tokens get zeros."""
        if self.per_token:
            grid = outputs.new_zeros((*tokens.shape[:2], outputs.shape[1]))
            if tokens.mask is None:
                grid = outputs.reshape(grid.shape)
            else:
                grid[tokens.mask] = outputs
            outputs = grid
        return outputs.squeeze(-1) if self.squeeze else outputs


class Program(NamedTuple):
    """The convex program of a head on some tokens: ``min_Z F(A Z) + beta g(Z)``."""

    operator: Operator
    penalty: Penalty


class Head(ABC):
    """An architecture: its operator, its penalty, and its recovery and lift maps."""

    name: ClassVar[str]
    per_token: ClassVar[bool]
    """Whether it takes targets ``(N, s, c)``."""
    masks: ClassVar[bool] = True
    """Whether it takes masked tokens."""
    positional: ClassVar[bool]
    """Whether its weights belong to token positions, so that the number of tokens is fixed."""

    streams: ClassVar[bool] = False
    """Whether tokens may come in batches: its operator treats samples one by one, and its penalty looks at no token."""

    @property
    def combines(self) -> bool:
        """Whether it can be part of a :class:`~convexformer.heads.Sum`: its weights are one tensor."""
        return True

    rebuilds: bool = True
    """Whether certificates of a float32 solve rebuild the operator from float64 tokens. If not, features and kernels in
    float32 are the data of the program, and the certificate is that of the program on them."""

    def fitted(self, tokens: Tokens) -> Head:
        """Return this head with all that it learns from training tokens besides its weights; most learn nothing.

        A problem calls it before :meth:`program`; its head, and that of its solutions, is the fitted one. A head that is
        fitted already returns itself.
        """
        return self

    def program(self, tokens: TokenDataset, layout: Layout) -> Program:
        """Return operator and penalty on the training tokens.

        A head defines this, or :meth:`operator` and :meth:`penalty` where the two share no work.
        """
        if type(self).operator is Head.operator or type(self).penalty is Head.penalty:
            raise TypeError(f"{type(self).__name__} must define program(), or operator() and penalty().")
        return Program(self.operator(tokens, layout), self.penalty(tokens, layout))

    def streams_for(self, layout: Layout) -> bool:
        """Tell whether the head streams with outputs of this layout; as a rule it does, or does not, with any.

        Exact ReLU does not: its penalty looks at the tokens.
        """
        return self.streams and self.combines

    def program_on(self, tokens: Tokens, layout: Layout) -> Program:
        """Return operator and penalty on training tokens in memory or, batch by batch, on disk."""
        if not isinstance(tokens, TokenStream):
            return self.program(tokens, layout)
        if not self.streams_for(layout):
            raise ValueError(
                f"the {self.name} head needs all tokens in memory, and {tokens!r} is larger than its limit. Raise "
                "open(store, memory=bytes), take some rows, or choose a head that streams, such as 'mlp'."
            )
        operator = streamed(tokens, lambda batch: self.operator(batch, layout), per_token=layout.per_token)
        return Program(operator, self.penalty(tokens.first(), layout))

    def operator(self, tokens: TokenDataset, layout: Layout) -> Operator:
        """Return the linear map from ``Z`` to outputs on these tokens, training or new ones."""
        return self.program(tokens, layout).operator

    def outputs(self, tokens: TokenDataset, layout: Layout, Z: Operand) -> Tensor:
        """Return ``A Z: (R, c)`` on these tokens."""
        return apply_weights(self.operator(tokens, layout), Z)

    def penalty(self, tokens: TokenDataset, layout: Layout) -> Penalty:
        """Return the gauge of the atoms of the architecture; it may depend on the training tokens."""
        return self.program(tokens, layout).penalty

    @abstractmethod
    def recover(self, weights: Weights, layout: Layout) -> Network:
        """Return a network with the same outputs and ``decay()`` equal to the gauge of ``Z``."""

    @abstractmethod
    def lift(self, network: nn.Module, layout: Layout) -> Weights:
        """Return ``network.lift()``, after checking that the network is one of this head's."""

    @abstractmethod
    def config(self) -> dict[str, Any]:
        """Return the constructor's arguments; tensors where the user gave gates."""

    def traits(self, layout: Layout) -> dict[str, object]:
        """Return what ``Z`` depends on besides the sizes: options, and gates as tensors."""
        return {}

    def identity(self, layout: Layout) -> dict[str, object]:
        """Return, by name, everything that ``Z`` depends on; weights fit any problem of an equal identity."""
        sizes: dict[str, object] = {
            "head": self.name,
            "token size d": layout.width,
            "number of outputs c": layout.n_outputs,
            "output per token": layout.per_token,
        }
        if self.positional:
            sizes["number of tokens s"] = layout.n_tokens
        plain = (str, int, float, bool, type(None))
        traits = self.traits(layout)
        return sizes | {
            name: value if isinstance(value, plain) else f"fingerprint {fingerprint({name: value})[:12]}"
            for name, value in traits.items()
        }

    def check(self, layout: Layout) -> None:
        """Raise if the head does not support these sizes, e.g. if gates have the wrong shape."""
        if layout.per_token and not self.per_token:
            raise ValueError(
                f"Y is per token, but the {self.name} head has one output per sample. Pass targets (N,) or (N, c), "
                "or choose a head with token outputs such as 'mlp'."
            )

    def weight_shape(self, layout: Layout) -> tuple[int, ...]:
        """Return the shape of ``Z``, here from a sample of zeros: shapes never depend on the data."""
        probe = TokenDataset(torch.zeros((1, layout.n_tokens, layout.width), dtype=torch.float64))
        return self.operator(probe, layout).weight_shape

    def label(self) -> str:
        """Return a few words that tell this head from others in a table."""
        return self.name

    def token_norms(self, weights: Weights) -> Tensor | None:
        """``(s,)`` the norm of each token position's weights; None for heads without weights per position."""
        return None

    def attention_map(self, weights: Weights, layout: Layout) -> Tensor | None:
        """``(s, s)`` how much each output row draws on each token; None for heads whose weights do not tell."""
        return None


HEADS: Registry[Head] = Registry("head")


def resolve_head(head: str | Head) -> Head:
    """Return the head itself, or the one of that name with its defaults."""
    if isinstance(head, Head):
        return head
    if isinstance(head, type) and issubclass(head, Head):
        raise TypeError(
            f"head is a class, {head.__name__}; expected a name or an object from convexformer.heads: {head.__name__}()."
        )
    if not isinstance(head, str):
        raise TypeError(f"head is a {type(head).__name__}; expected a name or an object from convexformer.heads.")
    if head not in HEADS:
        raise ValueError(unknown("head", head, HEADS))
    return HEADS[head]()

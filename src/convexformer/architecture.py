"""What a head is: an operator plus a penalty, and the maps to and from an ordinary network.

Concrete heads live in :mod:`convexformer.heads`; problems and solutions know only this interface.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, final

import torch
from torch import Tensor, nn

from convexformer.data import TokenDataset
from convexformer.gauges import Penalty
from convexformer.operators import LowRank, Operator
from convexformer.registry import Registry, unknown


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
    channel_blocks: tuple[tuple[int, ...], ...] = ()
    """Blocks of channels that no sample correlates, where a head found some (Sahiner et al. 2022, corollary 3.2)."""

    def shape(self, outputs: Tensor, tokens: TokenDataset) -> Tensor:
        """Give rows of outputs ``(R, c)`` the shape of the targets; masked tokens get zeros."""
        if self.per_token:
            grid = outputs.new_zeros((*tokens.X.shape[:2], outputs.shape[1]))
            if tokens.mask is None:
                grid = outputs.reshape(grid.shape)
            else:
                grid[tokens.mask] = outputs
            outputs = grid
        return outputs.squeeze(-1) if self.squeeze else outputs


@final
@dataclass(frozen=True)
class Weights:
    """A point of the convex program: ``Z`` and, where the problem has one, the intercept ``(c,)``."""

    Z: Any
    """A tensor, or :class:`~convexformer.operators.LowRank` factors of one."""
    intercept: Tensor | None = None
    origin: tuple[Head, Layout] | None = field(default=None, repr=False, compare=False)
    """The head and layout that a solution's weights belong to; None for weights made by hand or lifted."""

    def tensors(self) -> dict[str, Tensor]:
        """Return all numbers by name, for a file."""
        own = {"Z": self.Z} if isinstance(self.Z, Tensor) else {"U": self.Z.U, "V": self.Z.V, "block": self.Z.block}
        return own if self.intercept is None else {**own, "intercept": self.intercept}

    @classmethod
    def of_tensors(cls, tensors: dict[str, Tensor], shape: tuple[int, ...]) -> Weights:
        """Undo :meth:`tensors`; ``shape`` is that of a dense ``Z``."""
        if "Z" in tensors:
            return cls(tensors["Z"], tensors.get("intercept"))
        factors = LowRank(tensors["U"], tensors["V"], tensors["block"], tuple(shape))
        return cls(factors, tensors.get("intercept"))

    def dense(self) -> Tensor:
        """``Z`` as one tensor."""
        return self.Z if isinstance(self.Z, Tensor) else self.Z.dense()

    def to(self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Weights:
        """Move to another device or dtype."""
        b = None if self.intercept is None else self.intercept.to(device=device, dtype=dtype)
        return Weights(self.Z.to(device=device, dtype=dtype), b, self.origin)

    def misfit(self, head: Head, layout: Layout) -> str:
        """Say why these weights mean something else in a problem of that head and layout; empty where nothing is known.

        Equal shapes are not enough: gates, mixing or channel blocks may differ. A solution belongs where its network does.
        """
        if self.origin is None:
            return ""
        own, place = self.origin
        if own is head and replace(place, squeeze=layout.squeeze) == layout:
            return ""
        empty = torch.zeros_like(self.Z) if isinstance(self.Z, Tensor) else LowRank.zeros(self.Z.shape, self.Z.U)
        network = own.recover(Weights(empty), place)
        try:
            head.lift(network, layout)
        except ValueError as error:
            return (
                f"these weights are a solution of another problem, with a {own.name} head: {error} Build the problem with "
                "the solution's own head (solution.head) and tokens of the same sizes, or solve this problem anew."
            )
        if place.channel_blocks != layout.channel_blocks:
            return (
                f"these weights are laid out by the channel blocks {place.channel_blocks} of other tokens; this problem's "
                f"tokens have {layout.channel_blocks or 'none'}. Pass the network (solution.network()), which has no blocks."
            )
        return ""

    def check_home(self, head: Head, layout: Layout) -> None:
        """Raise with :meth:`misfit` where there is one."""
        if reason := self.misfit(head, layout):
            raise ValueError(reason)


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


class Head(ABC):
    """An architecture: its operator, its penalty, and its recovery and lift maps."""

    name: ClassVar[str]
    per_token: ClassVar[bool]
    """Whether targets ``(N, s, c)`` make sense for it."""
    masks: ClassVar[bool] = True
    """Whether masked tokens make sense for it."""
    positional: ClassVar[bool]
    """Whether its weights belong to token positions, so that the number of tokens is fixed."""

    @abstractmethod
    def operator(self, tokens: TokenDataset, layout: Layout) -> Operator:
        """Return the linear map from ``Z`` to outputs on these tokens."""

    @abstractmethod
    def penalty(self, layout: Layout) -> Penalty:
        """Return the gauge of the atoms of the architecture."""

    @abstractmethod
    def recover(self, weights: Weights, layout: Layout) -> Network:
        """Return a network with the same outputs and ``decay()`` equal to the gauge of ``Z``."""

    @abstractmethod
    def lift(self, network: nn.Module, layout: Layout) -> Weights:
        """Return ``network.lift()``, after checking that the network is one of this head's."""

    @abstractmethod
    def config(self) -> dict[str, Any]:
        """Return the constructor's arguments; tensors where the user gave gates."""

    def check(self, layout: Layout) -> None:
        """Raise when the head cannot serve these sizes, gates of the wrong shape for instance."""
        if layout.per_token and not self.per_token:
            raise ValueError(
                f"Y is per token, but the {self.name} head has one output a sample. Pass targets (N,) or (N, c), "
                "or choose a head with token outputs such as 'mlp'."
            )

    def prepare(self, tokens: TokenDataset, layout: Layout) -> Layout:
        """Return the layout with whatever structure the head finds in the training tokens."""
        return layout

    def token_norms(self, weights: Weights) -> Tensor | None:
        """``(s,)`` how much weight each token position has; None when no weights belong to one position."""
        return None


HEADS: Registry[Head] = Registry("head")


def resolve_head(head: str | Head) -> Head:
    """Return the head itself, or the one of that name with its defaults."""
    if isinstance(head, Head):
        return head
    if not isinstance(head, str):
        raise TypeError(f"head is a {type(head).__name__}; expected a name or an object from convexformer.heads.")
    if head not in HEADS:
        raise ValueError(unknown("head", head, HEADS))
    return HEADS[head]()

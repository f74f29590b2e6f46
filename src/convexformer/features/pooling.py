"""First-order features: the mean token, all tokens side by side, one token."""

from __future__ import annotations

import numbers
from typing import final

from torch import Tensor

from convexformer.data.stores import Tokens
from convexformer.data.tokens import TokenDataset
from convexformer.features.base import FEATURES, TokenFeature


@final
class MeanPooling(TokenFeature):
    """The mean of the real tokens, ``(d,)``: what a linear probe reads."""

    def compute(self, tokens: TokenDataset) -> Tensor:
        """``(n, d)``."""
        return tokens.X.sum(1) / tokens.lengths[:, None]

    def sample_size(self, n_tokens: int, width: int) -> int:
        """The mean."""
        return width


@final
class Flatten(TokenFeature):
    """All tokens side by side, ``(s d,)``; masked tokens are zeros. The number of tokens is fixed."""

    positional = True

    def compute(self, tokens: TokenDataset) -> Tensor:
        """``(n, s d)``."""
        return tokens.X.flatten(1)

    def sample_size(self, n_tokens: int, width: int) -> int:
        """The tokens."""
        return n_tokens * width


@final
class ClassToken(TokenFeature):
    """The token at one position, ``(d,)``: the class token of a backbone that has one, at position 0 as a rule.

    Parameters
    ----------
    position : int
        Where the token stands; negative counts from the end.
    """

    def __init__(self, position: int = 0) -> None:
        super().__init__()
        self.position = position

    def learn(self, tokens: Tokens) -> None:
        """Check the position."""
        if not isinstance(self.position, numbers.Integral) or not -tokens.n_tokens <= self.position < tokens.n_tokens:
            raise ValueError(
                f"position={self.position} was given; expected a whole number below the {tokens.n_tokens} tokens."
            )

    def compute(self, tokens: TokenDataset) -> Tensor:
        """``(n, d)``."""
        if not -tokens.n_tokens <= self.position < tokens.n_tokens:
            raise ValueError(f"X has {tokens.n_tokens} tokens a sample, none at position={self.position}.")
        return tokens.X[:, int(self.position)]

    def sample_size(self, n_tokens: int, width: int) -> int:
        """One token."""
        return width


for kind in (MeanPooling, Flatten, ClassToken):
    FEATURES.register(kind.__name__, kind)

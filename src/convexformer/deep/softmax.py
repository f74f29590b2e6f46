"""The baseline: a standard transformer with softmax attention (Ergen et al. 2022, equation (1), with an MLP)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional

from convexformer.deep.base import Embedding, SequenceModel, positive
from convexformer.registry import one_of

LAYER_NORMS = ("post", "pre", "none")  # LayerNorm after each sublayer, before it, or not at all


@final
class SoftmaxTransformer(SequenceModel):
    """A decoder on the equation ``a o b =``, read at the last position (Power et al. 2022).

    Each layer is causal softmax attention with ``heads`` heads and a ReLU MLP of width 4d, both with skip connections, and
    LayerNorm after (``"post"``, as in Power et al.), before (``"pre"``) or not at all. An operator symbol is put between the
    tokens and an equals sign behind them. The only convex part is the last linear layer, given the rest.

    Parameters
    ----------
    n_symbols : int
        Symbols to embed.
    n_classes : int
        Logits.
    n_tokens : int
        Symbols in a sample.
    depth : int
        The number of layers.
    width : int
        The token size ``d``.
    heads : int
        Attention heads in a layer.
    norm : {"post", "pre", "none"}
        Where LayerNorm stands.
    seeds : int or sequence of int
        How many models are trained at once, from seeds 0, 1, ..., or their seeds.
    """

    signs: Tensor  # (n,) what follows each token
    mask: Tensor  # (2n, 2n) causal

    def __init__(
        self,
        n_symbols: int,
        n_classes: int,
        n_tokens: int = 2,
        *,
        depth: int = 2,
        width: int = 128,
        heads: int = 4,
        norm: str = "post",
        seeds: int | Sequence[int] = 1,
    ) -> None:
        super().__init__(n_symbols, n_classes, n_tokens, seeds)
        self.depth, self.width, self.heads = (
            positive("depth", depth),
            positive("width", width),
            positive("heads", heads),
        )
        self.norm = one_of("norm", norm, LAYER_NORMS)
        if width % heads:
            raise ValueError(f"heads={heads} do not divide width={width}; choose a divisor.")
        d, draw, length = width, self.draws.normal, 2 * self.n_tokens
        self.embedding = Embedding(self.n_symbols + 2, 1, d, "learned", False, self.draws)
        signs = torch.tensor([self.n_symbols] * (self.n_tokens - 1) + [self.n_symbols + 1])  # operator ..., equals
        self.register_buffer("signs", signs, persistent=False)
        self.register_buffer("mask", torch.full((length, length), -math.inf).triu(1), persistent=False)
        s = d**-0.5
        self.position, self.unembedding = (
            nn.Parameter(draw(length, d, scale=s)),
            nn.Parameter(draw(d, n_classes, scale=s)),
        )
        for l in range(self.depth):
            for name, shape, scale in (
                (f"qkv{l}", (d, 3 * d), s),
                (f"out{l}", (d, d), s),
                (f"up{l}", (d, 4 * d), s),
                (f"down{l}", (4 * d, d), s / 2),
            ):
                self.register_parameter(name, nn.Parameter(draw(*shape, scale=scale)))
            self.register_parameter(f"bias_up{l}", nn.Parameter(draw(4 * d, scale=0.0)))
            self.register_parameter(f"bias_down{l}", nn.Parameter(draw(d, scale=0.0)))
            for gain in (f"gain_attention{l}", f"gain_mlp{l}") if norm != "none" else ():
                self.register_parameter(gain, nn.Parameter(draw(d, scale=0.0) + 1))
        if norm == "pre":
            self.gain_last = nn.Parameter(draw(d, scale=0.0) + 1)

    def last_tokens(self, symbols: Tensor) -> Tensor:
        """``(S, B, 1, d)``: the residual stream at the equals sign."""
        x = self.embedding(self._equation(self.expanded(symbols))) + self.position[:, None]  # (S, B, 2n, d)
        for l in range(self.depth):
            last = l == self.depth - 1
            x = self._attend(x, l, last)
            x = self._feed(x, l)
        return self._normalised(x, "gain_last") if self.norm == "pre" else x

    def last_weights(self) -> Tensor:
        """``(S, 1, d, c)``."""
        return self.unembedding.unsqueeze(1)

    def matrices(self) -> dict[str, Tensor]:
        """Return every weight matrix but the embeddings."""
        names = [f"{kind}{l}" for l in range(self.depth) for kind in ("qkv", "out", "up", "down")]
        return {**{name: self.get_parameter(name) for name in names}, "unembedding": self.unembedding}

    def group_norm(self) -> Tensor:
        """There is none: the penalty belongs to the layers of equation (12)."""
        raise ValueError(
            "penalty='group' belongs to a ConvexTransformer; a softmax transformer takes 'none' or 'ridge'."
        )

    def config(self) -> dict[str, Any]:
        """Return the constructor's arguments, but for the seeds."""
        return {
            **self.sizes(),
            "depth": self.depth,
            "width": self.width,
            "heads": self.heads,
            "norm": self.norm,
        }

    # ------------------------------------------------------------------ inside

    def _equation(self, symbols: Tensor) -> Tensor:
        """``a b`` -> ``a o b =``."""
        signs = self.signs.expand(*symbols.shape)
        return torch.stack([symbols, signs], -1).flatten(2)

    def _attend(self, x: Tensor, l: int, last: bool) -> Tensor:
        S, B, n, d = x.shape
        y = self._normalised(x, f"gain_attention{l}") if self.norm == "pre" else x
        W, first = self.get_parameter(f"qkv{l}"), l == 0
        if last:  # only the output at the equals sign is used
            q, x = self._product(y, W[..., :d], first, last=True), x[:, :, -1:]
            k, v = self._product(y, W[..., d:], first).chunk(2, -1)
        else:
            q, k, v = self._product(y, W, first).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)) for part in (q, k, v))  # (S, B, positions, heads, d / heads)
        scale = (d // self.heads) ** -0.5
        if last:  # it sees all positions; products with one row are faster as sums
            weights = ((q * scale) * k).sum(-1, keepdim=True).softmax(2)
            mixed = (weights * v).sum(2)
        else:
            q, k, v = (part.reshape(S * B, n, self.heads, -1).transpose(1, 2) for part in (q, k, v))
            mixed = ((q @ k.mT * scale + self.mask).softmax(-1) @ v).transpose(1, 2)
        mixed = mixed.reshape(S, -1, d) @ self.get_parameter(f"out{l}")
        x = x + mixed.view(x.shape)
        return self._normalised(x, f"gain_attention{l}") if self.norm == "post" else x

    @staticmethod
    def _product(y: Tensor, W: Tensor, first: bool, last: bool = False) -> Tensor:
        """``y @ W`` at every position, or at the last; before the first layer signs are the same in every sample."""
        S, B, n, _ = y.shape
        if not first:
            y = y[:, :, -1:] if last else y
            return (y.flatten(1, 2) @ W).view(S, B, -1, W.shape[-1])
        signs = (y[:, 0, 1::2] @ W).unsqueeze(1).expand(S, B, n // 2, -1)
        if last:
            return signs[:, :, -1:]
        tokens = (y[:, :, ::2].flatten(1, 2) @ W).view(S, B, n // 2, -1)
        return torch.stack([tokens, signs], 3).flatten(2, 3)

    def _feed(self, x: Tensor, l: int) -> Tensor:
        y = (self._normalised(x, f"gain_mlp{l}") if self.norm == "pre" else x).flatten(1, 2)
        y = functional.relu(y @ self.get_parameter(f"up{l}") + self.get_parameter(f"bias_up{l}")[:, None])
        y = y @ self.get_parameter(f"down{l}") + self.get_parameter(f"bias_down{l}")[:, None]
        x = x + y.view(x.shape)
        return self._normalised(x, f"gain_mlp{l}") if self.norm == "post" else x

    def _normalised(self, x: Tensor, gain: str) -> Tensor:
        return functional.layer_norm(x, x.shape[-1:]) * self.get_parameter(gain)[:, None, None]

"""Stacks of gated layers, each convex in its own weights (Ergen et al. 2022, theorem 3, equation (12))."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn

from convexformer.deep.base import Embedding, SequenceModel, positive, rms_normalised
from convexformer.features import Fastfood

Activate = Callable[[Tensor, Tensor], Tensor]  # projections and tokens to features


@final
class ConvexTransformer(SequenceModel):
    """A stack of the layers of equation (12), on embedded symbols::

        layer(X)_l = sum_q sum_j 1{<U_qj, X_q> >= 0} <Z_qjl, X_q>,   q = 1..blocks, j = 1..gates

    ``X_q: (n, d / blocks)`` is the q-th block of channels of the n tokens. ``blocks=1`` is the layer as printed, with
    gates ``U_j = u1_j u2_j^T`` when ``rank_one``; blocks of width 2 with full Gaussian gates generalise better. Gates
    are drawn, never trained. The first layer reads the tokens and gives one of size d, the layers between map one to one,
    the last gives the logits.

    With a fixed embedding and depth 1 training is a convex problem; with a **trained embedding or a stack
    it is not**. ``residual`` and ``normalize`` (root mean square, no trained gain; layers after the first) are not in
    the paper; without them depth 4 fails on some seeds.

    ``fastfood`` puts random features of that kind (``convexformer.features``) in front of every layer, of scale ``sigma``;
    with ``"chi"`` this is the kernel preconditioning of Fisher et al.

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
    blocks : int
        Blocks of channels in a layer.
    gates : int
        Gates in a block.
    rank_one : bool
        Gates as printed in the paper, of rank one.
    residual, normalize : bool
        Skip connections and root-mean-square normalisation after the first layer.
    embedding : {"learned", "fixed", "one_hot"}
        How symbols become tokens.
    separate : bool
        Whether each position has an embedding of its own.
    fastfood : str, optional
        The kind of random features in front of every layer.
    sigma : float
        Their scale.
    scale : float
        Multiplies the initial weights.
    seeds : int or sequence of int
        How many models are trained at once, from seeds 0, 1, ..., or their seeds.
    """

    def __init__(
        self,
        n_symbols: int,
        n_classes: int,
        n_tokens: int = 2,
        *,
        depth: int = 1,
        width: int = 32,
        blocks: int = 16,
        gates: int = 8,
        rank_one: bool = False,
        residual: bool = False,
        normalize: bool = False,
        embedding: str = "learned",
        separate: bool = False,
        fastfood: str | None = None,
        sigma: float = 1.0,
        scale: float = 1.0,
        seeds: int | Sequence[int] = 1,
    ) -> None:
        super().__init__(n_symbols, n_classes, n_tokens, seeds)
        self.depth, self.blocks, self.gates = (
            positive("depth", depth),
            positive("blocks", blocks),
            positive("gates", gates),
        )
        self.rank_one, self.residual, self.normalize = bool(rank_one), bool(residual), bool(normalize)
        self.fastfood, self.sigma, self.scale, self.hidden = fastfood, sigma, scale, positive("width", width)
        self.embedding = Embedding(self.n_symbols, self.n_tokens, width, embedding, separate, self.draws)
        self.Z = nn.ParameterList()
        tokens, size = self.n_tokens, self.embedding.width
        for layer in range(self.depth):
            size = self._precondition(layer, size)
            if size % self.blocks:
                raise ValueError(
                    f"blocks={blocks} do not divide the {size} channels of layer {layer + 1}; choose a divisor."
                )
            outputs = self.n_classes if layer == self.depth - 1 else self.hidden
            self.register_buffer(f"U{layer}", self._gates(tokens, size // self.blocks))
            inputs = self.blocks * self.gates * tokens * size // self.blocks
            # half the gates are open: this scale keeps the variance of the activations
            self.Z.append(nn.Parameter(self.draws.normal(inputs, outputs, scale=scale / math.sqrt(inputs / 2))))
            tokens, size = 1, self.hidden

    def last_tokens(self, symbols: Tensor) -> Tensor:
        """``(S, B, blocks * gates * n, d / blocks)``: each token's block times each gate, 0 or 1."""
        X = self.embedding(self.expanded(symbols))  # (S, B, n, d)
        for layer in range(self.depth - 1):
            out = (self._gated(self._input(X, layer), layer).flatten(2) @ self.Z[layer]).unsqueeze(2)
            X = X + out if self.residual and layer > 0 else out
        return self._gated(self._input(X, self.depth - 1), self.depth - 1)

    def last_weights(self) -> Tensor:
        """``(S, blocks * gates * n, d / blocks, c)``."""
        Z = self.Z[-1]
        return Z.view(len(self.seeds), -1, self._block_width(self.depth - 1), self.n_classes)

    def matrices(self) -> dict[str, Tensor]:
        """``Z1``, ``Z2``, ...: all gates of a layer stacked on the rows."""
        return {f"Z{layer + 1}": Z for layer, Z in enumerate(self.Z)}

    def group_norm(self) -> Tensor:
        """``sum |z_qjlk|_2`` over blocks, gates, outputs and tokens: the penalty of equation (12)."""
        total = self.zero()
        for layer, Z in enumerate(self.Z):
            rows = Z.view(len(self.seeds), -1, self._block_width(layer), Z.shape[-1])
            total = total + (rows.square().sum(2) + 1e-12).sqrt().sum((1, 2))
        return total

    @property
    def convex_last_layer(self) -> bool:
        """True for depth 1 on a fixed embedding."""
        return self.depth == 1 and self.embedding.kind != "learned"

    def config(self) -> dict[str, Any]:
        """Return the constructor's arguments, but for the seeds."""
        return {
            **self.sizes(),
            "depth": self.depth,
            "width": self.hidden,
            "blocks": self.blocks,
            "gates": self.gates,
            "rank_one": self.rank_one,
            "residual": self.residual,
            "normalize": self.normalize,
            "embedding": self.embedding.kind,
            "separate": self.embedding.separate,
            "fastfood": self.fastfood,
            "sigma": self.sigma,
            "scale": self.scale,
        }

    # ------------------------------------------------------------------ inside

    def _gates(self, tokens: int, width: int) -> Tensor:
        """``(S, blocks, tokens * width, gates)``."""
        if self.rank_one:
            u1 = self.draws.normal(self.blocks, tokens, 1, self.gates)
            u2 = self.draws.normal(self.blocks, 1, width, self.gates)
            return (u1 * u2).flatten(2, 3)
        return self.draws.normal(self.blocks, tokens, width, self.gates).flatten(2, 3)

    def _precondition(self, layer: int, size: int) -> int:
        """Draw the random features in front of a layer, and return how many there are."""
        if self.fastfood is None:
            return size
        self._activate, features = stacked_fastfood(self, layer, size, self.fastfood, self.sigma)
        return features

    def _input(self, X: Tensor, layer: int) -> Tensor:
        if self.normalize and layer > 0:
            X = rms_normalised(X)
        return X if self.fastfood is None else apply_fastfood(self, layer, X, self._activate)

    def _block_width(self, layer: int) -> int:
        tokens = self.n_tokens if layer == 0 else 1
        return self.get_buffer(f"U{layer}").shape[2] // tokens

    def _gated(self, X: Tensor, layer: int) -> Tensor:
        """``(S, B, n, d)`` -> ``(S, B, blocks * gates * n, d / blocks)``."""
        S, B, n, d = X.shape
        x = X.reshape(S, B, n, self.blocks, d // self.blocks).transpose(2, 3).flatten(3)  # (S, B, blocks, n * width)
        with torch.no_grad():  # an indicator has no gradient
            U = self.get_buffer(f"U{layer}")
            opened = (torch.einsum("sbqw,sqwh->sbqh", x, U) >= 0).to(x.dtype)
        return (opened.unsqueeze(-1) * x.unsqueeze(-2)).reshape(S, B, -1, d // self.blocks)


def stacked_fastfood(model: SequenceModel, layer: int, size: int, kind: str, sigma: float) -> tuple[Activate, int]:
    """Draw one map per seed and keep their matrices, ``(S, rows, size)``, as the buffer ``fastfood{layer}`` of the model.

    At the sizes of these models one batched product is faster than S fast transforms. Returns what is done with the
    products, and the number of features.
    """
    maps = [Fastfood(kind, sigma=sigma, seed=1000 * seed + layer).build(size) for seed in model.seeds]
    model.register_buffer(f"fastfood{layer}", torch.stack([each.matrix().float() for each in maps]))
    return maps[0].activate, maps[0].n_outputs


def apply_fastfood(model: SequenceModel, layer: int, X: Tensor, activate: Activate) -> Tensor:
    """Apply each seed's map to its tokens ``(S, B, n, d)``."""
    V = model.get_buffer(f"fastfood{layer}")
    return activate((X.flatten(1, 2) @ V.mT).view(*X.shape[:3], -1), X)

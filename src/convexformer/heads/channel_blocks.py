"""Self-attention on channels that fall into uncorrelated blocks (Sahiner et al. 2022, corollary 3.2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

import torch
from scipy.sparse.csgraph import connected_components
from torch import Tensor, nn

from convexformer.data import TokenDataset
from convexformer.gauges import NuclearNorm, Penalty, SumPenalty
from convexformer.heads.base import HEADS, Head, Layout
from convexformer.heads.gating import mismatch
from convexformer.heads.matrix import SelfAttention
from convexformer.networks import SelfAttentionNetwork
from convexformer.operators import LowRank, Operator, SelfAttentionOperator, SumOperator
from convexformer.operators.budget import sample_chunks
from convexformer.operators.selfattention import exact_gram
from convexformer.weights import Weights

Blocks = tuple[tuple[int, ...], ...]


def channel_blocks(X: Any, mask: Any = None) -> Blocks:
    """Return the blocks of channels that no sample correlates: ``X_i^T X_i`` is block-diagonal for every i.

    Two channels are separated only if their inner products are provably zero in exact arithmetic (disjoint supports,
    integers); one that merely rounds to zero joins them, since small correlations may carry the signal. A single block
    means that the program does not separate.
    """
    tokens = TokenDataset.of(X, mask)
    N, s, d = tokens.X.shape
    nonzero = torch.zeros((d, d), dtype=torch.bool, device=tokens.X.device)
    for part in sample_chunks(N, 4 * d * (s + d), tokens.X, torch.float64):
        x = tokens.X[part].double()
        nonzero |= (x.mT @ x != 0).any(0)
        if bool(nonzero.all()):  # typical data: all channels are joined after the first chunk
            break
        nonzero |= ~exact_gram(x).all(0)
    count, label = connected_components(nonzero.cpu().numpy(), directed=False)
    return tuple(tuple(int(k) for k in (label == b).nonzero()[0]) for b in range(count))


@final
@dataclass(frozen=True, eq=False)
class BlockSelfAttention(Head):
    """Linear self-attention whose program separates by blocks of channels (Sahiner et al. 2022, corollary 3.2)::

        min_Z  sum_i L(sum_b attention of X_i on the Gram matrix of block b with Z_b, Y_i) + beta sum_b ||Z_b||_*

    ``Z_b: (|b| d, |b| c)``; ``Z`` is their flattened variables one after the other. Where ``blocks`` are those that
    :func:`channel_blocks` finds, the optimum is that of :class:`SelfAttention`, with ``sum_b |b|^2`` instead of ``d^2``
    times ``d c`` variables; with other blocks it is a different, smaller model, which is certified as well.

    Parameters
    ----------
    blocks : sequence of sequences of int
        The channels of each block, a partition of ``0..d-1``; :func:`channel_blocks` finds one.
    """

    blocks: Any = None

    name = "block_self_attention"
    per_token = True
    streams = True
    positional = False

    def __post_init__(self) -> None:
        if not isinstance(self.blocks, (list, tuple)) or not all(
            isinstance(b, (list, tuple)) and b for b in self.blocks
        ):
            raise ValueError(
                f"blocks={self.blocks!r} was given; expected lists of channels, such as cf.heads.channel_blocks(X)."
            )
        object.__setattr__(self, "blocks", tuple(tuple(int(k) for k in block) for block in self.blocks))

    def config(self) -> dict[str, Any]:
        """Return the blocks."""
        return {"blocks": self.blocks}

    def traits(self, layout: Layout) -> dict[str, object]:
        """Return the blocks."""
        return {"blocks of channels": str(self.blocks)}

    def check(self, layout: Layout) -> None:
        """Check that the blocks partition the channels."""
        super().check(layout)
        if sorted(k for block in self.blocks for k in block) != list(range(layout.width)):
            raise ValueError(f"the blocks must hold each of the {layout.width} channels once; got {self.blocks}.")

    def operator(self, tokens: TokenDataset, layout: Layout) -> Operator:
        """One self-attention operator per block, on the Gram matrices of its channels."""
        X = tokens.X
        rows = X if layout.per_token else tokens.mean_token[:, None]
        keep = tokens.mask if layout.per_token else None
        parts: list[Operator] = []
        for block in self.blocks:
            own = X[..., list(block)]
            parts.append(SelfAttentionOperator(rows, own.mT @ own, layout.n_outputs, keep))
        return SumOperator(parts)

    def penalty(self, tokens: TokenDataset, layout: Layout) -> Penalty:
        """A nuclear norm for each block."""
        shapes = self._shapes(layout)
        return SumPenalty([NuclearNorm() for _ in shapes], list(shapes))

    def recover(self, weights: Weights, layout: Layout) -> SelfAttentionNetwork:
        """Factors of each block become factors of the whole ``Z`` that are zero outside their block."""
        d, c, Z = layout.width, layout.n_outputs, weights.dense()
        full = LowRank.zeros((d * d, d * c), Z)
        pieces = Z.split([rows * cols for rows, cols in self._shapes(layout)])
        for block, piece, shape in zip(self.blocks, pieces, self._shapes(layout), strict=True):
            own = LowRank.of(piece.view(shape))
            U, V = Z.new_zeros((own.n_terms, d, d)), Z.new_zeros((own.n_terms, d, c))
            U[:, list(block)] = own.U.view(-1, len(block), d)
            V[:, list(block)] = own.V.view(-1, len(block), c)
            full = full.append(U.flatten(1), V.flatten(1), own.block)
        network = SelfAttention().recover(Weights(full, weights.intercept), layout)
        assert isinstance(network, SelfAttentionNetwork)
        return network

    def lift(self, network: nn.Module, layout: Layout) -> Weights:
        """Return the diagonal blocks of the lift of a linear self-attention network whose heads use one block each."""
        lifted = SelfAttention().lift(network, layout)
        Z = lifted.Z
        assert isinstance(Z, LowRank)
        U, V = Z.U.view(-1, layout.width, layout.width), Z.V.view(-1, layout.width, layout.n_outputs)
        parts: list[Tensor] = []
        left = (U.abs().sum((1, 2)) * V.abs().sum((1, 2))).clone()  # l1 mass of each head outside the blocks
        for block in self.blocks:
            own = list(block)
            parts.append((U[:, own].flatten(1).T @ V[:, own].flatten(1)).flatten())
            left -= U[:, own].abs().sum((1, 2)) * V[:, own].abs().sum((1, 2))
        if bool((left > 1e-9 * U.abs().sum() * V.abs().sum()).any()):
            raise mismatch(self.name, f"blocks={self.blocks}", "one of its heads mixes channels of several blocks")
        return Weights(torch.cat(parts), lifted.intercept)

    def random_network(self, layout: Layout, n_heads: int, seed: int = 0, bias: bool = False) -> SelfAttentionNetwork:
        """Return a random network of linear self-attention whose heads use one block each, cyclically."""
        network = SelfAttention().random_network(layout, n_heads, seed, bias)
        assert isinstance(network, SelfAttentionNetwork)
        for j in range(n_heads):
            outside = [k for k in range(layout.width) if k not in self.blocks[j % len(self.blocks)]]
            network.w1.data[j, :, outside] = 0.0
            network.w2.data[j, outside] = 0.0
        return network

    def _shapes(self, layout: Layout) -> list[tuple[int, ...]]:
        return [(len(block) * layout.width, len(block) * layout.n_outputs) for block in self.blocks]


HEADS.register("block_self_attention", BlockSelfAttention)

"""Convex attention with an output per token: three ways to constrain the attention weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

from convexformer.data import TokenDataset
from convexformer.gauges import GroupNorm, NuclearNorm, Penalty, StochasticNorm
from convexformer.heads.base import Layout
from convexformer.heads.gating import mismatch, random_factors
from convexformer.heads.recovery import RANK_TOLERANCE, group_heads, singular_heads
from convexformer.networks import PositionAttentionNetwork, StochasticAttentionNetwork
from convexformer.networks.simplex import random_simplex
from convexformer.networks.token_attention import normalised, pair_norms
from convexformer.operators import PositionOperator
from convexformer.weights import Weights

STOCHASTIC = ("row", "sub", "independent")


@final
@dataclass(frozen=True)
class TokenAttention:
    """The part of :class:`~convexformer.heads.Attention` for targets per token, ``(N, s, c)``; ``Z: (s, s, d, c)``::

        min_Z  sum_{i,r} L(sum_k Z[r, k]^T x_ik, y_ir) + beta g(Z)

    ``"row"``, ``"sub"``: ``f = sum_j W1_j X w2_j w3_j^T`` with ``beta/2 sum_j (||w2_j||_1^2 + ||w3_j||_1^2)``, ``W1_j``
    row-stochastic or substochastic; g is :class:`~convexformer.gauges.StochasticNorm`. ``"independent"``: each head writes
    to one token of its own; g is the sum over pairs (r, k) of group norms (``decay="l1"``) or nuclear norms (``"l2"``).
    """

    stochastic: str
    decay: str

    def check(self, activation: str) -> None:
        """Raise where no tractable program is known."""
        if activation != "linear":
            raise ValueError(
                f"Y is per token and activation={activation!r}: attention with an output per token is linear in this "
                "version. Pass activation='linear', or pooled targets (N,) or (N, c)."
            )
        if self.decay != "l1" and self.stochastic != "independent":
            raise ValueError(
                f"Y is per token, stochastic={self.stochastic!r} and decay={self.decay!r}: the polar of that program is "
                "NP-hard, so nothing could be certified. Use decay='l1', or stochastic='independent', which allows both."
            )

    def operator(self, tokens: TokenDataset, layout: Layout) -> PositionOperator:
        """One matrix for each pair of positions; rows are the real tokens."""
        if self.stochastic == "row" and tokens.X.dtype != torch.float64:
            raise ValueError(
                f"the tokens are {tokens.X.dtype} and stochastic='row' asks for equal row sums, which are certified in "
                "float64 only. Pass dtype=torch.float64 to the problem."
            )
        return PositionOperator(tokens.X, tokens.mask, layout.n_outputs)

    def penalty(self) -> Penalty:
        """The gauge of the heads."""
        if self.stochastic != "independent":
            return StochasticNorm(self.stochastic)
        return GroupNorm("class_token") if self.decay == "l1" else NuclearNorm()

    def recover(self, weights: Weights, layout: Layout) -> StochasticAttentionNetwork | PositionAttentionNetwork:
        """At most two heads for each (channel, output); for ``"independent"`` one for each group or singular value."""
        Z, b = weights.dense(), weights.intercept
        if self.stochastic != "independent":
            return StochasticAttentionNetwork(*stochastic_heads(Z, self.stochastic), b, stochastic=self.stochastic)
        slices = Z.reshape(-1, *Z.shape[-2:])  # (s * s, d, c)
        where, w2, w3 = group_heads(slices) if self.decay == "l1" else singular_heads(slices)
        s = layout.n_tokens
        w1 = one_hot(where % s, s).to(w2)
        return PositionAttentionNetwork(w1, w2, w3, b, decay=self.decay, position=where // s)

    def lift(self, network: nn.Module, layout: Layout) -> Weights:
        """``Z[r, k] = sum_j w1_j[r, k] w2_j w3_j^T``, after checking constraint, decay and sizes."""
        expected = f"stochastic={self.stochastic!r}, decay={self.decay!r}"
        if self.stochastic == "independent":
            if not isinstance(network, PositionAttentionNetwork):
                raise mismatch(
                    "attention", expected, f"it is a {type(network).__name__}, not a PositionAttentionNetwork"
                )
            if network.kind != self.decay:
                raise mismatch("attention", expected, f"its decay is {network.kind!r}")
        else:
            if not isinstance(network, StochasticAttentionNetwork):
                raise mismatch(
                    "attention", expected, f"it is a {type(network).__name__}, not a StochasticAttentionNetwork"
                )
            if network.stochastic == "sub" and self.stochastic == "row":
                raise mismatch("attention", expected, "its attention is substochastic")
        sizes = (network.w1.shape[1], network.w2.shape[1], network.w3.shape[-1])
        if sizes != (layout.n_tokens, layout.width, layout.n_outputs):
            raise mismatch("attention", expected, f"its sizes (s, d, c) are {sizes}")
        return network.lift()

    def random_network(
        self, layout: Layout, n_heads: int, seed: int, bias: bool
    ) -> StochasticAttentionNetwork | PositionAttentionNetwork:
        """Return a random network, a start for gradient training; attention weights are near uniform."""
        s, d, c = layout.n_tokens, layout.width, layout.n_outputs
        generator = torch.Generator().manual_seed(seed)
        b = torch.zeros(c, dtype=torch.float64) if bias else None
        if self.stochastic == "independent":
            w2, w3 = random_factors([(d,), (s, c)], n_heads, seed)
            return PositionAttentionNetwork(random_simplex(n_heads, s, generator), w2, w3, b, decay=self.decay)
        w2, w3 = random_factors([(d,), (c,)], n_heads, seed)
        w1 = random_simplex(n_heads * s, s, generator).view(n_heads, s, s)
        return StochasticAttentionNetwork(w1, w2, w3, b, stochastic=self.stochastic)

    def attention_map(self, weights: Weights) -> Tensor:
        """``(s, s)`` what each token k adds to token r, as a share of the penalty of row r; rows sum to one."""
        Z = weights.dense()
        scores = Z.abs().sum((-2, -1)) if self.stochastic != "independent" else pair_norms(Z, self.decay)
        return normalised(scores)

    def identity(self) -> dict[str, Any]:
        """Return the options that ``Z`` depends on."""
        return {"stochastic": self.stochastic}


def stochastic_heads(Z: Tensor, rows: str) -> tuple[Tensor, Tensor, Tensor]:
    """Split ``Z: (s, s, d, c)`` into heads: attention ``(h, s, s)``, and one-entry factors ``(h, d)`` and ``(h, c)``.

    Positive and negative part of each ``Z_al``, divided by the largest row sum t, are the attention of a head of weight t
    and of one of weight -t. Row-stochastic heads need equal row sums: where ``Z_al`` has equal row sums itself, both parts
    lack the same amount in each row, and adding it to both, evenly over the tokens, leaves their difference as it is.
    """
    s, _, d, c = Z.shape
    pairs = Z.permute(2, 3, 0, 1).reshape(d * c, s, s)
    parts = torch.stack([pairs.clamp_min(0), (-pairs).clamp_min(0)])  # (2, d c, s, s)
    if rows == "row":
        masses = parts.sum((0, -1))  # (d c, s) absolute row sums
        lack = 0.5 * (masses.amax(-1, keepdim=True) - masses)
        parts = parts + lack[None, ..., None] / s
    sizes = parts.sum(-1).amax(-1)  # (2, d c)
    sign, pair = (sizes > RANK_TOLERANCE * sizes.max()).nonzero(as_tuple=True)
    t, w1 = sizes[sign, pair], parts[sign, pair]
    w1 = w1 / (w1.sum(-1, keepdim=True) if rows == "row" else t[:, None, None])
    roots = t.sqrt()[:, None]
    signs = (1.0 - 2.0 * sign.to(Z.dtype))[:, None]
    return w1, roots * one_hot(pair // c, d).to(Z), signs * roots * one_hot(pair % c, c).to(Z)

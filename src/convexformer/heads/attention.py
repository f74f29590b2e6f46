"""Convex attention: one direction for each token, pooled by the simplex weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from convexformer.data import TokenDataset
from convexformer.gauges import GroupNorm, NuclearNorm, Penalty
from convexformer.heads.base import HEADS, Head, Layout, Program
from convexformer.heads.gating import (
    check_activation,
    check_gates,
    draw_gates,
    mismatch,
    random_factors,
    read_gate,
    same_gates,
)
from convexformer.heads.recovery import group_heads, singular_heads
from convexformer.heads.relu import balanced_neurons, position_layers, relu_operator, relu_program
from convexformer.heads.token_attention import STOCHASTIC, TokenAttention
from convexformer.networks import AttentionNetwork
from convexformer.networks.simplex import SimplexNetwork, random_simplex
from convexformer.operators import DenseOperator, GatedOperator, Operator
from convexformer.operators.gates import sample_gates
from convexformer.registry import one_of
from convexformer.weights import Weights


@final
@dataclass(frozen=True, eq=False)
class Attention(Head):
    """Attention with weights in the simplex, ``f = sum_j (w1_j^T X w2_j) w3_j``, as a convex program.

    ``decay="l1"``, penalty ``beta/2 sum_j (||w2_j||_2^2 + ||w3_j||_1^2)`` (Ergen et al. 2022, theorem 1 for one output,
    theorem 2 for several, theorem 3 when gated)::

        min_Z  sum_i L(<Z_l, X_i>_l, y_i) + beta sum_{k,l} ||Z[k, :, l]||_2

    ``decay="l2"``, ordinary weight decay ``beta/2 sum_j (||w2_j||_2^2 + ||w3_j||_2^2)``, which the paper does not treat::

        min_Z  sum_i L(sum_k Z_k^T x_ik, y_i) + beta sum_k ||Z_k||_*

    ``activation="gated_relu"`` multiplies each head by a fixed gate ``1{u1^T X u2 >= 0}``; ``gates`` is their number
    (Gaussian, drawn with ``seed``) or the pair ``(u1: (g, s), u2: (g, d))``. Several heads may share a gate. Weights:
    ``Z: (s, d, c)``, gated ``(g, s, d, c)``.

    ``activation="relu"``: exact ReLU heads ``relu(x_k^T w2_j) w3_j`` on one token ``k`` each, the atoms of theorem 3
    with the cones of their gates. With ReLU the vertices of the simplex are a restriction: a head on a mixture of
    tokens is no mixture of heads on tokens, and the polar over all of the simplex may be larger (by 10% in examples).

    With targets per token, ``(N, s, c)``, a head has attention weights for each of its outputs, ``W1_j: (s, s)``, and
    ``f = sum_j W1_j X w2_j w3_j^T``. ``stochastic="row"``: ``W1_j`` is row-stochastic, the exact program of appendix A.7;
    ``"sub"``: substochastic, which is what theorem A.1 as printed solves; ``"independent"``: every output row has heads of
    its own, which is (9) with the numbers of all tokens as outputs. See
    :class:`~convexformer.heads.token_attention.TokenAttention` for the programs. Weights: ``Z: (s, s, d, c)``.

    Parameters
    ----------
    activation : {"linear", "gated_relu", "relu"}
        ``"gated_relu"`` multiplies each head by a fixed gate; the gates are data of the program, not trained. ``"relu"`` is
        exact, for small problems.
    decay : {"l1", "l2"}
        Weight decay of ``w3``: the squared sum of absolute values, as in the paper, or ordinary weight decay.
    gates : int or pair of arrays
        The number of fixed gates, Gaussian, drawn with ``seed``; or the gates themselves as above. Not used when linear.
    seed : int
        Draws the gates where ``gates`` is a number.
    stochastic : {"row", "sub", "independent"}
        What the attention weights are constrained to where targets are per token.
    """

    activation: str = "linear"
    decay: str = "l1"
    gates: Any = 16
    seed: int = 0
    stochastic: str = "row"

    name = "attention"
    streams = True
    per_token = True
    positional = True

    def __post_init__(self) -> None:
        check_activation(self.activation)
        one_of("decay", self.decay, ("l1", "l2"))
        one_of("stochastic", self.stochastic, STOCHASTIC)
        check_gates(self.gates, parts=2)

    @property
    def combines(self) -> bool:
        """All but exact ReLU."""
        return self.activation != "relu"

    @property
    def _tokenwise(self) -> TokenAttention:
        return TokenAttention(self.stochastic, self.decay)

    def config(self) -> dict[str, Any]:
        """Return the constructor's arguments."""
        return {
            "activation": self.activation,
            "decay": self.decay,
            "gates": self.gates,
            "seed": self.seed,
            "stochastic": self.stochastic,
        }

    def traits(self, layout: Layout) -> dict[str, object]:
        """Return activation, decay and gates; with an output per token, the constraint on the attention."""
        own = self._tokenwise.identity() if layout.per_token else {}
        return own | {"activation": self.activation, "decay": self.decay, "gates": self._gate_vectors(layout)}

    def check(self, layout: Layout) -> None:
        """Check that given gates match the tokens."""
        super().check(layout)
        if layout.per_token:
            self._tokenwise.check(self.activation)
        self._gate_vectors(layout)

    def program(self, tokens: TokenDataset, layout: Layout) -> Program:
        """Return operator and penalty; those of exact ReLU share the hidden rows."""
        if self.activation != "relu":
            return super().program(tokens, layout)
        return relu_program(position_layers(tokens, layout), tokens, layout, self.decay, self.seed)

    def streams_for(self, layout: Layout) -> bool:
        """With an output per sample alone, and not for exact ReLU."""
        return not layout.per_token and self.combines

    def operator(self, tokens: TokenDataset, layout: Layout) -> Operator:
        """Flattened tokens; masked tokens are zero and do not contribute."""
        if self.activation == "relu":
            return relu_operator(position_layers(tokens, layout), tokens, layout)
        if layout.per_token:
            return self._tokenwise.operator(tokens, layout)
        features = tokens.X.reshape(tokens.n_samples, -1)
        axes = (layout.n_tokens, layout.width)
        vectors = self._gate_vectors(layout)
        if vectors is None:
            return DenseOperator(features, axes, layout.n_outputs)
        return GatedOperator(features, sample_gates(tokens.X, *vectors), axes, layout.n_outputs)

    def penalty(self, tokens: TokenDataset, layout: Layout) -> Penalty:
        """Group norm per (token, class), or nuclear norm per token; with ReLU constrained to the cones of all cells."""
        if self.activation == "relu":
            return self.program(tokens, layout).penalty
        if layout.per_token:
            return self._tokenwise.penalty()
        return GroupNorm("class_token") if self.decay == "l1" else NuclearNorm()

    def recover(self, weights: Weights, layout: Layout) -> SimplexNetwork:
        """One head for each nonzero group (l1) or each singular value of a token's slice (l2); ``w1`` is a vertex.

        Zero groups get no head; proposition 1 as printed does not treat them.
        """
        if self.activation == "relu":
            neurons = balanced_neurons(weights, self.decay)
            vertex = nn.functional.one_hot(neurons.block, layout.n_tokens).to(neurons.U)
            options: dict[str, Any] = {"decay": self.decay, "relu": True, "squeeze": layout.squeeze}
            return AttentionNetwork(vertex, neurons.U, neurons.V, weights.intercept, **options)
        if layout.per_token:
            return self._tokenwise.recover(weights, layout)
        slices = weights.dense().reshape(-1, *weights.shape[-2:])  # (g*s, d, c)
        where, w2, w3 = group_heads(slices) if self.decay == "l1" else singular_heads(slices)
        s = layout.n_tokens
        w1 = nn.functional.one_hot(where % s, s).to(w2)
        vectors = self._gate_vectors(layout)
        gated: dict[str, Any] = {}
        if vectors is not None:
            u1, u2 = (u.to(w2.device) for u in vectors)
            gated = {"u1": u1, "u2": u2, "gate_index": where // s}
        return AttentionNetwork(w1, w2, w3, weights.intercept, decay=self.decay, squeeze=layout.squeeze, **gated)

    def lift(self, network: nn.Module, layout: Layout) -> Weights:
        """``Z = sum_j w1_j (x) w2_j (x) w3_j``, after checking gates, sizes and decay."""
        if layout.per_token:
            return self._tokenwise.lift(network, layout)
        vectors = self._gate_vectors(layout)
        u1, u2 = vectors if vectors is not None else (None, None)
        expected = f"decay={self.decay!r}, activation={self.activation!r}"
        if not isinstance(network, AttentionNetwork):
            raise mismatch(self.name, expected, f"it is a {type(network).__name__}, not an AttentionNetwork")
        if network.kind != self.decay:
            raise mismatch(self.name, expected, f"its decay is {network.kind!r}")
        same = same_gates(network.u1, u1) and same_gates(network.u2, u2)
        if not same or network.relu != (self.activation == "relu"):
            raise mismatch(self.name, expected, "its gates differ")
        sizes = (network.w1.shape[1], network.w2.shape[1], network.w3.shape[1])
        if sizes != (layout.n_tokens, layout.width, layout.n_outputs):
            raise mismatch(self.name, expected, f"its sizes (s, d, c) are {sizes}")
        return network.lift()

    def random_network(self, layout: Layout, n_heads: int, seed: int = 0, bias: bool = False) -> SimplexNetwork:
        """Return a random network of this head, a start for gradient training."""
        if layout.per_token:
            return self._tokenwise.random_network(layout, n_heads, seed, bias)
        generator = torch.Generator().manual_seed(seed)
        w2, w3 = random_factors([(layout.width,), (layout.n_outputs,)], n_heads, seed)
        vectors = self._gate_vectors(layout)
        gated: dict[str, Any] = {}
        if vectors is not None:
            index = torch.arange(n_heads) % vectors[0].shape[0]
            gated = {"u1": vectors[0], "u2": vectors[1], "gate_index": index}
        w1 = random_simplex(n_heads, layout.n_tokens, generator)
        if self.activation == "relu":  # one token a head
            w1 = nn.functional.one_hot(w1.argmax(1), layout.n_tokens).to(w1)
        return AttentionNetwork(
            w1,
            w2,
            w3,
            torch.zeros(layout.n_outputs, dtype=torch.float64) if bias else None,
            decay=self.decay,
            relu=self.activation == "relu",
            squeeze=layout.squeeze,
            **gated,
        )

    def token_norms(self, weights: Weights) -> Tensor:
        """``(s,)`` the Frobenius norm of each token's slice (of the tokens attended to, with an output per token).

        With ReLU the sum of the sizes of a token's neurons.
        """
        if self.activation == "relu":
            neurons = balanced_neurons(weights, self.decay)
            sizes = neurons.U.new_zeros(neurons.shape[0])
            return sizes.index_add_(0, neurons.block, neurons.U.square().sum(1))
        return weights.dense().movedim(-3, 0).flatten(1).norm(dim=1)

    def attention_map(self, weights: Weights, layout: Layout) -> Tensor | None:
        """``(s, s)`` with an output per token: what each token adds to each output row, as shares that sum to one."""
        return self._tokenwise.attention_map(weights) if layout.per_token else None

    def _gate_vectors(self, layout: Layout) -> tuple[Tensor, Tensor] | None:
        """``(u1: (g, s), u2: (g, d))``, or None for a linear head."""
        if self.activation != "gated_relu":
            return None
        if isinstance(self.gates, (tuple, list)):
            u1 = read_gate(self.gates[0], (None, layout.n_tokens), "gates[0] (u1)")
            u2 = read_gate(self.gates[1], (None, layout.width), "gates[1] (u2)")
            if u1.shape[0] != u2.shape[0]:
                raise ValueError(
                    f"gates hold {u1.shape[0]} vectors u1 and {u2.shape[0]} vectors u2; expected the same number of both."
                )
            return u1, u2
        both = draw_gates((int(self.gates), layout.n_tokens + layout.width), self.seed)
        return both[:, : layout.n_tokens].contiguous(), both[:, layout.n_tokens :].contiguous()


HEADS.register("attention", Attention)

"""Two-layer networks applied to every token."""

from __future__ import annotations

import numbers
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from convexformer.architecture import HEADS, Head, Layout, Weights
from convexformer.data import TokenDataset
from convexformer.gauges import NuclearNorm, Penalty
from convexformer.heads.gating import check_activation, check_gates, foreign, read_gate, same_gates
from convexformer.heads.recovery import singular_heads
from convexformer.networks import MLPNetwork
from convexformer.operators import DenseOperator, GatedOperator, Operator
from convexformer.operators.gates import draw, token_gates


@final
@dataclass(frozen=True, eq=False)
class MLP(Head):
    """``f(X)_t = sum_j D_j(x_t) (x_t^T w1_j) w2_j`` with ordinary weight decay (Sahiner et al. 2022)::

        min_Z  sum_i L(sum_g D_g X_i Z_g, Y_i) + beta sum_g ||Z_g||_*

    Targets per token, or pooled: the mean over the real tokens, which then depends on the tokens only through the gated
    mean token of each gate. ``gates`` is their number or ``h: (g, d)``, gate ``1{X h >= 0}``; a gate may carry several
    neurons. Weights: ``Z: (d, c)``, gated ``(g, d, c)``.
    """

    activation: str = "linear"
    gates: Any = 16
    seed: int = 0

    name = "mlp"
    per_token = True
    positional = False

    def __post_init__(self) -> None:
        check_activation(self.name, self.activation)
        check_gates(self.gates, parts=1)

    def config(self) -> dict[str, Any]:
        """Return the constructor's arguments."""
        return {"activation": self.activation, "gates": self.gates, "seed": self.seed}

    def check(self, layout: Layout) -> None:
        """Check that given gates match the tokens."""
        super().check(layout)
        self._gate_vectors(layout)

    def operator(self, tokens: TokenDataset, layout: Layout) -> Operator:
        """Per token: rows are real tokens. Pooled: rows are samples, features the gated mean tokens."""
        h, c, d = self._gate_vectors(layout), layout.n_outputs, layout.width
        if h is None:
            features = tokens.real_tokens if layout.per_token else tokens.mean_token
            return DenseOperator(features, (d,), c)
        if layout.per_token:
            return GatedOperator(tokens.real_tokens, token_gates(tokens.real_tokens, h), (d,), c)
        open_gates = token_gates(tokens.X, h).to(tokens.X.dtype)  # (N, s, g)
        pooled = open_gates.mT @ tokens.X / tokens.lengths[:, None, None]  # (N, g, d)
        return DenseOperator(pooled.flatten(1), (h.shape[0], d), c)

    def penalty(self) -> Penalty:
        """Nuclear norm, one for each gate."""
        return NuclearNorm()

    def recover(self, weights: Weights, layout: Layout) -> MLPNetwork:
        """One neuron for each singular value of each gate's block."""
        where, w1, w2 = singular_heads(weights.Z.reshape(-1, *weights.Z.shape[-2:]))
        h = self._gate_vectors(layout)
        gated = {} if h is None else {"gates": h.to(w1.device), "gate_index": where}
        return MLPNetwork(w1, w2, weights.intercept, per_token=layout.per_token, squeeze=layout.squeeze, **gated)

    def lift(self, network: nn.Module, layout: Layout) -> Weights:
        """``Z_g = sum_j w1_j w2_j^T``, after checking gates and sizes."""
        expected = f"activation={self.activation!r}"
        if not isinstance(network, MLPNetwork):
            raise foreign(self.name, expected, f"it is a {type(network).__name__}, not an MLPNetwork")
        if not same_gates(network.gates, self._gate_vectors(layout)):
            raise foreign(self.name, expected, "its gates are others")
        sizes = (network.w1.shape[1], network.w2.shape[1])
        if sizes != (layout.width, layout.n_outputs) or network.per_token != layout.per_token:
            raise foreign(self.name, expected, f"its sizes (d, c) are {sizes}, per token: {network.per_token}")
        return network.lift()

    def random_network(self, layout: Layout, n_heads: int, seed: int = 0, bias: bool = False) -> MLPNetwork:
        """Return a random network of this head, a start for gradient training."""
        generator = torch.Generator().manual_seed(seed)
        w1, w2 = (
            torch.randn((n_heads, size), generator=generator, dtype=torch.float64) / size**0.5
            for size in (layout.width, layout.n_outputs)
        )
        h = self._gate_vectors(layout)
        gated = {} if h is None else {"gates": h, "gate_index": torch.arange(n_heads) % h.shape[0]}
        start = torch.zeros(layout.n_outputs, dtype=torch.float64) if bias else None
        return MLPNetwork(w1, w2, start, per_token=layout.per_token, squeeze=layout.squeeze, **gated)

    def _gate_vectors(self, layout: Layout) -> Tensor | None:
        """``(g, d)``, or None for a linear head."""
        if self.activation == "linear":
            return None
        if isinstance(self.gates, numbers.Integral):
            return draw((int(self.gates), layout.width), self.seed)
        return read_gate(self.gates, layout.width, "gates")


HEADS.register("mlp", MLP)

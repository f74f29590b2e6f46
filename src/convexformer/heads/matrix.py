"""Self-attention and the MLP-Mixer: heads whose weights are matrices on both sides."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from convexformer.data import TokenDataset
from convexformer.gauges import NuclearNorm, Penalty
from convexformer.heads.base import HEADS, Head, Layout, Program
from convexformer.heads.gating import check_activation, check_gates, gate_tensor, mismatch, random_factors, same_gates
from convexformer.heads.relu import balanced_neurons, mixer_layer, pair_layer, relu_operator, relu_program
from convexformer.networks import MixerNetwork, SelfAttentionNetwork
from convexformer.networks.selfattention import MatrixNetwork
from convexformer.operators import (
    DenseOperator,
    GatedMixerOperator,
    GatedSelfAttentionOperator,
    HiddenLayer,
    LowRank,
    MixerOperator,
    Neurons,
    Operator,
    SelfAttentionOperator,
)
from convexformer.operators.gates import AttentionRule, MixerRule, hold_gates
from convexformer.weights import Operand, Weights


class MatrixHead(Head):
    """Base of both heads: gates given by square matrices, recovery by singular vectors, the lift.

    ``Z = sum_j vec_F(W1_j) vec_C(W2_j)^T`` (columns of ``W1`` one after the other, rows of ``W2`` one after the
    other): the vectorisation that appendix A of Sahiner et al. requires but does not state. With ``activation="relu"``
    the weights are the neurons ``(vec_F(W1_j), vec_C(W2_j))`` themselves; see :class:`~convexformer.gauges.ReLUNorm`.
    """

    activation: str
    gates: Any
    seed: int

    per_token = True
    streams = True
    network_type: type[MatrixNetwork]

    def __post_init__(self) -> None:
        check_activation(self.activation)
        check_gates(self.gates, parts=1)

    @property
    def combines(self) -> bool:
        """All but exact ReLU."""
        return self.activation != "relu"

    @abstractmethod
    def side(self, layout: Layout) -> int:
        """Return the side of the square ``W1``: d for self-attention, s for the mixer."""

    @abstractmethod
    def hidden_layer(self, tokens: TokenDataset, layout: Layout) -> HiddenLayer:
        """Return the rows of the hidden layer, for exact ReLU."""

    def program(self, tokens: TokenDataset, layout: Layout) -> Program:
        """Return operator and penalty; those of exact ReLU share the hidden rows."""
        if self.activation != "relu":
            return super().program(tokens, layout)
        return relu_program([self.hidden_layer(tokens, layout)], tokens, layout, "l2", self.seed)

    def config(self) -> dict[str, Any]:
        """Return the constructor's arguments."""
        return {"activation": self.activation, "gates": self.gates, "seed": self.seed}

    def traits(self, layout: Layout) -> dict[str, object]:
        """Return activation and gates."""
        return {"activation": self.activation, "gates": self._gate_matrices(layout)}

    def check(self, layout: Layout) -> None:
        """Check that given gates match the tokens."""
        super().check(layout)
        self._gate_matrices(layout)

    def recover(self, weights: Weights, layout: Layout) -> MatrixNetwork:
        """One head for each singular value: ``W1 = sqrt(sigma) unvec_F(u)``, ``W2 = sqrt(sigma) unvec_C(v)``."""
        n, c, d = self.side(layout), layout.n_outputs, layout.width
        if self.activation == "relu":
            neurons = balanced_neurons(weights)
            w1, w2 = neurons.U.view(-1, n, n).mT, neurons.V.view(-1, d, c)
            options: dict[str, Any] = {"per_token": layout.per_token, "squeeze": layout.squeeze}
            return self.network_type(w1, w2, weights.intercept, relu=True, **options)
        Z = self._as_factors(weights.Z, layout).balanced()
        H = self._gate_matrices(layout)
        gated: dict[str, Any] = {} if H is None else {"gates": H.to(Z.device), "gate_index": Z.block}
        m = Z.n_terms
        w1, w2 = Z.U.view(m, n, n).mT, Z.V.view(m, d, c)
        return self.network_type(w1, w2, weights.intercept, per_token=layout.per_token, squeeze=layout.squeeze, **gated)

    def lift(self, network: nn.Module, layout: Layout) -> Weights:
        """``Z = sum_j vec_F(W1_j) vec_C(W2_j)^T``, after checking gates and sizes."""
        expected = f"activation={self.activation!r}"
        if not isinstance(network, self.network_type):
            raise mismatch(self.name, expected, f"it is a {type(network).__name__}, not a {self.network_type.__name__}")
        if not same_gates(network.gates, self._gate_matrices(layout)) or network.relu != (self.activation == "relu"):
            raise mismatch(self.name, expected, "its gates differ")
        sizes = (network.w1.shape[1], network.w2.shape[1], network.w2.shape[2])
        if sizes != (self.side(layout), layout.width, layout.n_outputs) or network.per_token != layout.per_token:
            raise mismatch(self.name, expected, f"its sizes are {sizes}, per token: {network.per_token}")
        return network.lift()

    def random_network(self, layout: Layout, n_heads: int, seed: int = 0, bias: bool = False) -> MatrixNetwork:
        """Return a random network of this head, a start for gradient training."""
        n = self.side(layout)
        w1, w2 = random_factors([(n, n), (layout.width, layout.n_outputs)], n_heads, seed)
        H = self._gate_matrices(layout)
        gated = {} if H is None else {"gates": H, "gate_index": torch.arange(n_heads) % H.shape[0]}
        start = torch.zeros(layout.n_outputs, dtype=torch.float64) if bias else None
        options: dict[str, Any] = {"per_token": layout.per_token, "squeeze": layout.squeeze, **gated}
        return self.network_type(w1, w2, start, relu=self.activation == "relu", **options)

    def _as_factors(self, Z: Operand, layout: Layout) -> LowRank:
        """Return weights of the program as factors of the full ``Z``."""
        assert not isinstance(Z, Neurons)  # those of exact ReLU are recovered by themselves
        return Z if isinstance(Z, LowRank) else LowRank.of(Z)

    def _gate_matrices(self, layout: Layout) -> Tensor | None:
        """``(g, n, n)``, or None for a linear head."""
        if self.activation != "gated_relu":
            return None
        n = self.side(layout)
        return gate_tensor(self.gates, (None, n, n), self.seed)


@final
@dataclass(frozen=True, eq=False)
class SelfAttention(MatrixHead):
    """``f(X) = sum_j (D_j . (X W1_j X^T)) X W2_j`` with ordinary weight decay (Sahiner et al. 2022, theorems 3.1, C.1)::

        min_Z  sum_i L(sum_g D_g-gated attention with Z_g, Y_i) + beta sum_g ||Z_g||_*,    Z_g: (d^2, d c)

    Linear attention needs the tokens only through Gram matrices, and through the mean token when pooled: they are read
    once. ``gates`` is their number or ``H: (g, d, d)``, gate ``1{X H X^T >= 0}``. Where the channels fall into blocks that
    no sample correlates, :class:`BlockSelfAttention` has the same optimum with fewer variables (corollary 3.2).

    Parameters
    ----------
    activation : {"linear", "gated_relu", "relu"}
        ``"gated_relu"`` multiplies each head by a fixed gate; the gates are data of the program, not trained. ``"relu"`` is
        exact, for small problems.
    gates : int or array (g, d, d)
        The number of fixed gates, Gaussian, drawn with ``seed``; or the gates themselves. Not used when linear.
    seed : int
        Draws the gates where ``gates`` is a number.
    """

    activation: str = "linear"
    gates: Any = 4
    seed: int = 0

    name = "self_attention"
    positional = False
    network_type = SelfAttentionNetwork

    def side(self, layout: Layout) -> int:
        """d: ``W1`` acts on channels."""
        return layout.width

    def operator(self, tokens: TokenDataset, layout: Layout) -> Operator:
        """Gram matrices where linear, gated scores otherwise; pairs of tokens with exact ReLU."""
        if self.activation == "relu":
            return relu_operator([pair_layer(tokens, layout)], tokens, layout)
        X, c = tokens.X, layout.n_outputs
        if (H := self._gate_matrices(layout)) is not None:
            pool = None
            if not layout.per_token:
                shape = X.shape[:2]
                real = torch.ones(shape, device=X.device) if tokens.mask is None else tokens.mask
                pool = real.double() / tokens.lengths.double()[:, None]
            return GatedSelfAttentionOperator(X, hold_gates(X, AttentionRule(H.to(X.device))), c, pool, tokens.mask)
        keep = tokens.mask if layout.per_token else None
        return SelfAttentionOperator.of_tokens(X, None if layout.per_token else tokens.lengths, c, keep)

    def penalty(self, tokens: TokenDataset, layout: Layout) -> Penalty:
        """Nuclear norm, one for each gate; with ReLU constrained to the cones of all cells (theorem 3.3)."""
        return self.program(tokens, layout).penalty if self.activation == "relu" else NuclearNorm()

    def hidden_layer(self, tokens: TokenDataset, layout: Layout) -> HiddenLayer:
        """Pairs of tokens."""
        return pair_layer(tokens, layout)


@final
@dataclass(frozen=True, eq=False)
class MLPMixer(MatrixHead):
    """``f(X) = sum_j (D_j . (W1_j X)) W2_j`` with ordinary weight decay (Sahiner et al. 2022, theorems 4.1, C.2)::

        min_Z  sum_i L(sum_g D_g-gated mixing with Z_g, Y_i) + beta sum_g ||Z_g||_*,    Z_g: (s^2, d c)

    Pooled and linear it is exactly the smaller program ``sum_i L(sum_t X_i[t] Z_t, y_i) + beta sqrt(s) ||Z||_*`` with
    ``Z: (s, d c)``. ``gates`` is their number or ``H: (g, s, s)``, gate ``1{H X >= 0}``. Tokens are mixed by position, so
    there are no masks.

    Parameters
    ----------
    activation : {"linear", "gated_relu", "relu"}
        ``"gated_relu"`` multiplies each head by a fixed gate; the gates are data of the program, not trained. ``"relu"`` is
        exact, for small problems.
    gates : int or array (g, s, s)
        The number of fixed gates, Gaussian, drawn with ``seed``; or the gates themselves. Not used when linear.
    seed : int
        Draws the gates where ``gates`` is a number.
    """

    activation: str = "linear"
    gates: Any = 4
    seed: int = 0

    name = "mlp_mixer"
    positional = True
    masks = False
    network_type = MixerNetwork

    def side(self, layout: Layout) -> int:
        """s: ``W1`` acts on positions."""
        return layout.n_tokens

    def operator(self, tokens: TokenDataset, layout: Layout) -> Operator:
        """Flattened tokens when pooled and linear, mixing otherwise."""
        if self.activation == "relu":
            return relu_operator([mixer_layer(tokens, layout)], tokens, layout)
        X, c = tokens.X, layout.n_outputs
        if (H := self._gate_matrices(layout)) is not None:
            return GatedMixerOperator(X, hold_gates(X, MixerRule(H.to(X.device))), c, pooled=not layout.per_token)
        if layout.per_token:
            return MixerOperator(X, c)
        return DenseOperator(X.flatten(1), (layout.n_tokens, layout.width), c, columns=layout.width * c)

    def penalty(self, tokens: TokenDataset, layout: Layout) -> Penalty:
        """Nuclear norm, times ``sqrt(s)`` in the reduced program; with ReLU constrained to cones (theorem 4.2)."""
        if self.activation == "relu":
            return self.program(tokens, layout).penalty
        return NuclearNorm(layout.n_tokens**0.5 if self._reduced(layout) else 1.0)

    def hidden_layer(self, tokens: TokenDataset, layout: Layout) -> HiddenLayer:
        """Entries of ``W1 X``."""
        return mixer_layer(tokens, layout)

    def _reduced(self, layout: Layout) -> bool:
        return self.activation == "linear" and not layout.per_token

    def _as_factors(self, Z: Operand, layout: Layout) -> LowRank:
        """``z v^T`` of the reduced program is the atom ``W1 = 1 z^T``, ``W2 = v`` of the full one."""
        small = super()._as_factors(Z, layout)
        if not self._reduced(layout):
            return small
        s = layout.n_tokens
        U = small.U[:, :, None].expand(-1, s, s).flatten(1)  # W1[o, t] = z[t], stored by columns
        return LowRank(U, small.V, small.block, (s * s, Z.shape[1]))


HEADS.register("self_attention", SelfAttention)
HEADS.register("mlp_mixer", MLPMixer)

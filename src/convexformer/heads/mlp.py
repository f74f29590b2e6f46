"""Two-layer networks on every token, after a fixed mixing of tokens: MLP, PoolFormer, FNet."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from convexformer.data import TokenDataset
from convexformer.gauges import NuclearNorm, Penalty
from convexformer.heads.base import HEADS, Head, Layout, Program
from convexformer.heads.gating import (
    check_activation,
    check_gates,
    gate_tensor,
    is_whole,
    mismatch,
    random_factors,
    same_gates,
)
from convexformer.heads.recovery import singular_heads
from convexformer.heads.relu import balanced_neurons, relu_operator, relu_program, token_layer
from convexformer.networks import MLPNetwork
from convexformer.operators import DenseOperator, GatedOperator, Operator
from convexformer.operators.gates import token_gates
from convexformer.operators.mixing import ask_about_class_token, check_grid, fourier_mix, local_mean
from convexformer.weights import Weights


class TokenMLP(Head):
    """``f(X)_t = sum_j D_j(h_t) (h_t^T w1_j) w2_j`` with ordinary weight decay, ``h = h(X)`` a fixed mixing of tokens::

        min_Z  sum_i L(sum_g D_g h(X_i) Z_g, Y_i) + beta sum_g ||Z_g||_*

    (Sahiner et al. 2022, theorems C.5, C.7). Targets per token, or pooled: the mean over the real tokens, which then
    depends on them only through the gated mean of each gate. ``gates`` is their number or ``h: (g, d)``, gate
    ``1{h(X) h >= 0}``; several neurons may share a gate. Weights: ``Z: (d, c)``, gated ``(g, d, c)``.

    ``activation="relu"``: ``D_j(h_t) = 1{h_t^T w1_j >= 0}``, exact ReLU (theorem C.6); see
    :class:`~convexformer.gauges.ReLUNorm`.
    """

    activation: str
    gates: Any
    seed: int

    per_token = True
    streams = True

    @property
    def combines(self) -> bool:
        """All but exact ReLU."""
        return self.activation != "relu"

    @abstractmethod
    def mix(self, tokens: TokenDataset) -> TokenDataset:
        """Return ``h(X)``."""

    @abstractmethod
    def mixing(self) -> dict[str, Any]:
        """Return the options by which :class:`MLPNetwork` mixes tokens in the same way."""

    def __post_init__(self) -> None:
        check_activation(self.activation)
        check_gates(self.gates, parts=1)

    def config(self) -> dict[str, Any]:
        """Return the constructor's arguments."""
        return {"activation": self.activation, "gates": self.gates, "seed": self.seed}

    def traits(self, layout: Layout) -> dict[str, object]:
        """Return activation, gates and mixing."""
        return {
            "activation": self.activation,
            "gates": self._gate_vectors(layout),
            "mixing of tokens": str(self.mixing()),
        }

    def check(self, layout: Layout) -> None:
        """Check that given gates match the tokens."""
        super().check(layout)
        self._gate_vectors(layout)

    def program(self, tokens: TokenDataset, layout: Layout) -> Program:
        """Return operator and penalty; those of exact ReLU share the hidden rows."""
        if self.activation != "relu":
            return super().program(tokens, layout)
        mixed = self.mix(tokens)
        return relu_program([token_layer(mixed, layout)], mixed, layout, "l2", self.seed)

    def operator(self, tokens: TokenDataset, layout: Layout) -> Operator:
        """Per token: rows are real tokens. Pooled: rows are samples, features the gated mean tokens."""
        tokens = self.mix(tokens)
        if self.activation == "relu":
            return relu_operator([token_layer(tokens, layout)], tokens, layout)
        h, c, d = self._gate_vectors(layout), layout.n_outputs, layout.width
        if h is None:
            features = tokens.real_tokens if layout.per_token else tokens.mean_token
            return DenseOperator(features, (d,), c)
        if layout.per_token:
            return GatedOperator(tokens.real_tokens, token_gates(tokens.real_tokens, h), (d,), c)
        open_gates = token_gates(tokens.X, h).to(tokens.X.dtype)  # (N, s, g)
        pooled = open_gates.mT @ tokens.X / tokens.lengths[:, None, None]  # (N, g, d)
        return DenseOperator(pooled.flatten(1), (h.shape[0], d), c)

    def penalty(self, tokens: TokenDataset, layout: Layout) -> Penalty:
        """Nuclear norm, one for each gate; with ReLU constrained to the cones of all cells."""
        return self.program(tokens, layout).penalty if self.activation == "relu" else NuclearNorm()

    def recover(self, weights: Weights, layout: Layout) -> MLPNetwork:
        """One neuron for each singular value of each gate's block."""
        if self.activation == "relu":
            neurons = balanced_neurons(weights)
            return MLPNetwork(neurons.U, neurons.V, weights.intercept, relu=True, **self._options(layout))
        where, w1, w2 = singular_heads(weights.dense().reshape(-1, *weights.shape[-2:]))
        h = self._gate_vectors(layout)
        gated: dict[str, Any] = {} if h is None else {"gates": h.to(w1.device), "gate_index": where}
        return MLPNetwork(w1, w2, weights.intercept, **self._options(layout), **gated)

    def lift(self, network: nn.Module, layout: Layout) -> Weights:
        """``Z_g = sum_j w1_j w2_j^T``, after checking mixing, gates and sizes."""
        expected = f"activation={self.activation!r}"
        if not isinstance(network, MLPNetwork):
            raise mismatch(self.name, expected, f"it is a {type(network).__name__}, not an MLPNetwork")
        if network.mixing() != self.mixing():
            raise mismatch(self.name, expected, f"it mixes tokens by {network.mixing()}, not {self.mixing()}")
        if not same_gates(network.gates, self._gate_vectors(layout)) or network.relu != (self.activation == "relu"):
            raise mismatch(self.name, expected, "its gates differ")
        sizes = (network.w1.shape[1], network.w2.shape[1])
        if sizes != (layout.width, layout.n_outputs) or network.per_token != layout.per_token:
            raise mismatch(self.name, expected, f"its sizes (d, c) are {sizes}, per token: {network.per_token}")
        return network.lift()

    def random_network(self, layout: Layout, n_heads: int, seed: int = 0, bias: bool = False) -> MLPNetwork:
        """Return a random network of this head, a start for gradient training."""
        w1, w2 = random_factors([(layout.width,), (layout.n_outputs,)], n_heads, seed)
        h = self._gate_vectors(layout)
        gated: dict[str, Any] = {} if h is None else {"gates": h, "gate_index": torch.arange(n_heads) % h.shape[0]}
        start = torch.zeros(layout.n_outputs, dtype=torch.float64) if bias else None
        relu = self.activation == "relu"
        return MLPNetwork(w1, w2, start, relu=relu, **self._options(layout), **gated)

    def _options(self, layout: Layout) -> dict[str, Any]:
        return {"per_token": layout.per_token, "squeeze": layout.squeeze, **self.mixing()}

    def _gate_vectors(self, layout: Layout) -> Tensor | None:
        """``(g, d)``, or None for a linear head."""
        if self.activation != "gated_relu":
            return None
        return gate_tensor(self.gates, (None, layout.width), self.seed)


@final
@dataclass(frozen=True, eq=False)
class MLP(TokenMLP):
    """The network on the tokens themselves, ``h(X) = X``: see :class:`TokenMLP` for the program.

    Parameters
    ----------
    activation : {"linear", "gated_relu", "relu"}
        ``"gated_relu"`` multiplies each head by a fixed gate; the gates are data of the program, not trained. ``"relu"`` is
        exact, for small problems.
    gates : int or array (g, d)
        The number of fixed gates, Gaussian, drawn with ``seed``; or the gates themselves. Not used when linear.
    seed : int
        Draws the gates where ``gates`` is a number.
    """

    activation: str = "linear"
    gates: Any = 16
    seed: int = 0

    name = "mlp"
    positional = False

    def mix(self, tokens: TokenDataset) -> TokenDataset:
        """Return the tokens."""
        return tokens

    def mixing(self) -> dict[str, Any]:
        """No mixing."""
        return {"mix": "none", "window": 1, "grid": None}


@final
@dataclass(frozen=True, eq=False)
class PoolFormer(TokenMLP):
    """The network on local means: ``h(X)_t`` averages the real tokens in a window centred at t.

    ``window`` is odd; with ``grid=(h, w)`` windows are squares on the grid. See :class:`TokenMLP` for the program.

    Parameters
    ----------
    activation : {"linear", "gated_relu", "relu"}
        ``"gated_relu"`` multiplies each head by a fixed gate; the gates are data of the program, not trained. ``"relu"`` is
        exact, for small problems.
    window : int
        Odd number of tokens in a window, on a grid the side of a square; edges average fewer.
    grid : (int, int), optional
        Height and width of the image whose patches the tokens are, row by row; None takes tokens in a line.
    gates : int or array (g, d)
        The number of fixed gates, Gaussian, drawn with ``seed``; or the gates themselves. Not used when linear.
    seed : int
        Draws the gates where ``gates`` is a number.
    """

    activation: str = "linear"
    window: int = 3
    grid: tuple[int, int] | None = None
    gates: Any = 16
    seed: int = 0

    name = "poolformer"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not is_whole(self.window) or self.window < 1 or self.window % 2 == 0:
            raise ValueError(f"window={self.window} was given; expected an odd number of tokens, such as 3.")
        object.__setattr__(self, "window", int(self.window))  # a NumPy integer is not JSON

    @property
    def positional(self) -> bool:  # type: ignore[override]
        """True with a grid, which fixes the number of tokens; plain windows take any number."""
        return self.grid is not None

    def config(self) -> dict[str, Any]:
        """Return the constructor's arguments."""
        return {**super().config(), "window": self.window, "grid": self.grid}

    def check(self, layout: Layout) -> None:
        """Check that the grid holds the tokens."""
        super().check(layout)
        check_grid(self.grid, layout.n_tokens)
        ask_about_class_token(self.name, self.grid, layout.n_tokens)

    def mix(self, tokens: TokenDataset) -> TokenDataset:
        """Return local means."""
        return local_mean(tokens, self.window, self.grid)

    def mixing(self) -> dict[str, Any]:
        """Local means."""
        return {"mix": "pool", "window": self.window, "grid": None if self.grid is None else tuple(self.grid)}


@final
@dataclass(frozen=True, eq=False)
class FNet(TokenMLP):
    """The network on ``h(X) = Re(F_s X F_d^T)``, the unnormalised two-dimensional Fourier transform; no masks.

    See :class:`TokenMLP` for the program.

    Parameters
    ----------
    activation : {"linear", "gated_relu", "relu"}
        ``"gated_relu"`` multiplies each head by a fixed gate; the gates are data of the program, not trained. ``"relu"`` is
        exact, for small problems.
    gates : int or array (g, d)
        The number of fixed gates, Gaussian, drawn with ``seed``; or the gates themselves. Not used when linear.
    seed : int
        Draws the gates where ``gates`` is a number.
    """

    activation: str = "linear"
    gates: Any = 16
    seed: int = 0

    name = "fnet"
    positional = True
    masks = False

    def check(self, layout: Layout) -> None:
        """Ask about a class token."""
        super().check(layout)
        ask_about_class_token(self.name, None, layout.n_tokens)

    def mix(self, tokens: TokenDataset) -> TokenDataset:
        """Return the real part of the transform."""
        return fourier_mix(tokens)

    def mixing(self) -> dict[str, Any]:
        """Fourier."""
        return {"mix": "fourier", "window": 1, "grid": None}


HEADS.register("mlp", MLP)
HEADS.register("poolformer", PoolFormer)
HEADS.register("fnet", FNet)

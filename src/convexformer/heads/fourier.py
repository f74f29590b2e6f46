"""Fourier neural operators, whole and in blocks of channels."""

from __future__ import annotations

import math
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
from convexformer.heads.relu import balanced_neurons, relu_operator, relu_program, shift_layers
from convexformer.networks import FourierNetwork
from convexformer.operators import DenseOperator, FourierOperator, Operator
from convexformer.operators.fourier import fourier_gates
from convexformer.operators.mixing import ask_about_class_token, check_grid
from convexformer.weights import Weights


class FourierHead(Head):
    """``f(X)_b = sum_j D_j . (circ(X_b) w1_j) w2_j^T`` on each of B blocks of channels, with ordinary weight decay::

        min_Z  sum_i L(sum_g D_g circ(X_i) Z_g, Y_i) + beta sum_{b,g} ||Z_bg||_*,    Z_bg: (s d/B, c/B)

    ``circ(X) = [roll(X, u) for u in 0..s-1]``; with ``grid=(h, w)`` shifts are two-dimensional. Weights: ``Z: (s d, c)``,
    gated ``(g, s d, c)``, in blocks with a leading axis B. **Pooled and linear, the head is a linear head on the mean
    token** (``Z: (d, c)``, nuclear norm over ``sqrt(s)``): it ignores the order of the tokens. No masks.

    ``activation="relu"``: exact ReLU (theorems 4.5, 4.8); see :class:`~convexformer.gauges.ReLUNorm`.
    """

    activation: str
    grid: tuple[int, int] | None
    gates: Any
    seed: int

    per_token = True
    streams = True
    positional = True
    masks = False

    def __post_init__(self) -> None:
        check_activation(self.activation)
        check_gates(self.gates, parts=1)

    @property
    def combines(self) -> bool:
        """All but exact ReLU."""
        return self.activation != "relu"

    @property
    @abstractmethod
    def n_blocks(self) -> int:
        """B, the number of blocks of channels."""

    @property
    @abstractmethod
    def blocked(self) -> bool:
        """Whether ``Z`` has the axis B."""

    @abstractmethod
    def gate_shape(self, layout: Layout) -> tuple[int | None, ...]:
        """Return the shape in which users give gates."""

    def traits(self, layout: Layout) -> dict[str, object]:
        """Return activation, gates, grid and blocks."""
        grid = check_grid(self.grid, layout.n_tokens)
        own = {"activation": self.activation, "grid": str(grid), "blocks": self.n_blocks}
        return {**own, "gates": self._gates(layout)}

    def check(self, layout: Layout) -> None:
        """Check grid, gates and divisibility."""
        super().check(layout)
        check_grid(self.grid, layout.n_tokens)
        ask_about_class_token(self.name, self.grid, layout.n_tokens)
        if layout.width % self.n_blocks or layout.n_outputs % self.n_blocks:
            raise ValueError(
                f"blocks={self.n_blocks} must divide the token size d={layout.width} and the number of outputs "
                f"c={layout.n_outputs}; each block of channels has its own block of outputs. {_blocks_that_fit(layout)}"
            )
        self._gates(layout)

    def program(self, tokens: TokenDataset, layout: Layout) -> Program:
        """Return operator and penalty; those of exact ReLU share the hidden rows."""
        if self.activation != "relu":
            return super().program(tokens, layout)
        layers = shift_layers(tokens, layout, check_grid(self.grid, layout.n_tokens), self.n_blocks)
        return relu_program(layers, tokens, layout, "l2", self.seed)

    def operator(self, tokens: TokenDataset, layout: Layout) -> Operator:
        """FFT over the tokens; the mean token where the program reduces to it; shifted tokens with exact ReLU."""
        grid, B, c = check_grid(self.grid, layout.n_tokens), self.n_blocks, layout.n_outputs
        if self.activation == "relu":
            return relu_operator(shift_layers(tokens, layout, grid, B), tokens, layout)
        if self._reduced(layout):
            if not self.blocked:
                return DenseOperator(tokens.mean_token, (layout.width,), c)
            # block b maps its channels to its outputs, as the Fourier operator on a single token does
            return FourierOperator(tokens.mean_token[:, None], (1,), c, blocks=B, pooled=True, axes="b")
        h = self._gates(layout)
        gates = None if h is None else fourier_gates(tokens.X, h, grid)
        axes = ("b" if self.blocked else "") + ("" if h is None else "g")
        return FourierOperator(tokens.X, grid, c, gates, blocks=B, pooled=not layout.per_token, axes=axes)

    def penalty(self, tokens: TokenDataset, layout: Layout) -> Penalty:
        """Nuclear norm of each block, over ``sqrt(s)`` in the reduced program; with ReLU constrained to cones."""
        if self.activation == "relu":
            return self.program(tokens, layout).penalty
        return NuclearNorm(layout.n_tokens**-0.5 if self._reduced(layout) else 1.0)

    def recover(self, weights: Weights, layout: Layout) -> FourierNetwork:
        """One kernel for each singular value; in the reduced program kernels are constant over shifts."""
        s, B = layout.n_tokens, self.n_blocks
        if self.activation == "relu":
            neurons = balanced_neurons(weights)
            kernels = neurons.U.reshape(-1, s, layout.width // B)
            return self._network(kernels, neurons.V, weights.intercept, neurons.block, neurons.block, layout)
        where, w1, w2 = singular_heads(weights.dense().reshape(-1, *weights.shape[-2:]))
        if self._reduced(layout):
            # the kernel 1_s (x) w / s has the same pooled output; balancing leaves w / s^(3/4) and s^(-1/4) w2
            w1, w2 = w1[:, None].expand(-1, s, -1) * s**-0.75, w2 * s**-0.25
        g = 1 if self.activation == "linear" else weights.shape[-3]
        return self._network(w1.reshape(-1, s, layout.width // B), w2, weights.intercept, where // g, where % g, layout)

    def lift(self, network: nn.Module, layout: Layout) -> Weights:
        """``Z = sum_j w1_j w2_j^T`` by block and gate, after checking grid, gates and sizes."""
        expected = f"activation={self.activation!r}, grid={self.grid}, blocks={self.n_blocks}"
        if not isinstance(network, FourierNetwork):
            raise mismatch(self.name, expected, f"it is a {type(network).__name__}, not a FourierNetwork")
        if not same_gates(network.gates, self._gates(layout)) or network.relu != (self.activation == "relu"):
            raise mismatch(self.name, expected, "its gates differ")
        sizes = (
            network.grid,
            network.blocks,
            network.blocked,
            *network.w1.shape[1:],
            network.w2.shape[1],
            network.per_token,
        )
        B = self.n_blocks
        own = (check_grid(self.grid, layout.n_tokens), B, self.blocked, layout.n_tokens, layout.width // B)
        if sizes != (*own, layout.n_outputs // B, layout.per_token):
            raise mismatch(self.name, expected, f"its sizes are {sizes}")
        return network.lift()

    def random_network(self, layout: Layout, n_heads: int, seed: int = 0, bias: bool = False) -> FourierNetwork:
        """Return a random network of this head, a start for gradient training."""
        B, h = self.n_blocks, self._gates(layout)
        sizes: list[tuple[int, ...]] = [(layout.n_tokens, layout.width // B), (layout.n_outputs // B,)]
        w1, w2 = random_factors(sizes, n_heads, seed)
        index = torch.arange(n_heads)
        gate = index // B % (1 if h is None else h.shape[1])
        start = torch.zeros(layout.n_outputs, dtype=torch.float64) if bias else None
        return self._network(w1, w2, start, index % B, gate, layout)

    def _network(
        self, w1: Tensor, w2: Tensor, bias: Tensor | None, block: Tensor, gate: Tensor, layout: Layout
    ) -> FourierNetwork:
        h = self._gates(layout)
        gated = {} if h is None else {"gates": h.to(w1.device), "gate_index": gate}
        return FourierNetwork(
            w1,
            w2,
            bias,
            block=block,
            blocks=self.n_blocks,
            blocked=self.blocked,
            grid=check_grid(self.grid, layout.n_tokens),
            relu=self.activation == "relu",
            per_token=layout.per_token,
            squeeze=layout.squeeze,
            **gated,
        )

    def _reduced(self, layout: Layout) -> bool:
        return self.activation == "linear" and not layout.per_token

    def _gates(self, layout: Layout) -> Tensor | None:
        """``(B, g, s, d/B)``, or None for a linear head."""
        if self.activation != "gated_relu":
            return None
        h = gate_tensor(self.gates, self.gate_shape(layout), self.seed)
        return h if self.blocked else h[None]


@final
@dataclass(frozen=True, eq=False)
class FNO(FourierHead):
    """The Fourier neural operator (Sahiner et al. 2022, theorems 4.4, C.3): see :class:`FourierHead` for the program.

    ``gates`` is their number or ``h: (g, s, d)``, gate ``1{sum_u roll(X, u) h[u] >= 0}``.

    Parameters
    ----------
    activation : {"linear", "gated_relu", "relu"}
        ``"gated_relu"`` multiplies each head by a fixed gate; the gates are data of the program, not trained. ``"relu"`` is
        exact, for small problems.
    grid : (int, int), optional
        Height and width of the image whose patches the tokens are, row by row; None takes tokens in a line.
    gates : int or array (g, s, d)
        The number of fixed gates, Gaussian, drawn with ``seed``; or the gates themselves. Not used when linear.
    seed : int
        Draws the gates where ``gates`` is a number.
    """

    activation: str = "linear"
    grid: tuple[int, int] | None = None
    gates: Any = 4
    seed: int = 0

    name = "fno"

    @property
    def n_blocks(self) -> int:
        """All channels together."""
        return 1

    @property
    def blocked(self) -> bool:
        """No axis of blocks."""
        return False

    def config(self) -> dict[str, Any]:
        """Return the constructor's arguments."""
        return {"activation": self.activation, "grid": self.grid, "gates": self.gates, "seed": self.seed}

    def gate_shape(self, layout: Layout) -> tuple[int | None, ...]:
        """``(g, s, d)``."""
        return (None, layout.n_tokens, layout.width)


@final
@dataclass(frozen=True, eq=False)
class BlockFNO(FourierHead):
    """The block Fourier neural operator (Sahiner et al. 2022, theorems 4.7, C.4), ``blocks`` blocks of channels.

    ``gates`` is a number for each block or ``h: (B, g, s, d/B)``. See :class:`FourierHead` for the program.

    Parameters
    ----------
    activation : {"linear", "gated_relu", "relu"}
        ``"gated_relu"`` multiplies each head by a fixed gate; the gates are data of the program, not trained. ``"relu"`` is
        exact, for small problems.
    blocks : int
        The number of blocks of channels; it divides both ``d`` and ``c``.
    grid : (int, int), optional
        Height and width of the image whose patches the tokens are, row by row; None takes tokens in a line.
    gates : int or array (B, g, s, d/B)
        The number of fixed gates, Gaussian, drawn with ``seed``; or the gates themselves. Not used when linear.
    seed : int
        Draws the gates where ``gates`` is a number.
    """

    activation: str = "linear"
    blocks: int = 2
    grid: tuple[int, int] | None = None
    gates: Any = 4
    seed: int = 0

    name = "block_fno"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not is_whole(self.blocks) or self.blocks < 1:
            raise ValueError(f"blocks={self.blocks} was given; expected a positive whole number.")
        object.__setattr__(self, "blocks", int(self.blocks))  # a NumPy integer is not JSON

    @property
    def n_blocks(self) -> int:
        """The number of blocks."""
        return self.blocks

    @property
    def blocked(self) -> bool:
        """``Z`` has an axis of blocks."""
        return True

    def config(self) -> dict[str, Any]:
        """Return the constructor's arguments."""
        own = {"activation": self.activation, "blocks": self.blocks, "grid": self.grid}
        return {**own, "gates": self.gates, "seed": self.seed}

    def gate_shape(self, layout: Layout) -> tuple[int | None, ...]:
        """``(B, g, s, d/B)``."""
        return (self.blocks, None, layout.n_tokens, layout.width // self.blocks)


def _blocks_that_fit(layout: Layout) -> str:
    """Say what to pass instead of a number of blocks that does not divide channels and outputs."""
    common = math.gcd(layout.width, layout.n_outputs)
    fitting = [str(B) for B in range(2, common + 1) if common % B == 0]
    if fitting:
        return f"Pass head=cf.heads.BlockFNO(blocks=B) with B one of {', '.join(fitting)}."
    hint = " Two classes have two outputs with loss='cross_entropy'." if layout.n_outputs == 1 else ""
    return f"Only blocks=1 divides both, and that is head='fno'.{hint}"


HEADS.register("fno", FNO)
HEADS.register("block_fno", BlockFNO)

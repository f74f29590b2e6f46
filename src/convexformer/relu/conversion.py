"""From a gated ReLU head to a ReLU network of the same function, by cone decomposition."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from convexformer.arrangements import split_in_cone
from convexformer.data import TokenDataset
from convexformer.heads import FNO, MLP, BlockFNO, FNet, Head, MLPMixer, PoolFormer, SelfAttention
from convexformer.networks import Network
from convexformer.operators import LowRank, Neurons, ReLUOperator
from convexformer.solution import Solution
from convexformer.weights import Weights

CONVERTIBLE = (MLP, PoolFormer, FNet, FNO, BlockFNO, SelfAttention, MLPMixer)
STEPS = 20  # reweightings of a cone decomposition: the price is then within a percent or so of the least


@final
@dataclass(frozen=True)
class Conversion:
    """A ReLU network with the outputs of a gated head on some tokens, and what it costs."""

    head: Head
    """The head with ``activation="relu"``, whose problems the network belongs to."""
    weights: Weights
    network: Network
    gated_decay: float
    """The gauge of the gated weights."""
    relu_decay: float
    """``network.decay()``."""

    @property
    def price(self) -> float:
        """``relu_decay / gated_decay``, at least one."""
        return self.relu_decay / self.gated_decay if self.gated_decay > 0 else 1.0


def from_gated(solution: Solution, X: Any, mask: Any = None) -> Conversion:
    """Turn the solution of a gated ReLU head into a ReLU network with equal outputs on the tokens ``X``.

    A gated neuron ``1{x^T h >= 0} (x^T u) v`` is ``relu(x^T a) v - relu(x^T b) v`` on the rows ``x`` of the hidden
    layer if ``u = a - b`` with ``a`` and ``b`` in the cone of the gate's pattern (Mishkin, Sahiner and Pilanci 2022,
    for gated MLPs). The gate's own vector is inside that cone, so there always is such a pair; the one of about the
    least ``|a| + |b|`` is taken. On other tokens the two functions differ where a gate and its neurons do. Pass
    training and test tokens together for equal outputs on both.
    """
    head = solution.head
    if not isinstance(head, CONVERTIBLE) or head.activation != "gated_relu":
        raise ValueError(
            f"the {head.name} head of this solution cannot be converted; expected activation='gated_relu' and one of "
            f"{', '.join(kind.name for kind in CONVERTIBLE)}. (A gate of the attention head belongs to a whole sample; "
            "its pattern need not be one that a single token can have.)"
        )
    layout = solution.layout
    relu_head = replace(head, activation="relu")
    length = layout.n_tokens if head.positional else None
    tokens = TokenDataset.of(X, mask, dtype=torch.float64, length=length)
    operator = relu_head.operator(tokens, layout)
    assert isinstance(operator, ReLUOperator)
    Z, gates = _factors(solution, operator), _gate_vectors(head, solution)
    U, V, block = [], [], []
    for (b, g), own in _blocks(Z, len(operator.layers)):
        K = _cone(operator.hidden_rows()[b], gates[b, g])
        for u, v in zip(Z.U[own], Z.V[own], strict=True):
            parts = _inside(K, *split_in_cone(K, u.numpy(), STEPS, 1e-5), gates[b, g].numpy())
            for part, sign in zip(parts, (1.0, -1.0), strict=True):
                if part.any():
                    U.append(torch.from_numpy(part))
                    V.append(sign * v)
                    block.append(b)
    shape = operator.weight_shape
    neurons = Neurons(torch.stack(U), torch.stack(V), torch.tensor(block), shape) if U else Neurons.none(shape, Z.U)
    b0 = solution.weights.intercept
    weights = Weights(neurons, None if b0 is None else b0.double(), relu_head.identity(layout))
    network = relu_head.recover(weights, layout)
    gated_decay = float(Z.singular_values().sum())
    return Conversion(relu_head, weights, network, gated_decay, float(network.decay().detach()))


def _factors(solution: Solution, operator: ReLUOperator) -> LowRank:
    """The weights of a gated head as factors, blocks ``(B g)``; by singular vectors, so that norms are least."""
    Z = solution.weights.to(device="cpu", dtype=torch.float64).Z
    if isinstance(Z, LowRank):
        return Z.balanced()
    assert isinstance(Z, Tensor)
    return LowRank.of(Z.reshape(-1, *operator.weight_shape[-2:]))


def _blocks(Z: LowRank, n_blocks: int) -> list[tuple[tuple[int, int], slice]]:
    """``((block of channels, gate), terms)`` of the factors in use."""
    per_block = max(1, Z.n_blocks // n_blocks)
    return [(divmod(k, per_block), own) for k, own in Z.spans()]


def _gate_vectors(head: Head, solution: Solution) -> Tensor:
    """``(B, g, p)`` the gates in the coordinates of the hidden rows."""
    gates = head.traits(solution.layout)["gates"]
    assert isinstance(gates, Tensor)
    if isinstance(head, (SelfAttention, MLPMixer)):
        return gates.mT.flatten(1)[None]  # vec_F
    if isinstance(head, (FNO, BlockFNO)):
        return gates.flatten(2)
    return gates[None]


def _inside(K: np.ndarray, a: np.ndarray, b: np.ndarray, gate: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Move both parts along the gate, which is inside the cone, by what rounding has left of violations."""
    low, margin = np.minimum(K @ a, K @ b), K @ gate
    outside = (low < 0) & (margin > 0)
    step = float((-low[outside] / margin[outside]).max(initial=0.0))
    small = step * np.linalg.norm(gate) <= 1e-3 * (np.linalg.norm(a) + np.linalg.norm(b))
    return (a + step * gate, b + step * gate) if small and a.any() and b.any() else (a, b)


def _cone(rows: Tensor, gate: Tensor) -> np.ndarray:
    """``K = (2 D - 1) rows`` for the gate's pattern ``D``, each direction once."""
    sides = rows @ gate.to(rows)
    K = torch.where(sides >= 0, 1.0, -1.0)[:, None] * rows
    sizes = K.norm(dim=1)
    K = K[sizes > 0] / sizes[sizes > 0, None]
    return np.unique(K.numpy().round(14), axis=0) if len(K) else K.numpy()

"""The nonconvex attention model of Ergen et al."""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor

from convexformer.networks.base import TokenNetwork, fixed, neuron_weights, optional, owned
from convexformer.operators.gates import open_samples
from convexformer.registry import one_of
from convexformer.weights import Weights


@final
class AttentionNetwork(TokenNetwork):
    """``f(X) = sum_j D_j(X) (w1_j^T X w2_j) w3_j + bias`` with ``w1_j`` in the simplex (Ergen et al. 2022, (9), (11)).

    ``w1: (h, s)`` attention weights over tokens, ``w2: (h, d)``, ``w3: (h, c)``. ``D_j = 1`` for a linear head; for a gated
    one ``D_j(X) = 1{u1^T X u2 >= 0}`` with the fixed gate ``gate_index[j]`` of ``u1: (g, s)``, ``u2: (g, d)``. With ``relu``
    the gate is the head's own: ``1{w1_j^T X w2_j >= 0}``.
    ``decay()`` is ``1/2 sum_j (||w2_j||_2^2 + ||w3_j||_1^2)`` for ``decay="l1"`` (theorems 1-3) and
    ``1/2 sum_j (||w2_j||_2^2 + ||w3_j||_2^2)`` for ``decay="l2"`` (ordinary weight decay).
    """

    u1: Tensor | None
    u2: Tensor | None
    gate_index: Tensor | None

    def __init__(
        self,
        w1: Tensor,
        w2: Tensor,
        w3: Tensor,
        bias: Tensor | None = None,
        *,
        decay: str = "l1",
        u1: Tensor | None = None,
        u2: Tensor | None = None,
        gate_index: Tensor | None = None,
        relu: bool = False,
        squeeze: bool = False,
    ) -> None:
        super().__init__()
        if relu and u1 is not None:
            raise ValueError("a network has fixed gates or ReLU heads, not both: relu=True and u1 were given.")
        self.w1, self.w2, self.w3 = owned(w1), owned(w2), owned(w3)
        self.bias = optional(bias)
        self.kind = one_of("decay", decay, ("l1", "l2"))
        self.relu, self.squeeze = relu, squeeze
        self.keep("u1", u1)
        self.keep("u2", u2)
        self.keep("gate_index", gate_index)

    def forward(self, X: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return outputs ``(N, c)``, or ``(N,)`` if the targets were ``(N,)``."""
        tokens = self.tokens(X, mask, length=self.w1.shape[1])
        scores = self._scores(tokens.X)
        if self.u1 is not None and self.u2 is not None:
            scores = scores * open_samples(tokens.X.detach(), self.u1, self.u2)[:, self.gate_index].to(scores.dtype)
        if self.relu:
            scores = scores.relu()
        outputs = scores @ self.w3
        if self.bias is not None:
            outputs = outputs + self.bias
        return outputs.squeeze(-1) if self.squeeze else outputs

    def _scores(self, X: Tensor) -> Tensor:
        """``(N, h)`` the values ``w1_j^T X_i w2_j``, in the order of products that needs less memory.

        A traced network is for batches of any size, and few samples at a time: its order is fixed.
        """
        if torch.compiler.is_compiling() or X.shape[0] < self.w2.shape[1]:
            return ((X @ self.w2.T) * self.w1.T).sum(1)
        return X.flatten(1) @ torch.einsum("hs,hd->sdh", self.w1, self.w2).flatten(0, 1)

    def decay(self) -> Tensor:
        """Return the weight decay of the paper's nonconvex problem."""
        last = self.w3.abs().sum(1).square() if self.kind == "l1" else self.w3.square().sum(1)
        return 0.5 * (self.w2.square().sum() + last.sum())

    def lift(self) -> Weights:
        """``Z = sum_j w1_j (x) w2_j (x) w3_j``, summed over the heads of each gate."""
        w1, w2, w3 = self.w1.detach(), self.w2.detach(), self.w3.detach()
        low, total = float(w1.min()) if w1.numel() else 0.0, w1.sum(1)
        if low < -1e-9 or bool(((total - 1).abs() > 1e-6).any()):
            worst = float(total[(total - 1).abs().argmax()])
            raise ValueError(
                f"w1 must lie in the simplex: its smallest entry is {low:.3g} and a row sums to {worst:.6g}. The nonconvex "
                "problem has that constraint; normalise w1 (softmax or projection) before certifying."
            )
        bias = fixed(self.bias)
        if self.relu:
            top, token = w1.max(dim=1) if len(w1) else (w1.new_ones(0), w1.new_zeros(0, dtype=torch.int64))
            if bool((top < 1 - 1e-6).any()):
                raise ValueError(
                    "this ReLU network has heads whose w1 is no vertex of the simplex; the exact program is that of heads "
                    "on one token each (a ReLU head on a mixture of tokens is no mixture of ReLU heads on tokens)."
                )
            return neuron_weights(w2 * top[:, None], w3, token, w1.shape[1], bias)
        if self.u1 is None or self.gate_index is None:
            return Weights(torch.einsum("hs,hd,hc->sdc", w1, w2, w3), bias)
        Z = w1.new_zeros((self.u1.shape[0], w1.shape[1], w2.shape[1], w3.shape[1]))
        for gate in self.gate_index.unique():  # one gate at a time: no (h, s, d, c) tensor
            own = self.gate_index == gate
            Z[gate] = torch.einsum("hs,hd,hc->sdc", w1[own], w2[own], w3[own])
        return Weights(Z, bias)

    @property
    def token_size(self) -> tuple[int | None, int]:
        """``(s, d)``."""
        return self.w1.shape[1], self.w2.shape[1]

    def config(self) -> dict[str, Any]:
        """Return the options."""
        return {"decay": self.kind, "relu": self.relu, "squeeze": self.squeeze}

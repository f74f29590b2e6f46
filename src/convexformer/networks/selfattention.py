"""Multi-head self-attention and the MLP-Mixer, as in the theorems of Sahiner et al. (2022)."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from convexformer.networks.base import FactorNetwork
from convexformer.operators import LowRank
from convexformer.operators.gated_attention import attention_gates
from convexformer.operators.gated_mixer import mixer_gates
from convexformer.weights import Weights

HEADS_AT_ONCE = 8  # intermediates (N, heads, s, s) and (N, heads, s, d) are formed for so many heads at a time


class MatrixNetwork(FactorNetwork):
    """Base of both networks: square ``W1_j``, matrices ``W2_j``, and the lift."""

    def groups(self) -> list[slice]:
        """Cut the heads into groups."""
        return [slice(j, j + HEADS_AT_ONCE) for j in range(0, self.w1.shape[0], HEADS_AT_ONCE)]

    def lift(self) -> Weights:
        """``Z = sum_j vec_F(W1_j) vec_C(W2_j)^T``, block by gate, as factors; with ``relu`` the neurons themselves."""
        U, V = self.w1.detach().mT.flatten(1), self.w2.detach().flatten(1)
        if self.relu:
            return self.neurons(U, V)
        bias = self.own_bias()
        shape: tuple[int, ...] = (U.shape[1], V.shape[1])
        if self.gates is None or self.gate_index is None:
            return Weights(LowRank(U, V, torch.zeros(len(U), dtype=torch.int64, device=U.device), shape), bias)
        return Weights(LowRank(U, V, self.gate_index, (self.gates.shape[0], *shape)), bias)


@final
class SelfAttentionNetwork(MatrixNetwork):
    """``f(X) = sum_j (D_j . (X W1_j X^T)) X W2_j + bias`` (Sahiner et al. 2022, (12)); pooled: its mean over real tokens.

    ``w1: (h, d, d)``, ``w2: (h, d, c)``; ``D_j = 1{X H X^T >= 0}`` with ``H = gates[gate_index[j]]``, ``H = W1_j`` with
    ``relu``, or 1.
    """

    def forward(self, X: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return outputs ``(N, c)``, or ``(N, s, c)`` per token."""
        tokens = self.tokens(X, mask)
        x = tokens.X
        rows = x if self.per_token else tokens.mean()[:, None]
        if self.gates is None and not self.relu:
            context = x.mT @ x  # (N, d, d): linear attention needs the Gram matrix alone
            outputs = torch.einsum("nod,hde,nef,hfc->noc", rows, self.w1, context, self.w2)
        else:
            outputs = x.new_zeros((*rows.shape[:2], self.w2.shape[2]))
            open_gates = None if self.gates is None else attention_gates(x.detach(), self.gates)
            real = None if tokens.mask is None else tokens.mask.to(x.dtype)
            for own in self.groups():
                scores = x[:, None] @ self.w1[own] @ x.mT[:, None]  # (N, heads, s, s)
                if open_gates is None or self.gate_index is None:
                    scores = scores.relu()
                else:
                    scores = scores * open_gates[:, self.gate_index[own]].to(x.dtype)
                if not self.per_token:  # the mean over real tokens comes first: it is linear
                    scores = scores if real is None else scores * real[:, None, :, None]
                    scores = scores.sum(2, keepdim=True) / tokens.lengths[:, None, None, None]
                outputs = outputs + (scores @ (x[:, None] @ self.w2[own])).sum(1)
        return self.finish(outputs if self.per_token else outputs[:, 0], tokens.mask)

    @property
    def token_size(self) -> tuple[int | None, int]:
        """Any number of tokens."""
        return None, self.w1.shape[1]


@final
class MixerNetwork(MatrixNetwork):
    """``f(X) = sum_j (D_j . (W1_j X)) W2_j + bias`` (Sahiner et al. 2022, (17)); pooled: its mean over tokens.

    ``w1: (h, s, s)``, ``w2: (h, d, c)``; ``D_j = 1{H X >= 0}`` with ``H = gates[gate_index[j]]``, ``H = W1_j`` with
    ``relu``, or 1.
    """

    def lift(self) -> Weights:
        """As in the base class; pooled and linear the smaller ``Z = sum_j mean_o(W1_j[o]) vec_C(W2_j)^T`` (see the head)."""
        whole = super().lift()
        if self.per_token or self.relu or self.gates is not None:
            return whole
        rows = self.w1.detach().mean(1)  # (h, s): the mean over output tokens depends on W1 only through this
        return Weights(rows.T @ self.w2.detach().flatten(1), whole.intercept)

    def forward(self, X: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return outputs ``(N, c)``, or ``(N, s, c)`` per token."""
        tokens = self.tokens(X, mask)
        x = tokens.X
        if x.shape[1] != self.w1.shape[1] or tokens.mask is not None:
            raise ValueError(
                f"this mixer takes {self.w1.shape[1]} tokens and no mask; got X {tuple(x.shape)}"
                f"{', and a mask' if tokens.mask is not None else ''}."
            )
        outputs = x.new_zeros((x.shape[0], x.shape[1] if self.per_token else 1, self.w2.shape[2]))
        open_gates = None if self.gates is None else mixer_gates(x.detach(), self.gates)  # (N, g, s, d)
        linear = open_gates is None and not self.relu
        for own in self.groups():
            w1 = self.w1[own] if self.per_token or not linear else self.w1[own].mean(1, keepdim=True)
            mixed = w1 @ x[:, None]  # (N, heads, s, d)
            if open_gates is not None and self.gate_index is not None:
                mixed = mixed * open_gates[:, self.gate_index[own]].to(x.dtype)
            elif self.relu:
                mixed = mixed.relu()
            if not self.per_token and not linear:
                mixed = mixed.mean(2, keepdim=True)
            outputs = outputs + (mixed @ self.w2[own]).sum(1)
        return self.finish(outputs if self.per_token else outputs[:, 0], None)

    @property
    def token_size(self) -> tuple[int | None, int]:
        """``(s, d)``."""
        return self.w1.shape[1], self.w2.shape[1]

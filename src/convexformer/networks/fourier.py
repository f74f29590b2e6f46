"""Fourier neural operators with real kernels."""

from __future__ import annotations

import math
from typing import Any, final

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from convexformer.networks.base import FactorNetwork
from convexformer.networks.convolution import convolve, open_fourier
from convexformer.weights import Weights


@final
class FourierNetwork(FactorNetwork):
    """``f(X)_block = sum_j D_j . (circ(X_block) w1_j) w2_j^T + bias`` (Sahiner et al. 2022, (24), (28)).

    ``w1: (h, s, d/B)`` kernels over shifts and channels, ``w2: (h, c/B)``, ``block: (h,)`` the channel block of each;
    ``gates: (B, g, s, d/B)`` with ``gate_index: (h,)``, or None; with ``relu`` the gate of a kernel is its own sign. Pooled:
    the mean over tokens.
    """

    block: Tensor
    fft: bool = True
    """False takes matrices instead of FFTs, for runtimes without complex numbers."""

    def __init__(
        self,
        w1: Tensor,
        w2: Tensor,
        bias: Tensor | None = None,
        *,
        block: Tensor,
        blocks: int = 1,
        blocked: bool = False,
        grid: tuple[int, ...] = (),
        **shared: Any,
    ) -> None:
        super().__init__(w1, w2, bias, **shared)
        self.blocks, self.blocked = blocks, blocked
        self.grid = tuple(grid) or (w1.shape[1],)
        self.keep("block", block)

    def forward(self, X: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return outputs ``(N, c)``, or ``(N, s, c)`` per token."""
        tokens = self.tokens(X, mask)
        if tokens.mask is not None or tokens.n_tokens != math.prod(self.grid):
            raise ValueError(
                f"this network takes {math.prod(self.grid)} tokens and no mask; got X {tuple(tokens.X.shape)}"
                f"{', and a mask' if tokens.mask is not None else ''}."
            )
        x = tokens.X
        w1, w2 = (in_block(w, self.block, self.blocks) for w in (self.w1, self.w2))  # (h, s, d), (h, c)
        if self.gates is None and not (self.per_token or self.relu):  # the mean over tokens of a circular convolution
            return self.finish(tokens.mean() @ w1.sum(1).T @ w2, None)
        hidden = convolve(x, w1, self.grid, self.fft)  # (N, s, h)
        if self.gates is not None and self.gate_index is not None:
            g = self.gates.shape[1]
            blocks = torch.arange(self.blocks, device=x.device).repeat_interleave(g)
            kernels = in_block(self.gates.flatten(0, 1), blocks, self.blocks)  # (B g, s, d)
            gates = open_fourier(x.detach(), kernels, self.grid, self.fft)
            hidden = hidden * gates[..., self.block * g + self.gate_index].to(hidden.dtype)
        if self.relu:
            hidden = hidden.relu()
        return self.finish((hidden if self.per_token else hidden.mean(1)) @ w2, None)

    @property
    def token_size(self) -> tuple[int | None, int]:
        """``(s, d)``."""
        return math.prod(self.grid), self.blocks * self.w1.shape[2]

    def lift(self) -> Weights:
        """``Z = sum_j w1_j w2_j^T`` by block and gate; for pooled linear outputs the sum over shifts (see the head).

        With ``relu`` the neurons themselves.
        """
        if self.relu:
            return self.neurons(self.w1.flatten(1), self.w2, self.block, self.blocks)
        Z = self._dense(self.w1.detach(), self.w2.detach())
        if self.gates is None and not self.per_token:
            B, _, _, cb = Z.shape
            Z = Z.view(B, 1, math.prod(self.grid), -1, cb).sum(2)
        if self.gates is None:
            Z = Z[:, 0]
        if not self.blocked:
            Z = Z[0]
        return Weights(Z, self.own_bias())

    def _dense(self, w1: Tensor, w2: Tensor) -> Tensor:
        """``(B, g, s*d/B, c/B)``."""
        g = 1 if self.gates is None else self.gates.shape[1]
        slot = self.block * g + (0 if self.gate_index is None else self.gate_index)
        flat = w1.flatten(1)
        Z = [flat[slot == k].T @ w2[slot == k] for k in range(self.blocks * g)]
        return torch.stack(Z).view(self.blocks, g, flat.shape[1], w2.shape[1])

    def config(self) -> dict[str, Any]:
        """Return the options."""
        return {**super().config(), "blocks": self.blocks, "grid": list(self.grid), "blocked": self.blocked}


def in_block(w: Tensor, block: Tensor, blocks: int) -> Tensor:
    """``(h, ..., k)`` to ``(h, ..., blocks k)``: row j in the channels of ``block[j]``, zeros in the others."""
    own = one_hot(block, blocks).to(w.dtype)
    return (own.view(-1, *(1,) * (w.ndim - 2), blocks, 1) * w[..., None, :]).flatten(-2)

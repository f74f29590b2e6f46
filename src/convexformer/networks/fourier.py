"""Fourier neural operators with real kernels."""

from __future__ import annotations

import math
from typing import Any, final

import torch
from torch import Tensor

from convexformer.networks.base import FactorNetwork, fixed
from convexformer.operators.fourier import FourierOperator, fourier_gates
from convexformer.weights import Weights


@final
class FourierNetwork(FactorNetwork):
    """``f(X)_block = sum_j D_j . (circ(X_block) w1_j) w2_j^T + bias`` (Sahiner et al. 2022, (24), (28)).

    ``w1: (h, s, d/B)`` kernels over shifts and channels, ``w2: (h, c/B)``, ``block: (h,)`` the channel block of each;
    ``gates: (B, g, s, d/B)`` with ``gate_index: (h,)``, or None; with ``relu`` the gate of a kernel is its own sign. Pooled:
    the mean over tokens.
    """

    block: Tensor

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
        self.register_buffer("block", fixed(block))

    def forward(self, X: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return outputs ``(N, c)``, or ``(N, s, c)`` per token."""
        tokens = self.tokens(X, mask)
        if tokens.mask is not None or tokens.n_tokens != math.prod(self.grid):
            raise ValueError(
                f"this network takes {math.prod(self.grid)} unmasked tokens; got shape {tuple(tokens.X.shape)}."
            )
        if self.relu:
            return self.finish(self._relu_outputs(tokens.X), None)
        X = tokens.X.to(torch.promote_types(tokens.X.dtype, torch.float32))  # torch has no FFT in half precision
        Z, c = self._dense(self.w1, self.w2).to(X.dtype), self.blocks * self.w2.shape[1]
        gates = None if self.gates is None else fourier_gates(tokens.X.detach(), self.gates, self.grid)
        operator = FourierOperator(X, self.grid, c, gates, blocks=self.blocks, pooled=not self.per_token)
        outputs = operator.apply(Z).to(tokens.X.dtype)
        if self.per_token:
            outputs = outputs.view(tokens.n_samples, tokens.n_tokens, c)
        return self.finish(outputs, None)

    def _relu_outputs(self, X: Tensor) -> Tensor:
        """One convolution a kernel, a ReLU, and its output weights in the outputs of its block."""
        wide = torch.promote_types(X.dtype, torch.float32)
        field = X.to(wide).view(len(X), *self.grid, X.shape[2])
        axes = tuple(range(1, 1 + len(self.grid)))
        spectrum = torch.fft.fftn(field, dim=axes)
        db, cb = X.shape[2] // self.blocks, self.w2.shape[1]
        outputs = X.new_zeros((*X.shape[:2], self.blocks * cb))
        for j, b in enumerate(self.block.tolist()):
            kernel = torch.fft.fftn(self.w1[j].to(wide).view(*self.grid, db), dim=tuple(range(len(self.grid))))
            product = (spectrum[..., b * db : (b + 1) * db] * kernel).sum(-1)
            hidden = torch.fft.ifftn(product, dim=axes).real.flatten(1).relu().to(X.dtype)  # (N, s)
            part = hidden[..., None] * self.w2[j]
            outputs = outputs + torch.nn.functional.pad(part, (b * cb, (self.blocks - 1 - b) * cb))
        return outputs if self.per_token else outputs.mean(1)

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

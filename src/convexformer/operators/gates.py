"""Fixed gates: which samples or tokens a gate lets through. Always decided in float64, so precision never moves them."""

from __future__ import annotations

import torch
from torch import Tensor

GATE_CHUNK = 1 << 24  # entries of a float64 temporary, at most: 128 MiB


def draw(shape: tuple[int, ...], seed: int) -> Tensor:
    """Return Gaussian gate vectors, the same on every machine for one seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def sample_gates(X: Tensor, u1: Tensor, u2: Tensor) -> Tensor:
    """``(N, g)`` bool, ``1{u1_g^T X_i u2_g >= 0}`` for ``X: (N, s, d)``, ``u1: (g, s)``, ``u2: (g, d)``."""
    u1, u2 = u1.to(X.device, torch.float64), u2.to(X.device, torch.float64)
    rank_one = (u1[:, :, None] * u2[:, None, :]).flatten(1).T  # (s d, g): one product, and no temporary of size N s g
    step = max(1, GATE_CHUNK // (X.shape[1] * X.shape[2]))
    parts = [x.flatten(1).to(torch.float64) @ rank_one >= 0 for x in X.split(step)]
    return torch.cat(parts)


def token_gates(H: Tensor, h: Tensor) -> Tensor:
    """``(..., g)`` bool, ``1{h_g^T H_t >= 0}`` for tokens ``H: (..., d)`` and ``h: (g, d)``."""
    h = h.to(H.device, torch.float64)
    flat = H.reshape(-1, H.shape[-1])
    step = max(1, GATE_CHUNK // (H.shape[-1] + h.shape[0]))
    parts = [rows.to(torch.float64) @ h.T >= 0 for rows in flat.split(step)]
    return torch.cat(parts).view(*H.shape[:-1], h.shape[0])

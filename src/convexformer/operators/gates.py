"""Fixed gates: which samples or tokens a gate lets through. Always decided in float64, so precision never moves them.

A gate depends on its own sample alone. The gates of matrix heads have an entry for each pair of tokens or for each token and
channel, many times the tokens: they are stored as booleans, as bits, or decided anew whenever they are needed, whichever
the memory budget allows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol, final

import torch
from torch import Tensor

from convexformer.operators.budget import sample_chunks, worth_storing

TILE = 32
"""Samples whose gates are decided in one go when they are not stored: always the same ones together, whatever the chunk,
so that rounding cannot open a gate in one product and close it in the next."""
PACKED_SHARE = 8
"""Booleans are stored as they are up to this fraction of the budget; unpacking bits costs time."""


def draw(shape: tuple[int, ...], seed: int) -> Tensor:
    """Return Gaussian gate vectors, the same on every machine for one seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def sample_gates(X: Tensor, u1: Tensor, u2: Tensor) -> Tensor:
    """``(N, g)`` bool, ``1{u1_g^T X_i u2_g >= 0}`` for ``X: (N, s, d)``, ``u1: (g, s)``, ``u2: (g, d)``."""
    chunks = sample_chunks(len(X), 2 * X.shape[1] * X.shape[2], X, torch.float64)
    return torch.cat([open_samples(X[part], u1, u2) for part in chunks])


def open_samples(X: Tensor, u1: Tensor, u2: Tensor) -> Tensor:
    """What :func:`sample_gates` decides, for a batch in one go."""
    u1, u2 = u1.to(X.device, torch.float64), u2.to(X.device, torch.float64)
    rank_one = (u1[:, :, None] * u2[:, None, :]).flatten(1).T  # (s d, g): one product, and no temporary of size N s g
    return X.flatten(1).to(torch.float64) @ rank_one >= 0


def token_gates(H: Tensor, h: Tensor) -> Tensor:
    """``(..., g)`` bool, ``1{h_g^T H_t >= 0}`` for tokens ``H: (..., d)`` and ``h: (g, d)``."""
    flat = H.reshape(-1, H.shape[-1])
    chunks = sample_chunks(len(flat), 2 * (H.shape[-1] + h.shape[0]), H, torch.float64)
    return torch.cat([open_tokens(flat[part], h) for part in chunks]).view(*H.shape[:-1], h.shape[0])


def open_tokens(H: Tensor, h: Tensor) -> Tensor:
    """What :func:`token_gates` decides, for a batch in one go."""
    return H.to(torch.float64) @ h.to(H.device, torch.float64).T >= 0


# ---------------------------------------------------------------------- rules: tokens to gates


class GateRule(Protocol):
    """How the gates of a sample follow from its tokens."""

    @property
    def n_gates(self) -> int:
        """g, the number of gates."""

    def shape(self, s: int, d: int) -> tuple[int, int]:
        """Return the shape of one gate of one sample."""

    def decide(self, x: Tensor, b: int) -> Tensor:
        """Return gate b of samples ``x: (n, s, d)`` in float64: bool, ``(n, *shape)``."""


@final
@dataclass(frozen=True)
class AttentionRule:
    """``1{X H_b X^T >= 0}``, ``(o, t)``; ``H: (g, d, d)``."""

    H: Tensor

    @property
    def n_gates(self) -> int:
        """g."""
        return self.H.shape[0]

    def shape(self, s: int, d: int) -> tuple[int, int]:
        """Pairs of tokens."""
        return s, s

    def decide(self, x: Tensor, b: int) -> Tensor:
        """Two products a sample."""
        return (x @ self.H[b].to(x)) @ x.mT >= 0


@final
@dataclass(frozen=True)
class MixerRule:
    """``1{H_b X >= 0}``, transposed, ``(a, o)``: channels come first; ``H: (g, s, s)``."""

    H: Tensor

    @property
    def n_gates(self) -> int:
        """g."""
        return self.H.shape[0]

    def shape(self, s: int, d: int) -> tuple[int, int]:
        """Channels and tokens."""
        return d, s

    def decide(self, x: Tensor, b: int) -> Tensor:
        """One product a sample."""
        return x.mT @ self.H[b].to(x).T >= 0


# ---------------------------------------------------------------------- where gates are kept


class Gates(ABC):
    """The gates of all samples, taken chunk by chunk."""

    n_gates: int

    @abstractmethod
    def take(self, part: slice, b: int) -> Tensor:
        """Return gate b of some samples: bool, ``(n, *shape)``."""

    @abstractmethod
    def to(self, device: torch.device | str | None) -> Gates:
        """Return the same gates on another device."""


@final
class StoredGates(Gates):
    """Booleans ``(g, N, *shape)``."""

    def __init__(self, gates: Tensor) -> None:
        self.gates = gates
        self.n_gates = gates.shape[0]

    def take(self, part: slice, b: int) -> Tensor:
        """A view."""
        return self.gates[b, part]

    def to(self, device: torch.device | str | None) -> StoredGates:
        """Move the booleans."""
        return StoredGates(self.gates.to(device=device))


@final
class PackedGates(Gates):
    """Bits, eight gates a byte: ``(g, N, ceil(entries / 8))``."""

    def __init__(self, bits: Tensor, shape: tuple[int, int]) -> None:
        self.bits, self.shape = bits, shape
        self.n_gates = bits.shape[0]
        self.values = torch.tensor([1 << k for k in range(8)], dtype=torch.uint8, device=bits.device)

    @staticmethod
    def pack(gates: Tensor) -> Tensor:
        """``(n, *shape)`` booleans to ``(n, bytes)``."""
        flat = gates.flatten(1).to(torch.uint8)
        flat = torch.nn.functional.pad(flat, (0, -flat.shape[1] % 8)).unflatten(1, (-1, 8))
        values = torch.tensor([1 << k for k in range(8)], dtype=torch.uint8, device=flat.device)
        return (flat * values).sum(2, dtype=torch.uint8)

    def take(self, part: slice, b: int) -> Tensor:
        """Unpack."""
        bits = self.bits[b, part]
        flat = (bits[:, :, None] & self.values).ne(0).flatten(1)
        return flat[:, : self.shape[0] * self.shape[1]].unflatten(1, self.shape)

    def to(self, device: torch.device | str | None) -> PackedGates:
        """Move the bits."""
        return PackedGates(self.bits.to(device=device), self.shape)


@final
class RecomputedGates(Gates):
    """No gates at all: the tokens that decide them, and the rule."""

    def __init__(self, X: Tensor, rule: GateRule) -> None:
        self.X, self.rule = X, rule
        self.n_gates = rule.n_gates

    def take(self, part: slice, b: int) -> Tensor:
        """Decide, tile by tile."""
        start, stop, _ = part.indices(len(self.X))
        first = start - start % TILE
        tiles = [self.rule.decide(self.X[at : at + TILE].to(torch.float64), b) for at in range(first, stop, TILE)]
        return torch.cat(tiles)[start - first : stop - first]

    def to(self, device: torch.device | str | None) -> RecomputedGates:
        """Move the tokens."""
        return RecomputedGates(self.X.to(device=device), self.rule)


def hold_gates(X: Tensor, rule: GateRule) -> Gates:
    """Decide the gates of tokens ``X: (N, s, d)`` and keep them as the memory budget allows."""
    N, s, d = X.shape
    shape = rule.shape(s, d)
    entries = rule.n_gates * N * shape[0] * shape[1]
    packed = not worth_storing(PACKED_SHARE * entries, X, torch.uint8)
    if packed and not worth_storing(-(-entries // 8), X, torch.uint8):
        return RecomputedGates(X, rule)
    width = -(-shape[0] * shape[1] // 8)
    kept = torch.empty(
        (rule.n_gates, N, width) if packed else (rule.n_gates, N, *shape),
        dtype=torch.uint8 if packed else torch.bool,
        device=X.device,
    )
    for part in sample_chunks(N, s * d + 3 * shape[0] * shape[1] + d * max(s, d), X, torch.float64):
        x = X[part].to(torch.float64)
        for b in range(rule.n_gates):
            gates = rule.decide(x, b)
            kept[b, part] = PackedGates.pack(gates) if packed else gates
    return PackedGates(kept, shape) if packed else StoredGates(kept)


def all_gates(X: Tensor, rule: GateRule) -> Tensor:
    """``(N, g, *shape)`` bool, for networks on a batch of samples in one go."""
    x = X.to(torch.float64)
    return torch.stack([rule.decide(x, b) for b in range(rule.n_gates)], 1)

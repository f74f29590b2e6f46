"""Base of the sequence models: a copy of every weight for each seed, embeddings, and access to the last layer."""

from __future__ import annotations

import numbers
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from convexformer.registry import one_of

EMBEDDINGS = ("learned", "fixed", "one_hot")  # trained; random and fixed; fixed unit vectors


class Draws:
    """Gaussian numbers with a leading seed axis; those of a seed do not depend on the other seeds."""

    def __init__(self, seeds: Iterable[int]) -> None:
        self.generators = [torch.Generator().manual_seed(7 + seed) for seed in seeds]

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        """``(S, *shape)`` with standard deviation ``scale``."""
        return torch.stack([torch.randn(shape, generator=generator) * scale for generator in self.generators])


class SequenceModel(nn.Module, ABC):
    """Classifies sequences of symbols; S copies, one for each seed, are evaluated and trained at once.

    Every parameter has a leading seed axis. ``forward`` takes symbols ``(S, B, n)``, or ``(B, n)`` for all copies alike, and
    returns logits ``(S, B, c)``. The logits are linear in the weights of the last layer::

        logits = sum_k H_k(x) Z_k,   H = last_tokens(x): (S, B, T, w),   Z = last_weights(): (S, T, w, c)

    so with the lower part frozen the last layer alone is a convex program (``certify_last_layer``). Trained as a whole,
    embedding and layers together, the problem is **not** convex.
    """

    def __init__(self, n_symbols: int, n_classes: int, n_tokens: int, seeds: int | Sequence[int]) -> None:
        super().__init__()
        self.n_symbols, self.n_classes, self.n_tokens = (
            positive(name, value)
            for name, value in (("n_symbols", n_symbols), ("n_classes", n_classes), ("n_tokens", n_tokens))
        )
        self.seeds = read_seeds(seeds)
        self.draws = Draws(self.seeds)

    @abstractmethod
    def last_tokens(self, symbols: Tensor) -> Tensor:
        """``(S, B, T, w)`` what the last layer reads."""

    @abstractmethod
    def last_weights(self) -> Tensor:
        """``(S, T, w, c)`` the weights of the last layer."""

    @abstractmethod
    def matrices(self) -> dict[str, Tensor]:
        """Return the weight matrices of the layers, ``(S, rows, columns)`` each, for penalties and spectra."""

    @abstractmethod
    def config(self) -> dict[str, Any]:
        """Return the constructor's arguments, but for the seeds."""

    @abstractmethod
    def group_norm(self) -> Tensor:
        """``(S,)`` the group-l2 penalty of theorem 3 (Ergen et al. 2022), summed over layers; raises if there is none."""

    @property
    def convex_last_layer(self) -> bool:
        """Whether nothing below the last layer is trained: then, and only then, training is a convex problem."""
        return False

    def forward(self, symbols: Tensor) -> Tensor:
        """Return logits ``(S, B, c)``."""
        tokens = self.last_tokens(symbols)
        return tokens.flatten(2) @ self.last_weights().flatten(1, 2)

    def ridge(self) -> Tensor:
        """``(S,)`` the sum of squares of the layers' weights, as Fisher et al. penalise them (section 5.2)."""
        return sum((Z.square().sum((1, 2)) for Z in self.matrices().values()), start=self.zero())

    def undecayed(self) -> set[str]:
        """Return the parameters that weight decay leaves alone: gains of normalisations."""
        return {name for name, _ in self.named_parameters() if name.startswith("gain")}

    def sizes(self) -> dict[str, int]:
        """Return the sizes of the task that the model is for."""
        return {"n_symbols": self.n_symbols, "n_classes": self.n_classes, "n_tokens": self.n_tokens}

    @property
    def n_parameters(self) -> int:
        """The number of trained numbers in one copy."""
        return sum(parameter[0].numel() for parameter in self.parameters())

    def zero(self) -> Tensor:
        """``(S,)`` of zeros, on the device of the model."""
        return next(self.parameters()).new_zeros(len(self.seeds))

    def expanded(self, symbols: Tensor) -> Tensor:
        """``(S, B, n)`` of symbols, checked for shape."""
        if symbols.ndim == 2:
            symbols = symbols.expand(len(self.seeds), *symbols.shape)
        if symbols.ndim != 3 or symbols.shape[0] != len(self.seeds) or symbols.shape[2] != self.n_tokens:
            raise ValueError(
                f"symbols have shape {tuple(symbols.shape)}; expected (B, {self.n_tokens}) or "
                f"({len(self.seeds)}, B, {self.n_tokens}): one sequence set per seed, or one for all."
            )
        return symbols

    def extra_repr(self) -> str:
        """Say how many copies there are."""
        return f"seeds={list(self.seeds)}, parameters={self.n_parameters}"


class Embedding(nn.Module):
    """Symbols to vectors of size ``width``: learned, fixed and random, or one-hot; one table, or one for each position."""

    table: Tensor  # (S, rows, width)
    shift: Tensor  # (n,) first row of each position
    symbols: Tensor  # (rows,)

    def __init__(self, n_symbols: int, n_tokens: int, width: int, kind: str, separate: bool, draws: Draws) -> None:
        super().__init__()
        self.kind, self.separate = one_of("embedding", kind, EMBEDDINGS), bool(separate)
        self.rows = n_symbols * (n_tokens if separate else 1)
        self.width = self.rows if kind == "one_hot" else positive("width", width)
        shift = torch.arange(n_tokens) * n_symbols if separate else torch.zeros(n_tokens, dtype=torch.long)
        self.register_buffer("shift", shift, persistent=False)
        self.register_buffer("symbols", torch.arange(self.rows), persistent=False)
        if kind == "one_hot":
            table = torch.eye(self.rows).expand(len(draws.generators), -1, -1).clone()
        else:
            table = draws.normal(self.rows, self.width, scale=self.width**-0.5)
        if kind == "learned":
            self.table = nn.Parameter(table)
        else:
            self.register_buffer("table", table)

    def forward(self, symbols: Tensor) -> Tensor:
        """``(S, B, n)`` -> ``(S, B, n, d)``, by a product with one-hot rows, whose gradient needs no scatter."""
        hot = (symbols + self.shift).unsqueeze(-1).eq(self.symbols).to(self.table.dtype)
        return (hot.flatten(1, 2) @ self.table).view(*symbols.shape, self.width)


def rms_normalised(x: Tensor) -> Tensor:
    """Divide by the root mean square of the last axis."""
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()


def positive(name: str, value: Any) -> int:
    """Return a positive whole number, or say what was given."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 1:
        raise ValueError(f"{name}={value!r} was given; expected a positive whole number.")
    return int(value)


def read_seeds(seeds: int | Sequence[int]) -> tuple[int, ...]:
    """A number of seeds means 0, 1, ...; a sequence gives them."""
    chosen = tuple(range(positive("seeds", seeds))) if isinstance(seeds, int) else tuple(seeds)
    if not chosen or not all(isinstance(seed, numbers.Integral) and seed >= 0 for seed in chosen):
        raise ValueError(f"seeds={seeds!r} was given; expected how many, or a list of whole numbers from 0.")
    if len(set(chosen)) < len(chosen):
        raise ValueError(f"seeds={seeds!r} repeats a seed; the copies would be the same.")
    return tuple(int(seed) for seed in chosen)

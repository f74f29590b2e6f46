"""Tables of modular arithmetic as sequences of symbols: the algorithmic data sets on which grokking is studied."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from convexformer.data.tables import LabelledTokens


@final
@dataclass(frozen=True)
class SymbolTask:
    """Sequences of symbols ``X: (N, n)``, integers below ``n_symbols``, and labels ``y: (N,)`` below ``n_classes``.

    Unpacks as ``X, y``. ``name`` says what is computed.
    """

    X: Tensor
    y: Tensor
    n_symbols: int
    n_classes: int
    name: str

    def __iter__(self) -> Iterator[Tensor]:
        return iter((self.X, self.y))

    def __len__(self) -> int:
        return len(self.y)

    @property
    def n_tokens(self) -> int:
        """The length n of a sequence."""
        return self.X.shape[1]

    def select(self, rows: Tensor | np.ndarray) -> SymbolTask:
        """Return the samples ``rows``."""
        index = torch.as_tensor(rows)
        return SymbolTask(self.X[index], self.y[index], self.n_symbols, self.n_classes, self.name)

    def split(self, train: float = 0.5, seed: int = 0) -> tuple[SymbolTask, SymbolTask]:
        """Shuffle and split into a train and a test part; ``train`` is the fraction kept for training."""
        rows, others = self.splits(train, [seed])
        return self.select(rows[0]), self.select(others[0])

    def splits(self, train: float, seeds: Iterable[int]) -> tuple[Tensor, Tensor]:
        """Return row numbers ``(S, n_train), (S, n_test)``, one split per seed."""
        cut = self.cut(train)
        orders = np.stack([np.random.default_rng([seed, 0x5917]).permutation(len(self)) for seed in seeds])
        return torch.from_numpy(orders[:, :cut]), torch.from_numpy(orders[:, cut:])

    def cut(self, train: float) -> int:
        """Return how many samples a fraction is; both parts must have some."""
        if not isinstance(train, numbers.Real) or not 0 < train < 1:
            raise ValueError(f"train={train} was given; expected a fraction strictly between 0 and 1, such as 0.5.")
        cut = round(float(train) * len(self))
        if not 0 < cut < len(self):
            raise ValueError(f"train={train} of {len(self)} samples leaves a part empty; expected samples in both.")
        return cut

    def one_hot(self, dtype: torch.dtype = torch.float64) -> LabelledTokens:
        """Return tokens ``(N, n, n_symbols)`` for the heads: a fixed embedding, with which every head is convex."""
        return LabelledTokens(torch.nn.functional.one_hot(self.X, self.n_symbols).to(dtype), self.y)


def modular_division(p: int = 97) -> SymbolTask:
    """``a / b mod p`` for all a and all **units** b (Power et al. 2022; figures 4-7 of Ergen et al. 2022).

    For a prime p the units are 1..p-1. Modulo a composite p division is defined for b coprime to p alone: 15 has 8
    units and so 120 pairs; other constructions have several answers or none for one pair.
    """
    return _table(p, "a / b", lambda a, b: a * pow(b, -1, p), columns=units(p))


def modular_addition(p: int = 97) -> SymbolTask:
    """``a + b mod p`` for all pairs."""
    return _table(p, "a + b", lambda a, b: a + b)


def modular_subtraction(p: int = 97) -> SymbolTask:
    """``a - b mod p`` for all pairs."""
    return _table(p, "a - b", lambda a, b: a - b)


def modular_multiplication(p: int = 97) -> SymbolTask:
    """``a * b mod p`` for all pairs."""
    return _table(p, "a * b", lambda a, b: a * b)


def periodicity(p: int = 97) -> SymbolTask:
    """``(x^-1 + y^2) * (2x mod floor(log2 p)) mod p`` for all units x and all y (Fisher et al., section 5.1).

    Fisher et al. print ``[log_2 97]``; the floor, 6, is taken. A third of the x then have the factor 0 and the answer 0.
    """
    period = int(_modulus(p)).bit_length() - 1
    return _table(
        p, "(1/x + y^2) (2x mod log2 p)", lambda x, y: (pow(x, -1, p) + y * y) * ((2 * x) % period), rows=units(p)
    )


def units(p: int) -> list[int]:
    """Return the numbers below p that are coprime to it, those that can be divided by."""
    return [b for b in range(1, _modulus(p)) if math.gcd(b, p) == 1]


def _table(
    p: int,
    name: str,
    rule: Callable[[int, int], int],
    rows: Sequence[int] | None = None,
    columns: Sequence[int] | None = None,
) -> SymbolTask:
    everything = range(_modulus(p))
    pairs = [
        (a, b) for a in (everything if rows is None else rows) for b in (everything if columns is None else columns)
    ]
    labels = [rule(a, b) % p for a, b in pairs]
    return SymbolTask(torch.tensor(pairs), torch.tensor(labels), p, p, f"{name} mod {p}")


def _modulus(p: Any) -> int:
    if isinstance(p, bool) or not isinstance(p, numbers.Integral) or p < 3:
        raise ValueError(f"p={p!r} was given; expected a whole number of at least 3, such as 97.")
    return int(p)

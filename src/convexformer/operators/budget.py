"""How much memory operators may take beyond the tokens: one budget, which every loop over chunks of samples obeys."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor

MIB, GIB = 1 << 20, 1 << 30


@final
@dataclass(frozen=True)
class Budget:
    """Bytes that an operator may use beyond its tokens.

    Chunks of samples are cut so that the intermediates of one product stay within ``temporaries``; a chunk of that size
    takes well under a second, so that time limits, which are checked between products, bind. What could be computed
    anew from the tokens (gates, gated tokens, spectra) is kept only within ``stored``.
    """

    temporaries: int
    """The intermediates of one product, allocated anew for every chunk."""
    buffers: int
    """Intermediates that all chunks of a product write into in turn."""
    stored: int
    """What an operator keeps so that it need not compute it again: each of its caches by itself."""
    formed: int
    """A block of a dual matrix, in float64, that a certificate may form; its Gram matrix comes on top."""


CPU_BUDGET = Budget(temporaries=32 * MIB, buffers=256 * MIB, stored=2 * GIB, formed=4 * GIB)
"""Larger temporaries cost more time in page faults than in arithmetic: glibc maps blocks beyond 32 MiB anew every time
(gated self-attention, 1,000 x 65 x 128: 0.74 s a product of eight vectors at 256 MiB, 0.58 s at 32, 0.53 s at 8)."""
CUDA_SHARES = (1 / 128, 1 / 16, 1 / 4, 1 / 16)
"""The same as fractions of a GPU's memory; of all of it, since asking for what is free would wait for the device."""

_override: Budget | None = None


def budget_on(device: torch.device) -> Budget:
    """Return the budget on a device."""
    if _override is not None:
        return _override
    if device.type != "cuda":
        return CPU_BUDGET
    total = torch.cuda.get_device_properties(device).total_memory
    return Budget(*(int(share * total) for share in CUDA_SHARES))


@contextmanager
def memory_budget(**sizes: int) -> Iterator[Budget]:
    """Set fields of the budget, in bytes, for all operators built and used inside; the others are those of a CPU."""
    global _override
    before, _override = _override, replace(CPU_BUDGET, **sizes)
    try:
        yield _override
    finally:
        _override = before


def sample_chunks(
    n: int, numbers_each: int, like: Tensor, dtype: torch.dtype | None = None, *, buffered: bool = False
) -> list[slice]:
    """Cut ``n`` samples so that temporaries of ``numbers_each`` numbers a sample, in ``dtype``, stay within the budget."""
    budget, size = budget_on(like.device), (like.dtype if dtype is None else dtype).itemsize
    step = max(1, (budget.buffers if buffered else budget.temporaries) // max(1, size * numbers_each))
    return [slice(start, min(start + step, n)) for start in range(0, n, step)]


def worth_storing(numbers: int, like: Tensor, dtype: torch.dtype | None = None) -> bool:
    """Tell whether so many numbers may be kept."""
    size = (like.dtype if dtype is None else dtype).itemsize
    return numbers * size <= budget_on(like.device).stored

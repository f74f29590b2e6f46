"""One thread for work in small pieces: handing microseconds of it to many cores makes it tens of times slower."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]
from torch import Tensor

LARGE = 4_000_000  # numbers in the tokens from which on more threads pay


@contextmanager
def few_threads(tokens: Tensor) -> Iterator[None]:
    """Run torch and the BLAS on one thread for small tokens on the CPU, and restore what was set before."""
    if tokens.device.type != "cpu" or tokens.numel() > LARGE:
        yield
        return
    before = torch.get_num_threads()
    with threadpool_limits(limits=1):
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(before)

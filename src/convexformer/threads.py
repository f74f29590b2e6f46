"""How the machine is used: one thread for work in small pieces, tensor cores for rough products on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]
from torch import Tensor

LARGE = 4_000_000  # numbers in the tokens, times outputs, from which on more threads pay


@contextmanager
def few_threads(tokens: Tensor, n_outputs: int = 1) -> Iterator[None]:
    """Run torch and the BLAS on one thread for small problems on the CPU, and restore what was set before."""
    if tokens.device.type != "cpu" or tokens.numel() * n_outputs > LARGE:
        yield
        return
    before = torch.get_num_threads()
    with threadpool_limits(limits=1):
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(before)


@contextmanager
def tensor_cores() -> Iterator[None]:
    """Let float32 products on a GPU round their factors to TF32 (three digits), and restore what was set before."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before

"""Hardware settings: one thread for small problems, TF32 products, and asynchronous reads from a GPU."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, final

import threadpoolctl  # type: ignore[import-untyped]
import torch
from torch import Tensor

SINGLE_THREAD_WORK = 4_000_000  # products with at most this many multiplications run on one thread


@contextmanager
def few_threads(like: Tensor, work: int | None = None) -> Iterator[None]:
    """Run torch and the BLAS on one thread for small problems on the CPU, and restore what was set before.

    ``work`` counts the multiplications of a product, by default the entries of ``like``.
    """
    if like.device.type != "cpu" or (like.numel() if work is None else work) > SINGLE_THREAD_WORK:
        yield
        return
    with one_thread():
        yield


@contextmanager
def one_thread() -> Iterator[None]:
    """Run torch and the BLAS on one thread, and restore what was set before."""
    if torch.get_num_threads() == 1:  # whoever has set torch to one thread has divided the cores already
        yield
        return
    with limited_threads(1):
        yield


@contextmanager
def limited_threads(limit: int) -> Iterator[None]:
    """Run torch and the BLAS on at most so many threads, and restore what was set before."""
    before = torch.get_num_threads()
    _BLAS.begin(limit)
    try:
        with _pools().limit(limits=limit, user_api="openmp"):
            torch.set_num_threads(limit)
            try:
                yield
            finally:
                torch.set_num_threads(before)
    finally:
        _BLAS.end(limit)


@final
class _BlasLimits:
    """The limits that threads of this process ask for: a pool of the BLAS belongs to all of them, and the least counts.

    What was set before the first is restored after the last, in whatever order they end: with a limiter each, the second
    would find, and restore, what the first has set.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._asked: list[int] = []
        self._before: Any = None

    def begin(self, limit: int) -> None:
        """Ask for at most so many threads."""
        with self._lock:
            if not self._asked:
                self._before = self._limited(limit)
            elif limit < min(self._asked):
                self._limited(limit)
            self._asked.append(limit)

    def end(self, limit: int) -> None:
        """Take that back."""
        with self._lock:
            self._asked.remove(limit)
            if not self._asked:
                _free_blas()
                self._before.restore_original_limits()
                _free_blas()
            elif limit < min(self._asked):
                self._limited(min(self._asked))

    def _limited(self, limit: int) -> Any:
        _free_blas()
        limiter = _pools().limit(limits=limit, user_api="blas")
        _free_blas()
        return limiter


def _free_blas() -> None:
    """Let any thread set the limits of OpenBLAS: where threadpoolctl obeys only the thread that was the first to do so."""
    controller = getattr(threadpoolctl, "OpenBLASController", None)
    if (clear := getattr(controller, "clear_controlling_thread", None)) is not None:
        clear(force=True)


_BLAS = _BlasLimits()


@cache
def _pools() -> Any:
    """Return the thread pools of this process; looking for them takes milliseconds, as long as a small solve."""
    return threadpoolctl.ThreadpoolController()


@contextmanager
def tensor_cores() -> Iterator[None]:
    """Let float32 products on a GPU round their factors to TF32 (three digits), and restore what was set before."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def nearest_factors(x: Tensor, *, in_place: bool = False) -> Tensor:
    """Round ``x`` to the nearest TF32 numbers where products would cut its digits off, always towards zero."""
    if not (x.is_cuda and x.dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32):
        return x
    return nearest_tf32(x if in_place else x.clone())


def nearest_tf32(x: Tensor) -> Tensor:
    """Round float32 numbers in place to ten digits (bits) after the first."""
    x.view(torch.int32).add_(0x1000).bitwise_and_(~0x1FFF)
    return x


@final
class AsyncScalars:
    """Numbers copied to the host asynchronously: the copy starts at once, and :meth:`read` waits for it.

    Kernels launched in between are not waited for; a plain ``float()`` would wait for them.
    """

    def __init__(self, numbers: Tensor) -> None:
        self._event = None
        if numbers.is_cuda:
            self._host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._host.copy_(numbers, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._host = numbers.clone()

    def read(self) -> list[float]:
        """Wait for the copy and return the numbers."""
        if self._event is not None:
            self._event.synchronize()
        return self._host.tolist()

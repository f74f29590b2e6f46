"""Ctrl-C is answered at once, also while a library computes and does not listen."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

FIRST = "\ninterrupted: ending after the operation that is under way; Ctrl-C again ends at once.\n"
ENDED = 128 + signal.SIGINT  # the exit code of a program that Ctrl-C ended


@contextmanager
def answered() -> Iterator[None]:
    """Say so when Ctrl-C is pressed, from a thread of its own; end the process when it is pressed again.

    Python hands a signal to the program between two of its own instructions. A product of large matrices, the compiler of
    numba or an import keeps it waiting; the thread, woken by the signal itself, does not wait.
    """
    if threading.current_thread() is not threading.main_thread() or os.name != "posix":
        yield
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    threading.Thread(target=_watch, args=(reader,), daemon=True, name="ctrl-c").start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(writer)  # ends the thread


def _watch(reader: int) -> None:
    presses = 0
    while received := os.read(reader, 1):
        if received[0] != signal.SIGINT:
            continue
        presses += 1
        if presses == 1:
            sys.stderr.write(FIRST)
            sys.stderr.flush()
        else:
            os._exit(ENDED)
    os.close(reader)

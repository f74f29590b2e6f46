"""Tell bad input, which a validation raises deliberately, from a bug, where an operation failed."""

from __future__ import annotations

import dis
import os
from pathlib import Path
from types import ModuleType

import sklearn

import convexformer

RAISE = dis.opmap["RAISE_VARARGS"]  # the opcode of a ``raise`` statement


def is_bad_input(error: BaseException) -> bool:
    """Tell whether an error is about what the user gave.

    An OSError is: a file that cannot be read or written. A ValueError or TypeError is when a ``raise`` statement of this
    package or of scikit-learn, which validates tables and labels, made it: those carry a message for the user; so is a
    ValueError of scikit-learn's conversions. Anything else, such as a TypeError from an operation inside torch, NumPy or
    this package, is a bug.
    """
    if isinstance(error, OSError):
        return True
    trace = error.__traceback__
    if trace is None or not isinstance(error, (ValueError, TypeError)):
        return False
    while trace.tb_next is not None:  # the innermost frame is where the error arose
        trace = trace.tb_next
    code = trace.tb_frame.f_code
    deliberate = code.co_code[trace.tb_lasti] == RAISE
    if _belongs(code.co_filename, sklearn):
        return deliberate or isinstance(error, ValueError)
    return deliberate and _belongs(code.co_filename, convexformer)


def _belongs(file: str, package: ModuleType) -> bool:
    return file.startswith(f"{Path(str(package.__file__)).parent}{os.sep}")

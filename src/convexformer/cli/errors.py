"""Tell bad input, which a validation raises deliberately, from a bug, where an operation failed."""

from __future__ import annotations

import dis
import os
import re
from pathlib import Path
from types import ModuleType

RAISE = dis.opmap["RAISE_VARARGS"]  # the opcode of a ``raise`` statement


def is_bad_input(error: BaseException) -> bool:
    """Tell whether an error is about what the user gave.

    An OSError is: a file that cannot be read or written. A ValueError or TypeError is when a ``raise`` statement of this
    package or of scikit-learn, which validates tables and labels, made it: those carry a message for the user; so is a
    ValueError of scikit-learn's conversions; so is an ImportError of this package, which names what to install, and data
    that does not fit into memory. Anything else, such as a TypeError from an operation inside torch, NumPy or
    this package, is a bug.
    """
    import sklearn

    import convexformer

    if isinstance(error, OSError) or out_of_memory(error):
        return True
    trace = error.__traceback__
    if trace is None or not isinstance(error, (ValueError, TypeError, ImportError)):
        return False
    while trace.tb_next is not None:  # the innermost frame is where the error arose
        trace = trace.tb_next
    code = trace.tb_frame.f_code
    deliberate = code.co_code[trace.tb_lasti] == RAISE
    if _belongs(code.co_filename, sklearn):
        return deliberate or isinstance(error, ValueError)
    return deliberate and _belongs(code.co_filename, convexformer)


def out_of_memory(error: BaseException) -> bool:
    """Tell whether memory ran out: Python's and NumPy's error, or one of torch's."""
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and re.search("out of memory|can't allocate memory", str(error)) is not None
    )


def explained(error: BaseException) -> str:
    """Return the message for the user."""
    if not out_of_memory(error):
        return str(error)
    reason = str(error).splitlines()[0] if str(error) else "none left"
    return f"there is not enough memory ({reason}). Use fewer samples, tokens or gates, or a machine with more of it."


def _belongs(file: str, package: ModuleType) -> bool:
    return file.startswith(f"{Path(str(package.__file__)).parent}{os.sep}")

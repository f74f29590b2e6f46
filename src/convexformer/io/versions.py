"""The versions of the software at work, noted in model folders and shown in reports."""

from __future__ import annotations

import platform

import numpy
import scipy
import sklearn
import torch


def environment() -> dict[str, str]:
    """Return versions by the names of their packages; that of convexformer itself has its own place in a folder."""
    return {
        "Python": platform.python_version(),
        "torch": str(torch.__version__),
        "NumPy": numpy.__version__,
        "SciPy": scipy.__version__,
        "scikit-learn": sklearn.__version__,
    }

"""Solvers, one a file; ``solve`` picks one, watches it and certifies its answer."""

from convexformer.solvers.choose import SOLVERS, solve
from convexformer.solvers.monitor import Monitor

__all__ = ["SOLVERS", "Monitor", "solve"]

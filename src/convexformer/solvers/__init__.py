"""Solvers, one folder each; ``auto`` picks one, ``run`` watches it and certifies its answer."""

from convexformer.solvers.auto import SELECTION, SOLVERS, explain, select
from convexformer.solvers.base import Solver
from convexformer.solvers.monitor import Monitor
from convexformer.solvers.run import Limits, Result, minimise
from convexformer.solvers.status import Record, Status

__all__ = [
    "SELECTION",
    "SOLVERS",
    "Limits",
    "Monitor",
    "Record",
    "Result",
    "Solver",
    "Status",
    "explain",
    "minimise",
    "select",
]

"""Attention heads on frozen tokens, trained to a certified global optimum."""

__version__ = "0.1.0"

from convexformer import data, gauges, heads, losses, networks, operators
from convexformer.certificates import Certificate, certify
from convexformer.networks import lift
from convexformer.problem import Problem
from convexformer.registry import ZeroSolutionWarning
from convexformer.solution import Solution, Status
from convexformer.solvers import solve

__all__ = [
    "Certificate",
    "Problem",
    "Solution",
    "Status",
    "ZeroSolutionWarning",
    "certify",
    "data",
    "gauges",
    "heads",
    "lift",
    "losses",
    "networks",
    "operators",
    "solve",
]

"""Attention heads on frozen tokens, trained to a certified global optimum."""

__version__ = "0.1.0"

from convexformer import data, deep, features, gauges, heads, losses, margin, networks, operators, solvers
from convexformer.certificates import Certificate
from convexformer.embedding import embed
from convexformer.estimators import (
    Leaderboard,
    TokenClassifier,
    TokenClassifierCV,
    TokenRegressor,
    TokenRegressorCV,
    compare,
)
from convexformer.io import ModelFileError, load, save
from convexformer.objective import Objective
from convexformer.path import Path, path
from convexformer.problem import Problem
from convexformer.registry import MissingMaskWarning, ZeroSolutionWarning
from convexformer.solution import Solution, Status
from convexformer.solving import certify, lift, solve

__all__ = [
    "Certificate",
    "Leaderboard",
    "MissingMaskWarning",
    "ModelFileError",
    "Objective",
    "Path",
    "Problem",
    "Solution",
    "Status",
    "TokenClassifier",
    "TokenClassifierCV",
    "TokenRegressor",
    "TokenRegressorCV",
    "ZeroSolutionWarning",
    "certify",
    "compare",
    "data",
    "deep",
    "embed",
    "features",
    "gauges",
    "heads",
    "lift",
    "load",
    "losses",
    "margin",
    "networks",
    "operators",
    "path",
    "save",
    "solve",
    "solvers",
]

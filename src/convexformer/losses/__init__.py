"""Losses: value, gradient, conjugate and dual-feasible scaling of each."""

from convexformer.losses.base import LOSSES, Loss, SeparableLoss
from convexformer.losses.cross_entropy import CrossEntropy
from convexformer.losses.huber import Huber
from convexformer.losses.logistic import Logistic
from convexformer.losses.squared import Squared
from convexformer.losses.squared_hinge import SquaredHinge

__all__ = [
    "LOSSES",
    "CrossEntropy",
    "Huber",
    "Logistic",
    "Loss",
    "SeparableLoss",
    "Squared",
    "SquaredHinge",
]

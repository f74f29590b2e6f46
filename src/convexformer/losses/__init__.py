"""Losses: value, gradient, Hessian, conjugate, dual points and the exact intercept of each."""

from convexformer.losses.base import LOSSES, Loss
from convexformer.losses.cross_entropy import CrossEntropy
from convexformer.losses.hessian import DiagonalHessian, Hessian, SoftmaxHessian
from convexformer.losses.huber import Huber
from convexformer.losses.logistic import Logistic
from convexformer.losses.separable import QuadraticConjugateLoss, SeparableLoss
from convexformer.losses.squared import Squared
from convexformer.losses.squared_hinge import SquaredHinge

__all__ = [
    "LOSSES",
    "CrossEntropy",
    "DiagonalHessian",
    "Hessian",
    "Huber",
    "Logistic",
    "Loss",
    "QuadraticConjugateLoss",
    "SeparableLoss",
    "SoftmaxHessian",
    "Squared",
    "SquaredHinge",
]

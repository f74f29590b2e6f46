"""Operators: matrix-free maps from weights to outputs, with their adjoints."""

from convexformer.operators.base import Operator
from convexformer.operators.dense import DenseOperator
from convexformer.operators.gated import GatedOperator

__all__ = ["DenseOperator", "GatedOperator", "Operator"]

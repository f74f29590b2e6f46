"""Heads: an architecture is an operator, a gauge, and the maps to and from an ordinary network."""

from convexformer.architecture import HEADS, Head
from convexformer.heads.attention import Attention
from convexformer.heads.linear import Linear
from convexformer.heads.mlp import MLP

__all__ = ["HEADS", "MLP", "Attention", "Head", "Linear"]

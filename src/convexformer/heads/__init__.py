"""Heads: an architecture is an operator, a gauge, and the maps to and from an ordinary network."""

from convexformer.architecture import HEADS, Head
from convexformer.heads.attention import Attention
from convexformer.heads.combined import Sum
from convexformer.heads.fourier import FNO, BlockFNO
from convexformer.heads.linear import Linear
from convexformer.heads.matrix import MLPMixer, SelfAttention
from convexformer.heads.mlp import MLP, FNet, PoolFormer

__all__ = [
    "FNO",
    "HEADS",
    "MLP",
    "Attention",
    "BlockFNO",
    "FNet",
    "Head",
    "Linear",
    "MLPMixer",
    "PoolFormer",
    "SelfAttention",
    "Sum",
]

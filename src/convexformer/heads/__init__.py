"""Heads: an architecture is an operator, a gauge, and the maps to and from an ordinary network."""

from convexformer.heads.attention import Attention
from convexformer.heads.base import HEADS, Head, Layout, Program
from convexformer.heads.channel_blocks import BlockSelfAttention, channel_blocks
from convexformer.heads.combined import Sum
from convexformer.heads.feature import Feature, Kernel
from convexformer.heads.fourier import FNO, BlockFNO
from convexformer.heads.linear import Linear
from convexformer.heads.matrix import MLPMixer, SelfAttention
from convexformer.heads.mlp import MLP, FNet, PoolFormer
from convexformer.heads.portfolio import portfolio

__all__ = [
    "FNO",
    "HEADS",
    "MLP",
    "Attention",
    "BlockFNO",
    "BlockSelfAttention",
    "FNet",
    "Feature",
    "Head",
    "Kernel",
    "Layout",
    "Linear",
    "MLPMixer",
    "PoolFormer",
    "Program",
    "SelfAttention",
    "Sum",
    "channel_blocks",
    "portfolio",
]

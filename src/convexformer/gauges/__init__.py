"""Gauges: value, prox, polar (value and kind) and atom of each."""

from convexformer.gauges.base import (
    Atomic,
    Candidate,
    DualMatrix,
    Factored,
    FiniteAtoms,
    Gauge,
    HilbertBlock,
    LinearMap,
    NeuronOracle,
    Norm,
    Penalty,
    Polar,
    PolarKind,
    Proximal,
    Sliced,
    WeightsLike,
)
from convexformer.gauges.combined import SumPenalty
from convexformer.gauges.cone import ConeNuclearNorm
from convexformer.gauges.frobenius import FrobeniusNorm
from convexformer.gauges.group import GroupNorm
from convexformer.gauges.l1 import L1Norm
from convexformer.gauges.nuclear import NuclearNorm
from convexformer.gauges.relu import PolarOptions, ReLUNorm
from convexformer.gauges.representer import RepresenterNorm, RepresenterRidge
from convexformer.gauges.ridge import Ridge
from convexformer.gauges.scaled import ScaledPenalty
from convexformer.gauges.stochastic import StochasticNorm

__all__ = [
    "Atomic",
    "Candidate",
    "ConeNuclearNorm",
    "DualMatrix",
    "Factored",
    "FiniteAtoms",
    "FrobeniusNorm",
    "Gauge",
    "GroupNorm",
    "HilbertBlock",
    "L1Norm",
    "LinearMap",
    "NeuronOracle",
    "Norm",
    "NuclearNorm",
    "Penalty",
    "Polar",
    "PolarKind",
    "PolarOptions",
    "Proximal",
    "ReLUNorm",
    "RepresenterNorm",
    "RepresenterRidge",
    "Ridge",
    "ScaledPenalty",
    "Sliced",
    "StochasticNorm",
    "SumPenalty",
    "WeightsLike",
]

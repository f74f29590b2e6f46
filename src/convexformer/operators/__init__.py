"""Operators: matrix-free maps from weights to outputs, with their adjoints."""

from convexformer.operators.base import Operator, RowGram, Separable, TokenFeatures
from convexformer.operators.bilinear import BilinearOperator, FactoredView, ImplicitMatrix
from convexformer.operators.budget import Budget, budget_on, memory_budget
from convexformer.operators.combined import SumOperator
from convexformer.operators.dense import DenseOperator
from convexformer.operators.fourier import FourierOperator
from convexformer.operators.gated import GatedOperator
from convexformer.operators.gated_attention import GatedSelfAttentionOperator
from convexformer.operators.gated_mixer import GatedMixerOperator
from convexformer.operators.kernel import KernelOperator, RepresenterDual, StackedDual
from convexformer.operators.lowrank import LowRank
from convexformer.operators.mixer import MixerOperator
from convexformer.operators.neurons import NeuronOperator, Neurons
from convexformer.operators.positions import PositionOperator
from convexformer.operators.relu import CellOperator, HiddenLayer, ReLUDual, ReLUOperator
from convexformer.operators.selfattention import SelfAttentionOperator
from convexformer.operators.streamed import StreamedBilinear, StreamedOperator

__all__ = [
    "BilinearOperator",
    "Budget",
    "CellOperator",
    "DenseOperator",
    "FactoredView",
    "FourierOperator",
    "GatedMixerOperator",
    "GatedOperator",
    "GatedSelfAttentionOperator",
    "HiddenLayer",
    "ImplicitMatrix",
    "KernelOperator",
    "LowRank",
    "MixerOperator",
    "NeuronOperator",
    "Neurons",
    "Operator",
    "PositionOperator",
    "ReLUDual",
    "ReLUOperator",
    "RepresenterDual",
    "RowGram",
    "SelfAttentionOperator",
    "Separable",
    "StackedDual",
    "StreamedBilinear",
    "StreamedOperator",
    "SumOperator",
    "TokenFeatures",
    "budget_on",
    "memory_budget",
]

"""Stacked gated layers, the softmax baseline, training and spectra (not convex), and certified last layers."""

from convexformer.deep.base import SequenceModel
from convexformer.deep.certify import CertifiedLayer, certify_last_layer
from convexformer.deep.convex import ConvexTransformer
from convexformer.deep.history import History, Outcome, Run
from convexformer.deep.options import Training
from convexformer.deep.recipes import RECIPES, Recipe, recipe
from convexformer.deep.report import ReportTransformer
from convexformer.deep.softmax import SoftmaxTransformer
from convexformer.deep.spectra import effective_rank, singular_values, stable_rank
from convexformer.deep.train import train

__all__ = [
    "RECIPES",
    "CertifiedLayer",
    "ConvexTransformer",
    "History",
    "Outcome",
    "Recipe",
    "ReportTransformer",
    "Run",
    "SequenceModel",
    "SoftmaxTransformer",
    "Training",
    "certify_last_layer",
    "effective_rank",
    "recipe",
    "singular_values",
    "stable_rank",
    "train",
]

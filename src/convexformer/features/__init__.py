"""Maps of tokens that keep the problem convex: a head on mapped tokens is the same program with the same certificate."""

from convexformer.features.base import FEATURES, TokenFeature
from convexformer.features.covariance import CovariancePooling
from convexformer.features.fastfood import KERNELS, KINDS, Fastfood, fwht, hadamard, padded
from convexformer.features.pooling import ClassToken, Flatten, MeanPooling
from convexformer.features.queries import SoftmaxQueries
from convexformer.features.random_features import RandomFeatures

__all__ = [
    "FEATURES",
    "KERNELS",
    "KINDS",
    "ClassToken",
    "CovariancePooling",
    "Fastfood",
    "Flatten",
    "MeanPooling",
    "RandomFeatures",
    "SoftmaxQueries",
    "TokenFeature",
    "fwht",
    "hadamard",
    "padded",
]

"""The default program: which maps of the tokens to use, and how much of each, decided by one convex problem."""

from __future__ import annotations

from convexformer.features import ClassToken, CovariancePooling, Flatten, MeanPooling, SoftmaxQueries
from convexformer.heads.base import HEADS
from convexformer.heads.combined import Sum
from convexformer.heads.feature import Feature, Kernel


def portfolio(class_token: bool = False, n_queries: int = 32, max_channels: int = 128, seed: int = 0) -> Sum:
    """Return what ``head="auto"`` is: a sum of seven block norms, those that do not help coming out zero.

    Linear in the mean token, the flattened tokens, the square roots of token covariances and the views of fixed softmax
    queries; Gaussian kernels of the last three. ``class_token`` adds the token at position 0. One ``beta`` for all. Gaussian
    kernels of tokens are the same kernels whose features precondition attention elsewhere (random features of softmax
    kernels); here they are exact up to some ten thousand samples, and random features beyond.
    """
    flat, second, queries = (
        Flatten(),
        CovariancePooling(max_channels=max_channels),
        SoftmaxQueries(n_queries, seed=seed),
    )
    first = [MeanPooling(), *([ClassToken()] if class_token else [])]
    narrow = [Feature(feature, decay="frobenius") for feature in first]
    wide = [
        Kernel(feature, kernel=kernel, decay="frobenius")  # more features than samples, as a rule
        for kernel in ("linear", "gaussian")
        for feature in (flat, second, queries)
    ]
    return Sum([*narrow, *wide], weights="learned")


HEADS.register("auto", portfolio)

"""Content-based pooling without training: softmax attention of fixed queries."""

from __future__ import annotations

import math
import numbers
from typing import final

import torch
from torch import Tensor

from convexformer.data.stores import Tokens
from convexformer.data.tokens import TokenDataset
from convexformer.features.base import FEATURES, TokenFeature

SAMPLE = 256  # tokens a query that k-means sees (more change centroids little; the default of Faiss)
STEPS = 15  # of Lloyd's algorithm


@final
class SoftmaxQueries(TokenFeature):
    """What fixed queries see: ``sum_t softmax_t(<q_k, x_t> / temperature) x_t`` for each query ``q_k``, side by side.

    The queries are k-means centroids of training tokens; ``temperature="auto"`` is ``sqrt(d)``, as in attention (Vaswani et
    al. 2017). Made for standardised tokens. With fewer training tokens than ``n_queries``, every token is a query.

    Parameters
    ----------
    n_queries : int
        The number of centroids.
    temperature : float or "auto"
        Divides the scores before the softmax.
    seed : int
        Starts k-means.
    """

    queries: Tensor  # (k, d)

    def __init__(self, n_queries: int = 32, temperature: float | str = "auto", seed: int = 0) -> None:
        super().__init__()
        self.n_queries = n_queries
        self.temperature = temperature
        self.seed = seed

    def learn(self, tokens: Tokens) -> None:
        """Find the centroids."""
        if not isinstance(self.n_queries, numbers.Integral) or self.n_queries < 1:
            raise ValueError(f"n_queries={self.n_queries} was given; expected a positive whole number.")
        auto = isinstance(self.temperature, str) and self.temperature == "auto"
        if not auto and not (isinstance(self.temperature, numbers.Real) and self.temperature > 0):
            raise ValueError(f"temperature={self.temperature!r} was given; expected a positive number or 'auto'.")
        k = int(self.n_queries)
        self.register_buffer("queries", centroids(tokens.sampled_tokens(SAMPLE * k, int(self.seed)), k))

    def compute(self, tokens: TokenDataset) -> Tensor:
        """``(n, k d)``."""
        X = tokens.X
        temperature = math.sqrt(X.shape[2]) if isinstance(self.temperature, str) else float(self.temperature)
        scores = self.queries.to(X) @ X.mT / temperature  # (n, k, s)
        if tokens.mask is not None:
            scores = scores.masked_fill(~tokens.mask[:, None], -math.inf)
        return (scores.softmax(2) @ X).flatten(1)

    def sample_size(self, n_tokens: int, width: int) -> int:
        """Scores and features."""
        return int(self.n_queries) * (2 * n_tokens + 2 * width)


def centroids(points: Tensor, k: int) -> Tensor:
    """``(k, d)`` k-means centroids of points in random order, by Lloyd's algorithm from the first ones."""
    centers = points[:k].clone()
    for _ in range(STEPS):
        nearest = (centers.square().sum(1) - 2 * points @ centers.T).argmin(1)
        member = torch.nn.functional.one_hot(nearest, len(centers)).to(points)  # sums by a product: the same every time
        count = member.sum(0)[:, None]
        centers = torch.where(count > 0, member.T @ points / count.clamp_min(1), centers)
    return centers


FEATURES.register("SoftmaxQueries", SoftmaxQueries)

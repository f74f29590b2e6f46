"""Gaussian kernels beyond some ten thousand samples: random features of another map."""

from __future__ import annotations

from typing import Any, final

from torch import Tensor

from convexformer.data.tokens import TokenDataset
from convexformer.features.base import FEATURES, TokenFeature
from convexformer.features.fastfood import Fastfood, padded


@final
class RandomFeatures(TokenFeature):
    """Fastfood features of ``feature``, normalised, whose inner products estimate ``exp(-|u - v|^2 / width)``.

    ``n_features`` of them (an even number); the error of a kernel value is about ``1 / sqrt(n_features)`` (Le, Sarlos and
    Smola 2013).

    Parameters
    ----------
    feature : TokenFeature
        The map whose outputs the kernel compares.
    width : float
        Of the Gaussian kernel, in squared units of the normalised map.
    n_features : int
        An even number.
    seed : int
        Draws the projections.
    """

    def __init__(self, feature: TokenFeature | None = None, width: float = 2.0, n_features: int = 8192, seed: int = 0):
        super().__init__()
        self.feature = feature
        self.width = width
        self.n_features = n_features
        self.seed = seed

    @property
    def positional(self) -> bool:  # type: ignore[override]
        """As the map inside."""
        return self._inner().positional

    def _inner(self) -> TokenFeature:
        if not isinstance(self.feature, TokenFeature):
            raise TypeError(f"feature is a {type(self.feature).__name__}; expected a map from convexformer.features.")
        return self.feature

    def learn(self, tokens: TokenDataset) -> None:
        """Fit the map inside."""
        self.feature = self._inner().fitted(tokens)

    def compute(self, tokens: TokenDataset) -> Tensor:
        """``(n, n_features)``."""
        inner = self._inner()
        phi = (inner.compute(tokens) - inner.center.to(tokens.X)) / inner.spread.to(tokens.X)
        food = Fastfood("gaussian", int(self.n_features), (float(self.width) / 2) ** 0.5, int(self.seed))
        food.build(phi.shape[1]).to(tokens.X.device)
        return food.activate(food.project(phi), phi)

    def sample_size(self, n_tokens: int, width: int) -> int:
        """Those of the map inside, and a few projections."""
        inner = self._inner()
        p = inner.n_outputs if hasattr(inner, "n_features_in_") else n_tokens * width
        return inner.sample_size(n_tokens, width) + 4 * max(int(self.n_features), padded(p))

    def config(self) -> dict[str, Any]:
        """Return the options; the map inside has its own state."""
        own = super().config()
        if "state" in own:
            own["state"] = {name: value for name, value in own["state"].items() if not name.startswith("feature.")}
        return own


def n_random_features(n_samples: int, budget: int, itemsize: int) -> int:
    """Return an even number of random features for which the features of all samples fit into half the budget."""
    return 2 * max(256, min(4096, budget // (4 * itemsize * max(1, n_samples))))


FEATURES.register("RandomFeatures", RandomFeatures)

"""Gaussian kernels beyond some ten thousand samples: random features of another map."""

from __future__ import annotations

from typing import Any, final

from torch import Tensor

from convexformer.data.stores import Tokens
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

    food: Fastfood

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

    def learn(self, tokens: Tokens) -> None:
        """Fit the map inside and draw the projections."""
        self.feature = self._inner().fitted(tokens)
        self._draw(tokens.anchor)

    def _draw(self, like: Tensor) -> None:
        food = Fastfood("gaussian", int(self.n_features), (float(self.width) / 2) ** 0.5, int(self.seed))
        self.food = food.build(self._inner().n_outputs).to(like.device)

    def compute(self, tokens: TokenDataset) -> Tensor:
        """``(n, n_features)``."""
        phi = self._inner().embed(tokens)
        return self.food.activate(self.food.project(phi), phi)

    def sample_size(self, n_tokens: int, width: int) -> int:
        """Those of the map inside, and a few projections."""
        inner = self._inner()
        p = inner.n_outputs if hasattr(inner, "n_features_in_") else n_tokens * width
        return inner.sample_size(n_tokens, width) + 4 * max(int(self.n_features), padded(p))

    def config(self) -> dict[str, Any]:
        """Return the options; the map inside has its own state, and the seed draws the projections again."""
        own = super().config()
        if "state" in own:
            own["state"] = {name: value for name, value in own["state"].items() if "." not in name}
        return own

    @classmethod
    def of_config(cls, params: dict[str, Any], state: Any = None, sizes: Any = None) -> TokenFeature:
        """Undo :meth:`config`."""
        made = super().of_config(params, state, sizes)
        assert isinstance(made, RandomFeatures)
        if state is not None:
            made._draw(made.center)
        return made


def n_random_features(n_samples: int, budget: int, itemsize: int) -> int:
    """Return an even number of random features for which the features of all samples fit into half the budget."""
    return 2 * max(256, min(4096, budget // (4 * itemsize * max(1, n_samples))))


FEATURES.register("RandomFeatures", RandomFeatures)

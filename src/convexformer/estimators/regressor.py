"""The regressor on tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
from sklearn.base import RegressorMixin
from sklearn.metrics import r2_score

from convexformer.certificates import Certificate
from convexformer.clock import Clock
from convexformer.data.stores import Tokens
from convexformer.estimators.base import TokenEstimator
from convexformer.estimators.inputs import read_real
from convexformer.registry import one_of


class TokenRegressor(RegressorMixin, TokenEstimator):
    """A regressor on tokens, trained to a certified global optimum; ``loss`` is ``"squared"`` (auto) or ``"huber"``.

    Targets are ``(N,)`` or ``(N, c)``; heads with token outputs take ``(N, s, c)`` too. ``class_weight`` has no meaning
    here and must stay None.
    """

    def fit(self, X: Any, y: Any, sample_weight: Any = None, mask: Any = None) -> TokenRegressor:
        """Fit the head to tokens ``X`` and real targets ``y``."""
        clock = Clock(self.max_time)
        self._fit_tokens(*self._read_training(X, y, sample_weight, mask), clock=clock)
        return self

    def predict(self, X: Any, mask: Any = None) -> np.ndarray:
        """Return predictions in the shape of the targets."""
        return self.outputs(X, mask)

    def score(self, X: Any, y: Any, sample_weight: Any = None, mask: Any = None) -> float:
        """Return R^2 of ``predict(X, mask)``, for targets ``(N,)`` or ``(N, c)``."""
        return float(r2_score(y, self.predict(X, mask), sample_weight=sample_weight))

    def certify(self, X: Any, y: Any, sample_weight: Any = None, mask: Any = None) -> Certificate:
        """Recompute the certificate from the fitted weights and the training data alone."""
        return self._certify(X, read_real(y), self._read_weight(sample_weight, len(y)), mask)

    def _read_training(
        self, X: Any, y: Any, sample_weight: Any, mask: Any
    ) -> tuple[Tokens, np.ndarray, np.ndarray | None]:
        """Validate tokens, targets and weights."""
        if y is None:
            raise ValueError(f"{type(self).__name__} requires y to be passed, but the target y is None.")
        if self.class_weight is not None:
            raise ValueError(
                f"class_weight={self.class_weight!r} was given; a regressor has no classes. Use sample_weight."
            )
        one_of("loss", self.loss, ("auto", "squared", "huber"))
        tokens = self._read_tokens(X, mask, reset=True)
        return tokens, self._read_targets(y), self._read_weight(sample_weight, tokens.n_samples)

    def _read_targets(self, y: Any) -> np.ndarray:
        return read_real(y)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        tags.target_tags.single_output = True
        return tags

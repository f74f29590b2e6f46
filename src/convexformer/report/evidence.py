"""What a report is made from: the fitted model, test data, and what else the user or the run folder has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, final

import numpy as np
from sklearn.base import is_classifier

from convexformer.data import TokenDataset
from convexformer.estimators import TokenEstimator
from convexformer.estimators.inputs import plain_label
from convexformer.report.text import clean


@final
@dataclass(frozen=True)
class Measured:
    """A row of the leaderboard: scores by cross-validation and on the test data, None where there are none."""

    name: str
    reads: str
    setting: str
    cv_score: float | None = None
    spread: float | None = None
    test_score: float | None = None
    seconds: float | None = None
    gap: float | None = None
    """The certified relative gap; None where nothing is certified."""
    ours: bool = False


@final
@dataclass(frozen=True)
class BetaPath:
    """Certified fits along beta, from the largest ratio of ``beta_max`` to the smallest; ``source`` says whence."""

    ratios: np.ndarray
    gaps: np.ndarray
    source: str
    norms: np.ndarray | None = None
    """``(n_betas, s)`` weights of token positions."""
    cv_scores: np.ndarray | None = None
    cv_spread: np.ndarray | None = None
    test_scores: np.ndarray | None = None
    stopped: str = ""


@dataclass(frozen=True)
class Evidence:
    """Everything that the sections read. Test data is given as tokens with the user's own labels, or not at all."""

    model: TokenEstimator
    tokens: TokenDataset | None = None
    y: np.ndarray | None = None
    texts: Sequence[str | Sequence[str]] | None = None
    images: Sequence[Any] | None = None
    grid: tuple[int, int] | None = None
    class_names: Mapping[Any, str] = field(default_factory=dict)
    rows: Sequence[Measured] = ()
    beta_path: BetaPath | None = None
    no_path: str = ""
    """Why there is no path."""
    n_given: int = 0
    """Test samples that were given; those read may be fewer."""
    environment: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 20.0
    """For what is computed by leaving tokens out."""

    @property
    def classifies(self) -> bool:
        """Whether the model is a classifier."""
        return bool(is_classifier(self.model))

    @cached_property
    def classes(self) -> list[str]:
        """Names of the classes, in the order of the model."""
        return [self.name_of(label) for label in self.model.classes_]

    def name_of(self, label: Any) -> str:
        """Return the name of a class."""
        plain = plain_label(label)
        return clean(self.class_names.get(plain, plain), 80)

    @cached_property
    def outputs(self) -> np.ndarray:
        """Outputs of the model on the test data."""
        assert self.tokens is not None
        return self.model.outputs(self.tokens)

    @cached_property
    def predicted(self) -> np.ndarray:
        """Predictions on the test data."""
        assert self.tokens is not None
        return self.model.predict(self.tokens)

    @cached_property
    def probabilities(self) -> np.ndarray | None:
        """``(N, c)`` class probabilities; None for a loss that has none."""
        if self.tokens is None or not hasattr(self.model, "predict_proba"):
            return None
        return self.model.predict_proba(self.tokens)

    @cached_property
    def score(self) -> float | None:
        """Accuracy or R^2 on the test data."""
        if self.tokens is None or self.y is None or (not self.classifies and self.y.ndim > 2):
            return None
        return float(self.model.score(self.tokens, self.y))

    @cached_property
    def token_grid(self) -> tuple[int, int] | None:
        """``(rows, columns)`` of the tokens: as given, or a square where there are pictures; None for a sequence."""
        n = self.model.token_shape_[0]
        if self.grid is not None:
            return self.grid
        side = round(n**0.5)
        for tokens in (n, n - 1):  # the same behind a class token
            side = round(tokens**0.5)
            if self.images is not None and side > 1 and side * side == tokens:
                return side, side
        return None

    @property
    def class_token(self) -> int:
        """How many tokens come before the grid: 1 for a class token, 0 for none."""
        return 0 if self.token_grid is None else self.model.token_shape_[0] - self.token_grid[0] * self.token_grid[1]

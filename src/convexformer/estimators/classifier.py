"""The classifier on tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from sklearn.base import ClassifierMixin
from sklearn.metrics import accuracy_score
from sklearn.utils import compute_sample_weight
from sklearn.utils.metaestimators import available_if
from sklearn.utils.validation import check_is_fitted

from convexformer.certificates import Certificate
from convexformer.clock import Clock
from convexformer.data.stores import Tokens
from convexformer.estimators.base import TokenEstimator
from convexformer.estimators.inputs import plain_label, single_sample
from convexformer.estimators.labels import ClassTargets, read_class_targets
from convexformer.losses import LOSSES
from convexformer.registry import one_of


def _has_probabilities(estimator: TokenClassifier) -> bool:
    return estimator.loss != "squared_hinge"  # its outputs are margins, not log-odds


class TokenClassifier(ClassifierMixin, TokenEstimator):
    """A classifier on tokens, trained to a certified global optimum.

    Labels are ``(N,)``, numbers or text. Two classes use the logistic loss (one output), more use softmax cross-entropy;
    ``loss="squared_hinge"`` is there for two classes as well. Rows of probabilities ``(N, c)``, as floats, are soft labels
    (distillation, label smoothing); heads with token outputs take labels of tokens ``(N, s)`` too, where those of masked
    tokens may be anything. Both use softmax cross-entropy.

    After ``fit``: ``classes_``, ``beta_``, ``beta_max_``, ``certificate_``, ``solution_``, ``network_``, ``n_iter_``,
    ``token_importance_``.

    Examples
    --------
    >>> import convexformer as cf
    >>> X, y = cf.data.digits(patch=2)
    >>> probe = cf.TokenClassifier(beta_ratio=0.05).fit(X[:1200], y[:1200])
    >>> probe.certificate_.relative_gap <= 1e-3
    True
    >>> bool(probe.score(X[1200:], y[1200:]) > 0.9)
    True
    """

    def fit(self, X: Any, y: Any, sample_weight: Any = None, mask: Any = None) -> TokenClassifier:
        """Fit the head to tokens ``X`` and labels ``y: (N,)``."""
        clock = Clock(self.max_time)
        self._fit_tokens(*self._read_training(X, y, sample_weight, mask), clock=clock)
        return self

    def decision_function(self, X: Any, mask: Any = None) -> np.ndarray:
        """Return the score of class 1, ``(N,)``, for two classes; logits ``(N, c)`` for more."""
        scores = self.outputs(X, mask)
        # two classes have two logits with cross-entropy, one with the other losses
        if len(self.classes_) == 2 and scores.shape[-1] == 2 and scores.ndim > 1:
            return scores[..., 1] - scores[..., 0]
        return scores

    def predict(self, X: Any, mask: Any = None) -> np.ndarray:
        """Return the most likely class of each sample, or of each token ``(N, s)``."""
        scores = self.decision_function(X, mask)
        binary = len(self.classes_) == 2
        return self.classes_[(scores > 0).astype(int) if binary else scores.argmax(-1)]

    def score(self, X: Any, y: Any, sample_weight: Any = None, mask: Any = None) -> float:
        """Return the accuracy of ``predict(X, mask)``; soft labels count as their most likely class, tokens one by one."""
        check_is_fitted(self, "solution_")
        predicted = self.predict(X, mask)
        targets = read_class_targets(y, self.solution_.layout.n_tokens, type(self).__name__)
        if predicted.ndim == 1 and not targets.per_token:
            labels = self.classes_[targets.hard] if targets.soft else targets.values
            return float(accuracy_score(labels, predicted, sample_weight=sample_weight))
        real = self._real_tokens(X, mask)
        labels = ClassTargets(targets.hard, soft=False, per_token=True).real(real)
        w = None if sample_weight is None else np.repeat(sample_weight, predicted.shape[1]).reshape(predicted.shape)
        keep = np.ones(predicted.shape, dtype=bool) if real is None else real
        return float(accuracy_score(labels, predicted[keep], sample_weight=None if w is None else w[keep]))

    @available_if(_has_probabilities)
    def predict_proba(self, X: Any, mask: Any = None) -> np.ndarray:
        """``(N, c)`` class probabilities, or ``(N, s, c)`` per token."""
        return np.exp(self.predict_log_proba(X, mask))

    @available_if(_has_probabilities)
    def predict_log_proba(self, X: Any, mask: Any = None) -> np.ndarray:
        """``(N, c)`` logarithms of the class probabilities, or ``(N, s, c)`` per token."""
        scores = torch.from_numpy(self.decision_function(X, mask))
        if len(self.classes_) == 2:
            scores = torch.stack([torch.zeros_like(scores), scores], -1)
        return scores.log_softmax(-1).numpy()

    def certify(self, X: Any, y: Any, sample_weight: Any = None, mask: Any = None) -> Certificate:
        """Recompute the certificate from the fitted weights and the training data alone."""
        check_is_fitted(self, "solution_")
        w = self._read_weight(sample_weight, len(y))
        targets = read_class_targets(y, self.token_shape_[0], type(self).__name__)
        codes, w = self._encode(targets, w, self._real_tokens(X, mask) if targets.per_token else None)
        return self._certify(X, codes, w, mask)

    def _read_training(
        self, X: Any, y: Any, sample_weight: Any, mask: Any
    ) -> tuple[Tokens, np.ndarray, np.ndarray | None]:
        """Validate tokens, labels and weights; learn the classes."""
        if y is None:
            raise ValueError(f"{type(self).__name__} requires y to be passed, but the target y is None.")
        one_of("loss", self.loss, ("auto", "cross_entropy", "logistic", "squared_hinge"))
        tokens = self._read_tokens(X, mask, reset=True)
        targets = read_class_targets(y, tokens.n_tokens, type(self).__name__)
        if len(targets.values) != tokens.n_samples:
            raise ValueError(
                f"X has {tokens.n_samples} samples and y has {len(targets.values)}; they must match."
                f"{single_sample(X, len(targets.values))}"
            )
        real = None if tokens.mask is None else tokens.mask.cpu().numpy()
        self.classes_ = targets.classes(real)
        if len(self.classes_) < 2:
            raise ValueError(
                f"y holds one class only ({plain_label(self.classes_[0])!r}); a classifier needs at least two. "
                "Check the labels."
            )
        return tokens, *self._encode(targets, self._read_weight(sample_weight, tokens.n_samples), real)

    def _read_targets(self, y: Any) -> np.ndarray:
        return read_class_targets(y, self.token_shape_[0], type(self).__name__).values

    def _real_tokens(self, X: Any, mask: Any) -> np.ndarray | None:
        """``(N, s)`` which tokens are real, None where all are."""
        found = self._read_tokens(X, mask, reset=False).mask
        return None if found is None else found.cpu().numpy()

    def _encode(
        self, targets: ClassTargets, w: np.ndarray | None, real: np.ndarray | None
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Return targets as the loss expects them, and sample weights times class weights."""
        if (targets.soft or targets.per_token) and self.class_weight is not None:
            raise ValueError(
                f"class_weight={self.class_weight!r} was given with "
                f"{'soft labels' if targets.soft else 'labels of tokens'}; it is for one label a sample. Use sample_weight."
            )
        if targets.soft:
            return targets.values, w
        labels = targets.values
        if not np.isin(targets.real(real), self.classes_).all():
            raise ValueError("y holds labels that the estimator was not fitted with.")
        codes = np.searchsorted(self.classes_, labels).clip(max=len(self.classes_) - 1)
        if targets.per_token:
            return np.eye(len(self.classes_))[codes], w  # (N, s, c): floats, so that nobody takes them for a sample's
        if self.class_weight is not None:
            by_class = compute_sample_weight(self.class_weight, labels)
            w = by_class if w is None else w * by_class
        if w is not None and self.fit_intercept:
            seen = np.bincount(codes, weights=w, minlength=len(self.classes_)) > 0
            if not seen.all():
                raise ValueError(
                    f"class {plain_label(self.classes_[~seen][0])!r} has no sample of positive weight; "
                    "drop its samples or give them weight."
                )
        return (codes if LOSSES[self._loss_name(codes)]().class_labels else 2 * codes - 1), w

    def _loss_name(self, y: np.ndarray) -> str:
        binary = len(self.classes_) == 2
        if y.ndim > 1:  # probabilities, of samples or tokens
            if self.loss not in ("auto", "cross_entropy"):
                raise ValueError(f"loss={self.loss!r} takes one label a sample; soft labels need loss='cross_entropy'.")
            return "cross_entropy"
        if self.loss == "auto":
            return "logistic" if binary else "cross_entropy"
        if not binary and not LOSSES[self.loss]().class_labels:
            raise ValueError(
                f"loss={self.loss!r} is for two classes and y holds {len(self.classes_)}; use loss='cross_entropy'."
            )
        return self.loss

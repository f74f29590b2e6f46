"""scikit-learn estimators on tokens: thin, deterministic, certified."""

from __future__ import annotations

from abc import ABC, abstractmethod
from os import PathLike
from typing import Any

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.metrics import accuracy_score, r2_score
from sklearn.utils import compute_sample_weight
from sklearn.utils.metaestimators import available_if
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data
from torch import Tensor

from convexformer.architecture import Head, Network
from convexformer.certificates import Certificate, certify
from convexformer.data import TokenDataset
from convexformer.data.tokens import pick_device
from convexformer.estimator_inputs import (
    as_table,
    is_tokens,
    plain_label,
    read_head,
    read_labels,
    read_real,
    read_seed,
    warn_of_padding,
)
from convexformer.networks import StandardizedNetwork
from convexformer.problem import Problem
from convexformer.registry import one_of
from convexformer.solution import Solution, Status
from convexformer.solvers import solve

__all__ = ["TokenClassifier", "TokenRegressor"]


class TokenEstimator(BaseEstimator, ABC):
    """What the estimators share: reading tokens, standardising, solving, certifying.

    ``X`` is ``(N, s, d)``, or ``(N, p)`` taken as one token of size ``p`` (``token_shape=(s, d)`` reshapes it), or a list
    of ragged ``(s_i, d)`` arrays; padding in one array is told by ``mask: (N, s)``, in ``score`` as well as in ``fit``.
    ``beta`` is absolute and, when given, overrides ``beta_ratio``, a fraction of ``beta_max``. ``standardize`` centres and
    scales each channel over the real training tokens. ``random_state`` draws the gates.

    Ctrl-C ends ``fit`` with KeyboardInterrupt, so that a loop or a search around it ends, too; the best point so far is
    kept all the same, certified: the estimator predicts, and with ``warm_start=True`` it goes on from there.
    """

    def __init__(
        self,
        head: str | Head = "attention",
        activation: str = "linear",
        beta: float | None = None,
        beta_ratio: float | None = 0.1,
        tolerance: float = 1e-3,
        fit_intercept: bool = True,
        standardize: bool = True,
        gates: Any = 16,
        decay: str = "l1",
        class_weight: dict[Any, float] | str | None = None,
        device: str | torch.device = "auto",
        random_state: int | np.random.RandomState | None = 0,
        verbose: int = 0,
        *,
        loss: str = "auto",
        token_shape: tuple[int, int] | None = None,
        max_iter: int | None = None,
        max_time: float | None = None,
        warm_start: bool = False,
    ) -> None:
        self.head = head
        self.activation = activation
        self.beta = beta
        self.beta_ratio = beta_ratio
        self.tolerance = tolerance
        self.fit_intercept = fit_intercept
        self.standardize = standardize
        self.gates = gates
        self.decay = decay
        self.class_weight = class_weight
        self.device = device
        self.random_state = random_state
        self.verbose = verbose
        self.loss = loss
        self.token_shape = token_shape
        self.max_iter = max_iter
        self.max_time = max_time
        self.warm_start = warm_start

    mean_: Tensor | None
    scale_: Tensor | None
    solution_: Solution
    masked_: bool
    seed_: int

    # ------------------------------------------------------------------ fitted attributes

    @property
    def network_(self) -> Network:
        """The ordinary network on raw tokens, standardisation included."""
        check_is_fitted(self, "solution_")
        network = self.solution_.network()
        if self.mean_ is None or self.scale_ is None:
            return network
        return StandardizedNetwork(network, self.mean_, self.scale_)

    @property
    def token_importance_(self) -> np.ndarray:
        """``(s,)`` the norm of each token position's weights; only for heads that tell positions apart."""
        check_is_fitted(self, "solution_")
        norms = self.solution_.token_norms()
        if norms is None:
            raise AttributeError(f"the {self.solution_.head.name} head has no weights that belong to token positions.")
        return norms.cpu().numpy()

    # ------------------------------------------------------------------ the chain

    def path_problem(self, X: Any, y: Any, sample_weight: Any = None, mask: Any = None) -> Problem:
        """Return the problem that ``fit`` would solve, standardised, at ``beta_max``: where a path begins."""
        tokens, targets, w = self._read_training(X, y, sample_weight, mask)
        self._learn_scale(tokens, w)
        return self._problem(tokens, targets, w, beta_ratio=1.0)

    def _fit_tokens(
        self, tokens: TokenDataset, y: np.ndarray, w: np.ndarray | None, checkpoint: str | PathLike[str] | None = None
    ) -> None:
        """Standardise, build the problem, solve it, and keep what was learnt."""
        previous = getattr(self, "solution_", None) if self.warm_start else None
        self._learn_scale(tokens, w)
        problem = self._problem(tokens, y, w)
        if previous is not None and (
            previous.weights.misfit(problem.head, problem.layout)
            or tuple(previous.weights.Z.shape) != tuple(problem.operator.weight_shape)
        ):
            previous = None  # options or sizes have changed since
        self._keep(problem, solve(problem, warm_start=previous, checkpoint=checkpoint, **self._solver_options()))
        if self.solution_.status is Status.INTERRUPTED:
            raise KeyboardInterrupt(
                f"{type(self).__name__}.fit was interrupted; the best point so far is kept in solution_, and "
                "warm_start=True goes on from it."
            )

    def _learn_scale(self, tokens: TokenDataset, w: np.ndarray | None) -> None:
        """Learn the standardisation from these tokens alone."""
        self.mean_ = self.scale_ = None
        if self.standardize:
            self.mean_, self.scale_ = tokens.moments(None if w is None else torch.tensor(w))

    def _standardized(self, tokens: TokenDataset) -> TokenDataset:
        if self.mean_ is None or self.scale_ is None:
            return tokens
        return tokens.standardized(self.mean_, self.scale_)

    def _problem(
        self,
        tokens: TokenDataset,
        y: np.ndarray,
        w: np.ndarray | None,
        beta: float | None = None,
        beta_ratio: float | None = None,
    ) -> Problem:
        """Build the problem on standardised tokens; ``beta`` or ``beta_ratio`` here overrides the estimator's own."""
        if beta is None and beta_ratio is None:
            beta, beta_ratio = self.beta, None if self.beta is not None else self.beta_ratio
        tokens = self._standardized(tokens)
        return Problem(
            self._build_head(),
            tokens,
            y,
            loss=self._loss_name(y),
            sample_weight=w,
            intercept=self.fit_intercept,
            dtype=tokens.X.dtype,
            beta=beta,
            beta_ratio=beta_ratio,
        )

    def _keep(self, problem: Problem, solution: Solution) -> None:
        self.solution_ = solution
        self.beta_, self.beta_max_ = problem.beta, problem.beta_max
        self.certificate_ = solution.certificate
        self.n_iter_ = solution.n_iter

    def _outputs(self, X: Any, mask: Any) -> np.ndarray:
        check_is_fitted(self, "solution_")
        tokens = self._read_tokens(X, mask, reset=False)
        return self.solution_.predict(self._standardized(tokens)).cpu().numpy()

    def _certify(self, X: Any, y: np.ndarray, w: np.ndarray | None, mask: Any) -> Certificate:
        check_is_fitted(self, "solution_")
        tokens = self._read_tokens(X, mask, reset=False)
        problem, solution = self._problem(tokens, y, w, beta=self.beta_), self.solution_
        # other samples may correlate other channels; the network is the same point, laid out by none
        blocks = problem.layout.channel_blocks != solution.layout.channel_blocks
        return certify(solution.network() if blocks else solution, problem)

    def _build_head(self) -> Head:
        """Build the head named, with the estimator's options that it takes; an object is used as it is."""
        seed = read_seed(self.random_state, self.seed_)
        return read_head(
            self.head, {"activation": self.activation, "decay": self.decay, "gates": self.gates, "seed": seed}
        )

    def _loss_name(self, y: np.ndarray) -> str:
        return self.loss

    def _solver_options(self) -> dict[str, Any]:
        return {
            "tolerance": self.tolerance,
            "max_iter": self.max_iter,
            "max_time": self.max_time,
            "progress": bool(self.verbose),
        }

    # ------------------------------------------------------------------ reading

    @abstractmethod
    def _read_training(
        self, X: Any, y: Any, sample_weight: Any, mask: Any
    ) -> tuple[TokenDataset, np.ndarray, np.ndarray | None]:
        """Validate tokens, targets and weights; targets come back as the loss wants them."""

    @abstractmethod
    def _read_targets(self, y: Any) -> np.ndarray:
        """Validate targets alone, as the user has them."""

    def _read_tokens(self, X: Any, mask: Any, *, reset: bool) -> TokenDataset:
        """Read tokens; 2-D input goes through scikit-learn's own validation."""
        if not is_tokens(X):
            X = validate_data(self, as_table(X), reset=reset, dtype=[np.float64, np.float32], ensure_min_samples=1)
        if not reset and self.masked_ and mask is None:
            warn_of_padding(X)
        device = pick_device(self.device) if reset else self.solution_.weights.Z.device
        length = None
        if not reset and self.solution_.head.positional:
            length = self.solution_.layout.n_tokens
        tokens = TokenDataset.of(X, mask, device=device, token_shape=self.token_shape, length=length)
        if reset:
            self.token_shape_ = (tokens.n_tokens, tokens.width)
            self.masked_ = tokens.mask is not None
            self.seed_ = read_seed(self.random_state)  # once a fit: all its problems have the same gates
            if is_tokens(X):
                self.n_features_in_ = tokens.width
        elif tokens.width != self.token_shape_[1]:
            raise ValueError(
                f"X has tokens of size d={tokens.width}, but {type(self).__name__} was fitted with "
                f"d={self.token_shape_[1]}. Use the same embedding as for training."
            )
        return tokens

    def _read_weight(self, sample_weight: Any, n: int) -> np.ndarray | None:
        if sample_weight is None:
            return None
        return _check_sample_weight(sample_weight, np.empty((n, 1)), dtype=np.float64, ensure_non_negative=True)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.three_d_array = True
        return tags


def _has_probabilities(estimator: TokenClassifier) -> bool:
    return estimator.loss != "squared_hinge"


class TokenClassifier(ClassifierMixin, TokenEstimator):
    """A classifier on tokens, trained to a certified global optimum.

    Two classes use the logistic loss (one output), more use softmax cross-entropy; ``loss="squared_hinge"`` is there for
    two classes as well. After ``fit``: ``classes_``, ``beta_``, ``beta_max_``, ``certificate_``, ``solution_``,
    ``network_``, ``n_iter_``, ``token_importance_``.

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
        self._fit_tokens(*self._read_training(X, y, sample_weight, mask))
        return self

    def decision_function(self, X: Any, mask: Any = None) -> np.ndarray:
        """Return the score of class 1, ``(N,)``, for two classes; logits ``(N, c)`` for more."""
        scores = self._outputs(X, mask)
        # two classes by cross-entropy have a logit each
        return scores[:, 1] - scores[:, 0] if scores.ndim == 2 and len(self.classes_) == 2 else scores

    def predict(self, X: Any, mask: Any = None) -> np.ndarray:
        """Return the most likely class of each sample."""
        scores = self.decision_function(X, mask)
        index = (scores > 0).astype(int) if scores.ndim == 1 else scores.argmax(1)
        return self.classes_[index]

    def score(self, X: Any, y: Any, sample_weight: Any = None, mask: Any = None) -> float:
        """Return the accuracy of ``predict(X, mask)``."""
        return float(accuracy_score(y, self.predict(X, mask), sample_weight=sample_weight))

    @available_if(_has_probabilities)
    def predict_proba(self, X: Any, mask: Any = None) -> np.ndarray:
        """``(N, c)`` class probabilities."""
        return np.exp(self.predict_log_proba(X, mask))

    @available_if(_has_probabilities)
    def predict_log_proba(self, X: Any, mask: Any = None) -> np.ndarray:
        """``(N, c)`` logarithms of the class probabilities."""
        scores = torch.from_numpy(self.decision_function(X, mask))
        if scores.ndim == 1:
            scores = torch.stack([torch.zeros_like(scores), scores], 1)
        return scores.log_softmax(1).numpy()

    def certify(self, X: Any, y: Any, sample_weight: Any = None, mask: Any = None) -> Certificate:
        """Recompute the certificate from the fitted weights and the training data alone."""
        check_is_fitted(self, "solution_")
        w = self._read_weight(sample_weight, len(y))
        codes, w = self._encode(read_labels(y), w)
        return self._certify(X, codes, w, mask)

    def _read_training(
        self, X: Any, y: Any, sample_weight: Any, mask: Any
    ) -> tuple[TokenDataset, np.ndarray, np.ndarray | None]:
        """Validate tokens, labels and weights; learn the classes."""
        if y is None:
            raise ValueError(f"{type(self).__name__} requires y to be passed, but the target y is None.")
        one_of("loss", self.loss, ("auto", "cross_entropy", "logistic", "squared_hinge"))
        tokens = self._read_tokens(X, mask, reset=True)
        labels = read_labels(y)
        if len(labels) != tokens.n_samples:
            raise ValueError(f"X has {tokens.n_samples} samples and y has {len(labels)}; they must match.")
        self.classes_ = np.unique(labels)
        if len(self.classes_) < 2:
            raise ValueError(
                f"y holds one class only ({plain_label(self.classes_[0])!r}); a classifier needs at least two. "
                "Check the labels."
            )
        return tokens, *self._encode(labels, self._read_weight(sample_weight, tokens.n_samples))

    def _read_targets(self, y: Any) -> np.ndarray:
        return read_labels(y)

    def _encode(self, labels: np.ndarray, w: np.ndarray | None) -> tuple[np.ndarray, np.ndarray | None]:
        """Return labels as the loss wants them, and weights with the class weights in."""
        if not np.isin(labels, self.classes_).all():
            raise ValueError("y holds labels that were not there when the estimator was fitted.")
        codes = np.searchsorted(self.classes_, labels)
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
        return (codes if self._loss_name(codes) == "cross_entropy" else 2 * codes - 1), w

    def _loss_name(self, y: np.ndarray) -> str:
        binary = len(self.classes_) == 2
        if self.loss == "auto":
            return "logistic" if binary else "cross_entropy"
        if self.loss in ("logistic", "squared_hinge") and not binary:
            raise ValueError(
                f"loss={self.loss!r} is for two classes and y holds {len(self.classes_)}; use loss='cross_entropy'."
            )
        return self.loss


class TokenRegressor(RegressorMixin, TokenEstimator):
    """A regressor on tokens, trained to a certified global optimum; ``loss`` is ``"squared"`` (auto) or ``"huber"``.

    Targets are ``(N,)`` or ``(N, c)``; heads with token outputs take ``(N, s, c)`` too. ``class_weight`` has no meaning
    here and must stay None.
    """

    def fit(self, X: Any, y: Any, sample_weight: Any = None, mask: Any = None) -> TokenRegressor:
        """Fit the head to tokens ``X`` and real targets ``y``."""
        self._fit_tokens(*self._read_training(X, y, sample_weight, mask))
        return self

    def predict(self, X: Any, mask: Any = None) -> np.ndarray:
        """Return predictions in the shape of the targets."""
        return self._outputs(X, mask)

    def score(self, X: Any, y: Any, sample_weight: Any = None, mask: Any = None) -> float:
        """Return R^2 of ``predict(X, mask)``, for targets ``(N,)`` or ``(N, c)``."""
        return float(r2_score(y, self.predict(X, mask), sample_weight=sample_weight))

    def certify(self, X: Any, y: Any, sample_weight: Any = None, mask: Any = None) -> Certificate:
        """Recompute the certificate from the fitted weights and the training data alone."""
        return self._certify(X, read_real(y), self._read_weight(sample_weight, len(y)), mask)

    def _read_training(
        self, X: Any, y: Any, sample_weight: Any, mask: Any
    ) -> tuple[TokenDataset, np.ndarray, np.ndarray | None]:
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

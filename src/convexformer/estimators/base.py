"""Base of the estimators: scikit-learn's interface around a problem, a solve and a certificate."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps
from inspect import signature
from os import PathLike
from pathlib import Path as FilePath
from typing import Any

import numpy as np
import torch
from rich.console import Console
from sklearn.base import BaseEstimator
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data
from torch import Tensor

from convexformer.certificates import Certificate
from convexformer.clock import Clock
from convexformer.data.containers import check_container, check_token_ids
from convexformer.data.stores import Tokens, read_tokens
from convexformer.data.tokens import pick_device
from convexformer.estimators.docstrings import describe_parameters
from convexformer.estimators.inputs import as_table, is_tokens, read_head, read_seed, warn_of_padding
from convexformer.heads.base import Head
from convexformer.networks import StandardizedNetwork
from convexformer.networks.base import Network
from convexformer.problem import Problem
from convexformer.progress import spinner
from convexformer.registry import one_of, unknown
from convexformer.solution import Solution
from convexformer.solvers import SOLVERS
from convexformer.solvers.status import Status
from convexformer.solving import certify, solve

HEAD_DEFAULTS: dict[str, Any] = {"activation": "linear", "decay": "l1", "gates": 16}  # of the estimators


def named_options(init: Callable[..., None]) -> Callable[..., None]:
    """Make unknown keywords of a constructor errors that name the user's class and the nearest option."""
    known = [name for name in signature(init).parameters if name != "self"]

    @wraps(init)
    def checked(self: Any, *args: Any, **options: Any) -> None:
        for name in options:
            if name not in known:
                raise TypeError(f"{type(self).__name__}: {unknown('option', name, known)}")
        init(self, *args, **options)

    return checked


class TokenEstimator(BaseEstimator, ABC):
    """Reads tokens, standardises them, solves, and certifies; subclasses handle the targets.

    ``X`` is ``(N, s, d)``, or ``(N, p)`` taken as one token of size ``p`` (``token_shape=(s, d)`` reshapes it), or a list
    of ragged ``(s_i, d)`` arrays; ``mask: (N, s)`` marks the real tokens of padded samples, in ``score`` as in ``fit``.

    Ctrl-C ends ``fit`` with KeyboardInterrupt, so that a loop or a search around it ends as well. The best point so far is
    kept with its certificate: the estimator predicts, and ``fit`` with ``warm_start=True`` continues from it.

    Parameters
    ----------
    head : str or Head
        ``"attention"``, ``"self_attention"``, ``"mlp_mixer"``, ``"fno"``, ``"block_fno"``, ``"poolformer"``, ``"fnet"``,
        ``"mlp"``, ``"linear"``; with cross-validation also ``"auto"``, one program over several maps; or an object from
        ``convexformer.heads``, which has its own options (grids, windows, blocks); those below then keep their defaults.
    activation : {"linear", "gated_relu", "relu"}
        Of a head given by name. ``"gated_relu"`` has fixed gates; ``"relu"`` is exact, for small problems.
    beta : float, optional
        The strength of the penalty, absolute; it overrides ``beta_ratio``. The loss is a sum over samples.
    beta_ratio : float
        The strength as a fraction of ``beta_max``, the smallest beta at which all weights are zero.
    tolerance : float
        The certified relative duality gap at which to stop.
    fit_intercept : bool
        Whether to add an unpenalised intercept.
    standardize : bool
        Whether to centre and scale each channel over the real training tokens; ``network_`` includes it.
    gates : int or arrays
        The number of gates of a gated head, or the gates themselves; see the head.
    decay : {"l1", "l2"}
        Weight decay of the attention head: token-sparse, or ordinary.
    class_weight : dict or "balanced", optional
        Weights of classes, as in scikit-learn; classifiers only.
    device : str or torch.device
        ``"auto"`` takes a GPU where there is one.
    random_state : int, RandomState or None
        Draws the gates where their number is given.
    verbose : int
        Above 0, shows progress.
    loss : str
        ``"auto"``, or for classifiers ``"logistic"``, ``"cross_entropy"``, ``"squared_hinge"``, for regressors
        ``"squared"``, ``"huber"``.
    token_shape : (int, int), optional
        ``(s, d)``, by which two-dimensional ``X`` is reshaped.
    max_iter : int, optional
        Iterations at which to stop with the best point so far.
    max_time : float, optional
        Seconds from the call of ``fit`` on, reading, standardising and building the operator included.
    warm_start : bool
        Whether to start from the last fit where it is of the same head and sizes.
    solver : str
        ``"auto"`` or one of ``convexformer.solvers.SOLVERS``.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        describe_parameters(cls)

    @named_options
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
        solver: str = "auto",
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
        self.solver = solver

    mean_: Tensor | None
    scale_: Tensor | None
    solution_: Solution
    masked_: bool
    seed_: int
    data_fingerprint_: str  # of the training data, where a command read them from files

    # ------------------------------------------------------------------ parameters, those of the head included

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """Return the options; ``deep`` adds those of a head object as ``head__name``."""
        own = super().get_params(deep)
        if deep and isinstance(self.head, Head):
            own.update({f"head__{name}": value for name, value in self.head.config().items()})
        return own

    def set_params(self, **params: Any) -> Any:
        """Set options; ``head__name`` sets one of the head, whether it is an object or a name."""
        nested = {key.removeprefix("head__"): params.pop(key) for key in list(params) if key.startswith("head__")}
        super().set_params(**params)
        if not nested:
            return self
        if isinstance(self.head, str):  # options that estimators have as well stay with them
            super().set_params(**{key: nested.pop(key) for key in list(nested) if key in HEAD_DEFAULTS})
        if nested:
            head = self._build_head()
            for name in nested:
                one_of(f"option of the {head.name} head", name, head.config())
            self.head = type(head)(**{**head.config(), **nested})
        return self

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
        """``(s,)`` the norm of each token position's weights; only for heads with weights per position."""
        check_is_fitted(self, "solution_")
        norms = self.solution_.token_norms()
        if norms is None:
            raise AttributeError(f"the {self.solution_.head.name} head has no weights that belong to token positions.")
        return norms.cpu().numpy()

    def outputs(self, X: Any, mask: Any = None) -> np.ndarray:
        """Return the outputs of the network, logits or values, in the shape of the targets."""
        check_is_fitted(self, "solution_")
        tokens = self._read_tokens(X, mask, reset=False)
        return self.solution_.predict(self._standardized(tokens)).cpu().numpy()

    def report(self, path: str | PathLike[str], X_test: Any = None, y_test: Any = None, **options: Any) -> FilePath:
        """Write one self-contained HTML page about this model; options are those of :func:`convexformer.report.report`."""
        from convexformer.report import report  # the only step up in the order of imports: a door for the user

        return report(self, path, X_test, y_test, **options)

    # ------------------------------------------------------------------ fitting

    def fit_checkpointed(
        self,
        X: Any,
        y: Any,
        sample_weight: Any = None,
        mask: Any = None,
        checkpoint: str | PathLike[str] | None = None,
    ) -> None:
        """Do what ``fit`` does, with a file from which an interrupted solve continues (see ``solve``)."""
        clock = Clock(self.max_time)
        self._fit_tokens(*self._read_training(X, y, sample_weight, mask), clock=clock, checkpoint=checkpoint)

    def path_problem(self, X: Any, y: Any, sample_weight: Any = None, mask: Any = None) -> Problem:
        """Return the problem that ``fit`` would solve, standardised, at ``beta_max``: where a path begins."""
        tokens, targets, w = self._read_training(X, y, sample_weight, mask)
        self._learn_scale(tokens, w)
        return self._problem(tokens, targets, w, beta_ratio=1.0)

    def _fit_tokens(
        self,
        tokens: Tokens,
        y: np.ndarray,
        w: np.ndarray | None,
        clock: Clock,
        checkpoint: str | PathLike[str] | None = None,
    ) -> None:
        """Standardise, build the problem, solve it in the time that is left, and keep the solution."""
        one_of("solver", self.solver, ("auto", *SOLVERS))
        previous: Solution | None = getattr(self, "solution_", None) if self.warm_start else None
        with spinner("standardising, operator, beta_max", Console()) if self.verbose else nullcontext():
            self._learn_scale(tokens, w)
            problem = self._problem(tokens, y, w)
        if previous is not None and not _continues(previous, problem):
            previous = None
        options = {**self._solver_options(), "max_time": clock.left()}
        self._keep(problem, solve(problem, warm_start=previous, checkpoint=checkpoint, **options))
        if self.solution_.status is Status.INTERRUPTED:
            raise KeyboardInterrupt(
                f"{type(self).__name__}.fit was interrupted; the best point so far is kept in solution_, and "
                "warm_start=True continues from it."
            )

    def _learn_scale(self, tokens: Tokens, w: np.ndarray | None) -> None:
        """Learn the standardisation from these tokens alone."""
        self.mean_ = self.scale_ = None
        if self.standardize:
            self.mean_, self.scale_ = tokens.moments(None if w is None else torch.tensor(w))

    def _standardized(self, tokens: Tokens) -> Tokens:
        if self.mean_ is None or self.scale_ is None:
            return tokens
        return tokens.standardized(self.mean_, self.scale_)

    def _problem(
        self,
        tokens: Tokens,
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
            dtype=tokens.dtype,
            beta=beta,
            beta_ratio=beta_ratio,
        )

    def _keep(self, problem: Problem, solution: Solution) -> None:
        self.solution_ = solution
        self.beta_, self.beta_max_ = problem.beta, problem.beta_max
        self.certificate_ = solution.certificate
        self.n_iter_ = solution.n_iter

    def _certify(self, X: Any, y: np.ndarray, w: np.ndarray | None, mask: Any) -> Certificate:
        check_is_fitted(self, "solution_")
        tokens = self._read_tokens(X, mask, reset=False).to(dtype=self.solution_.weights.form.dtype)
        return certify(self.solution_, self._problem(tokens, y, w, beta=self.beta_))

    def _build_head(self) -> Head:
        """Return the head of that name with those of the estimator's options that it takes; an object as it is."""
        return read_head(self.head, self._head_options(), HEAD_DEFAULTS, type(self).__name__)

    def _head_options(self) -> dict[str, Any]:
        seed = read_seed(self.random_state, getattr(self, "seed_", 0))
        return {"activation": self.activation, "decay": self.decay, "gates": self.gates, "seed": seed}

    def _loss_name(self, y: np.ndarray) -> str:
        return self.loss

    def _solver_options(self) -> dict[str, Any]:
        return {
            "tolerance": self.tolerance,
            "solver": self.solver,
            "max_iter": self.max_iter,
            "max_time": self.max_time,
            "progress": bool(self.verbose),
        }

    # ------------------------------------------------------------------ reading

    @abstractmethod
    def _read_training(
        self, X: Any, y: Any, sample_weight: Any, mask: Any
    ) -> tuple[Tokens, np.ndarray, np.ndarray | None]:
        """Validate tokens, targets and weights; targets are returned as the loss expects them."""

    @abstractmethod
    def _read_targets(self, y: Any) -> np.ndarray:
        """Validate targets, and return them in the user's own encoding."""

    def _read_tokens(self, X: Any, mask: Any, *, reset: bool) -> Tokens:
        """Read tokens; 2-D input goes through scikit-learn's own validation."""
        whose = type(self).__name__
        check_container(X, whose)
        if not is_tokens(X):
            check_token_ids(X, whose)
            self._check_sample(X, reset)
            X = validate_data(self, as_table(X), reset=reset, dtype=[np.float64, np.float32], ensure_min_samples=1)
        if not reset and self.masked_ and mask is None:
            warn_of_padding(X)
        device = pick_device(self.device) if reset else self.solution_.weights.form.device
        length = None
        if not reset and self.solution_.head.positional:
            length = self.solution_.layout.n_tokens
        tokens = read_tokens(X, mask, device=device, token_shape=self.token_shape, length=length)
        if reset:
            self.token_shape_ = (tokens.n_tokens, tokens.width)
            self.masked_ = tokens.mask is not None
            self.seed_ = read_seed(self.random_state)  # drawn once a fit, so that all its problems have the same gates
            if is_tokens(X):
                self.n_features_in_ = tokens.width
        elif tokens.width != self.token_shape_[1]:
            raise ValueError(
                f"X has tokens of size d={tokens.width}, but {type(self).__name__} was fitted with "
                f"d={self.token_shape_[1]}. Use the same embedding as for training."
            )
        return tokens

    def _check_sample(self, X: Any, reset: bool) -> None:
        """Tell a single sample ``(s, d)`` from a table, where the fit was on more than one token."""
        shape = tuple(getattr(X, "shape", ()))
        if reset or len(shape) != 2 or self.token_shape is not None or self.token_shape_[0] == 1:
            return
        if shape[1] == self.token_shape_[1]:
            raise ValueError(
                f"X has shape {shape} and {type(self).__name__} was fitted with samples of {self.token_shape_[0]} tokens of "
                f"size {self.token_shape_[1]}. A single sample needs the axis of samples: pass X[None]."
            )

    def _read_weight(self, sample_weight: Any, n: int) -> np.ndarray | None:
        if sample_weight is None:
            return None
        return _check_sample_weight(sample_weight, np.empty((n, 1)), dtype=np.float64, ensure_non_negative=True)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.three_d_array = True
        return tags


def _continues(previous: Solution, problem: Problem) -> bool:
    """Tell whether a solution may start this problem: the same head and sizes."""
    if tuple(previous.weights.shape) != tuple(problem.operator.weight_shape):
        return False
    return not previous.weights.incompatibility(problem.head.identity(problem.layout))

"""Model selection: folds in parallel, one warm-started path each."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import nullcontext
from numbers import Integral
from os import PathLike
from typing import Any

import numpy as np
import torch
from joblib import delayed, effective_n_jobs
from sklearn.base import clone, is_classifier
from sklearn.model_selection import check_cv
from sklearn.utils.validation import check_is_fitted

from convexformer.clock import Clock
from convexformer.data import TokenDataset
from convexformer.data.stores import Tokens
from convexformer.estimators.base import TokenEstimator, named_options
from convexformer.estimators.classifier import TokenClassifier
from convexformer.estimators.folds import (
    CountedParallel,
    FoldOptions,
    Share,
    carried_forward,
    score_path,
    uninterrupted,
)
from convexformer.estimators.leaderboard import Entry, Leaderboard
from convexformer.estimators.portfolio import AutoGrid, auto_path, one_thread, shared_path
from convexformer.estimators.race import RACERS, widen
from convexformer.estimators.regressor import TokenRegressor
from convexformer.heads.base import Head
from convexformer.heads.combined import Sum
from convexformer.jit import interpreted
from convexformer.path import beta_ratios, total_clock, walk
from convexformer.progress import step_bar
from convexformer.registry import GridEndWarning, one_of, warn
from convexformer.solvers import SOLVERS
from convexformer.solvers.block_newton import BlockNewton, BlockNewtonOptions
from convexformer.solvers.run import check_limits
from convexformer.solving import solve
from convexformer.threads import limited_threads

LADDER = 0.3  # ratio of successive betas on the way to the one selected
ROUGH = 0.1  # their relative gap


class CrossValidated(TokenEstimator):
    """Base of the estimators that choose beta by cross-validation; it must come first among their bases.

    Each fold standardises on its own training part, walks a warm-started path of ``n_betas`` from its ``beta_max`` down to
    ``beta_min_ratio`` of it, and scores every solution on the part left out. The ratio selected is then fitted to all
    samples, to ``tolerance``. Sample weights count in the fit, and in the score where the scorer takes them.

    What selection cannot see is not computed (``fold_tolerance``, ``patience``). Further scores of a fold that has ended are
    NaN in ``cv_results_``, and count in the mean as its last one; the mean is NaN where no fold has got. A selection at the
    small end of the grid warns (``GridEndWarning``).

    There is no ``warm_start``, since every path is warm-started anyway. Ctrl-C ends the whole search and keeps nothing.

    ``head="auto"`` is one convex program over maps of the tokens (:func:`convexformer.heads.portfolio`). It has its own
    grid, ``beta_ratio`` from 0.2 to 8e-4 and on while scores rise (``n_betas`` and ``beta_min_ratio`` do not matter), and is
    solved in float32 and certified in float64. ``validation="folds"``: each fold fits everything on its training part
    alone. ``"shared"``: one path on all samples; folds refit coefficients and intercepts, and share with it the maps, which
    are learnt without labels, and the block weights, one number a map. ``"auto"`` shares where ``cv`` is a number and there
    are no ``groups``. ``portfolio="wide"`` lets the papers' heads race by successive halving in ``max_time``, here the time
    of the whole fit; the winner is cross-validated on the same folds, and kept if it does better.

    After ``fit``: ``leaderboard_``, ``cv_results_``, ``beta_ratios_``, ``best_index_`` (the one selected), ``best_score_``
    and ``beta_ratio_`` besides the attributes of the plain estimator; ``n_iter_`` counts the path of the last fit.

    Parameters
    ----------
    n_betas, beta_min_ratio : int, float
        The grid: so many betas from ``beta_max`` down to this fraction of it, evenly in logarithm.
    cv : int, splitter or iterable
        As in scikit-learn.
    scoring : str or callable, optional
        Chooses beta; the estimator's own ``score`` by default.
    selection : {"best", "1se"}
        The ratio with the best mean score (the largest on ties), or the largest, the sparsest head, within one standard
        error of it.
    n_jobs : int, optional
        Folds at a time, on joblib's current backend (``joblib.parallel_config``), Dask's or Ray's too.
    max_iter, max_time : int, float, optional
        Limits of each beta of each fold, and of the last fit.
    fold_tolerance : float
        The relative gap to which folds are solved, ``tolerance`` if that is larger; the last fit is certified to the latter.
        ``head="auto"`` takes 0.03 at most.
    patience : int, optional
        Once its score has risen, a fold ends its path after so many betas without one better by 1% of the rise.
    total_time : float, optional
        Seconds of the whole of ``fit``. Each fold has its share of what is left, and ends its path when that is up; the
        best of what has been scored is fitted in the rest.
    validation : {"auto", "folds", "shared"}
        How ``head="auto"`` is cross-validated: each fold by itself, or coefficients only, given the maps' weights.
    portfolio : {"default", "wide"}
        ``"wide"`` lets the papers' heads race against ``head="auto"``.
    """

    @named_options
    def __init__(
        self,
        head: str | Head = "attention",
        activation: str = "linear",
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
        n_betas: int = 20,
        beta_min_ratio: float = 1e-3,
        cv: Any = 5,
        scoring: Any = None,
        selection: str = "best",
        n_jobs: int | None = None,
        loss: str = "auto",
        token_shape: tuple[int, int] | None = None,
        max_iter: int | None = None,
        max_time: float | None = None,
        solver: str = "auto",
        fold_tolerance: float = 0.1,
        patience: int | None = 3,
        total_time: float | None = None,
        validation: str = "auto",
        portfolio: str = "default",
    ) -> None:
        super().__init__(
            head=head,
            activation=activation,
            tolerance=tolerance,
            fit_intercept=fit_intercept,
            standardize=standardize,
            gates=gates,
            decay=decay,
            class_weight=class_weight,
            device=device,
            random_state=random_state,
            verbose=verbose,
            loss=loss,
            token_shape=token_shape,
            max_iter=max_iter,
            max_time=max_time,
            solver=solver,
        )
        self.n_betas = n_betas
        self.beta_min_ratio = beta_min_ratio
        self.cv = cv
        self.scoring = scoring
        self.selection = selection
        self.n_jobs = n_jobs
        self.fold_tolerance = fold_tolerance
        self.patience = patience
        self.total_time = total_time
        self.validation = validation
        self.portfolio = portfolio

    def fit_checkpointed(
        self,
        X: Any,
        y: Any,
        sample_weight: Any = None,
        mask: Any = None,
        checkpoint: str | PathLike[str] | None = None,
    ) -> None:
        """Raise: a search has no checkpoints."""
        raise TypeError(
            f"{type(self).__name__} has no checkpoints: its folds run in parallel and keep nothing. Call fit, or fit a "
            "plain estimator at a beta of your choice."
        )

    def _choose_and_fit(self, X: Any, y: Any, sample_weight: Any, mask: Any, groups: Any) -> None:
        """Choose beta by cross-validation, then fit all samples with it."""
        clock, race_clock = total_clock(self.total_time), Clock(self.max_time)
        self._check_options()
        self.winner_: str | None = None
        self.raced_: list[dict[str, Any]] = []
        tokens, codes, w = self._read_training(X, y, sample_weight, mask)
        targets = self._read_targets(y)
        if self.scoring is None and targets.ndim > 2:
            raise ValueError(
                f"y has shape {targets.shape}, targets per token, and scoring=None means R^2, one row per sample. "
                "Pass scoring=callable(estimator, X, y), or choose beta yourself along cf.path."
            )
        splitter = check_cv(self.cv, targets if targets.ndim == 1 else None, classifier=is_classifier(self))
        folds = list(splitter.split(np.zeros(len(targets)), targets, groups))
        own = self._read_weight(sample_weight, tokens.n_samples)
        began = time.perf_counter()
        auto = AutoGrid() if self._is_auto else None
        whole = tokens
        if auto is not None:
            tokens = tokens.to(dtype=torch.float32)
        ratios = beta_ratios(self.n_betas, self.beta_min_ratio) if auto is None else auto.ratios()
        options = FoldOptions(ratios, self.scoring, self.patience, max(self.tolerance, self.fold_tolerance))
        if auto is not None and isinstance(tokens, TokenDataset) and self._shares(tokens, groups):
            with one_thread(tokens), interpreted():  # few calls: compiling would take longer than all of them
                self._share(tokens, codes, w, targets, own, folds, options, clock)
        else:
            self._record(ratios, *self._walk_folds(tokens, targets, own, folds, options, clock))
            self._refit(tokens, codes, w, clock, ladder=auto is None)
        self.search_seconds_ = time.perf_counter() - began
        if self.portfolio == "wide":
            widen(self, whole, targets, own, folds, race_clock)

    @property
    def _is_auto(self) -> bool:
        return isinstance(self.head, str) and self.head == "auto"

    def _build_head(self) -> Head:
        """Return the winner of a race, else the head asked for."""
        winner = getattr(self, "winner_", None)
        return super()._build_head() if winner is None else RACERS[winner]

    def _walk_folds(
        self,
        tokens: Tokens,
        targets: np.ndarray,
        w: np.ndarray | None,
        folds: Sequence[tuple[np.ndarray, np.ndarray]],
        options: FoldOptions,
        clock: Clock,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the scores and gaps of every fold's own path, ``(folds, betas)``."""
        host, workers = tokens.to(device="cpu"), effective_n_jobs(self.n_jobs)
        share = Share.of(clock, len(folds), workers)
        fold = auto_path if self._is_auto else score_path
        jobs = (
            delayed(fold)(self.single(), host, targets, w, train, test, options, share.of_fold(k))
            for k, (train, test) in enumerate(folds)
        )
        shown = step_bar("cross-validation", len(folds), shown=bool(self.verbose))
        with (
            shown as bar,
            limited_threads(max(1, torch.get_num_threads() // workers)) if workers > 1 else nullcontext(),
        ):
            rows = CountedParallel(bar, n_jobs=self.n_jobs)(jobs)
        scores, gaps = zip(*rows, strict=True)
        return np.array(scores), np.array(gaps)

    def _shares(self, tokens: TokenDataset, groups: Any) -> bool:
        """Whether folds share maps and block weights with the fit on all samples."""
        fits = self.solver in ("auto", BlockNewton.name) and tokens.n_samples <= BlockNewtonOptions().max_rows
        if self.validation == "shared" and not fits:
            raise ValueError(
                f"validation='shared' needs the solver {BlockNewton.name!r} and at most {BlockNewtonOptions().max_rows:,} "
                f"samples; given were solver={self.solver!r} and {tokens.n_samples:,} samples. Use validation='folds'."
            )
        plain = groups is None and (self.cv is None or isinstance(self.cv, Integral))
        return fits and (self.validation == "shared" or (self.validation == "auto" and plain))

    def _share(
        self,
        tokens: TokenDataset,
        codes: np.ndarray,
        w: np.ndarray | None,
        targets: np.ndarray,
        own: np.ndarray | None,
        folds: Sequence[tuple[np.ndarray, np.ndarray]],
        options: FoldOptions,
        clock: Clock,
    ) -> None:
        """Choose beta by folds that share a path of block weights, and solve there, on all samples, to the tolerance."""
        self._learn_scale(tokens, w)
        problem = self._problem(tokens, codes, w, beta_ratio=1.0)
        most = Share.of(clock, 1, 1).clock()  # the last solve needs some of the time
        path = shared_path(self, problem, tokens, targets, own, folds, options, most)
        self._record(options.ratios, path.scores, np.broadcast_to(path.gaps, path.scores.shape))
        last = problem.with_beta(problem.beta * self.beta_ratio_)
        limits = {**self._solver_options(), "max_time": clock.left(self.max_time)}
        found = next(uninterrupted(iter([solve(last, warm_start=path.starts[self.best_index_], **limits)])))
        self._keep(last, found)
        self.n_iter_ = max(1, found.n_iter + path.n_iter)

    def _check_options(self) -> None:
        one_of("selection", self.selection, ("best", "1se"))
        one_of("validation", self.validation, ("auto", "folds", "shared"))
        one_of("portfolio", self.portfolio, ("default", "wide"))
        if self.portfolio == "wide" and not self._is_auto:
            raise ValueError(
                f"portfolio='wide' widens head='auto'; head={self.head!r} was given. Leave one of them out."
            )
        one_of("solver", self.solver, ("auto", *SOLVERS))
        check_limits(self.fold_tolerance, None, None)
        if self.patience is not None and (not isinstance(self.patience, Integral) or self.patience < 1):
            raise ValueError(f"patience={self.patience} was given; expected a positive number of betas or None.")
        if isinstance(self.scoring, (list, tuple, set, dict)):
            raise ValueError(f"scoring={self.scoring!r} names several scores; beta is chosen by one. Pass one of them.")

    def _refit(self, tokens: Tokens, codes: np.ndarray, w: np.ndarray | None, clock: Clock, ladder: bool) -> None:
        """Fit all samples at the ratio selected: down a ladder of betas, roughly, then to the tolerance.

        Without ``ladder`` at once, for a solver that has its own way down.
        """
        self._learn_scale(tokens, w)
        problem = self._problem(tokens, codes, w, beta_ratio=1.0)
        rungs = math.ceil(math.log(self.beta_ratio_) / math.log(LADDER))
        betas = np.geomspace(1.0, self.beta_ratio_, rungs + 1)[min(1, rungs) if ladder else -1 :]
        steps = walk(problem, betas, early_tolerance=ROUGH, clock=clock, **self._solver_options())
        total = 0
        for solution in uninterrupted(steps):
            total += solution.n_iter
            last = solution
        self._keep(problem.with_beta(last.beta), last)
        self.n_iter_ = max(1, total)  # scikit-learn asks for at least one

    @property
    def leaderboard_(self) -> Leaderboard:
        """What was tried, as a table: the score of the head at its beta, its spread over folds, seconds, gap."""
        check_is_fitted(self, "solution_")
        return Leaderboard([self.entry(), *(Entry(**raced) for raced in self.raced_)])

    def entry(self) -> Entry:
        """Return the row of this search in a leaderboard."""
        head, found, at = self.solution_.head, self.cv_results_, self.best_index_
        return Entry(
            name=self.winner_ or (self.head if isinstance(self.head, str) else head.label()),
            score=float(found["mean_test_score"][at]),
            spread=float(found["std_test_score"][at]),
            seconds=self.search_seconds_,
            gap=max(float(np.nanmax(found["max_relative_gap"])), self.certificate_.relative_gap),
            reads=", ".join(head.labels()) if isinstance(head, Sum) else head.label(),
            setting=f"beta_ratio {self.beta_ratio_:.2g}",
        )

    def single(self, head: Head | None = None) -> TokenEstimator:
        """Return an unfitted plain estimator with the same options, for one fold; with another head, where given."""
        plain = TokenClassifier if is_classifier(self) else TokenRegressor
        names = set(plain().get_params())
        own = {name: value for name, value in self.get_params(deep=False).items() if name in names}
        own |= {"verbose": 0, "random_state": self.seed_} | ({} if head is None else {"head": head, "max_time": None})
        return clone(plain(**own))  # the same gates in every fold

    def _record(self, ratios: np.ndarray, scores: np.ndarray, gaps: np.ndarray) -> None:
        """Select a beta from the scores and gaps, ``(folds, betas)``, NaN where a fold has not got."""
        scored = ~np.isnan(scores)
        if not scored.any():
            raise TimeoutError(
                f"total_time={self.total_time} was up before any fold had solved one beta. Give more time, fewer folds, "
                "or a larger fold_tolerance."
            )
        filled = carried_forward(scores[scored.any(1)])
        reached = scored.any(0)
        filled[:, ~reached] = np.nan
        mean, n_folds = filled.mean(0), len(filled)
        error = filled.std(0, ddof=1) / np.sqrt(n_folds) if n_folds > 1 else 0.0 * mean
        best = int(np.nanargmax(mean))  # on ties the first: the largest beta
        if len(ratios) > 1 and best == len(ratios) - 1 and mean[best] > mean[best - 1]:
            warn(
                f"the best mean score is at the smallest beta of the grid, beta_ratio={ratios[best]:.3g}; a smaller one may "
                f"be better.{'' if self._is_auto else f' Lower beta_min_ratio, which is {self.beta_min_ratio:.3g}.'}",
                GridEndWarning,
            )
        if self.selection == "1se":
            best = int(np.argmax(mean >= mean[best] - error[best]))
        self.beta_ratios_ = ratios
        self.cv_results_ = {
            "beta_ratio": ratios,
            "mean_test_score": mean,
            "std_test_score": filled.std(0),
            "standard_error": error,
            "max_relative_gap": np.where(reached, np.nanmax(gaps, 0, initial=0.0), np.nan),
            **{f"split{k}_test_score": row for k, row in enumerate(scores)},
        }
        self.best_index_ = best
        self.best_score_ = float(mean[best])
        self.beta_ratio_ = float(ratios[best])


class TokenClassifierCV(CrossValidated, TokenClassifier):
    """A :class:`TokenClassifier` whose beta is chosen by cross-validation; see :class:`CrossValidated` for how.

    Folds are stratified unless ``cv`` says otherwise; ``scoring`` is the accuracy by default.
    """

    def fit(self, X: Any, y: Any, sample_weight: Any = None, mask: Any = None, groups: Any = None) -> TokenClassifierCV:
        """Choose beta by cross-validation, then fit all samples with it; ``groups`` is for the splitter."""
        self._choose_and_fit(X, y, sample_weight, mask, groups)
        return self


class TokenRegressorCV(CrossValidated, TokenRegressor):
    """A :class:`TokenRegressor` whose beta is chosen by cross-validation; see :class:`CrossValidated` for how.

    ``scoring`` is R^2 by default.
    """

    def fit(self, X: Any, y: Any, sample_weight: Any = None, mask: Any = None, groups: Any = None) -> TokenRegressorCV:
        """Choose beta by cross-validation, then fit all samples with it; ``groups`` is for the splitter."""
        self._choose_and_fit(X, y, sample_weight, mask, groups)
        return self

"""The search of ``head="auto"``: one convex program over maps of the tokens, one beta by cross-validation.

Everything is solved in float32, features and kernels being the data of the program, and certified in float64. Two ways:

* :func:`shared_path`: one path of block weights, on half of the samples (:class:`~convexformer.estimators.part.Part`), which
  the folds share together with the maps; a fold fits coefficients and intercept to all of its training samples
  (:class:`~convexformer.estimators.held_out.HeldOut`). The program is then solved on all samples. The default.
* :func:`auto_path`: every fold for itself, maps and block weights included, to a loose gap; the program is then solved once
  more, on all samples, to the estimator's tolerance.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from sklearn.metrics import check_scoring
from torch import Tensor

from convexformer.certificates import Certificate
from convexformer.clock import Clock
from convexformer.data import TokenDataset
from convexformer.data.stores import Tokens
from convexformer.estimators.base import TokenEstimator
from convexformer.estimators.folds import FoldOptions, Share, one_number, scored, takes_weight, uninterrupted
from convexformer.estimators.held_out import HeldOut
from convexformer.estimators.part import Part
from convexformer.operators import Operator
from convexformer.path import walk
from convexformer.problem import Problem
from convexformer.progress import step_bar
from convexformer.solution import Solution
from convexformer.solvers.run import Limits, Result
from convexformer.solvers.status import Status
from convexformer.threads import limited_threads
from convexformer.weights import Weights, apply_weights

SINGLE_THREAD_SAMPLES = 4_000


@final
@dataclass(frozen=True)
class AutoGrid:
    """The path of a fold; set with benchmarks/probes.py."""

    first: float = 10**-0.7
    last: float = 10**-3.1
    count: int = 5
    begin: int = 2
    """Where a shared path begins; it comes back to larger betas only where the best score is there."""
    longest: int = 9
    """Betas at most: the path goes on, at the same pace, where the best score is at its end (many classes want it)."""
    patience: int = 2
    """Betas without a better score after which a fold ends its path, or one such beyond ``count``."""
    tolerance: float = 3e-2
    """Relative gap of the folds' fits at most, unless the estimator's own is larger."""

    def ratios(self) -> np.ndarray:
        """Every ratio that a fold may come to."""
        step = (self.last / self.first) ** (1 / (self.count - 1))
        return self.first * step ** np.arange(self.longest)

    def reached(self, estimator: TokenEstimator, options: FoldOptions) -> float:
        """Return the relative gap to solve to."""
        return max(min(self.tolerance, options.tolerance), float(estimator.tolerance))

    def settled(self, scores: list[float], begin: int = 0) -> bool:
        """Tell whether smaller betas are of no use; scores that are all the same (a common class) say nothing."""
        if max(scores) == min(scores) < 1:
            return False
        since = len(scores) - 1 - int(np.argmax(scores))
        return since >= self.patience or (begin + len(scores) >= self.count and since > 0)

    def noise(self, scores: np.ndarray) -> bool:
        """Tell whether the last column of ``(folds, betas)``, from ``count`` on, is better than those before by noise alone.

        Its mean gain over the folds on the best of them is then at most the standard error of that gain. Ever smaller betas
        with ever so slightly better scores fit the training samples to the last digit, and cost the more.
        """
        if scores.shape[1] < self.count or len(scores) < 2:
            return False
        before = int(np.nanargmax(np.where(np.isnan(scores[0, :-1]), np.nan, scores[:, :-1].mean(0))))
        gain = scores[:, -1] - scores[:, before]
        return bool(gain.mean() <= gain.std(ddof=1) / math.sqrt(len(gain)))


def one_thread(tokens: TokenDataset) -> AbstractContextManager[None]:
    """Keep up to some thousand samples on one thread of a CPU.

    A second thread gains little on triangular solves, and loses ten times that where other processes want the core, since
    the threads of a product wait for each other.
    """
    alone = tokens.X.device.type == "cpu" and tokens.n_samples <= SINGLE_THREAD_SAMPLES
    return limited_threads(1) if alone else nullcontext()


def auto_path(
    estimator: TokenEstimator,
    tokens: Tokens,
    targets: np.ndarray,
    w: np.ndarray | None,
    train: np.ndarray,
    test: np.ndarray,
    options: FoldOptions,
    share: Share,
    grid: AutoGrid = AutoGrid(),
) -> tuple[np.ndarray, np.ndarray]:
    """Walk the path on one fold; return scores and relative gaps, ``(n_betas,)`` each, NaN where it has not got."""
    clock = share.clock()
    part = None if w is None else w[train]
    inside, codes, own = estimator._read_training(tokens.select(train), targets[train], part, None)
    inside = inside.to(dtype=torch.float32)
    estimator._learn_scale(inside, own)
    problem = estimator._problem(inside, codes, own, beta_ratio=1.0)
    outside = tokens.select(test).to(device=inside.device, dtype=torch.float32)
    scaled = estimator._standardized(outside)
    operator = problem.head.program_on(scaled, problem.layout).operator  # once for all betas
    scorer = check_scoring(estimator, scoring=options.scoring)
    weighted = {"sample_weight": w[test]} if w is not None and takes_weight(scorer, options.scoring) else {}
    solver_options = {**estimator._solver_options(), "tolerance": grid.reached(estimator, options)}
    scores, gaps = np.full((2, len(options.ratios)), np.nan)
    found: list[float] = []
    for k, solution in enumerate(uninterrupted(walk(problem, options.ratios, clock=clock, **solver_options))):
        if clock.late and not solution.certificate.meets(solver_options["tolerance"]):
            break
        estimator._keep(problem.with_beta(solution.beta), solution)
        _says(estimator, _outputs(solution, operator))
        found.append(one_number(scored(scorer, estimator, options.scoring, outside, targets[test], weighted)))
        scores[k], gaps[k] = found[-1], solution.certificate.relative_gap
        if grid.settled(found):
            break
    return scores, gaps


@final
@dataclass(frozen=True)
class SharedPath:
    """What came of a path whose folds share block weights; NaN where it has not been."""

    scores: np.ndarray
    """``(folds, n_betas)``."""
    gaps: np.ndarray
    """``(n_betas,)`` relative gaps of the programs that the block weights are from."""
    starts: dict[int, Weights]
    """For the betas visited: from where to solve the program of all samples."""
    n_iter: int


def shared_path(
    estimator: TokenEstimator,
    problem: Problem,
    tokens: TokenDataset,
    targets: np.ndarray,
    w: np.ndarray | None,
    folds: Sequence[tuple[np.ndarray, np.ndarray]],
    options: FoldOptions,
    clock: Clock,
    grid: AutoGrid = AutoGrid(),
) -> SharedPath:
    """Walk a path of block weights, on part of the samples where these are many, and score the folds at each beta.

    ``problem`` is that of all samples at ``beta_max``, and ``estimator`` what scorers ask.
    """
    scorer, voice = check_scoring(estimator, scoring=options.scoring), copy(estimator)
    weighted = takes_weight(scorer, options.scoring)
    parts = [
        (tokens.select(test), targets[test], {"sample_weight": w[test]} if weighted and w is not None else {})
        for _, test in folds
    ]
    scores, gaps = np.full((len(folds), len(options.ratios)), np.nan), np.full(len(options.ratios), np.nan)
    part, held_out, starts, count = Part(problem.objective), HeldOut(folds), dict[int, Weights](), 0
    tolerance = grid.reached(estimator, options)

    def visit(k: int, before: Result | None) -> Result | None:
        nonlocal count
        ratio = float(options.ratios[k])
        limits = Limits(tolerance, estimator.max_iter, clock.left(estimator.max_time))
        found = part.solve(ratio, before, limits)
        if found.status is Status.INTERRUPTED:
            raise KeyboardInterrupt
        if clock.late and not found.certificate.meets(tolerance):
            return None
        count += found.n_iter
        at = problem.with_beta(problem.beta * ratio)
        eta, b = part.block_weights(found, ratio), found.weights.intercept
        fits = list(held_out.outputs(at.objective, eta, part.coefficients(found, eta, ratio), b))
        starts[k], gaps[k] = held_out.start(at.objective, eta), found.certificate.relative_gap
        voice._keep(at, _unproved(at, starts[k]))
        for row, outputs, (X, y, weight) in zip(scores, fits, parts, strict=True):
            _says(voice, outputs.squeeze(-1) if problem.layout.squeeze else outputs)
            row[k] = one_number(scored(scorer, voice, options.scoring, X, y, weight))
        if bar is not None:
            bar.advance()
        return found

    with step_bar("betas", len(options.ratios), shown=bool(estimator.verbose)) as bar:
        first = found = visit(grid.begin, None)
        means = [float(scores[:, grid.begin].mean())]
        for k in range(grid.begin + 1, len(options.ratios)):
            if found is None or clock.late or grid.settled(means, grid.begin) or grid.noise(scores[:, :k]):
                break
            found = visit(k, found)
            means.append(float(scores[:, k].mean()))
        if first is not None and int(np.nanargmax(means)) == 0:  # the best score is where the path began: look above
            found = first
            for k in reversed(range(grid.begin)):
                found = None if clock.late else visit(k, found)
                if found is None or scores[:, k].mean() < scores[:, k + 1].mean():
                    break
    return SharedPath(scores, gaps, starts, count)


def _unproved(problem: Problem, weights: Weights) -> Solution:
    """Return weights as a solution that claims nothing: what a scorer sees of a fold's estimator."""
    return Solution(
        weights=weights,
        head=problem.head,
        layout=problem.layout,
        loss=problem.loss,
        beta=problem.beta,
        certificate=Certificate(math.inf, -math.inf, "none", 0.0, {}, "a start, not solved yet"),
        status=Status.MAX_ITER,
    )


def _says(estimator: TokenEstimator, outputs: Tensor) -> None:
    """Let an estimator answer with known outputs."""
    known = outputs.cpu().numpy()
    estimator.outputs = lambda X, mask=None: known  # type: ignore[method-assign]


def _outputs(solution: Solution, operator: Operator) -> Tensor:
    weights = solution.weights.to(dtype=operator.like.dtype)  # a solve that stalls in float32 ends in float64
    found = apply_weights(operator, weights.Z)
    if weights.intercept is not None:
        found = found + weights.intercept
    return found.squeeze(-1) if solution.layout.squeeze else found

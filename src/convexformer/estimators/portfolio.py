"""The search of ``head="auto"``: one convex program over maps of the tokens, one beta by cross-validation.

Everything is solved in float32, features and kernels being the data of the program, and certified in float64. Folds refit
every map on their own training part, to a loose gap; the program is then solved once more, on all samples, to the
estimator's tolerance.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from sklearn.metrics import check_scoring

from convexformer.data.stores import Tokens
from convexformer.estimators.base import TokenEstimator
from convexformer.estimators.folds import FoldOptions, Share, one_number, takes_weight, uninterrupted
from convexformer.path import walk
from convexformer.solution import Solution
from convexformer.weights import apply_weights


@final
@dataclass(frozen=True)
class AutoGrid:
    """The path of a fold; set with benchmarks/probes.py."""

    first: float = 10**-0.7
    last: float = 10**-3.1
    count: int = 5
    longest: int = 9
    """Betas at most: the path goes on, at the same pace, where the best score is at its end (many classes want it)."""
    patience: int = 2
    """Betas without a better score after which a fold ends its path, or one such beyond ``count``."""
    tolerance: float = 2e-2
    """Relative gap of the folds' fits, unless the estimator's own is larger."""

    def ratios(self) -> np.ndarray:
        """Every ratio that a fold may come to."""
        step = (self.last / self.first) ** (1 / (self.count - 1))
        return self.first * step ** np.arange(self.longest)

    def settled(self, scores: list[float]) -> bool:
        """Tell whether smaller betas are of no use; scores that are all the same (a common class) say nothing."""
        if max(scores) == min(scores) < 1:
            return False
        since = len(scores) - 1 - int(np.argmax(scores))
        return since >= self.patience or (len(scores) >= self.count and since > 0)


def auto_path(
    estimator: TokenEstimator,
    tokens: Tokens,
    targets: np.ndarray,
    w: np.ndarray | None,
    train: np.ndarray,
    test: np.ndarray,
    options: FoldOptions,
    share: Share,
    grid: AutoGrid = AutoGrid(),  # noqa: B008  (frozen)
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
    solver_options = {**estimator._solver_options(), "tolerance": max(grid.tolerance, options.tolerance)}
    scores, gaps = np.full((2, len(options.ratios)), np.nan)
    found: list[float] = []
    for k, solution in enumerate(uninterrupted(walk(problem, options.ratios, clock=clock, **solver_options))):
        if clock.late and not solution.certificate.meets(solver_options["tolerance"]):
            break
        estimator._keep(problem.with_beta(solution.beta), solution)
        outputs = _outputs(solution, operator)
        estimator.outputs = lambda X, mask=None, known=outputs: known  # type: ignore[method-assign,misc]
        found.append(one_number(scorer(estimator, outside, targets[test], **weighted)))
        scores[k], gaps[k] = found[-1], solution.certificate.relative_gap
        if grid.settled(found):
            break
    return scores, gaps


def _outputs(solution: Solution, operator: Any) -> np.ndarray:
    found = apply_weights(operator, solution.weights.Z)
    if solution.weights.intercept is not None:
        found = found + solution.weights.intercept.to(found)
    return (found.squeeze(-1) if solution.layout.squeeze else found).cpu().numpy()

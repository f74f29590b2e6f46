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

from convexformer.data import TokenDataset
from convexformer.estimators.base import TokenEstimator
from convexformer.path import walk
from convexformer.solution import Solution
from convexformer.weights import apply_weights


@final
@dataclass(frozen=True)
class AutoGrid:
    """The path of a fold; set with benchmarks/probes.py."""

    first: float = 10**-1.5
    last: float = 10**-3.5
    count: int = 5
    longest: int = 10
    """Betas at most: the path goes on, at the same pace, where the best score is at its end (many classes want it)."""
    patience: int = 2
    """Betas without a better score after which a fold ends its path."""
    tolerance: float = 2e-2
    """Relative gap of the folds' fits, unless the estimator's own is larger."""

    def ratios(self) -> np.ndarray:
        """Every ratio that a fold may come to."""
        step = (self.last / self.first) ** (1 / (self.count - 1))
        return self.first * step ** np.arange(self.longest)


GRID = AutoGrid()


def auto_fold(
    estimator: TokenEstimator,
    tokens: TokenDataset,
    targets: np.ndarray,
    w: np.ndarray | None,
    train: np.ndarray,
    test: np.ndarray,
    scoring: Any,
    weighted: bool,
    grid: AutoGrid = GRID,
) -> tuple[list[float], list[float]]:
    """Walk the path on one fold; return the scores and the certified gaps, as far as the path went."""
    part = None if w is None else w[train]
    inside, codes, own = estimator._read_training(tokens.select(train), targets[train], part, None)
    inside = inside.to(dtype=torch.float32)
    estimator._learn_scale(inside, own)
    problem = estimator._problem(inside, codes, own, beta_ratio=1.0)
    outside = tokens.select(test).to(device=inside.X.device, dtype=torch.float32)
    operator = problem.head.operator(estimator._standardized(outside), problem.layout)  # once for all betas
    scorer = check_scoring(estimator, scoring=scoring)
    options = {**estimator._solver_options(), "tolerance": max(grid.tolerance, estimator.tolerance), "progress": False}
    weights = {"sample_weight": w[test]} if weighted and w is not None else {}
    scores: list[float] = []
    gaps: list[float] = []
    for solution in walk(problem, grid.ratios(), **options):
        estimator._keep(problem.with_beta(solution.beta), solution)
        outputs = _outputs(solution, operator)
        estimator.outputs = lambda X, mask=None, found=outputs: found  # type: ignore[method-assign,misc]
        scores.append(float(scorer(estimator, outside, targets[test], **weights)))
        gaps.append(solution.certificate.relative_gap)
        if _settled(scores, grid):
            break
    return scores, gaps


def _outputs(solution: Solution, operator: Any) -> np.ndarray:
    found = apply_weights(operator, solution.weights.Z)
    if solution.weights.intercept is not None:
        found = found + solution.weights.intercept.to(found)
    return (found.squeeze(-1) if solution.layout.squeeze else found).cpu().numpy()


def _settled(scores: list[float], grid: AutoGrid) -> bool:
    """Tell whether smaller betas are of no use: the last few brought nothing better."""
    since = len(scores) - 1 - int(np.argmax(scores))
    return since >= grid.patience or (len(scores) >= grid.count and since > 0)


def together(rows: list[tuple[list[float], list[float]]]) -> tuple[np.ndarray, np.ndarray]:
    """``(folds, betas)`` scores and gaps; a fold that ended its path earlier keeps its last score."""
    longest = max(len(scores) for scores, _ in rows)
    scores = np.array([[*own, *[own[-1]] * (longest - len(own))] for own, _ in rows])
    gaps = np.array([[*own, *[own[-1]] * (longest - len(own))] for _, own in rows])
    return scores, gaps

"""Working sets: solve on the few slices of tokens that matter, then let the full gradient say which others do.

For gauges that are sums over token slices, ``g(Z) = sum_k g_k(Z_k)``: a slice whose part of the dual matrix has polar
below beta stays at zero. Each round takes the slices in use and those with the largest polars, solves on them, and
checks all in float64; the round's gap is that of the whole problem, so no token is discarded for good.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from convexformer.architecture import Weights
from convexformer.problem import Problem
from convexformer.solvers import compiled
from convexformer.solvers.accelerated_rounds import AcceleratedRounds
from convexformer.solvers.block_descent import BentDescent, SquaredDescent
from convexformer.solvers.monitor import Monitor
from convexformer.solvers.rounds import Place, Rounds

FEWEST, PART = 16, 4  # the first working set: so many slices, or this part of all
NEAR = 0.9  # of beta: a slice whose polar is below that may wait for a later round
WIDEST = 512  # width of tokens up to which blocks are minimised exactly
SHARE = 0.05  # of the whole gap: how far a round is taken


def working_set(problem: Problem, start: Weights, monitor: Monitor) -> None:
    """Solve a problem whose penalty is a sum over token slices, by rounds on growing working sets."""
    A = problem.operator
    Z = start.Z
    fit = problem.fit(A.apply(Z), start.intercept)
    point = monitor.check(Z, fit)
    rounds = _rounds(problem)(problem, Z, fit)
    for _ in monitor:
        record = monitor.history[-1]
        slices = _choose(problem, Z, point.M)
        goal = max(SHARE * (record.primal - record.dual), 0.3 * monitor.tolerance * abs(record.primal))
        Z = rounds.round(slices, Place(fit, point, record.relative_gap), goal, lambda: monitor.late)
        fit = problem.fit(A.apply(Z), fit.intercept)
        point = monitor.check(Z, fit)


def _rounds(problem: Problem) -> type[Rounds]:
    """Blocks where they are columns, small enough for their spectra, and there is a compiler; else acceleration."""
    A = problem.operator
    if not problem.penalty.column_groups or A.like.is_cuda or not compiled.available or A.weight_shape[-2] > WIDEST:
        return AcceleratedRounds
    return SquaredDescent if problem.loss.name == "squared" else BentDescent


def _choose(problem: Problem, Z: Tensor, M: Tensor) -> np.ndarray:
    """Return the slices in use and as many others, of largest polar and near ``beta`` at least, in order."""
    polars = problem.penalty.slice_polars(M)  # ([g,] s)
    assert polars is not None, "the penalty is a sum over slices"
    used = Z.flatten(-2).any(-1).flatten()
    size = max(FEWEST, used.numel() // PART, 2 * int(used.sum()))
    near = used | (polars.flatten() > NEAR * problem.beta)
    scores = torch.where(used, torch.inf, polars.flatten())
    return scores.topk(min(size, max(int(near.sum()), 1))).indices.sort().values.cpu().numpy()

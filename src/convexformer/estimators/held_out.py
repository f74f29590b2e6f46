"""Folds from one fit on all samples: coefficients and intercepts anew without the samples left out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import final

import numpy as np
import torch
from torch import Tensor

from convexformer.gauges import RepresenterRidge
from convexformer.objective import Objective
from convexformer.operators import KernelOperator
from convexformer.operators.base import times
from convexformer.solvers.block_newton.blocks import Blocks
from convexformer.solvers.block_newton.metric import Metric, Ridge, descend
from convexformer.weights import Weights

STEPS = 40  # of L-BFGS at most, all with one Cholesky factor; some ten as a rule, more with a hundred classes
TOLERANCE = 3e-4  # predicted decrease at which a fold's fit ends, relative to its objective
MEMORY = 8


@final
class HeldOut:
    """The folds of a path: what fits to ``train`` alone say about ``test``, for each ``(train, test)``.

    At its optimum a sum of block norms is a ridge problem, ``min_alpha F(K alpha + b) + 1/2 tr(alpha^T K alpha)`` with ``K =
    sum_b k_b K_b`` and ``k_b = |Z_b| / (beta s_b)``. A fold keeps these block weights, one number a block, and the maps
    behind the kernels, which no label has touched; it solves the ridge problem of its training rows for coefficients and
    intercept. ``K`` counts ``sum w / sum_train w`` times: the penalty keeps its share of a sample's loss, as it does at a
    fixed ``beta / beta_max``. Each fold starts from its own fit at the last beta.
    """

    def __init__(
        self, folds: Sequence[tuple[np.ndarray, np.ndarray]], steps: int = STEPS, tolerance: float = TOLERANCE
    ) -> None:
        self.folds, self.steps, self.tolerance = folds, steps, tolerance
        self._last: list[tuple[float, Ridge] | None] = [None] * len(folds)

    def outputs(self, objective: Objective, weights: Weights) -> Iterator[Tensor]:
        """Yield the outputs ``(n_test, c)`` of each fold, for the program whose optimum is ``weights``."""
        weights = weights.to(dtype=objective.like.dtype)  # a solve that stalls in float32 ends in float64
        blocks, Z, beta = Blocks(objective), weights.Z, objective.beta
        assert isinstance(Z, Tensor)
        at = objective.evaluate(objective.apply(Z), start=weights.intercept)
        K = blocks.combined(blocks.norms(Z) / beta, beta, blocks.grams[0].dtype)
        alpha = -at.V.double()
        whole = Ridge(alpha, alpha.new_zeros(alpha.shape[1]) if at.intercept is None else at.intercept, at.outputs)
        for k, (train, test) in enumerate(self.folds):
            inside, outside = (torch.as_tensor(rows, device=K.device) for rows in (train, test))
            share = float(objective.sample_weight[inside].sum() / objective.sample_weight.sum())
            own = K.index_select(0, inside).index_select(1, inside).div_(share)
            last = self._last[k]
            if last is None:
                start, b = whole.alpha[inside], whole.b
            else:
                start, b = last[1].alpha * (beta / last[0]), last[1].b
            point = self._fit(_ridge(objective, own, inside), own, start, b)
            self._last[k] = (beta, point)
            cross = K.index_select(0, outside).index_select(1, inside)
            yield times(cross, point.alpha.to(cross)).double() / share + point.b

    def _fit(self, ridge: Objective, K: Tensor, alpha: Tensor, b: Tensor) -> Ridge:
        if ridge.intercept:
            alpha = alpha - alpha.mean(0)
        start = Ridge(alpha, b, times(K, alpha.to(K)).double() + b)
        metric = Metric(ridge, K, start.outputs)
        return descend(ridge, metric, start, steps=self.steps, memory=MEMORY, tolerance=self.tolerance)


def _ridge(objective: Objective, K: Tensor, rows: Tensor) -> Objective:
    """Return the ridge problem of some rows, with the kernel ``K`` of these."""
    operator = KernelOperator(K, objective.n_outputs, trains=True)
    penalty = RepresenterRidge(operator.apply, len(rows))
    targets, w = objective.targets[rows], objective.sample_weight[rows]
    return replace(objective, operator=operator, penalty=penalty, targets=targets, sample_weight=w, beta=1.0)

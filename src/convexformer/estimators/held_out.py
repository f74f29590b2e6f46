"""Folds from block weights that they share: coefficients and intercepts anew without the samples left out."""

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

STEPS = (
    100  # of L-BFGS at most, all with one Cholesky factor; some five as a rule, fifty at the first beta of 101 classes
)
TOLERANCE = 2e-3  # predicted decrease at which a fold's fit ends, relative to its objective: scores see no less
MEMORY = 8


@final
class HeldOut:
    """The folds of a path: what fits to ``train`` alone say about ``test``, for each ``(train, test)``.

    At its optimum a sum of block norms is a ridge problem, ``min_alpha F(K alpha + b) + 1/2 tr(alpha^T K alpha)`` with ``K =
    sum_b k_b K_b`` and ``k_b = |Z_b| / (beta s_b)``. Folds share these block weights, one number a block, and the maps
    behind the kernels, which no label has touched; each solves the ridge problem of its training rows for coefficients and
    intercept. ``K`` counts ``sum w / sum_train w`` times: the penalty keeps its share of a sample's loss, as it does at a
    fixed ``beta / beta_max``. Each fold starts from its own fit at the last beta. In the dtype of the kernels.
    """

    def __init__(
        self, folds: Sequence[tuple[np.ndarray, np.ndarray]], steps: int = STEPS, tolerance: float = TOLERANCE
    ) -> None:
        self.folds, self.steps, self.tolerance = folds, steps, tolerance
        self._last: list[tuple[float, Ridge] | None] = [None] * len(folds)

    def outputs(
        self, objective: Objective, eta: Tensor, alpha: Tensor | None = None, b: Tensor | None = None
    ) -> Iterator[Tensor]:
        """Yield the outputs ``(n_test, c)`` of each fold, for the block weights ``eta: (B,)``.

        Coefficients ``alpha: (N, c)`` and intercept ``b: (c,)`` are where the first fold begins at the first beta, zero by
        default. The next begin where the one before ended: there, too, coefficients are minus the gradients of the losses,
        also of the samples that were left out.
        """
        blocks, beta = Blocks(objective), objective.beta
        K = blocks.combined(eta, beta, blocks.grams[0].dtype)
        alpha = K.new_zeros(objective.targets.shape) if alpha is None else alpha.to(K)
        b = K.new_zeros(objective.n_outputs) if b is None else b.to(K)
        for k, (train, test) in enumerate(self.folds):
            inside, outside = (torch.as_tensor(rows, device=K.device) for rows in (train, test))
            share = float(objective.sample_weight[inside].sum() / objective.sample_weight.sum())
            rows = K.index_select(0, inside).div_(share)  # (n_train, N)
            own, last = rows.index_select(1, inside), self._last[k]
            first, c = (alpha[inside], b) if last is None else (last[1].alpha * (beta / last[0]), last[1].b)
            point = self._fit(_ridge(objective, own, inside), own, first, c)
            self._last[k] = (beta, point)
            found = (times(rows.index_select(1, outside).T, point.alpha) + point.b).double()
            if last is None:
                alpha, b = torch.zeros_like(alpha).index_copy_(0, inside, point.alpha), point.b
            yield found

    def start(self, objective: Objective, eta: Tensor) -> Weights:
        """Return weights for all samples: the means of the folds' coefficients and intercepts, at these block weights."""
        total = torch.zeros_like(objective.targets)
        count, b = total.new_zeros((len(total), 1)), total.new_zeros(total.shape[1])
        for (train, _), last in zip(self.folds, self._last, strict=True):
            assert last is not None
            inside = torch.as_tensor(train, device=total.device)
            total.index_add_(0, inside, last[1].alpha.to(total))
            count[inside] += 1
            b += last[1].b.to(total) / len(self.folds)
        Z = Blocks(objective).weights(total / count.clamp_min(1), eta, objective.beta)
        return Weights(Z, b.to(Z) if objective.intercept else None)

    def _fit(self, ridge: Objective, K: Tensor, alpha: Tensor, b: Tensor) -> Ridge:
        if ridge.intercept:
            alpha = alpha - alpha.mean(0)
        start = Ridge(alpha, b, times(K, alpha) + b)
        metric = Metric(ridge, K, start.outputs.double())
        return descend(ridge, metric, start, steps=self.steps, memory=MEMORY, tolerance=self.tolerance)


def _ridge(objective: Objective, K: Tensor, rows: Tensor) -> Objective:
    """Return the ridge problem of some rows, with the kernel ``K`` of these."""
    operator = KernelOperator(K, objective.n_outputs, trains=True)
    penalty = RepresenterRidge(operator.apply, len(rows))
    targets, w = objective.targets[rows], objective.sample_weight[rows]
    return replace(objective, operator=operator, penalty=penalty, targets=targets, sample_weight=w, beta=1.0)

"""Block weights from part of the samples: one number a map needs fewer samples than coefficients do."""

from __future__ import annotations

import math
from typing import final

import numpy as np
import torch
from torch import Tensor

from convexformer.gauges import Penalty, RepresenterNorm, RepresenterRidge, ScaledPenalty, SumPenalty
from convexformer.objective import Objective
from convexformer.operators import KernelOperator, Operator, RowGram, SumOperator
from convexformer.solvers.block_newton import BlockNewton
from convexformer.solvers.block_newton.blocks import Blocks
from convexformer.solvers.run import Limits, Result, minimise

SHARE = 0.5
LEAST = 500  # samples of a part
LEAST_LEFT = 200  # samples that are left out, or none is: a part must save something


@final
class Part:
    """The program of ``head="auto"`` on part of the rows, where every block is its Gram matrix.

    At the same ``beta / beta_max`` it has about the block weights of the whole, for a fraction of the work: half of the rows
    cost an eighth of a Cholesky factor. They are drawn with a fixed seed, the same share of every class.
    """

    def __init__(self, objective: Objective) -> None:
        self.rows = _drawn(objective)
        self.size = len(objective.targets)
        w = objective.sample_weight
        self.share = float(w[self.rows].sum() / w.sum())
        self.objective = on_rows(objective, self.rows)
        self.beta_max = self.objective.critical_beta()

    def solve(self, ratio: float, start: Result | None, limits: Limits) -> Result:
        """Solve at a ratio of the part's own ``beta_max``, from the solution at another one."""
        at = self.objective.at(self._beta(ratio))
        return minimise(at, limits, solver=BlockNewton.name, start=None if start is None else start.weights)

    def block_weights(self, found: Result, ratio: float) -> Tensor:
        """``(B,)`` the block weights of the whole: those of a solution, times the share of the samples."""
        Z = found.weights.Z
        assert isinstance(Z, Tensor)
        return self.share * Blocks(self.objective).norms(Z.to(self.objective.like.dtype)) / self._beta(ratio)

    def coefficients(self, found: Result, eta: Tensor, ratio: float) -> Tensor:
        """``(N, c)`` the coefficients that the blocks of a solution have in common; zero for rows that are not in.

        ``eta`` are its :meth:`block_weights`.
        """
        k = Blocks(self.objective).coefficients(eta / self.share, self._beta(ratio))
        heaviest = max(range(len(k)), key=k.__getitem__)
        Z = found.weights.Z
        assert isinstance(Z, Tensor)
        own = Z.view(len(k), len(self.rows), -1)[heaviest] / max(k[heaviest], torch.finfo(torch.float32).tiny)
        return own.new_zeros((self.size, own.shape[1])).index_copy_(0, self.rows, own / self.share)

    def _beta(self, ratio: float) -> float:
        return ratio * (self.beta_max or 1.0)  # at beta_max = 0 every beta has the same solution


def on_rows(objective: Objective, rows: Tensor) -> Objective:
    """Return the program of some rows alone, on the coefficients of these: Hilbert norms and ridges of kernels."""
    kinds = objective.penalty.hilbert_blocks()
    assert kinds is not None
    parts: list[Operator] = []
    penalties: list[Penalty] = []
    for block, kind in zip(objective.operator.blocks(), kinds, strict=True):
        assert isinstance(block, RowGram)
        K = block.row_gram().index_select(0, rows).index_select(1, rows)
        operator = KernelOperator(K, objective.n_outputs, trains=True)
        own: Penalty = RepresenterRidge(operator.apply, len(rows)) if kind.squared else RepresenterNorm(operator.apply)
        parts.append(operator)
        penalties.append(ScaledPenalty(own, kind.weight))
    return Objective(
        operator=SumOperator(parts),
        loss=objective.loss,
        penalty=SumPenalty(penalties, [part.weight_shape for part in parts]),
        targets=objective.targets[rows],
        sample_weight=objective.sample_weight[rows],
        beta=objective.beta,
        intercept=objective.intercept,
    )


def _drawn(objective: Objective) -> Tensor:
    """``(n,)`` the rows of a part, the same share of every class, those of positive weight first; all where they are few."""
    Y, w = objective.targets.cpu().numpy(), objective.sample_weight.cpu().numpy()
    N, size = len(Y), max(LEAST, math.ceil(SHARE * len(Y)))
    if N - size < LEAST_LEFT:
        return torch.arange(N, device=objective.targets.device)
    labels = Y.argmax(1) if Y.shape[1] > 1 else (Y[:, 0] > Y[:, 0].mean()).astype(int)
    order = np.random.default_rng(0).permutation(N)
    order = order[np.argsort(2 * labels[order] + (w[order] <= 0), kind="stable")]
    _, first, counts = np.unique(labels[order], return_index=True, return_counts=True)
    rank = np.arange(N) - np.repeat(first, counts)  # of a sample in its class
    chosen = order[rank < np.ceil(np.repeat(counts, counts) * (size / N))]
    return torch.from_numpy(np.sort(chosen)).to(objective.targets.device)

"""Block descent for the squared loss."""

from __future__ import annotations

from typing import final

import numpy as np
from torch import Tensor

from convexformer.objective import Evaluation, Objective
from convexformer.solvers.working_set import compiled
from convexformer.solvers.working_set.block_descent import BlockDescent
from convexformer.solvers.working_set.options import WorkingSetOptions
from convexformer.solvers.working_set.token_sweep import token_sweep


@final
class SquaredDescent(BlockDescent):
    """The squared loss: the state is the residual ``sqrt(w) (f - y)``, which is the gradient too."""

    def __init__(
        self, objective: Objective, Z: Tensor, at: Evaluation, options: WorkingSetOptions, tolerance: float = 0.0
    ) -> None:
        super().__init__(objective, Z, at, options, tolerance)
        self.ones, self.scales = np.ones(self.R.shape), np.ones(len(self.Z))  # curvatures
        self.D = np.empty_like(self.R)  # changes of outputs that nobody reads

    def _take(self, at: Evaluation) -> None:
        self._settle(np.ascontiguousarray(at.V.double().numpy().T / self.divisor))

    def _settle(self, S: np.ndarray) -> None:
        self.S = self.R = S

    def _loss(self, S: np.ndarray) -> float:
        return 0.5 * float(np.vdot(S, S))

    def _sweep(self, groups: np.ndarray) -> None:
        at, weights = self.store, (self.beta, self.Z, self.gradient_correction)
        starts = at.starts(groups)
        if self._at_once(groups, starts):  # outputs do not meet: all columns of a slice move at once, and exactly
            model = (self.R, self.ones, self.ones, False, self.scales, 1.0, self.D)
            token_sweep(groups, starts, at.index, at.data, at.gates, at.gated, at.spectra, *weights, *model)
        else:
            compiled.sweep(groups, at.index, at.data, at.spectra, *weights, self.R)

    def _dual(self, limit: float) -> float:
        goal = self.objective.targets.numpy().T * self.store.root
        square, along = float(np.vdot(self.R, self.R)), -float(np.vdot(self.R, goal))
        t = max(-limit, min(along / square, limit)) if square > 0 else 0.0
        return t * along - 0.5 * t**2 * square

    def _hessian(self) -> tuple[np.ndarray, bool]:
        return self.ones.astype(np.float32), False

    def _own_curvature(self) -> np.ndarray:
        return np.ones(self.R.shape)

    def _moved_loss(self, U: np.ndarray | None) -> float:
        return self._loss(self.S if U is None else self.S + U)

    def _move(self, U: np.ndarray, intercept: np.ndarray) -> None:
        S, root = self.S + U, self.store.root
        if self.objective.intercept:  # its best value follows
            S -= np.outer(S @ root / (root @ root), root)
        self._settle(S)

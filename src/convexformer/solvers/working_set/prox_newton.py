"""Block descent for any loss with a known Hessian."""

from __future__ import annotations

from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from convexformer.certificates import dual_value
from convexformer.losses.hessian import DiagonalHessian, SoftmaxHessian
from convexformer.objective import Evaluation, Objective
from convexformer.solvers.working_set import compiled
from convexformer.solvers.working_set.block_descent import BlockDescent
from convexformer.solvers.working_set.options import WorkingSetOptions
from convexformer.solvers.working_set.token_sweep import token_sweep


@final
class ProxNewtonDescent(BlockDescent):
    """Any loss with curvature: the state is the outputs, and a sweep goes over the quadratic model of the loss there.

    This is a proximal Newton method whose model is refreshed every ``sweeps_of_model`` sweeps; a step that does not lower
    the objective is shortened.
    """

    single_threaded = True  # benchmarks/real/threads.py

    def __init__(
        self, objective: Objective, Z: Tensor, at: Evaluation, options: WorkingSetOptions, tolerance: float = 0.0
    ) -> None:
        self.softmax_hessian = False
        super().__init__(objective, Z, at, options, tolerance)
        self.scales = np.zeros(len(self.Z))
        self.D = np.empty_like(self.R)

    def _take(self, at: Evaluation) -> None:
        outputs = at.outputs if at.intercept is None else at.outputs - at.intercept
        self._set(np.ascontiguousarray(outputs.double().numpy().T * self.store.root), at)

    def _settle(self, S: np.ndarray) -> None:
        self._set(S, self._evaluate(S, self.at.intercept))

    def _set(self, S: np.ndarray, at: Evaluation) -> None:
        self.S, self.at = S, at
        self.R = np.ascontiguousarray(at.V.double().numpy().T / self.divisor)
        loss = self.objective.loss
        hessian = loss.hessian(at.outputs, self.objective.targets)
        assert isinstance(hessian, (DiagonalHessian, SoftmaxHessian)), "checked before this step is chosen"
        self.softmax_hessian = isinstance(hessian, SoftmaxHessian)
        own = hessian.q if isinstance(hessian, SoftmaxHessian) else hessian.h
        self.H = np.ascontiguousarray(own.numpy().T)  # (c, N)
        self.bare = self.H
        if not self.softmax_hessian:  # a flat loss may become curved within the step
            self.H = np.maximum(self.H, self.options.curvature_floor * loss.curvature)
        self.own = self.H * (1 - self.H) if self.softmax_hessian else self.H  # (c, N) the diagonal

    def _evaluate(self, S: np.ndarray, intercept: Tensor | None) -> Evaluation:
        outputs = torch.from_numpy((S / self.divisor).T.copy())
        few = self.objective.n_outputs <= self.objective.loss.nearly_exact_until
        nearly = few and self.gap > self.options.exact_from
        return self.objective.evaluate(outputs, intercept, inexact_intercept=nearly)

    def _loss(self, S: np.ndarray) -> float:
        """The loss at the last intercept: an upper bound on that at the best one, which is slow to find far away."""
        outputs = torch.from_numpy((S / self.divisor).T)
        return self._loss_at(outputs if self.at.intercept is None else outputs + self.at.intercept)

    def _loss_at(self, outputs: Tensor) -> float:
        objective = self.objective
        values = objective.loss.value(outputs, objective.targets)
        return float(objective.rows.dot(objective.sample_weight, values)) + objective.offset

    def _sweep(self, groups: np.ndarray) -> None:
        if len(groups) == 0:
            return
        at, start, S = self.store, self.Z[groups], self.S
        before = float(self.at.value) + self._penalty(start, groups)
        w = self.store.root**2
        mean = np.maximum(self.own @ w / w.sum(), 1e-3 * self.objective.loss.curvature)
        self.scales[:] = np.maximum(0.9 * self.scales, mean[at.index[2]])
        self.D[:] = 0.0
        self._model_sweep(groups)
        step, noise = self.Z[groups] - start, 1e-14 * abs(before)
        t = 1.0
        for _ in range(30):
            trial, Z = S + t * self.D, start + t * step
            penalty = self._penalty(Z, groups)
            # the best intercept is slow to find far away: a trial that was too long is judged at the last one first
            if t == 1.0 or self._loss(trial) + penalty <= before + noise:
                found = self._evaluate(trial, self.at.intercept)
                if float(found.value) + penalty <= before + noise:
                    self.Z[groups] = Z
                    self._set(trial, found)
                    return
            t /= 2
            if t < 0.25:  # the model is far off, not only a little long
                largest = self.objective.loss.curvature
                self.scales[groups] = np.minimum(2 * self.scales[groups], largest)
        self.Z[groups] = start

    def _model_sweep(self, groups: np.ndarray) -> None:
        """Go through the groups in the quadratic model: all outputs of a slice at once where there are several."""
        at = self.store
        largest = self.objective.loss.curvature
        model: tuple[Any, ...] = (self.R.copy(), self.H, self.own, self.softmax_hessian, self.scales, largest, self.D)
        weights: tuple[Any, ...] = (self.beta, self.Z, self.gradient_correction)
        starts = at.starts(groups)
        at_once = self._at_once(groups, starts)
        for _ in range(self.options.sweeps_of_model):
            if at_once:
                token_sweep(groups, starts, at.index, at.data, at.gates, at.gated, at.spectra, *weights, *model)
            else:
                compiled.prox_newton_sweep(groups, at.index, at.data, at.spectra, *weights, *model)

    def _dual(self, limit: float) -> float:
        return dual_value(self.objective, self.at, limit)[0]

    def _hessian(self) -> tuple[np.ndarray, bool]:
        return self.bare.astype(np.float32), self.softmax_hessian

    def _own_curvature(self) -> np.ndarray:
        return self.own

    def _moved_loss(self, U: np.ndarray | None) -> float:
        outputs = self.at.outputs
        return self._loss_at(outputs if U is None else outputs + torch.from_numpy((U / self.divisor).T))

    def _move(self, U: np.ndarray, intercept: np.ndarray) -> None:
        S, start = self.S + U, self.at.intercept
        if start is not None:
            S, start = S - np.outer(intercept, self.store.root), start + torch.from_numpy(intercept)
        self._set(S, self._evaluate(S, start))

"""Exact block coordinate descent for column groups, on token-major float32 features.

    min_Z  F(A Z) + beta sum_j ||z_j||_2

A block is a column ``z_j`` of one token, gate and output. In the eigenbasis of its Gram matrix the minimiser over a block
is the root of one scalar equation (Qin, Scheinberg and Goldfarb 2013), so a sweep reads the features once from memory
and needs no step size. Every few sweeps the iterates are extrapolated (Anderson acceleration as in Bertrand and
Massias 2021); outputs are linear in the weights, so a trial costs no product with the features.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from itertools import pairwise
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from convexformer.certificates import dual_value
from convexformer.losses.hessian import DiagonalHessian, SoftmaxHessian
from convexformer.objective import Evaluation, Objective
from convexformer.operators import TokenFeatures
from convexformer.solvers.base import Workspace
from convexformer.solvers.working_set import compiled
from convexformer.solvers.working_set.options import WorkingSetOptions
from convexformer.solvers.working_set.step import StepContext, WorkingSetStep


@final
class BlockStore:
    """Token-major features in float32, filled token by token as the working set grows, with Gram matrices' spectra.

    Untouched tokens cost no memory. The rows carry ``sqrt(w)``. One store serves all betas of a path.
    """

    def __init__(self, parts: TokenFeatures, w: Tensor, n_outputs: int, intercept: bool) -> None:
        self.source = parts.features.numpy()  # (R, s, d)
        R, s, d = self.source.shape
        gates = np.ones((R, 1), bool) if parts.gates is None else parts.gates.numpy() > 0
        g = gates.shape[1]
        self.root = np.sqrt(w.numpy())
        self.X = np.empty((s, R, d), np.float32)
        self.filled = np.zeros(s, bool)
        rows = np.concatenate([np.flatnonzero(gates[:, u]) for u in range(g)])
        first = np.concatenate([[0], np.cumsum(gates.sum(0))])
        self.data = (self.X, rows, first, self.root, float(w.sum()) if intercept else 0.0)
        self.spectra = (np.empty((g * s, d)), np.empty((g * s, d, d)), np.zeros(g * s, bool))
        gate, token, output = (np.ascontiguousarray(row) for row in np.indices((g, s, n_outputs)).reshape(3, -1))
        self.index = (token, gate, output)
        self.slice = gate * s + token  # of each group

    @classmethod
    def of(cls, objective: Objective) -> BlockStore:
        """Return the store of this objective, made once for all its betas."""
        w, intercept = objective.sample_weight, objective.intercept

        def make() -> BlockStore:
            parts = objective.operator.token_features()
            assert parts is not None, "the working-set solver requires slices of tokens"
            return cls(parts, w, objective.n_outputs, intercept)

        return STORES.get(objective.operator, make, w, intercept)

    def load(self, slices: np.ndarray) -> None:
        """Copy the features of the tokens of these slices, where they are not there yet."""
        tokens = np.unique(slices % len(self.X))
        compiled.load(self.source, tokens[~self.filled[tokens]], self.root, self.X)
        self.filled[tokens] = True


STORES: Workspace[BlockStore] = Workspace()


class BlockDescent(WorkingSetStep):
    """A descent on growing sets of slices.

    Weights by group ``Z: (J, d)``; a state ``S: (c, N)`` that is linear in them; ``R: (c, N)`` the gradient of the loss in
    the outputs; ``G: (J, d)`` gradients at the end of the last round, and ``gradient_correction``, what float32 features
    leave out of the float64 gradient: a constant within a round, so that rounds end at the optimum in float64 (iterative
    refinement). Outputs and gradients carry ``sqrt(w)``, as the features do.
    """

    def __init__(self, objective: Objective, Z: Tensor, at: Evaluation, options: WorkingSetOptions) -> None:
        self.objective, self.store, self.beta = objective, BlockStore.of(objective), objective.beta
        self.options = options
        self.shape = Z.shape
        self.divisor = np.where(self.store.root > 0, self.store.root, 1.0)
        self.Z = _by_group(Z).copy()
        self.G = np.zeros_like(self.Z)
        self.gradient_correction = np.zeros_like(self.Z)
        self.known = np.zeros(len(self.Z), bool)  # whose G belongs to R
        self.last = np.zeros(len(self.Z), bool)  # the working set of the last round
        self.R = np.empty((Z.shape[-1], len(self.divisor)))
        self.S = self.R
        self._take(at)

    def round(self, slices: np.ndarray, at: StepContext, tolerance: float, late: Callable[[], bool]) -> Tensor:
        """Minimise over some slices to an absolute gap of ``tolerance`` on them; return all weights."""
        self.store.load(slices)
        chosen = np.isin(self.store.slice, slices)
        groups = np.flatnonzero(chosen)
        growing = float(np.mean(~self.last[groups])) > 0.3
        self.last = chosen
        if at.gap < self.options.exact_from:
            self._take(at.evaluation)
            self.known[:] = False
        if at.gap < self.options.refine_from:
            self._gradients(np.flatnonzero(chosen & ~self.known))
            assert isinstance(at.point.M, Tensor)
            self.gradient_correction[groups] = _by_group(-at.point.M)[groups] - self.G[groups]
        least, patience = np.inf, self.options.patience
        while patience > 0 and not late():
            self._sweep(groups)
            active = groups[np.abs(self.Z[groups]).max(1) > 0]
            if growing:  # the set will change again: two sweeps are enough
                self._sweep(active)
                self.known[:] = False
                break
            self._accelerate(active)
            self._gradients(groups)
            self.known = chosen
            left = self._gap(groups)
            if left <= tolerance:
                break
            least, patience = (left, self.options.patience) if left < 0.95 * least else (least, patience - 1)
        d, c = self.shape[-2:]
        Z = torch.from_numpy(self.Z.copy()).view(*self.shape[:-2], c, d).transpose(-1, -2)
        return Z.to(self.objective.operator.like.dtype).contiguous()

    @abstractmethod
    def _take(self, at: Evaluation) -> None:
        """Set the state and the gradient to those of an evaluation in float64."""

    @abstractmethod
    def _settle(self, S: np.ndarray) -> None:
        """Set the state, and the gradient that belongs to it."""

    @abstractmethod
    def _loss(self, S: np.ndarray) -> float:
        """Return the loss at a state."""

    @abstractmethod
    def _sweep(self, groups: np.ndarray) -> None:
        """Go once through the groups."""

    @abstractmethod
    def _dual(self, limit: float) -> float:
        """Return the dual value at the best scale of the gradient up to ``limit``."""

    def _gradients(self, groups: np.ndarray) -> None:
        compiled.gradients(groups, self.store.index, self.store.data, self.R, self.G)

    def _accelerate(self, active: np.ndarray) -> None:
        """Sweep over the active groups a few times, then try the point that the sweeps are heading for."""
        Zs, Ss = [self.Z[active]], [self.S.copy()]
        for _ in range(self.options.sweeps):
            self._sweep(active)
            Zs.append(self.Z[active])
            Ss.append(self.S.copy())
        steps = np.array([(b - a).ravel() for a, b in pairwise(Zs)])  # (sweeps, n)
        gram = steps @ steps.T
        trace = float(np.trace(gram))
        if trace == 0.0:
            return
        solved = np.linalg.solve(gram + 1e-12 * trace * np.eye(self.options.sweeps), np.ones(self.options.sweeps))
        mix = solved / solved.sum()
        Z, S = np.tensordot(mix, np.array(Zs[1:]), 1), np.tensordot(mix, np.array(Ss[1:]), 1)
        if self._value(S, Z, active) < self._value(Ss[-1], Zs[-1], active):
            self.Z[active] = Z
            self._settle(S)

    def _value(self, S: np.ndarray, Z: np.ndarray, groups: np.ndarray) -> float:
        """Return the objective of the model, the weights of these groups being ``Z`` and all others zero."""
        return self._loss(S) + self.beta * float(_norms(Z).sum()) + float(np.vdot(self.gradient_correction[groups], Z))

    def _gap(self, groups: np.ndarray) -> float:
        """Return the duality gap of the objective on these groups alone."""
        polar = float(_norms(self.G[groups] + self.gradient_correction[groups]).max())
        primal = self._loss(self.S) + self.beta * float(_norms(self.Z).sum())
        return primal - self._dual(self.beta / polar if polar > 0 else np.inf)


@final
class SquaredDescent(BlockDescent):
    """The squared loss: the state is the residual ``sqrt(w) (f - y)``, which is the gradient too."""

    def _take(self, at: Evaluation) -> None:
        self._settle(np.ascontiguousarray(at.V.double().numpy().T / self.divisor))

    def _settle(self, S: np.ndarray) -> None:
        self.S = self.R = S

    def _loss(self, S: np.ndarray) -> float:
        return 0.5 * float(np.vdot(S, S))

    def _sweep(self, groups: np.ndarray) -> None:
        at = self.store
        compiled.sweep(groups, at.index, at.data, at.spectra, self.beta, self.Z, self.gradient_correction, self.R)

    def _dual(self, limit: float) -> float:
        goal = self.objective.targets.numpy().T * self.store.root
        square, along = float(np.vdot(self.R, self.R)), -float(np.vdot(self.R, goal))
        t = max(-limit, min(along / square, limit)) if square > 0 else 0.0
        return t * along - 0.5 * t**2 * square


@final
class ProxNewtonDescent(BlockDescent):
    """Any loss with curvature: the state is the outputs, and a sweep goes over the quadratic model of the loss there.

    This is a proximal Newton method whose model is refreshed at every sweep; a sweep that does not lower the objective
    is shortened.
    """

    def __init__(self, objective: Objective, Z: Tensor, at: Evaluation, options: WorkingSetOptions) -> None:
        self.softmax_hessian = False
        super().__init__(objective, Z, at, options)
        self.scales = np.zeros(len(self.Z))
        self.D = np.empty_like(self.R)

    def _take(self, at: Evaluation) -> None:
        outputs = at.outputs if at.intercept is None else at.outputs - at.intercept
        self._set(np.ascontiguousarray(outputs.double().numpy().T * self.store.root), at)

    def _settle(self, S: np.ndarray) -> None:
        self._set(S, self._evaluate(S))

    def _set(self, S: np.ndarray, at: Evaluation) -> None:
        self.S, self.at = S, at
        self.R = np.ascontiguousarray(at.V.double().numpy().T / self.divisor)
        loss = self.objective.loss
        hessian = loss.hessian(at.outputs, self.objective.targets)
        assert isinstance(hessian, (DiagonalHessian, SoftmaxHessian)), "checked before this step is chosen"
        self.softmax_hessian = isinstance(hessian, SoftmaxHessian)
        own = hessian.q if isinstance(hessian, SoftmaxHessian) else hessian.h
        self.H = np.ascontiguousarray(own.numpy().T)  # (c, N)
        if not self.softmax_hessian:  # a flat loss may become curved within the step
            self.H = np.maximum(self.H, self.options.curvature_floor * loss.curvature)
        self.own = self.H * (1 - self.H) if self.softmax_hessian else self.H  # (c, N) the diagonal
        self.mass = self.own @ self.store.root**2 if self.objective.intercept else np.zeros(len(self.H))

    def _evaluate(self, S: np.ndarray) -> Evaluation:
        return self.objective.evaluate(torch.from_numpy((S / self.divisor).T.copy()), self.at.intercept)

    def _loss(self, S: np.ndarray) -> float:
        """The loss at the last intercept: an upper bound on that at the best one, which is slow to find far away."""
        outputs = torch.from_numpy((S / self.divisor).T)
        outputs = outputs if self.at.intercept is None else outputs + self.at.intercept
        objective = self.objective
        values = objective.loss.value(outputs, objective.targets)
        return float(objective.rows.dot(objective.sample_weight, values)) + objective.offset

    def _sweep(self, groups: np.ndarray) -> None:
        at, start, S = self.store, self.Z[groups], self.S
        before = self._value(S, start, groups)
        mean = np.maximum(self.own.mean(1), 1e-3 * self.objective.loss.curvature)
        self.scales[:] = np.maximum(0.9 * self.scales, mean[at.index[2]])
        self.D[:] = 0.0
        R = self.R.copy()
        model: tuple[Any, ...] = (R, self.H, self.softmax_hessian, self.mass, self.scales, self.D)
        weights: tuple[Any, ...] = (self.beta, self.Z, self.gradient_correction)
        compiled.prox_newton_sweep(groups, at.index, at.data, at.spectra, *weights, *model)
        step, noise = self.Z[groups] - start, 1e-14 * abs(before)
        t = 1.0
        for _ in range(30):
            trial, Z = S + t * self.D, start + t * step
            if self._value(trial, Z, groups) <= before + noise:
                self.Z[groups] = Z
                self._settle(trial)
                return
            t /= 2
            self.scales[groups] *= 2
        self.Z[groups] = start

    def _dual(self, limit: float) -> float:
        return dual_value(self.objective, self.at, limit)[0]


def _by_group(Z: Tensor) -> np.ndarray:
    """``(..., d, c)`` to ``(J, d)``: one row a column of a slice."""
    return Z.double().transpose(-1, -2).reshape(-1, Z.shape[-2]).contiguous().numpy()


def _norms(Z: np.ndarray) -> np.ndarray:
    return np.sqrt(np.einsum("ja,ja->j", Z, Z))

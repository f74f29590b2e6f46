"""Block coordinate descent for column groups on token-major float32 features, finished by Newton's method.

    min_Z  F(A Z) + beta sum_j ||z_j||_2

A block is a column ``z_j`` of one token, gate and output. In the eigenbasis of its Gram matrix the minimiser over a block
is the root of one scalar equation (Qin, Scheinberg and Goldfarb 2013), so a sweep reads the features once from memory
and needs no step size. Every few sweeps the iterates are extrapolated (Anderson acceleration as in Bertrand and
Massias 2021), or, once the support has settled, a Newton step on the groups in use takes over. Outputs are linear in the
weights, so a trial costs no product with the features.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from convexformer.objective import Evaluation, Objective
from convexformer.solvers.working_set import compiled
from convexformer.solvers.working_set.newton import GroupModel, NewtonSchedule, newton_step
from convexformer.solvers.working_set.options import WorkingSetOptions
from convexformer.solvers.working_set.step import StepContext, WorkingSetStep
from convexformer.solvers.working_set.store import BlockStore
from convexformer.solvers.working_set.token_sweep import token_gradients


class BlockDescent(WorkingSetStep):
    """A descent on growing sets of groups.

    Weights by group ``Z: (J, d)``, in the channels of the store; a state ``S: (c, N)`` that is linear in them; ``R: (c, N)``
    the gradient of the loss in the outputs; ``G: (J, d)`` gradients at the end of the last round, and
    ``gradient_correction``, what float32 features leave out of the float64 gradient: a constant within a round, so that
    rounds end at the optimum in float64 (iterative refinement). Outputs and gradients carry ``sqrt(w)``, as the features do.
    """

    def __init__(
        self, objective: Objective, Z: Tensor, at: Evaluation, options: WorkingSetOptions, tolerance: float = 0.0
    ) -> None:
        width, from_tolerance = options.single_spectra
        single = Z.shape[-2] >= width and tolerance >= from_tolerance
        self.objective, self.beta = objective, objective.beta
        rotated = objective.n_rows <= options.rows_turned * objective.n_outputs
        self.store = BlockStore.of(objective, single_spectra=single, rotated=rotated)
        self.options, self.gap = options, np.inf
        self.shape = Z.shape
        self.divisor = np.where(self.store.root > 0, self.store.root, 1.0)
        self.Z = _by_group(Z).copy()
        used = self.store.used(self.Z)
        self.store.load(used)
        self.store.prepare(used)
        self.store.to_axes(self.Z, used)
        self.G = np.zeros_like(self.Z)
        self.gradient_correction = np.zeros_like(self.Z)
        self.known = np.zeros(len(self.Z), bool)  # whose G belongs to R
        self.last = np.zeros(len(self.Z), bool)  # the working set of the last round
        self.R = np.empty((Z.shape[-1], len(self.divisor)))
        self.S = self.R
        self.newton = NewtonSchedule(options.newton)
        self.rate = 0.0  # by which a sweep lowers the logarithm of the gap
        self._take(at)

    def round(self, slices: np.ndarray, at: StepContext, tolerance: float, late: Callable[[], bool]) -> Tensor:
        """Minimise over the groups of some slices that matter to an absolute gap of ``tolerance``; return all weights."""
        assert isinstance(at.point.M, Tensor)
        self.beta, self.gap = at.beta, at.gap
        self.store.load(slices)
        M = _by_group(at.point.M)
        near = self.Z.any(1) | (_norms(M) > self.options.near * self.beta)
        chosen = np.isin(self.store.slice, slices) & near
        groups = np.flatnonzero(chosen)
        growing = float(np.mean(~self.last[groups])) > 0.3 if len(groups) else False
        self.last = chosen
        self._take(at.evaluation)  # what float32 steps have left behind in the state
        self.known[:] = False
        if at.gap < self.options.refine_from:
            self._gradients(np.flatnonzero(chosen & ~self.known))
            M = M.copy()
            self.store.to_axes(M, slices)
            self.gradient_correction[groups] = -M[groups] - self.G[groups]
        least = at.gap * (float(at.evaluation.value) + self.beta * float(_norms(self.Z).sum()))
        patience, last = self.options.patience, least
        while patience > 0 and not late():
            before = self.Z[groups].any(1)
            self._sweep(groups)
            active = groups[self.Z[groups].any(1)]
            if growing:  # the set will change again: two sweeps are enough
                self._sweep(active)
                self.known[:] = False
                break
            newton = self.newton.begin()
            if self.newton.went_well:
                sweeps = self.options.newton.sweeps
                for _ in range(sweeps):
                    self._sweep(active)
            else:
                sweeps = self._sweeps_to(tolerance, last)
                self._accelerate(active, sweeps)
            after = self.Z[groups].any(1)
            changed = int((before != after).sum()) / max(int(after.sum()), 1)
            if newton and changed <= self.options.newton.settled and after.any() and not late():
                self._newton(groups[after], at.gap, late)
            self._gradients(groups)
            self.known = chosen
            left = self._gap(groups)
            self.rate, last = math.log(last / left) / sweeps if 0 < left < last else 0.0, left
            if left <= tolerance:
                break
            slow = left > self.options.newton.slow * least
            least, patience = (left, self.options.patience) if left < 0.95 * least else (least, patience - 1)
            idle = self.options.patience - patience
            self.newton.sweeps_are_slow = (
                idle >= self.options.newton.idle_quadratic if self.objective.loss.quadratic else slow
            )
        return self.weights()

    def weights(self) -> Tensor:
        """Return all weights ``([g,] s, d, c)``, in the channels of the objective."""
        d, c = self.shape[-2:]
        found = self.Z.copy()
        self.store.from_axes(found, self.store.used(found))
        Z = torch.from_numpy(found).view(*self.shape[:-2], c, d).transpose(-1, -2)
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

    @abstractmethod
    def _hessian(self) -> tuple[np.ndarray, bool]:
        """``(c, N)`` second derivatives of the loss in the outputs, or the probabilities of a softmax; whether these."""

    @abstractmethod
    def _own_curvature(self) -> np.ndarray:
        """``(c, N)`` the diagonal of the Hessian."""

    @abstractmethod
    def _moved_loss(self, U: np.ndarray | None) -> float:
        """Return the loss after the outputs, intercept included, have moved by ``U: (c, N)``; None: as it is."""

    @abstractmethod
    def _move(self, U: np.ndarray, intercept: np.ndarray) -> None:
        """Move the state by ``U: (c, N)``, of which ``intercept: (c,)`` is a part."""

    def _gradients(self, groups: np.ndarray) -> None:
        at, starts = self.store, self.store.starts(groups)
        if self._at_once(groups, starts):
            token_gradients(groups, starts, at.index, at.X, at.gates, at.gated, self.R, self.G)
        else:
            compiled.gradients(groups, at.index, at.data, self.R, self.G)

    def _at_once(self, groups: np.ndarray, starts: np.ndarray) -> bool:
        """Tell whether all columns of a slice are taken at once: several, or long ones, and float32 is exact enough."""
        several = len(groups) >= self.options.columns_at_once * (len(starts) - 1)
        long = not self.store.gated and self.R.shape[1] >= self.options.rows_at_once
        return len(groups) > 0 and (several or long) and self.gap > self.options.single_until

    def _newton(self, active: np.ndarray, gap: float, late: Callable[[], bool]) -> None:
        """Take a Newton step on these groups."""
        token, gate, _ = self.store.index
        active = active[np.lexsort((gate[active], token[active]))]
        support = self.store.support(active)
        own = self._own_curvature()
        mass = own @ self.store.root**2 if self.objective.intercept else np.zeros(len(own))
        scale = np.maximum(support.curvatures(own), 1e-5 * self.objective.loss.curvature)
        correction = self.gradient_correction[active]
        self._gradients(active)
        gradient = self.G[active] + correction, self.R @ self.store.root
        model = GroupModel(support, *self._hessian(), scale, mass, gradient, self._moved_loss, correction, self.beta)
        step = newton_step(model, self.Z[active], gap, self.newton.steps, self.options.newton, late)
        self.newton.took(step)
        if step is not None:
            self.Z[active] = step.Z
            self._move(step.outputs, step.intercept)

    def _sweeps_to(self, goal: float, gap: float) -> int:
        """Return how many sweeps the last rate would take from one gap to another, within limits."""
        most, least = self.options.sweeps, self.options.fewest_sweeps
        if self.rate <= 0 or goal <= 0:
            return most
        return min(max(math.ceil(math.log(gap / goal) / self.rate) if gap > goal else least, least), most)

    def _accelerate(self, active: np.ndarray, sweeps: int) -> None:
        """Sweep over the active groups a few times, then try the point that the sweeps are heading for."""
        Zs, Ss = [self.Z[active]], [self.S.copy()]
        for _ in range(sweeps):
            self._sweep(active)
            Zs.append(self.Z[active])
            Ss.append(self.S.copy())
        steps = np.array([(b - a).ravel() for a, b in pairwise(Zs)])  # (sweeps, n)
        gram = steps @ steps.T
        trace = float(np.trace(gram))
        if trace == 0.0:
            return
        solved = np.linalg.solve(gram + 1e-12 * trace * np.eye(sweeps), np.ones(sweeps))
        mix = solved / solved.sum()
        Z, S = np.tensordot(mix, np.array(Zs[1:]), 1), np.tensordot(mix, np.array(Ss[1:]), 1)
        if self._value(S, Z, active) < self._value(Ss[-1], Zs[-1], active):
            self.Z[active] = Z
            self._settle(S)

    def _value(self, S: np.ndarray, Z: np.ndarray, groups: np.ndarray) -> float:
        """Return the objective of the model, the weights of these groups being ``Z`` and all others zero."""
        return self._loss(S) + self._penalty(Z, groups)

    def _penalty(self, Z: np.ndarray, groups: np.ndarray) -> float:
        """Return the terms of the model that the outputs do not show."""
        return self.beta * float(_norms(Z).sum()) + float(np.vdot(self.gradient_correction[groups], Z))

    def _gap(self, groups: np.ndarray) -> float:
        """Return the duality gap of the objective on these groups alone."""
        polar = float(_norms(self.G[groups] + self.gradient_correction[groups]).max(initial=0.0))
        primal = self._loss(self.S) + self.beta * float(_norms(self.Z).sum())
        return primal - self._dual(self.beta / polar if polar > 0 else np.inf)


def _by_group(Z: Tensor) -> np.ndarray:
    """``(..., d, c)`` to ``(J, d)``: one row a column of a slice."""
    return Z.double().transpose(-1, -2).reshape(-1, Z.shape[-2]).contiguous().numpy()


def _norms(Z: np.ndarray) -> np.ndarray:
    return np.sqrt(np.einsum("ja,ja->j", Z, Z))

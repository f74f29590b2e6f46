"""Newton's method on the groups in use, by preconditioned conjugate gradients.

On the groups that are not zero the objective ``F(A Z + b) + beta sum_j |z_j|`` is smooth, with Hessian

    A^T F'' A + beta / |z_j| (I - z_j z_j^T / |z_j|^2).

Coordinate descent finds the groups, and these steps finish (the second phase of proximal Newton and active-set methods,
e.g. Bertrand et al. 2022, Lee, Sun and Saunders 2014). In the principal axes of its slice, with spectrum ``lambda``, the
block of a group is about ``diag(h lambda + beta / |z|)`` less a term of rank one, ``h`` being the mean curvature that its
output meets there: the preconditioner. The intercept is a variable like the others. Outputs are linear in the step, so
a line search costs no product with the features. Features and preconditioner are float32, gradients float64.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import numpy as np

from convexformer.solvers.working_set import conjugate
from convexformer.solvers.working_set.options import NewtonOptions
from convexformer.solvers.working_set.support import TokenSupport

TINY = 1e-300
STEPS_AT_ONCE = 16  # of conjugate gradients, between two looks at the clock


@final
@dataclass(frozen=True)
class GroupModel:
    """The objective near some weights: what :func:`newton_step` needs."""

    support: TokenSupport
    hessian: np.ndarray
    """``(c, N)`` in float32: second derivatives of the loss in the outputs, or the probabilities of a softmax."""
    softmax: bool
    """Whether the Hessian of a sample is ``diag(q) - q q^T`` with those probabilities."""
    scale: np.ndarray
    """``(J, 1)`` the curvature that each group meets, as a multiple of its Gram matrix."""
    mass: np.ndarray
    """``(c,)`` the diagonal of the intercept's Hessian; zeros where there is none."""
    gradient: tuple[np.ndarray, np.ndarray]
    """Gradients of the loss in groups ``(J, d)``, ``correction`` included, and intercept ``(c,)``, in float64."""
    loss: Callable[[np.ndarray | None], float]
    """The loss after the outputs have moved by ``U: (c, N)``; None: as it is."""
    correction: np.ndarray
    """``(J, d)`` gradient of a linear term that the outputs do not show."""
    beta: float


@final
@dataclass(frozen=True)
class NewtonStep:
    """New weights ``Z: (J, d)`` of the groups, with the changes of outputs ``(c, N)`` and intercept ``(c,)``."""

    Z: np.ndarray
    outputs: np.ndarray
    intercept: np.ndarray
    length: float
    converged: bool
    """Whether conjugate gradients reached their goal, rather than their limit."""


def newton_step(
    model: GroupModel, Z: np.ndarray, gap: float, steps: int, options: NewtonOptions, late: Callable[[], bool]
) -> NewtonStep | None:
    """Take a Newton step from weights ``Z: (J, d)``, none of them zero.

    Groups that the step would turn against themselves are set to zero, and conjugate gradients go on with the others.
    ``gap`` is the relative duality gap: the farther from the optimum, the rougher the step. ``steps`` bounds conjugate
    gradients. None if nothing is gained.
    """
    solver = _Newton(model, Z, options.residual * min(options.roughest, gap), late)
    gradient = (model.gradient[0] + model.beta * solver.unit, model.gradient[1])
    first = solver.conjugate_gradients(gradient, steps)
    slope = _dot(gradient, (first.P, first.b))
    before = model.loss(None) + solver.penalty(Z)
    accepted = before + 1e-14 * abs(before)
    found = solver.without_crossings(first, steps // 2, options)
    if found is not None:
        W = solver.live[:, None] * (Z + found.P)
        U = model.support.apply(W - Z, found.b)
        if model.loss(U) + solver.penalty(W) <= accepted + 1e-4 * slope:
            return NewtonStep(W, U, found.b, 1.0, first.converged)
    t, U = 1.0, model.support.apply(first.P, first.b)
    while t > options.shortest:
        W = Z + t * first.P
        if model.loss(t * U) + solver.penalty(W) <= accepted + 1e-4 * t * slope:
            return NewtonStep(W, t * U, t * first.b, t, first.converged)
        t /= 2
    return None


@final
class NewtonSchedule:
    """When to take Newton steps: where sweeps have become slow, and steps go well."""

    def __init__(self, options: NewtonOptions) -> None:
        self.steps, self.sweeps_are_slow = options.first_steps, False
        self._most, self._wait, self._patience, self._goes_well = options.most_steps, 0, 1, False
        self.went_well = False
        """Whether the last round ended with a full Newton step: a few sweeps then do until the next."""

    def begin(self) -> bool:
        """Tell whether it is time for a Newton step, if the support has settled."""
        self._wait -= 1
        self.went_well, self._goes_well = self._goes_well, False
        return (self.went_well or self.sweeps_are_slow) and self._wait <= 0

    def took(self, step: NewtonStep | None) -> None:
        """Learn from a step: after one that gained little wait, each time twice as long."""
        good = step is not None and step.length >= 0.25
        self._wait, self._patience = (0, 1) if good else (self._patience + 1, 2 * self._patience)
        self._goes_well = step is not None and step.length == 1.0
        if step is not None and not step.converged:
            self.steps = min(2 * self.steps, self._most)


@final
@dataclass(frozen=True)
class _Iterate:
    """A point of conjugate gradients: weights, intercept, and the residual that is left."""

    P: np.ndarray
    b: np.ndarray
    residual: tuple[np.ndarray, np.ndarray]
    converged: bool


@final
class _Newton:
    """The linear system at one point."""

    def __init__(self, model: GroupModel, Z: np.ndarray, residual: float, late: Callable[[], bool]) -> None:
        self.model, self.Z, self.late, self.residual = model, Z, late, residual
        norms = np.sqrt(_rows_dot(Z, Z))
        self.unit, bend = Z / norms, model.beta / norms  # (J, d), (J, 1)
        self.live = np.ones(len(Z))
        self.stop = 0.0
        inverse = 1 / (model.scale * model.support.values + bend)  # block = its inverse less bend unit unit^T
        turned = model.support.turn(self.unit)
        along = inverse * turned
        left = 1 - bend * _rows_dot(turned, along)
        rank_one = bend / np.maximum(left, 1e-10)
        inverse_mass = np.where(model.mass > 0, 1 / np.maximum(model.mass, TINY), 0.0)
        curved = (model.hessian, model.softmax, self.unit, bend[:, 0].copy())
        self.system = (*curved, inverse, along, rank_one[:, 0].copy(), inverse_mass)

    def penalty(self, Z: np.ndarray) -> float:
        """Return the terms of the objective that the outputs do not show."""
        norms = np.sqrt(_rows_dot(Z, Z))
        return self.model.beta * float(norms.sum()) + float(np.vdot(self.model.correction, Z))

    def conjugate_gradients(self, gradient: tuple[np.ndarray, np.ndarray], steps: int) -> _Iterate:
        """Solve for the step from zero."""
        P, b = np.zeros_like(gradient[0]), np.zeros_like(gradient[1])
        at = _Iterate(P, b, (-gradient[0], -gradient[1]), converged=False)
        energy, _, _ = self._precondition(*at.residual)
        self.stop = self.residual * energy
        return self._iterate(at, steps)

    def without_crossings(self, at: _Iterate, steps: int, options: NewtonOptions) -> _Iterate | None:
        """Set groups that turn against themselves to zero and solve on for the others; None where no group does so."""
        crossed = False
        for _ in range(options.crossing_rounds):
            end = self.Z + at.P
            cross = (_rows_dot(end, self.unit)[:, 0] <= 0) & (self.live > 0)
            number = int(cross.sum())
            if number == 0 or number > options.most_crossings * len(end):
                break
            crossed = True
            jump = np.where(cross[:, None], -end, 0.0)
            self.live = self.live * ~cross
            HP, Hb = np.empty_like(jump), np.empty_like(at.b)
            conjugate.product(jump, np.zeros_like(at.b), self.live, self.model.support.features, self.system, HP, Hb)
            r = (self.live[:, None] * (at.residual[0] - HP), at.residual[1] - Hb)
            at = self._iterate(_Iterate(at.P + jump, at.b, r, converged=False), steps)
        return at if crossed else None

    def _iterate(self, at: _Iterate, steps: int) -> _Iterate:
        """Go on with conjugate gradients from an iterate."""
        x, b, r, rb = (array.copy() for array in (at.P, at.b, *at.residual))
        energy, p, pb = self._precondition(r, rb)
        features = self.model.support.features
        for start in range(0, steps, STEPS_AT_ONCE):
            if abs(energy) <= self.stop or energy < 0 or self.late():
                break
            now = min(STEPS_AT_ONCE, steps - start)
            energy = conjugate.iterate(x, b, r, rb, p, pb, energy, self.live, features, self.system, self.stop, now)
        return _Iterate(x, b, (r, rb), 0 <= energy <= self.stop)

    def _precondition(self, r: np.ndarray, rb: np.ndarray) -> tuple[float, np.ndarray, np.ndarray]:
        """Return the energy of a residual, and the residual times the inverse of the blocks."""
        y, yb = np.empty_like(r), np.empty_like(rb)
        energy = conjugate.precondition(r, rb, self.live, self.model.support.features, self.system, y, yb)
        return energy, y, yb


def _dot(a: tuple[np.ndarray, np.ndarray], b: tuple[np.ndarray, np.ndarray]) -> float:
    return float(np.vdot(a[0], b[0]) + np.vdot(a[1], b[1]))


def _rows_dot(A: np.ndarray, B: np.ndarray) -> np.ndarray:
    """``(J, 1)`` the dot products of rows."""
    return np.einsum("ja,ja->j", A, B)[:, None]

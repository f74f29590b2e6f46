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

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import numpy as np

from convexformer.solvers.working_set.options import NewtonOptions

TINY = 1e-300


class SupportMap(ABC):
    """The map from some groups ``P: (J, d)`` and an intercept ``b: (c,)`` to outputs ``U: (c, N)``, with its spectra."""

    values: np.ndarray
    """``(J, d)`` eigenvalues of each group's Gram matrix."""

    @abstractmethod
    def apply(self, P: np.ndarray, b: np.ndarray, *, exact: bool = False) -> np.ndarray:
        """Return the outputs, ``(c, N)``, in float32, or ``exact``, summed up in float64."""

    @abstractmethod
    def adjoint(self, V: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the gradients in the groups ``(J, d)`` and in the intercept ``(c,)`` of ``V: (c, N)``."""

    @abstractmethod
    def turn(self, P: np.ndarray) -> np.ndarray:
        """Return each group in the principal axes of its slice."""

    @abstractmethod
    def turn_back(self, P: np.ndarray) -> np.ndarray:
        """Undo :meth:`turn`."""


@final
@dataclass(frozen=True)
class GroupModel:
    """The objective near some weights: what :func:`newton_step` needs."""

    support: SupportMap
    hessian: Callable[[np.ndarray], np.ndarray]
    """``F''`` on outputs, ``(c, N) -> (c, N)``."""
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
        W = solver.live * (Z + found.P)
        U = model.support.apply(W - Z, found.b, exact=True)
        if model.loss(U) + solver.penalty(W) <= accepted + 1e-4 * slope:
            return NewtonStep(W, U, found.b, 1.0, first.converged)
    t, U = 1.0, model.support.apply(first.P, first.b, exact=True)
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
        self.unit, self.bend = Z / norms, model.beta / norms  # (J, d), (J, 1)
        self.live = np.ones_like(norms)
        self.stop = 0.0
        values = model.support.values
        self.inverse = 1 / (model.scale * values + self.bend)  # block = its inverse less bend unit unit^T
        turned = model.support.turn(self.unit)
        self.along = self.inverse * turned
        left = 1 - self.bend * _rows_dot(turned, self.along)
        self.rank_one = self.bend / np.maximum(left, 1e-10)
        self.inverse_mass = np.where(model.mass > 0, 1 / np.maximum(model.mass, TINY), 0.0)

    def penalty(self, Z: np.ndarray) -> float:
        """Return the terms of the objective that the outputs do not show."""
        norms = np.sqrt(_rows_dot(Z, Z))
        return self.model.beta * float(norms.sum()) + float(np.vdot(self.model.correction, Z))

    def conjugate_gradients(self, gradient: tuple[np.ndarray, np.ndarray], steps: int) -> _Iterate:
        """Solve for the step from zero."""
        self.stop = self.residual * _dot(gradient, self._precondition(*gradient))
        P, b = np.zeros_like(gradient[0]), np.zeros_like(gradient[1])
        zero = _Iterate(P, b, (-gradient[0], -gradient[1]), converged=False)
        return self._iterate(zero, steps)

    def without_crossings(self, at: _Iterate, steps: int, options: NewtonOptions) -> _Iterate | None:
        """Set groups that turn against themselves to zero and solve on for the others; None where no group does so."""
        crossed = False
        for _ in range(options.crossing_rounds):
            end = self.Z + at.P
            cross = (_rows_dot(end, self.unit) <= 0) & (self.live > 0)
            number = int(cross.sum())
            if number == 0 or number > options.most_crossings * len(end):
                break
            crossed = True
            jump = np.where(cross, -end, 0.0)
            self.live = self.live * ~cross
            HP, Hb = self._product(jump, np.zeros_like(at.b))
            r = (self.live * (at.residual[0] - HP), at.residual[1] - Hb)
            at = self._iterate(_Iterate(at.P + jump, at.b, r, converged=False), steps)
        return at if crossed else None

    def _iterate(self, at: _Iterate, steps: int) -> _Iterate:
        """Go on with conjugate gradients from an iterate."""
        x, b, r = at.P, at.b, at.residual
        p = y = self._precondition(*r)
        energy = _dot(r, y)
        for _ in range(steps):
            if energy <= self.stop or self.late():
                break
            Hp = self._product(*p)
            curvature = _dot(p, Hp)
            if not curvature > 1e-12 * energy:
                break
            a = energy / curvature
            x, b = x + a * p[0], b + a * p[1]
            r = (r[0] - a * Hp[0], r[1] - a * Hp[1])
            y = self._precondition(*r)
            before, energy = energy, _dot(r, y)
            p = (y[0] + energy / before * p[0], y[1] + energy / before * p[1])
        return _Iterate(x, b, r, energy <= self.stop)

    def _product(self, P: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the Hessian times a direction."""
        G, Hb = self.model.support.adjoint(self.model.hessian(self.model.support.apply(P, b)))
        tangent = P - self.unit * _rows_dot(self.unit, P)
        return self.live * (G + self.bend * tangent), Hb

    def _precondition(self, P: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        turned = self.model.support.turn(P)
        solved = self.inverse * turned + self.along * (self.rank_one * _rows_dot(self.along, turned))
        return self.live * self.model.support.turn_back(solved), self.inverse_mass * b


def _dot(a: tuple[np.ndarray, np.ndarray], b: tuple[np.ndarray, np.ndarray]) -> float:
    return float(np.vdot(a[0], b[0]) + np.vdot(a[1], b[1]))


def _rows_dot(A: np.ndarray, B: np.ndarray) -> np.ndarray:
    """``(J, 1)`` the dot products of rows."""
    return np.einsum("ja,ja->j", A, B)[:, None]

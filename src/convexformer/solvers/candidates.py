"""Candidate points for the gap check, by Newton's method on the fixed points of a proximal step.

A gap lags the objective: at a distance ``e`` from the optimum the objective is off by ``e^2``, but ``V = grad F(A Z)`` is
infeasible by ``e``, and scaling it back costs as much. Outputs are linear in the weights, so any better dual point worth
the name is that of better weights, and those can be certified, or handed to the solver to go on from.

With ``T(Z) = P(Z - A^T grad F(A Z) / L)``, ``P`` the prox of ``beta g / L``, ``J`` the derivative of ``P`` and
``K = A^T F'' A / L``, Newton's step ``D`` to a fixed point of ``T`` solves ``D - J (D - K D) = R = T(Z) - Z``. Then
``E = D - R`` lies in the range of ``J``, and there

    (J^-1 - I + K) E = R - K R,

which is symmetric, and positive definite near a nondegenerate optimum once the support (tokens, rank) is found.
Conjugate gradients preconditioned by ``J`` see the spectrum that FISTA sees, need no ``J^-1`` (it follows their recurrence)
and no prox: about four times fewer steps than FISTA for a digit, and cheaper ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor

from convexformer.problem import Fit, Problem

FIRST = 50  # iterations: FISTA is often done by then, and cheaper
STEPS = 100  # of conjugate gradients, at most
EARLY, HOPELESS = 10, 40.0  # from so many steps on, a residual above this over their number: no use to go on
DROP = 0.1  # of the residual: Newton's quadratic convergence is not worth more
LENGTHS = (1.0, 0.2)  # of the step: the model may be good for a part of it only
SMALL = 1 << 16  # weights up to which float32 is no faster
SETTLED = 0.01  # change of the support and of the loss between checks, at most


@final
class Candidates:
    """Tries Newton's step where the support has settled; after a failure it waits, each time twice as long."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._inner: Problem | None = None
        self._loss, self._support, self._wait, self._patience = math.inf, 0, 0, 2

    def better(self, Z: Tensor, F: Tensor, fit: Fit, L: Tensor, monitor: Any) -> tuple[Tensor, Tensor, Fit] | None:
        """Return weights of lower objective than ``Z``, with outputs and loss; None where not tried, or not found.

        ``F`` and ``fit`` are the outputs and the loss of ``Z``, ``L`` the curvature that FISTA found. Every step of
        conjugate gradients counts as an iteration of the monitor.
        """
        loss, support = float(fit.value), self.problem.penalty.support(Z)
        settled = abs(loss - self._loss) <= SETTLED * abs(loss) and abs(support - self._support) <= SETTLED * support
        self._loss, self._support = loss, support
        self._wait -= 1
        if not settled or support == 0 or self._wait > 0 or monitor.done or monitor.iteration < FIRST:
            return None
        found = self._newton(Z, F, fit, float(L), monitor)
        self._wait, self._patience = (self._patience, 2 * self._patience) if found is None else (0, 2)
        return found

    def _newton(self, Z: Tensor, F: Tensor, fit: Fit, L: float, monitor: Any) -> tuple[Tensor, Tensor, Fit] | None:
        problem, A = self.problem, self.problem.operator
        shifted = Z - A.adjoint(fit.V) / L
        Z1 = problem.penalty.prox(shifted, problem.beta / L)
        F1, R = A.apply(Z1), Z1 - Z
        solved = self._solve(shifted, R, F1 - F, F, fit, L, monitor)
        if solved is None:
            return None
        E, FE = solved
        value, size = self._value(Z, fit), float(torch.linalg.vector_norm(R))
        noise = 16 * torch.finfo(Z.dtype).eps * abs(value)
        for length in LENGTHS:
            W = Z1 + length * E
            at_W = problem.fit(F1 + length * FE, fit.intercept)
            # off the manifold by second order: a proximal step leads back
            Z2 = problem.penalty.prox(W - A.adjoint(at_W.V) / L, problem.beta / L)
            F2 = A.apply(Z2)
            at_Z2 = problem.fit(F2, at_W.intercept)
            gain = value - self._value(Z2, at_Z2)
            # where rounding hides the gain, a smaller residual tells
            if gain > noise or (gain >= -noise and float(torch.linalg.vector_norm(Z2 - W)) < 0.5 * size):
                return Z2, F2, at_Z2
        return None

    def _solve(
        self, shifted: Tensor, R: Tensor, FR: Tensor, F: Tensor, fit: Fit, L: float, monitor: Any
    ) -> tuple[Tensor, Tensor] | None:
        """Return ``E`` and ``A E``, to a digit or so, None where they do not come near.

        In float32 at first, which is exact enough for a digit and twice as fast, unless the conditioning is bad.
        """
        if self._inner is None:
            self._inner = self.problem.coarse() if R.numel() > SMALL else self.problem
        A = self._inner.operator
        dtype = A.like.dtype
        J = self.problem.penalty.prox_derivative(shifted.to(dtype), self.problem.beta / L)
        H = _hessian(self.problem, F, fit)
        r = R.to(dtype) - A.adjoint(H(FR).to(dtype)) / L
        p = J(r)
        q, rz = r, (r * p).sum()  # q = J^-1 p
        E, FE, first = torch.zeros_like(r), torch.zeros_like(F, dtype=dtype), rz
        for count, _ in zip(range(1, STEPS + 1), monitor, strict=False):
            Ap = A.apply(p)
            Sp = q - p + A.adjoint(H(Ap).to(dtype)) / L
            curvature = (p * Sp).sum()
            if monitor.late:
                break
            if not curvature > 0:
                self._inner = self.problem  # rounding: float32 had its chance
                break
            step = rz / curvature
            E, FE, r = E + step * p, FE + step * Ap, r - step * Sp
            z = J(r)
            before, rz = rz, (r * z).sum()
            if not rz > DROP**2 * first:
                break
            if count >= EARLY and rz > (HOPELESS / count) ** 2 * first:
                self._inner = self.problem
                return None
            p, q = z + (rz / before) * p, r + (rz / before) * q
        return E.to(R.dtype), FE.to(F.dtype)

    def _value(self, Z: Tensor, fit: Fit) -> float:
        return float(fit.value) + self.problem.beta * float(self.problem.penalty.value(Z))


def _hessian(problem: Problem, F: Tensor, fit: Fit) -> Callable[[Tensor], Tensor]:
    """Return ``X -> F''(A Z) X``, the intercept fitted along: a difference of gradients, for every loss alike."""
    size = 1e-6 * torch.linalg.vector_norm(fit.outputs)
    tiny = torch.finfo(torch.float64).tiny

    def product(X: Tensor) -> Tensor:
        X = X.double()
        h = size / torch.linalg.vector_norm(X).clamp_min(tiny)
        return problem.w[:, None] * (problem.fit(F.double() + h * X, fit.intercept).U - fit.U) / h

    return product

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
from dataclasses import dataclass
from typing import TypeAlias, final

import torch
from torch import Tensor

from convexformer.gauges import Proximal
from convexformer.objective import Evaluation, Objective
from convexformer.solvers.base import Watcher
from convexformer.solvers.fista.group_metric import forms_blocks, group_step

Step: TypeAlias = tuple[Tensor, Tensor, Evaluation]
"""Weights, their outputs, and the loss there."""


@final
@dataclass(frozen=True)
class PolishOptions:
    """Constants of the Newton steps, all set by benchmarks/dual_points.py."""

    first_iteration: int = 50
    """FISTA often converges before, and is cheaper."""
    max_steps: int = 100
    """Steps of conjugate gradients."""
    stall_from: int = 10
    stall_ratio: float = 40.0
    """Give up CG when the relative residual after k >= stall_from steps exceeds stall_ratio / k."""
    residual_drop: float = 0.1
    """Relative residual at which CG stops: the quadratic model is not worth more."""
    step_lengths: tuple[float, ...] = (1.0, 0.2)
    """Fractions of the Newton step that are tried: the model may hold for a part of it only."""
    group_lengths: tuple[float, ...] = (1.0, 0.5, 0.25, 0.125)
    """The same for steps on groups, along which values cost no product."""
    double_below: int = 1 << 16
    """Weights up to which float32 products are no faster than float64."""
    settled: float = 0.01
    """Relative change of support and loss between checks below which the support has settled."""


@final
class NewtonPolish:
    """Tries Newton's step where the support has settled; after a failure it waits, each time twice as long."""

    def __init__(self, objective: Objective, options: PolishOptions) -> None:
        self.objective, self.options = objective, options
        self._inner: Objective | None = None
        self._loss, self._support, self._wait, self._patience = math.inf, 0, 0, 2

    def try_step(self, Z: Tensor, F: Tensor, at: Evaluation, L: Tensor | float, monitor: Watcher) -> Step | None:
        """Return weights of lower objective than ``Z``, with outputs and loss; None where not tried, or not found.

        ``F`` and ``at`` are the outputs and the loss at ``Z``, ``L`` the curvature that FISTA found. Every step of
        conjugate gradients counts as an iteration of the monitor.
        """
        options, loss, support = self.options, float(at.value), self.objective.penalty.support(Z)
        same_loss = abs(loss - self._loss) <= options.settled * abs(loss)
        same_support = abs(support - self._support) <= options.settled * support
        self._loss, self._support = loss, support
        self._wait -= 1
        early = self._wait > 0 or monitor.iteration < options.first_iteration
        if not (same_loss and same_support) or support == 0 or early or monitor.done:
            return None
        found = self._newton(Z, F, at, float(L), monitor)
        self._wait, self._patience = (self._patience, 2 * self._patience) if found is None else (0, 2)
        return found

    def _newton(self, Z: Tensor, F: Tensor, at: Evaluation, L: float, monitor: Watcher) -> Step | None:
        objective, penalty = self.objective, self.objective.penalty
        assert isinstance(penalty, Proximal)
        if forms_blocks(objective, Z) and objective.loss.hessian(at.outputs, objective.targets) is not None:
            return self._on_groups(Z, F, at, L, monitor)
        shifted = Z - objective.adjoint(at.V) / L
        Z1 = penalty.prox(shifted, objective.beta / L)
        F1, R = objective.apply(Z1), Z1 - Z
        solved = self._solve(shifted, R, F1 - F, F, at, L, monitor)
        if solved is None:
            return None
        E, FE = solved
        value, size = self._value(Z, at), float(torch.linalg.vector_norm(R))
        noise = 16 * torch.finfo(Z.dtype).eps * abs(value)
        for length in self.options.step_lengths:
            W = Z1 + length * E
            at_W = objective.evaluate(F1 + length * FE, at.intercept)
            # off the manifold by second order: a proximal step leads back
            Z2 = penalty.prox(W - objective.adjoint(at_W.V) / L, objective.beta / L)
            F2 = objective.apply(Z2)
            at_Z2 = objective.evaluate(F2, at_W.intercept)
            gain = value - self._value(Z2, at_Z2)
            # where rounding hides the gain, a smaller residual tells
            if gain > noise or (gain >= -noise and float(torch.linalg.vector_norm(Z2 - W)) < 0.5 * size):
                return Z2, F2, at_Z2
        return None

    def _on_groups(self, Z: Tensor, F: Tensor, at: Evaluation, L: float, monitor: Watcher) -> Step | None:
        """The same with the blocks of outputs on the groups in use, which take a few steps of conjugate gradients."""
        objective, penalty = self.objective, self.objective.penalty
        assert isinstance(penalty, Proximal)
        E = group_step(objective, self._rough(Z), Z, at, _hessian(objective, at), monitor)
        if E is None:
            return None
        FE, value = objective.apply(E), self._value(Z, at)
        noise = 16 * torch.finfo(Z.dtype).eps * abs(value)
        for length in self.options.group_lengths:
            W, at_W = Z + length * E, objective.evaluate(F + length * FE, at.intercept)
            if self._value(W, at_W) < value + noise:
                break
        else:
            return None
        Z2 = penalty.prox(W - objective.adjoint(at_W.V) / L, objective.beta / L)  # lets other groups in
        F2 = objective.apply(Z2)
        at_Z2 = objective.evaluate(F2, at_W.intercept)
        return (Z2, F2, at_Z2) if self._value(Z2, at_Z2) < value + noise else None

    def _rough(self, Z: Tensor) -> Objective:
        """The objective for products: in float32 where that is faster."""
        if self._inner is None:
            single = Z.numel() > self.options.double_below
            self._inner = self.objective.to(dtype=torch.float32) if single else self.objective
        return self._inner

    def _solve(
        self, shifted: Tensor, R: Tensor, FR: Tensor, F: Tensor, at: Evaluation, L: float, monitor: Watcher
    ) -> tuple[Tensor, Tensor] | None:
        """Return ``E`` and ``A E``, to a digit or so, None where they do not come near.

        In float32 at first, which is exact enough for a digit and twice as fast, unless the conditioning is bad.
        """
        A = self._rough(R)
        dtype = A.like.dtype
        J = self.objective.penalty.prox_derivative(shifted.to(dtype), self.objective.beta / L)
        H = _hessian(self.objective, at)
        r = R.to(dtype) - A.adjoint(H(FR).to(dtype)) / L
        p = J(r)
        q, rz = r, (r * p).sum()  # q = J^-1 p
        E, FE, first = torch.zeros_like(r), torch.zeros_like(F, dtype=dtype), rz
        for count, _ in zip(range(1, self.options.max_steps + 1), monitor, strict=False):
            Ap = A.apply(p)
            Sp = q - p + A.adjoint(H(Ap).to(dtype)) / L
            curvature = (p * Sp).sum()
            if not curvature > 0:
                self._inner = self.objective  # rounding: go on in the objective's own precision
                break
            step = rz / curvature
            E, FE, r = E + step * p, FE + step * Ap, r - step * Sp
            z = J(r)
            before, rz = rz, (r * z).sum()
            if not rz > self.options.residual_drop**2 * first:
                break
            if count >= self.options.stall_from and rz > (self.options.stall_ratio / count) ** 2 * first:
                self._inner = self.objective
                return None
            p, q = z + (rz / before) * p, r + (rz / before) * q
        return E.to(R.dtype), FE.to(F.dtype)

    def _value(self, Z: Tensor, at: Evaluation) -> float:
        return float(at.value) + self.objective.beta * float(self.objective.penalty.value(Z))


def _hessian(objective: Objective, at: Evaluation) -> Callable[[Tensor], Tensor]:
    """Return ``X -> F''(A Z) X`` on outputs, the intercept eliminated where there is one.

    The best intercept moves by ``b`` with ``sum_i H_i (x_i + b) = 0``.
    """
    w, rows, loss, Y = objective.sample_weight[:, None], objective.rows, objective.loss, objective.targets
    known = loss.hessian(at.outputs, Y)

    def plain(X: Tensor) -> Tensor:
        return w * (loss.hessian_product(at.outputs, Y, X) if known is None else known.product(X))

    if at.intercept is None:
        return lambda X: plain(X.double())
    unit = torch.eye(objective.n_outputs, dtype=Y.dtype, device=Y.device)
    own = torch.stack([rows.sum(plain(e.expand_as(Y))) for e in unit])  # (c, c)
    inverse = torch.linalg.pinv(own, hermitian=True, rtol=1e-12)

    def eliminated(X: Tensor) -> Tensor:
        X = X.double()
        return plain(X - inverse @ rows.sum(plain(X)))

    return eliminated

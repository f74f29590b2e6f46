"""The Frobenius-norm SVM, and the proof that nothing separates.

    min 1/2 ||W||_F^2   s.t.  A W >= 1                                        (Tarzanagh et al. 2023, W_F-SVM)

Two stages. The least-distance program of Lawson and Hanson (1974, chapter 23),

    min_{lam >= 0}  1/2 ||A^T lam||_F^2 + 1/2 s^2 (1 - sum(lam))^2,

is bounded for all data; its minimiser is a multiple of the SVM's multipliers, or has ``A^T lam = 0`` and proves that
nothing separates. L-BFGS-B solves it fast for well-conditioned data. Otherwise an augmented Lagrangian follows, whose
subproblems are solved by semismooth Newton steps (Li, Sun and Toh 2018): direct linear algebra on the few binding
constraints, robust to ill-conditioning. On inseparable data its multipliers become a proof as
well: they grow without bound while ``A^T lam = W`` does not. Small data that barely separates, or barely fails to, ends
with nonnegative least squares.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from scipy.optimize import minimize, nnls
from torch import Tensor

from convexformer.gauges import FrobeniusNorm
from convexformer.margin.operator import MarginOperator
from convexformer.margin.progress import Answer, Limits, Progress
from convexformer.solvers.status import Status

FARKAS_RESIDUAL = 1e-13  # |A^T lam| below this, relative to the rows and sum(lam), proves that nothing separates
MAX_NEWTON_SYSTEM = 6000  # side of the largest Newton system: the fewer of binding constraints and weights
MAX_NNLS_ENTRIES = 2_000_000  # entries of the largest matrix that nonnegative least squares are tried on
QUASI_NEWTON_STEPS = 200  # L-BFGS-B iterations of the first stage
MAX_LAGRANGIAN_ROUNDS, MAX_NEWTON_STEPS = 40, 50  # multiplier updates, and Newton steps in each
RIDGES = (1e-15, 1e-13, 1e-11)  # tried in turn where Cholesky fails, relative to the largest diagonal entry


def solve_frobenius(operator: MarginOperator, limits: Limits) -> Answer:
    """Solve the Frobenius-norm SVM to ``limits.tolerance``; ``max_iter`` counts L-BFGS-B and Newton steps."""
    progress = Progress(operator, FrobeniusNorm(), limits)
    rows = operator.row_norms()
    farkas_bound = FARKAS_RESIDUAL * float(rows.max())

    def done(W: Tensor, lam: Tensor) -> bool:
        """Look at a pair; stop at the tolerance, or when ``lam`` proves that nothing separates."""
        stop = progress.see(W, lam, spent)
        return stop or float(operator.adjoint(lam).norm()) <= farkas_bound * float(lam.sum())

    lam, spent = _quasi_newton(operator, float(rows.square().mean()), min(QUASI_NEWTON_STEPS, limits.max_iter))
    W = operator.adjoint(lam)
    finished = done(W, lam)
    # scale to the SVM's own multipliers: for them sum(lam) = ||A^T lam||^2
    scale = float(lam.sum()) / max(float(W.square().sum()), farkas_bound**2, torch.finfo(W.dtype).tiny)
    lam, W = lam * scale, W * scale
    penalty = 10 * float(lam.sum()) / lam.numel()
    for _ in range(MAX_LAGRANGIAN_ROUNDS):
        if finished or spent >= limits.max_iter:
            return progress.answer()
        W, lam, used = _round(operator, W, lam, penalty, limits.max_iter - spent)
        spent += used
        if used == 0:
            break
        finished = done(W, lam) or done(operator.adjoint(lam), lam)
        penalty *= 5
    if not finished:
        last = _nonnegative_least_squares(operator, W, lam)
        if last is None or not done(operator.adjoint(last), last):
            progress.status = Status.STALLED
    return progress.answer()


def _quasi_newton(operator: MarginOperator, s_squared: float, iterations: int) -> tuple[Tensor, int]:
    """L-BFGS-B on the least-distance program; return the multipliers and the number of iterations."""
    like, shape = operator.like, operator.output_shape

    def value_and_gradient(x: np.ndarray) -> tuple[float, np.ndarray]:
        point = torch.from_numpy(x).to(like).view(shape)
        M = operator.adjoint(point)
        miss = float(1 - point.sum())
        gradient = operator.apply(M) - s_squared * miss
        return 0.5 * float(M.square().sum()) + 0.5 * s_squared * miss**2, gradient.flatten().cpu().numpy()

    size = shape[0] * shape[1]
    options = {"maxiter": iterations, "maxfun": 2 * iterations, "maxcor": 20, "ftol": 1e-16, "gtol": 1e-13 * s_squared}
    start, bounds = np.full(size, 1 / size), [(0.0, None)] * size
    found: Any = minimize(value_and_gradient, start, jac=True, method="L-BFGS-B", bounds=bounds, options=options)
    lam = torch.from_numpy(found.x).to(like).view(shape)
    return (lam if float(lam.sum()) > 0 else torch.full_like(lam, 1 / size)), max(int(found.nit), 1)


def _round(operator: MarginOperator, W: Tensor, lam: Tensor, penalty: float, steps: int) -> tuple[Tensor, Tensor, int]:
    """Minimise ``1/2 ||W||^2 + |t|^2 / (2 penalty)``, ``t = (lam + penalty (1 - A W))_+``; return ``W``, ``t``, steps."""
    for step in range(min(MAX_NEWTON_STEPS, steps)):
        t = (lam + penalty * (1 - operator.apply(W))).clamp_min(0)
        gradient = W - operator.adjoint(t)
        slope = float(gradient.norm())
        if slope <= 1e-12 * (1 + float(W.norm())):
            return W, t, step + 1
        direction = _newton_direction(operator, gradient, t > 0, penalty)
        if direction is None:
            return W, t, 0
        now, length = 0.5 * float(W.square().sum()) + float(t.square().sum()) / (2 * penalty), 1.0
        downhill = float((gradient * direction).sum())
        while length > 1e-6:
            trial = W + length * direction
            t = (lam + penalty * (1 - operator.apply(trial))).clamp_min(0)
            value = 0.5 * float(trial.square().sum()) + float(t.square().sum()) / (2 * penalty)
            if value <= now + 1e-4 * length * downhill:
                break
            length *= 0.5
        else:  # no descent left in this precision
            return W, (lam + penalty * (1 - operator.apply(W))).clamp_min(0), step + 1
        W = trial
    return W, t, steps if steps < MAX_NEWTON_STEPS else MAX_NEWTON_STEPS


def _newton_direction(operator: MarginOperator, gradient: Tensor, binding: Tensor, penalty: float) -> Tensor | None:
    """``-(I + penalty A_J^T A_J)^{-1} gradient`` for the binding rows J, in the smaller of the two spaces."""
    rows = binding.flatten().nonzero().flatten()
    size = gradient.numel()
    if len(rows) == 0:
        return -gradient
    if min(len(rows), size) > MAX_NEWTON_SYSTEM:
        return None
    if len(rows) <= size:
        H = operator.gram(rows)
        H.diagonal().add_(1 / penalty)
        inner = operator.apply(gradient).flatten()[rows]
        full = torch.zeros_like(binding, dtype=gradient.dtype).flatten()
        solved = positive_solve(H, inner)
        if solved is None:
            return None
        full[rows] = solved
        return operator.adjoint(full.view(binding.shape)) - gradient
    E = operator.dense_rows(rows)
    H = penalty * (E.mT @ E)
    H.diagonal().add_(1.0)
    solved = positive_solve(H, gradient.flatten())
    return None if solved is None else -solved.view_as(gradient)


def positive_solve(H: Tensor, right: Tensor) -> Tensor | None:
    """``H^{-1} right`` by Cholesky; None when it fails.

    Where rounding made ``H`` indefinite a ridge is added: the step stays a descent direction, only shorter.
    """
    top = float(H.diagonal().max())
    for ridge in (0.0, *RIDGES):
        H.diagonal().add_(ridge * top)
        factor, failed = torch.linalg.cholesky_ex(H)
        if not bool(failed):
            return torch.cholesky_solve(right[:, None], factor)[:, 0]
    return None


def _nonnegative_least_squares(operator: MarginOperator, W: Tensor, lam: Tensor) -> Tensor | None:
    """Solve the least-distance program by Lawson and Hanson's active-set method, which does not square the condition.

    For small data that barely separates, or barely fails to; ``s`` is set to the margin found so far.
    """
    rows = torch.arange(lam.numel(), device=lam.device)
    if lam.numel() * W.numel() > MAX_NNLS_ENTRIES:
        return None
    E = operator.dense_rows(rows).mT.cpu().numpy()  # (d^2, m)
    reach = float(operator.adjoint(lam).norm()) / max(float(lam.sum()), torch.finfo(lam.dtype).tiny)
    s = max(reach, 1e-12 * float(np.abs(E).max()), np.finfo(np.float64).tiny)
    target = np.concatenate([np.zeros(len(E)), [s]])
    try:
        found = nnls(np.vstack([E, np.full((1, E.shape[1]), s)]), target, maxiter=30 * E.shape[1])[0]
    except RuntimeError:  # more iterations than maxiter
        return None
    return torch.from_numpy(found).to(lam).view_as(lam) if found.sum() > 0 else None

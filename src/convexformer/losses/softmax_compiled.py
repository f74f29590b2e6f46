"""Softmax cross-entropy with few classes, its intercept and its gradient, compiled with numba.

The same steps as :class:`~convexformer.losses.softmax_intercept.SoftmaxIntercept` takes with torch, in one pass over the
samples each: with few classes and samples an evaluation is otherwise a hundred calls of torch for microseconds of work.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from convexformer.jit import Kernels, njit, ready
from convexformer.losses.base import Evaluated
from convexformer.rows import LOCAL, Rows

FEW_CLASSES = 32  # up to here a plain loop over pairs of classes is as fast as a matrix product
EPS = float(np.finfo(np.float64).eps)
LONGEST_STEP = 20.0
STEPS = 15
NAME = "softmax"
FEW_OUTPUTS = 1 << 15  # up to here the calls of torch cost more than its faster exponential gains


def serves(F: Tensor, rows: Rows) -> bool:
    """Tell whether :func:`best` takes these outputs ``F: (R, c)``: few classes, float64, all rows in this process.

    And whether it is compiled: see :data:`KERNELS`.
    """
    here = rows.in_process and not F.is_cuda and F.dtype == torch.float64
    return here and F.shape[1] <= FEW_CLASSES and ready(NAME)


def best(F: Tensor, Y: Tensor, w: Tensor, start: Tensor, tolerance: float = 4 * EPS) -> Tensor | None:
    """Return the best intercept of mean zero; None where plain Newton steps do not find it.

    ``tolerance`` is that of the slope, relative to its terms: by default rounding.
    """
    b = (start - start.mean()).numpy().copy()
    # contiguous, so that one version is compiled
    found = _newton(F.detach().contiguous().numpy(), Y.contiguous().numpy(), w.contiguous().numpy(), b, tolerance)
    return torch.from_numpy(b) if found else None


def value_and_gradient(F: Tensor, Y: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return the losses ``(R,)`` and their gradients ``(R, c)`` at outputs ``F``; None where torch is as fast."""
    if F.numel() > FEW_OUTPUTS or not serves(F, LOCAL) or Y.dtype != torch.float64:
        return None
    values, U = np.empty(len(F)), np.empty(tuple(F.shape))
    _value_and_gradient(F.detach().contiguous().numpy(), Y.contiguous().numpy(), values, U)
    return torch.from_numpy(values), torch.from_numpy(U)


def evaluate(F: Tensor, Y: Tensor, w: Tensor, start: Tensor, tolerance: float = 4 * EPS) -> Evaluated | None:
    """Intercept (as :func:`best` finds it), value and gradients in one call; None where one of them is not for here.

    An inexact intercept keeps the mean of ``start``.
    """
    if F.numel() > FEW_OUTPUTS or Y.dtype != torch.float64:
        return None
    first = start.numpy()
    mean = first.mean() if tolerance > 4 * EPS else 0.0
    arrays = _evaluate(
        F.detach().contiguous().numpy(), Y.contiguous().numpy(), w.contiguous().numpy(), first, mean, tolerance
    )
    if not arrays[0]:
        return None
    b, outputs, U, V = map(torch.from_numpy, arrays[2:])
    return torch.tensor(arrays[1], dtype=torch.float64), b, outputs, U, V


@njit(cache=True, nogil=True, error_model="numpy")
def _evaluate(F: Any, Y: Any, w: Any, start: Any, mean: float, tolerance: float) -> Any:
    """Whether the intercept is found; value, intercept, outputs with it, gradients of rows and of the weighted sum."""
    b, outputs = start - start.mean(), np.empty(F.shape)
    U, V, values = np.empty(F.shape), np.empty(F.shape), np.empty(F.shape[0])
    found = _newton(F, Y, w, b, tolerance)
    total = 0.0
    if found:
        b += mean
        for i in range(F.shape[0]):
            for k in range(F.shape[1]):
                outputs[i, k] = F[i, k] + b[k]
        _value_and_gradient(outputs, Y, values, U)
        for i in range(F.shape[0]):
            total += w[i] * values[i]
            for k in range(F.shape[1]):
                V[i, k] = w[i] * U[i, k]
    return found, total, b, outputs, U, V


@njit(cache=True, nogil=True, error_model="numpy")
def _value_and_gradient(F: Any, Y: Any, values: Any, U: Any) -> None:
    """``log sum exp(f) - <p, f>`` from the largest output, and ``softmax(f) - p`` with all its digits at a certain label."""
    c = F.shape[1]
    for i in range(F.shape[0]):
        first, top = 0, F[i, 0]
        for k in range(1, c):
            if F[i, k] > top or np.isnan(F[i, k]):
                first, top = k, F[i, k]
        others, linear = 0.0, 0.0
        for k in range(c):
            e = 1.0 if k == first else np.exp(F[i, k] - top)
            if k != first:
                others += e
            if Y[i, k] != 0.0:
                linear += Y[i, k] * (F[i, k] - top)
            U[i, k] = e
        values[i] = np.log1p(others) - linear
        label, rest = -1, 0.0
        for k in range(c):
            U[i, k] = U[i, k] / (1.0 + others) - Y[i, k]
            if Y[i, k] == 1.0:
                label = k
            else:
                rest += U[i, k]
        if label >= 0:
            U[i, label] = -rest


@njit(cache=True, nogil=True, error_model="numpy")
def _slope(F: Any, Y: Any, w: Any, b: Any, q: Any, G: Any, gram: Any) -> float:
    """``G = sum_i w_i (q_i - p_i)`` and the lower triangle of ``gram = sum_i w_i q_i q_i^T``; return the sum of moduli.

    At a label that is certain (``p_l = 1``) the gradient is minus the sum of the others, so that nothing cancels.
    """
    c = b.shape[0]
    G[:] = 0.0
    gram[:] = 0.0
    size = 0.0
    for i in range(F.shape[0]):
        top = -np.inf
        for k in range(c):
            q[k] = F[i, k] + b[k]
            top = max(top, q[k])
        total = 0.0
        for k in range(c):
            q[k] = np.exp(q[k] - top)
            total += q[k]
        label, others = -1, 0.0
        for k in range(c):
            q[k] /= total
            if Y[i, k] == 1.0:
                label = k
        for k in range(c):
            if k != label:
                u = w[i] * (q[k] - Y[i, k])
                G[k] += u
                others += u
                size += abs(u)
        if label >= 0:
            G[label] -= others
            size += abs(others)
        for k in range(c):
            for m in range(k):
                gram[k, m] += w[i] * q[k] * q[m]
    return size


@njit(cache=True, nogil=True, error_model="numpy")
def _step(gram: Any, G: Any, A: Any, step: Any) -> bool:
    """Solve ``H step = -G`` for ``H = diag(gram 1) - gram``, scaled to a unit diagonal, its kernel (shifts) filled."""
    c = G.shape[0]
    own = np.zeros(c)
    for k in range(c):
        for m in range(k):
            own[k] += gram[k, m]
            own[m] += gram[k, m]
    total = max(own.sum(), 1e-200)
    root = np.sqrt(np.maximum(own, 1e-200))
    for k in range(c):  # Cholesky, row by row
        for m in range(k + 1):
            value = root[k] * root[m] / total
            value += 1.0 + EPS if k == m else -gram[k, m] / (root[k] * root[m])
            for e in range(m):
                value -= A[k, e] * A[m, e]
            if k == m:
                if not value > 0.0:
                    return False
                A[k, k] = np.sqrt(value)
            else:
                A[k, m] = value / A[m, m]
    for k in range(c):
        value = -G[k] / root[k]
        for e in range(k):
            value -= A[k, e] * step[e]
        step[k] = value / A[k, k]
    for k in range(c - 1, -1, -1):
        value = step[k]
        for e in range(k + 1, c):
            value -= A[e, k] * step[e]
        step[k] = value / A[k, k]
    step /= root
    step -= step.mean()
    longest = np.abs(step).max()
    if longest > LONGEST_STEP:
        step *= LONGEST_STEP / longest
    return True


@njit(cache=True, nogil=True, error_model="numpy")
def _newton(F: Any, Y: Any, w: Any, b: Any, tolerance: float) -> bool:
    """Take Newton steps from ``b``, in place, until the slope is small; False where one does not halve the slope."""
    c = b.shape[0]
    if not np.isfinite(F.sum()):
        return False
    q, G, step, trial = np.empty(c), np.empty(c), np.zeros(c), np.empty(c)
    gram, A = np.empty((c, c)), np.zeros((c, c))
    size = _slope(F, Y, w, b, q, G, gram)
    worst = np.abs(G).max()
    for _ in range(STEPS):
        if not np.isfinite(worst):
            return False
        if worst <= tolerance * size:
            return True
        if not _step(gram, G, A, step):
            return False
        # by self-concordance the next slope is at most <step, H step>: where that is small none need be computed
        predicted = -np.dot(G, step)
        if np.abs(step).max() < 0.1 and predicted <= tolerance * size:
            b += step
            return True
        length, taken = 1.0, False
        while length > 0.1 and not taken:
            trial[:] = b + length * step
            size = _slope(F, Y, w, trial, q, G, gram)
            there = np.abs(G).max()
            taken = there <= 0.5 * worst
            length /= 2
        if not taken:
            return False
        b[:] = trial
        worst = there
    return False


def _compile_all() -> None:
    F, Y, w = np.zeros((2, 2)), np.eye(2), np.ones(2)
    _newton(F, Y, w, np.zeros(2), EPS)
    _value_and_gradient(F, Y, np.empty(2), np.empty((2, 2)))
    _evaluate(F, Y, w, np.zeros(2), 0.0, EPS)


KERNELS: Kernels = {NAME: _compile_all}

"""Softmax cross-entropy, for labels or for rows of probabilities."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import final

import torch
from torch import Tensor

from convexformer.losses.base import LOSSES, Loss

MANY_CLASSES = {"cpu": 64, "cuda": 1024}  # from which on the Hessian of an intercept is met through products
CG_STEPS = 10


@final
class CrossEntropy(Loss):
    """``L(f, p) = log sum_l exp(f_l) - <p, f>`` with ``p`` a row of probabilities (one-hot for a label).

    Rows of probabilities serve distillation and label smoothing. ``L*(u, p) = sum_l q_l log q_l`` with
    ``q = u + p`` in the simplex; scaling keeps it there, since ``t u + p = t q + (1 - t) p``.
    """

    name = "cross_entropy"
    curvature = 0.5

    def encode(self, Y: Tensor) -> Tensor:
        """Integer labels ``(R,)`` become one-hot rows; rows of probabilities are checked and kept."""
        if Y.ndim == 1:
            return _one_hot(Y)
        if Y.ndim != 2:
            raise ValueError(
                f"Y has shape {tuple(Y.shape)}; cross_entropy expects labels (N,) or probabilities (N, c)."
            )
        P = Y.to(torch.float64)
        if P.shape[1] < 2:
            raise ValueError(
                f"Y has {P.shape[1]} column; cross_entropy needs the probabilities of at least two classes."
            )
        sums = P.sum(1)
        if bool((P < 0).any()) or bool(((sums - 1).abs() > 1e-3).any()):
            worst = int((sums - 1).abs().argmax())
            raise ValueError(
                f"Y has shape {tuple(Y.shape)} and cross_entropy reads it as rows of probabilities, but row {worst} "
                f"sums to {float(sums[worst]):.4g} (smallest entry {float(P.min()):.4g}). Pass integer labels (N,), or "
                "rows that are nonnegative and sum to one."
            )
        return P / sums[:, None]

    def value(self, F: Tensor, Y: Tensor) -> Tensor:
        """``log sum exp(f) - <p, f>``, from the largest output: a loss of 1e-12 keeps its digits."""
        top, others = _others(F)
        return torch.log1p(others.sum(1)) + (Y * (top - F)).sum(1)

    def gradient(self, F: Tensor, Y: Tensor) -> Tensor:
        """``softmax(f) - p``; for a label that is all but certain, minus the sum of the other probabilities."""
        return _minus(F.softmax(1), Y)

    def curvatures(self, F: Tensor, Y: Tensor) -> Tensor:
        """``q = softmax(f)``: the Hessian of a row is ``diag(q) - q q^T``."""
        return F.softmax(1)

    def conjugate(self, U: Tensor, Y: Tensor) -> Tensor:
        """Return the negative entropy of ``q = u + p``."""
        Q = U + Y
        tolerance = 1e-9 if U.dtype == torch.float64 else 1e-5
        inside = (-tolerance <= Q).all(1) & ((Q.sum(1) - 1).abs() <= tolerance)
        Q = Q.clamp_min(0)
        # log q from what is missing to one, which U holds in full where the label is all but certain
        log = torch.where(
            Q > 0.5, torch.log1p((U + (Y - 1)).clamp_min(-0.75)), Q.clamp_min(torch.finfo(Q.dtype).tiny).log()
        )
        return torch.where(inside, (Q * log).sum(1), math.inf)

    def check_intercept(self, Y: Tensor, w: Tensor) -> None:
        """Every class needs some mass, or its intercept goes to minus infinity."""
        mass = (w[:, None] * Y).sum(0)
        if bool((mass <= 0).any()):
            absent = (mass <= 0).nonzero()[:, 0].tolist()
            raise ValueError(
                f"classes {absent[:10]} have no sample (of positive weight), so their best intercept is minus infinity. "
                "Relabel the classes 0..c-1 without gaps (np.unique(y, return_inverse=True)) or use intercept=False."
            )

    def intercept_step(self, F: Tensor, Y: Tensor, w: Tensor, slope: Tensor) -> Tensor:
        """``-H^-1 slope`` for intercepts of mean zero, of bounded length: far from the root the model means little."""
        return _newton_step(F.softmax(1), w, slope)

    def best_intercept(self, F: Tensor, Y: Tensor, w: Tensor, start: Tensor) -> Tensor:
        """Damped Newton in ``c`` variables; where outputs are saturated, along temperatures that fall to one.

        Far-apart outputs make the objective nearly piecewise linear and Newton's steps useless; divided by a temperature
        it is smooth, and each solution starts the next (the epsilon-scaling of optimal transport).
        """
        b, found = _newton(F, Y, w, start)
        if found:
            return b
        spread = float((F.amax(1) - F.amin(1)).max())
        b = torch.zeros_like(start)
        for stage in range(max(1, math.ceil(math.log2(max(spread, 2.0)))), -1, -1):
            temperature = 2.0**stage
            b = temperature * _newton(F / temperature, Y, w, b / temperature)[0]
        return b


def _minus(Q: Tensor, Y: Tensor) -> Tensor:
    """``q - p``, with all its digits where a label is all but certain."""
    U = Q - Y
    certain = Y == 1
    rest = torch.where(certain, 0.0, U).sum(1, keepdim=True)
    return torch.where(certain, -rest, U)


def _others(F: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest output of each row, ``(R, 1)``, and ``exp(f_l - top)`` for all outputs but that one."""
    top, where = F.max(1, keepdim=True)
    return top, (F - top).exp().scatter(1, where, 0.0)


def _newton_step(Q: Tensor, w: Tensor, slope: Tensor) -> Tensor:
    """Solve ``H step = -slope`` with ``H = sum_i w_i (diag(q_i) - q_i q_i^T)``, of bounded length.

    Exactly for few classes; for many by some steps of conjugate gradients, which never form ``H``.
    """
    WQ = w[:, None] * Q
    own = (WQ * (1 - Q)).sum(0)
    tiny = torch.finfo(Q.dtype).eps * own.max() + 1e-300
    if Q.shape[1] > MANY_CLASSES.get(Q.device.type, 64):
        mass = WQ.sum(0) + tiny
        step = _conjugate_gradients(lambda v: mass * v - WQ.T @ (Q @ v), -slope, mass)
    else:
        H = -Q.T @ WQ
        H.diagonal().copy_(own + tiny)
        step = -torch.linalg.solve_ex(H + own.mean(), slope)[0]  # the direction of a constant shift is left out
    return step * (20.0 / step.abs().max().clamp_min(1e-300)).clamp_max(1.0)


def _conjugate_gradients(H: Callable[[Tensor], Tensor], x: Tensor, scale: Tensor) -> Tensor:
    """Solve ``H z = x`` for ``x`` of mean zero, roughly, preconditioned by ``scale: (c,)``; nothing is read by the host."""
    z, r = torch.zeros_like(x), x
    p = y = r / scale
    old = r @ y
    for _ in range(CG_STEPS):
        Hp = H(p)
        length = torch.where(old > 0, old / (p @ Hp).clamp_min(1e-300), 0.0)
        z, r = z + length * p, r - length * Hp
        y = r / scale
        new = r @ y
        p = y + torch.where(old > 0, new / old, 0.0) * p
        old = new
    return z - z.mean()


def _newton(F: Tensor, Y: Tensor, w: Tensor, start: Tensor) -> tuple[Tensor, bool]:
    """Minimise ``sum_i w_i L(f_i + b, p_i)`` over ``b`` of mean zero; tell whether the minimum was found."""
    W, total = w[:, None], float(w.sum())
    wanted = (W * Y).sum(0)
    eps = torch.finfo(F.dtype).eps

    def look(b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        Q = (F + b).softmax(1)
        V = W * _minus(Q, Y)
        return Q, V, V.sum(0)

    def value(b: Tensor) -> float:
        return float((w * torch.logsumexp(F + b, 1)).sum() - (wanted * b).sum())

    b = start - start.mean()
    Q, V, G = look(b)
    for _ in range(60):
        size, rounding = float(G.abs().max()), eps * float(V.abs().sum())
        if size <= 4 * rounding:
            break
        step = _newton_step(Q, w, G)
        slope, t = float(G @ step), 1.0
        for _ in range(30 if size > 1e4 * rounding else 2):  # where rounding rules, shorter steps are no better
            Q_new, V_new, G_new = look(b + t * step)
            # near the minimum the value no longer tells, and the gradient does; it is also the cheaper to ask
            if float(G_new.abs().max()) < 0.5 * size or value(b + t * step) <= value(b) + 1e-4 * t * slope:
                break
            t /= 2
        else:
            break
        b, Q, V, G = b + t * step, Q_new, V_new, G_new
    return b - b.mean(), float(G.abs().max()) <= max(1e-10, 64 * eps) * total


def _one_hot(labels: Tensor) -> Tensor:
    """``(R,)`` integer labels to float64 ``(R, c)``; ``c`` is the largest label plus one."""
    if labels.is_floating_point() or labels.is_complex():
        raise TypeError(
            f"labels are {str(labels.dtype).removeprefix('torch.')}; cross_entropy expects integer labels 0..c-1, shape "
            "(N,). Convert them (Y.astype(int)), or use loss='squared' for real targets."
        )
    index = labels.to(torch.int64)
    if int(index.min()) < 0:
        raise ValueError(
            f"labels contain {int(index.min())}; cross_entropy expects integers 0..c-1. For labels -1/+1 use "
            "loss='logistic', or relabel with np.unique(y, return_inverse=True)."
        )
    present = index.unique()
    if present.numel() < 2:
        raise ValueError(f"Y holds one class only ({int(present[0])}); a classifier needs at least two classes.")
    c = int(index.max()) + 1
    if c > 100_000 or c > 1000 * present.numel():
        raise ValueError(
            f"the largest label is {c - 1} but only {present.numel()} labels occur; relabel them 0..c-1 "
            "with np.unique(y, return_inverse=True)."
        )
    return torch.nn.functional.one_hot(index, c).to(torch.float64)


LOSSES.register("cross_entropy", CrossEntropy)

"""The intercept of softmax cross-entropy: Newton's method in ``c`` variables, without forming anything twice."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import final

import torch
from torch import Tensor

from convexformer.rows import LOCAL, Rows

MANY_CLASSES = {"cpu": 256, "cuda": 1024}  # beyond this the Hessian of the intercept is used through products only
FEW_CLASSES = 32  # below this a CPU reduces over the first axis faster than over the last
CG_STEPS = 10
LONGEST_STEP = 20.0  # of the first Newton step, in the max norm; doubles with each step
FIRST_EVALUATIONS, STAGE_EVALUATIONS, LAST_EVALUATIONS = 40, 20, 60  # of the gradient: from a start, by temperature, at the end
MAX_STAGES = 50  # temperatures; outputs that are farther apart than 2^50 differ by less than their rounding
SUFFICIENT_DECREASE = 1e-4  # of the decrease that the slope predicts (Armijo)


@final
class SoftmaxIntercept:
    """Minimise ``sum_i w_i (log sum_l exp(f_il / T + b_l) - <p_i, b>)`` over ``b: (c,)`` of mean zero.

    Probabilities are kept as ``Q: (c, R)`` in one buffer that every evaluation overwrites.
    """

    def __init__(self, F: Tensor, Y: Tensor, w: Tensor, rows: Rows = LOCAL) -> None:
        self.F, self.Y, self.w, self.rows = F.T, Y, w, rows
        self.total, self.mass = float(rows.sum(w)), rows.weighted(w, Y)
        few = F.device.type == "cpu" and F.shape[1] < FEW_CLASSES
        self.Q = torch.empty_like(F.T, memory_format=torch.contiguous_format if few else torch.preserve_format)
        label = (Y @ torch.arange(Y.shape[1], dtype=Y.dtype, device=Y.device)).long()[None]
        one_hot = bool((Y.gather(1, label.T) == 1).all()) and int(torch.count_nonzero(Y)) == len(Y)
        self.label = label if one_hot else None  # (1, R)
        self.uniform = len(w) > 0 and bool((w == w[0]).all())
        self.half_sizes = w  # (R,) half the sum of the moduli of each row's gradient

    def best(self, start: Tensor) -> Tensor:
        """Return the minimiser at ``T = 1``; ``start`` where outputs are not finite.

        Far-apart outputs make the objective nearly piecewise linear and Newton's steps useless; divided by a temperature
        it is smooth, and each solution starts the next (the epsilon-scaling of optimal transport).
        """
        b, found = self._newton(start - start.mean(), 1.0, FIRST_EVALUATIONS)
        if found:
            return b
        spread = float(self.rows.bound(self.F.amax(0) - self.F.amin(0)))
        if not math.isfinite(spread):
            return start
        frequencies = (self.mass / self.total).clamp_min(torch.finfo(b.dtype).tiny).log()
        c = frequencies - frequencies.mean()  # the minimiser at an infinite temperature
        for stage in range(min(math.ceil(math.log2(max(spread, 2.0))), MAX_STAGES), 0, -1):
            c = 2 * self._newton(c, 2.0**stage, STAGE_EVALUATIONS, 1e-2)[0]
        return self._newton(c, 1.0, LAST_EVALUATIONS)[0]

    def _newton(self, b: Tensor, temperature: float, evaluations: int, tolerance: float = 0.0) -> tuple[Tensor, bool]:
        """Take Newton steps until the slope is rounding, or ``tolerance`` times the sum of moduli; tell whether it is."""
        eps = torch.finfo(b.dtype).eps
        G, cap = self._slope(b, temperature), LONGEST_STEP
        evaluations -= 1
        while evaluations > 0:
            worst = float(G.abs().max())
            if not math.isfinite(worst):
                return b, False
            limit = max(4 * eps, tolerance)
            if worst <= 2 * limit * self.total and worst <= limit * self._size():
                break
            step = self._step(G, cap)
            predicted, t, here = float(G @ step), 1.0, math.nan
            if not predicted < 0:
                break
            # by self-concordance the next slope is at most <step, H step>: if that is rounding no one need look
            exact = len(b) <= many_classes(b) and float(step.abs().max()) < 0.1
            if exact and -predicted <= 8 * eps * self.total and -predicted <= 4 * eps * self._size():
                return b + step, True
            # where rounding rules shorter steps are no better
            tries = min(evaluations, 30 if worst > 1e5 * eps * self._size() else 2)
            for _ in range(tries):
                G_there = self._slope(b + t * step, temperature)
                evaluations -= 1
                if float(G_there.abs().max()) <= 0.5 * worst:
                    break
                here = self._value(b, temperature) if math.isnan(here) else here
                if self._value(b + t * step, temperature) <= here + SUFFICIENT_DECREASE * t * predicted:
                    break
                t /= 2
            else:
                break
            b, G, cap = b + t * step, G_there, 2 * cap
        worst = float(G.abs().max())
        return b, worst <= max(1e-10, tolerance) * self._size()

    def _slope(self, b: Tensor, temperature: float) -> Tensor:
        """``sum_i w_i (q_i - p_i)``, with all its digits where labels are all but certain; leaves ``q`` in ``Q``."""
        Q, w = self._shifted(b, temperature, self.Q), self.w
        Q.sub_(Q.amax(0)).exp_()
        Q.div_(Q.sum(0))
        if self.label is not None:  # the gradient at the label is minus the sum of the others
            own = Q.gather(0, self.label)
            Q.scatter_(0, self.label, 0.0)
            self.half_sizes = Q.sum(0)
            G = Q @ w - (w * self.half_sizes) @ self.Y
            Q.scatter_(0, self.label, own)
        else:
            U, certain = Q - self.Y.T, self.Y.T == 1
            rest = U.masked_fill_(certain, 0.0).sum(0)
            G = torch.where(certain, -rest, U) @ w
            self.half_sizes = torch.maximum(U.abs().sum(0), rest.abs())
        return self.rows.total(G)

    def _size(self) -> float:
        """Sum of the moduli of the terms of the last slope."""
        return 2 * float(self.rows.dot(self.w, self.half_sizes))

    def _step(self, G: Tensor, cap: float) -> Tensor:
        """Newton's step at the point of the last slope ``G``."""
        Q, w = self.Q, self.w
        if len(Q) > many_classes(Q):
            return newton_step_by_products(Q, w, G, self.rows, cap)
        gram = w[0] * (Q @ Q.T) if self.uniform else Q @ (Q * w).T
        return newton_step(self.rows.total(gram), G, cap)

    def _value(self, b: Tensor, temperature: float) -> float:
        return float(self.rows.dot(self.w, cross_entropy((self.F / temperature + b[:, None]).T, self.Y)))

    def _shifted(self, b: Tensor, temperature: float, out: Tensor) -> Tensor:
        """``F / T + b``."""
        if temperature == 1.0:
            return torch.add(self.F, b[:, None], out=out)
        return torch.mul(self.F, 1 / temperature, out=out).add_(b[:, None])


def cross_entropy(F: Tensor, Y: Tensor) -> Tensor:
    """``(R,)`` ``log sum exp(f) - <p, f>``, from the largest output: a loss of 1e-12 keeps its digits."""
    top, where = F.max(1, keepdim=True)
    others = (F - top).exp().scatter(1, where, 0.0)
    return torch.log1p(others.sum(1)) + (Y * (top - F)).sum(1)


def many_classes(like: Tensor) -> int:
    """Return the number of classes beyond which conjugate gradients solve for a Newton step, on this device."""
    return MANY_CLASSES.get(like.device.type, 64)


def newton_step(gram: Tensor, slope: Tensor, cap: float = LONGEST_STEP) -> Tensor:
    """Solve ``H step = -slope`` for ``H = sum_i w_i (diag(q_i) - q_i q_i^T)``, and shorten the step to ``cap``.

    ``gram = sum_i w_i q_i q_i^T``. Its diagonal is not used: the rows of ``H`` sum to zero, so that
    ``H_ll = sum_{m != l} gram_lm``, where nothing cancels. ``H`` is scaled to a unit diagonal, since classes may differ by
    many orders of magnitude, and its kernel, constant shifts, is filled. No host sync.
    """
    H = -gram
    H.diagonal().zero_()
    own = -H.sum(1)
    scale = own.clamp_min(1e-200).rsqrt()
    kernel = own.sqrt() / own.sum().clamp_min(1e-200).sqrt()
    H = torch.addcmul(kernel[:, None] * kernel, H, scale[:, None] * scale)
    H.diagonal().add_(1 + torch.finfo(H.dtype).eps)
    return _shortened(-scale * torch.linalg.solve_ex(H, scale * slope)[0], cap)


def newton_step_by_products(Q: Tensor, w: Tensor, slope: Tensor, rows: Rows, cap: float = LONGEST_STEP) -> Tensor:
    """Return about the same step from ``Q: (c, R)`` by conjugate gradients, which never form ``H``. No host sync."""
    mass = rows.total(Q @ w)
    mass = mass + torch.finfo(Q.dtype).eps * mass.max() + 1e-300
    return _shortened(_conjugate_gradients(lambda v: mass * v - rows.total(Q @ (w * (v @ Q))), -slope, mass), cap)


def _conjugate_gradients(H: Callable[[Tensor], Tensor], x: Tensor, scale: Tensor) -> Tensor:
    """Solve ``H z = x`` for ``x`` of mean zero, roughly, preconditioned by ``scale: (c,)``; no host sync."""
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
    return z


def _shortened(step: Tensor, cap: float) -> Tensor:
    """Return the step less its mean, of max norm ``cap`` at most."""
    step = step - step.mean()
    return step * (cap / step.abs().max().clamp_min(1e-300)).clamp_max(1.0)

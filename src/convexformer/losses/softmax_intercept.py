"""The intercept of softmax cross-entropy: Newton's method in ``c`` variables, without forming anything twice."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import final

import torch
from torch import Tensor

from convexformer.losses.intercept import SUFFICIENT_DECREASE, finite, trust_region_newton
from convexformer.rows import LOCAL, Rows

MANY_CLASSES = {"cpu": 256, "cuda": 1024}  # beyond this the Hessian of the intercept is used through products only
FEW_CLASSES = 32  # below this a CPU reduces over the first axis faster than over the last
PLAIN_STEPS, STAGE_STEPS = 15, 5  # Newton steps from a start, and at each temperature
MAX_STAGES = 20  # temperatures, each half of the one before
CG_STEPS = 10
LONGEST_STEP = 20.0  # of a Newton step, in the max norm


@final
class SoftmaxIntercept:
    """Minimise ``sum_i w_i (log sum_l exp(f_il / T + b_l) - <p_i, b>)`` over ``b: (c,)`` of mean zero, at ``T = 1``.

    Probabilities are kept as ``Q: (c, R)`` in one buffer that every evaluation overwrites.
    """

    def __init__(self, F: Tensor, Y: Tensor, w: Tensor, rows: Rows = LOCAL) -> None:
        self.F, self.Y, self.w, self.rows = F.T, Y, w, rows
        self.total = float(rows.sum(w))
        few = F.device.type == "cpu" and F.shape[1] < FEW_CLASSES
        self.Q = torch.empty_like(F.T, memory_format=torch.contiguous_format if few else torch.preserve_format)
        label = (Y @ torch.arange(Y.shape[1], dtype=Y.dtype, device=Y.device)).long()[None]
        one_hot = bool((Y.gather(1, label.T) == 1).all()) and int(torch.count_nonzero(Y)) == len(Y)
        self.label = label if one_hot else None  # (1, R)
        self.uniform = len(w) > 0 and bool((w == w[0]).all())
        self.inverse_temperature = 1.0
        self.half_sizes = w  # (R,) half the sum of the moduli of each row's gradient

    def best(self, start: Tensor) -> Tensor:
        """Return the minimiser of mean zero; ``start`` where outputs are not finite.

        By Newton's method from ``start``. Where that fails, outputs are far apart and the objective is nearly piecewise
        linear; divided by a temperature they make it smooth, and each solution starts the next (the epsilon-scaling of
        optimal transport). What those temperatures leave to do, if anything, is done in a trust region.
        """
        b = finite(start)
        b, found = self._newton(b - b.mean(), PLAIN_STEPS)
        spread = 0.0 if found else float(self.rows.bound(self.F.amax(0) - self.F.amin(0)))
        if found or not math.isfinite(spread):
            return b if found else start
        b = (self.rows.weighted(self.w, self.Y) / self.total).clamp_min(1e-300).log()  # best at an infinite temperature
        for stage in range(min(math.ceil(math.log2(max(spread, 2.0))), MAX_STAGES), 0, -1):
            self.inverse_temperature = 0.5**stage
            b = 2 * self._newton(b - b.mean(), STAGE_STEPS, 1e-2)[0]
        self.inverse_temperature = 1.0
        b, found = self._newton(b, PLAIN_STEPS)
        if found:
            return b
        return trust_region_newton(
            self._value, self._slope_and_size, self._hessian, b, lambda: self.rows.bound(self.F.T)
        )

    def nearly_best(self, start: Tensor, tolerance: float) -> Tensor | None:
        """Return an intercept whose slope is ``tolerance`` of its terms; None where Newton's method from ``start`` fails."""
        b = finite(start)
        b, found = self._newton(b - b.mean(), PLAIN_STEPS, tolerance)
        return b if found else None

    def _newton(self, b: Tensor, steps: int, tolerance: float = 0.0) -> tuple[Tensor, bool]:
        """Take damped Newton steps until the slope is rounding, or ``tolerance`` times its terms; tell whether it is."""
        limit = max(4 * torch.finfo(b.dtype).eps, tolerance)
        G = self._slope(b)
        worst = float(G.abs().max())
        for _ in range(steps):
            if worst <= 2 * limit * self.total and worst <= limit * self._size():  # the size is at most twice the total
                return b, True
            if not math.isfinite(worst):
                break
            step = self._step(G)
            longest, predicted = torch.stack([step.abs().max(), -(G @ step)]).tolist()
            # by self-concordance the next slope is at most <step, H step>: where that is rounding none need be computed
            exact = len(b) <= many_classes(b) and longest < 0.1
            if exact and predicted <= 2 * limit * self.total and predicted <= limit * self._size():
                return b + step, True
            found = self._line_search(b, step, worst, predicted)
            if found is None:
                break
            b, G, worst = found
        return b, False

    def _line_search(
        self, b: Tensor, step: Tensor, worst: float, predicted: float
    ) -> tuple[Tensor, Tensor, float] | None:
        """Return the first point along the step that halves the slope or decreases the value, its slope and size."""
        here = None
        for t in (1.0, 0.5, 0.25, 0.125):
            trial = b + t * step
            G = self._slope(trial)
            worst_there = float(G.abs().max())
            if worst_there <= 0.5 * worst:
                return trial, G, worst_there
            here = float(self._value(b)) if here is None else here
            if float(self._value(trial)) <= here - SUFFICIENT_DECREASE * t * predicted:
                return trial, G, worst_there
        return None

    def _slope_and_size(self, b: Tensor) -> tuple[Tensor, Tensor]:
        return self._slope(b), 2 * self.rows.dot(self.w, self.half_sizes)

    def _slope(self, b: Tensor) -> Tensor:
        """``sum_i w_i (q_i - p_i)``, with all its digits where labels are all but certain; leaves ``q`` in ``Q``."""
        Q, w = torch.add(b[:, None], self.F, alpha=self.inverse_temperature, out=self.Q), self.w
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
            self.half_sizes = 0.5 * (U.abs().sum(0) + torch.where(certain.any(0), rest.abs(), 0.0))
        return self.rows.total(G)

    def _size(self) -> float:
        """Sum of the moduli of the terms of the last slope."""
        return 2 * float(self.rows.dot(self.w, self.half_sizes))

    def _step(self, G: Tensor) -> Tensor:
        """Newton's step at the point of the last slope ``G``."""
        if len(G) > many_classes(G):
            return newton_step_by_products(self.Q, self.w, G, self.rows)
        return newton_step(self._gram(), G)

    def _gram(self) -> Tensor:
        """``sum_i w_i q_i q_i^T`` at the point of the last slope."""
        Q, w = self.Q, self.w
        return self.rows.total(w[0] * (Q @ Q.T) if self.uniform else Q @ (Q * w).T)

    def _hessian(self, b: Tensor) -> Tensor | Callable[[Tensor], Tensor]:
        """Return the Hessian at the point of the last slope, with a curvature along constant shifts, which it has not."""
        if len(b) <= many_classes(b):
            H = hessian_matrix(self._gram())
            return H + H.diagonal().mean()
        Q, w, rows = self.Q.clone(), self.w, self.rows
        mass = rows.total(Q @ w)
        return lambda d: hessian_product(Q, w, rows, mass, d) + mass.mean() * d.mean()

    def _value(self, b: Tensor) -> Tensor:
        return self.rows.dot(self.w, cross_entropy(torch.add(b, self.F.T, alpha=self.inverse_temperature), self.Y))


def cross_entropy(F: Tensor, Y: Tensor) -> Tensor:
    """``(R,)`` ``log sum exp(f) - <p, f>``, from the largest output: a loss of 1e-12 keeps its digits."""
    top, where = F.max(1, keepdim=True)
    others = (F - top).exp().scatter(1, where, 0.0)
    return torch.log1p(others.sum(1)) + (Y * (top - F)).sum(1)


def many_classes(like: Tensor) -> int:
    """Return the number of classes beyond which conjugate gradients solve for a Newton step, on this device."""
    return MANY_CLASSES.get(like.device.type, 64)


def newton_step(gram: Tensor, slope: Tensor) -> Tensor:
    """Solve ``H step = -slope`` for ``H = sum_i w_i (diag(q_i) - q_i q_i^T)``, and shorten the step to ``LONGEST_STEP``.

    ``gram = sum_i w_i q_i q_i^T``. ``H`` is scaled to a unit diagonal, since classes may differ by many orders of magnitude,
    and its kernel, constant shifts, is filled. No host sync.
    """
    H = hessian_matrix(gram)
    own = H.diagonal()
    scale = own.clamp_min(1e-200).rsqrt()
    kernel = (own / own.sum().clamp_min(1e-200)).sqrt()
    H = torch.addcmul(kernel[:, None] * kernel, H, scale[:, None] * scale)
    H.diagonal().add_(torch.finfo(H.dtype).eps)
    return _shortened(-scale * torch.linalg.solve_ex(H, scale * slope)[0])


def hessian_matrix(gram: Tensor) -> Tensor:
    """``sum_i w_i (diag(q_i) - q_i q_i^T)`` from ``gram = sum_i w_i q_i q_i^T``.

    Its rows sum to zero, so that ``H_ll = sum_{m != l} gram_lm``: unlike in ``q (1 - q)`` nothing cancels.
    """
    H = -gram
    H.diagonal().zero_()
    H.diagonal().copy_(-H.sum(1))
    return H


def hessian_product(Q: Tensor, w: Tensor, rows: Rows, mass: Tensor, d: Tensor) -> Tensor:
    """``sum_i w_i (diag(q_i) - q_i q_i^T) d`` from ``Q: (c, R)`` and ``mass = sum_i w_i q_i``."""
    return mass * d - rows.total(Q @ (w * (d @ Q)))


def newton_step_by_products(Q: Tensor, w: Tensor, slope: Tensor, rows: Rows) -> Tensor:
    """Return about the same step from ``Q: (c, R)`` by conjugate gradients, which never form ``H``. No host sync."""
    mass = rows.total(Q @ w)
    mass = mass + torch.finfo(Q.dtype).eps * mass.max() + 1e-300
    return _shortened(_conjugate_gradients(partial(hessian_product, Q, w, rows, mass), -slope, mass))


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


def _shortened(step: Tensor) -> Tensor:
    """Return the step less its mean, of max norm ``LONGEST_STEP`` at most: far from the root the model means little."""
    step = step - step.mean()
    return step * (LONGEST_STEP / step.abs().max().clamp_min(1e-300)).clamp_max(1.0)

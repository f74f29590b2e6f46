"""Softmax cross-entropy, for labels or for rows of probabilities."""

from __future__ import annotations

import math
from typing import final

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from convexformer.jit import ready
from convexformer.losses import softmax_compiled
from convexformer.losses.base import LOSSES, Evaluated, Loss, imbalance
from convexformer.losses.encoding import one_hot, probabilities
from convexformer.losses.hessian import SoftmaxHessian
from convexformer.losses.simplex import mix_with_constant
from convexformer.losses.softmax_intercept import (
    FEW_CLASSES,
    MANY_CLASSES,
    SoftmaxIntercept,
    cross_entropy,
    many_classes,
    newton_step,
    newton_step_by_products,
)
from convexformer.rows import LOCAL, Rows

MANY_OUTPUTS = 1 << 15
"""Entries of targets from which it pays to look up their labels."""
NEARLY_ZERO = 1e-8
"""Of an inexact intercept: the value is then right to all digits, since its error is quadratic in the slope."""


@final
class CrossEntropy(Loss):
    """``L(f, p) = log sum_l exp(f_l) - <p, f>`` with ``p`` a row of probabilities (one-hot for a label).

    Rows of probabilities serve distillation and label smoothing. ``L*(u, p) = sum_l q_l log q_l`` with
    ``q = u + p`` in the simplex; scaling keeps it there, since ``t u + p = t q + (1 - t) p``.
    """

    name = "cross_entropy"
    curvature = 0.5
    class_labels = True
    kernels = softmax_compiled.KERNELS

    @property
    def nearly_exact_until(self) -> int:
        """Classes up to which the intercept's Hessian is formed, where loops are compiled; plain code has no host syncs."""
        return MANY_CLASSES["cpu"] if ready(softmax_compiled.NAME) else 0

    def encode(self, Y: Tensor) -> Tensor:
        """Integer labels ``(R,)`` become one-hot rows; rows of probabilities are checked and kept."""
        return one_hot(Y) if Y.ndim == 1 else probabilities(Y)

    def value(self, F: Tensor, Y: Tensor) -> Tensor:
        """``log sum exp(f) - <p, f>``, from the largest output: a loss of 1e-12 keeps its digits."""
        # compiled, with a gradient that nobody asked for, it is still faster; but torch does not differentiate it
        compiled = None if F.requires_grad else softmax_compiled.value_and_gradient(F, Y)
        return cross_entropy(F, Y) if compiled is None else compiled[0]

    def gradient(self, F: Tensor, Y: Tensor) -> Tensor:
        """``softmax(f) - p``; for a label that is all but certain, minus the sum of the other probabilities."""
        return _minus(_softmax(F), Y)

    def value_and_gradient(self, F: Tensor, Y: Tensor) -> tuple[Tensor, Tensor]:
        """Both from the same exponentials."""
        if (compiled := softmax_compiled.value_and_gradient(F, Y)) is not None:
            return compiled
        if (labels := _labels(Y)) is not None:
            return _of_labels(F, labels)
        top, where = F.max(1, keepdim=True)
        E = F - top
        linear = (Y * E).sum(1)
        others = E.exp_().scatter_(1, where, 0.0).sum(1)
        Q = E.scatter_(1, where, 1.0).div_(1 + others[:, None])
        return torch.log1p(others) - linear, _minus(Q, Y)

    def hessian(self, F: Tensor, Y: Tensor) -> SoftmaxHessian:
        """``diag(q) - q q^T`` with ``q = softmax(f)``."""
        return SoftmaxHessian(_softmax(F))

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

    def check_intercept(self, Y: Tensor, w: Tensor, rows: Rows = LOCAL) -> None:
        """Every class needs some mass, or its intercept goes to minus infinity."""
        mass = rows.weighted(w, Y)
        if bool((mass <= 0).any()):
            absent = (mass <= 0).nonzero()[:, 0].tolist()
            raise ValueError(
                f"classes {absent[:10]} have no sample (of positive weight), so their best intercept is minus infinity. "
                "Relabel the classes 0..c-1 without gaps (np.unique(y, return_inverse=True)) or use intercept=False."
            )

    def intercept_step(self, F: Tensor, Y: Tensor, w: Tensor, slope: Tensor, rows: Rows = LOCAL) -> Tensor:
        """``-H^-1 slope`` for intercepts of mean zero, of bounded length: far from the root the model means little."""
        Q = _softmax(F).T
        if len(Q) > many_classes(Q):
            return newton_step_by_products(Q, w, slope, rows)
        return newton_step(rows.total(Q @ (Q * w).T), slope)

    def best_intercept(self, F: Tensor, Y: Tensor, w: Tensor, start: Tensor, rows: Rows = LOCAL) -> Tensor:
        """Return the minimiser of mean zero, by Newton's method in ``c`` variables; see :class:`SoftmaxIntercept`."""
        if softmax_compiled.serves(F, rows) and (found := softmax_compiled.best(F, Y, w, start)) is not None:
            return found
        if not bool(torch.isfinite(rows.total(F.sum()))):
            return start
        return SoftmaxIntercept(F, Y, w, rows).best(start)

    def inexact_intercept(self, F: Tensor, Y: Tensor, w: Tensor, start: Tensor, rows: Rows = LOCAL) -> Tensor:
        """A slope of ``NEARLY_ZERO`` of its terms on a CPU, where Newton steps find it; else the steps of every loss."""
        nearly = None
        if softmax_compiled.serves(F, rows):
            nearly = softmax_compiled.best(F, Y, w, start, NEARLY_ZERO)
        elif not F.is_cuda and F.shape[1] <= self.nearly_exact_until:
            nearly = SoftmaxIntercept(F, Y, w, rows).nearly_best(start, NEARLY_ZERO)
        if nearly is not None:
            return nearly + start.mean()
        return super().inexact_intercept(F, Y, w, start, rows)

    def evaluate_nearly(self, F: Tensor, Y: Tensor, w: Tensor, start: Tensor, rows: Rows = LOCAL) -> Evaluated | None:
        """One compiled call for few classes and samples."""
        if not softmax_compiled.serves(F, rows):
            return None
        return softmax_compiled.evaluate(F, Y, w, start, NEARLY_ZERO)

    def evaluate_exactly(self, F: Tensor, Y: Tensor, w: Tensor, start: Tensor, rows: Rows = LOCAL) -> Evaluated | None:
        """The same."""
        if not softmax_compiled.serves(F, rows):
            return None
        known = softmax_compiled.evaluate(F, Y, w, start)
        if known is None or imbalance(known[3], w, rows) is None:
            return known
        value, b, outputs, U, _ = known
        U = self.balance(U, Y, w, rows)
        return value, b, outputs, U, w[:, None] * U

    def balance(self, U: Tensor, Y: Tensor, w: Tensor, rows: Rows = LOCAL) -> Tensor:
        """Mix with a constant predictor: ``(1 - a) u + a (q - p)`` with ``q`` in the simplex.

        ``q`` cancels the sum and ``a`` is about the least that allows it, see
        :func:`~convexformer.losses.simplex.mix_with_constant`: of the order of the sum over the rarest class's weight.
        """
        r = imbalance(U, w, rows)
        if r is None:
            return U
        keep, a, q, others = mix_with_constant(r, rows.weighted(w, Y), rows.sum(w))
        return keep * U + a * torch.where(Y == 1, -others, q - Y)


def _labels(Y: Tensor) -> Tensor | None:
    """``(R, 1)`` the labels of one-hot rows, kept as long as they live; None for other rows, for few, and on a GPU.

    With labels at hand a loss takes half as many passes over its outputs, which is what many classes cost on a CPU.
    """
    if Y.is_cuda or Y.numel() < MANY_OUTPUTS:
        return None
    found = _LABELS.get(Y)
    if found is None:
        labels = Y.argmax(1, keepdim=True)
        rest = Y.scatter(1, labels, 0.0)
        found = (labels if bool((Y.gather(1, labels) == 1).all()) and not bool(rest.any()) else None,)
        _LABELS[Y] = found
    return found[0]


_LABELS = WeakTensorKeyDictionary()


def _of_labels(F: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return losses and gradients for labels ``(R, 1)``, with all their digits where one is all but certain."""
    top, where = F.max(1, keepdim=True)
    Q = (F - top).exp_().scatter_(1, where, 0.0)
    others = Q.sum(1, keepdim=True)
    values = (top - F.gather(1, labels)).add_(torch.log1p(others))
    U = Q.scatter_(1, where, 1.0).div_(others.add_(1)).scatter_(1, labels, 0.0)
    return values[:, 0], U.scatter_(1, labels, -U.sum(1, keepdim=True))


def _softmax(F: Tensor) -> Tensor:
    """``softmax(f)`` of each row; on a CPU torch's own is slow for short rows."""
    if F.device.type != "cpu" or F.shape[1] >= FEW_CLASSES:
        return F.softmax(1)
    E = (F - F.amax(1, keepdim=True)).exp()
    return E / E.sum(1, keepdim=True)


def _minus(Q: Tensor, Y: Tensor) -> Tensor:
    """``q - p``, with all its digits where a label is all but certain; ``Q`` is overwritten."""
    certain = Y == 1
    U = Q.sub_(Y).masked_fill_(certain, 0.0)
    return torch.where(certain, -U.sum(1, keepdim=True), U, out=U)


LOSSES.register("cross_entropy", CrossEntropy)

"""Logistic loss for two classes."""

from __future__ import annotations

import math
from typing import final

import torch
from torch import Tensor

from convexformer.losses.base import LOSSES, imbalance
from convexformer.losses.encoding import signs
from convexformer.losses.separable import SeparableLoss
from convexformer.losses.simplex import mix_with_constant
from convexformer.rows import LOCAL, Rows

LONGEST_STEP = 20.0  # of an inexact intercept: where the sigmoid saturates Newton's step is meaningless


@final
class Logistic(SeparableLoss):
    """``L(f, y) = log(1 + exp(-y f))`` for ``y`` in {-1, +1}.

    ``L*(u, y) = p log p + (1 - p) log(1 - p)`` with ``p = -y u`` in [0, 1].
    """

    name = "logistic"
    curvature = 0.25

    def encode(self, Y: Tensor) -> Tensor:
        """Labels -1 and +1, one output."""
        return signs(Y, self.name)

    def check_intercept(self, Y: Tensor, w: Tensor, rows: Rows = LOCAL) -> None:
        """Both classes need some weight, or the intercept goes to infinity."""
        for label in (-1.0, 1.0):
            if not bool(rows.weighted(w, torch.eq(Y, label).to(w.dtype)) > 0):
                raise ValueError(
                    f"class {label:+.0f} has no sample of positive weight, so the best intercept is infinite. "
                    "Give both classes some weight or use intercept=False."
                )

    def value(self, F: Tensor, Y: Tensor) -> Tensor:
        """``log(1 + exp(-y f))``, without overflow."""
        return torch.logaddexp(-Y * F, torch.zeros_like(F)).sum(1)

    def gradient(self, F: Tensor, Y: Tensor) -> Tensor:
        """``-y sigmoid(-y f)``."""
        return -Y * torch.sigmoid(-Y * F)

    def second_derivative(self, F: Tensor, Y: Tensor) -> Tensor:
        """``p (1 - p)``, with all its digits where the sigmoid saturates."""
        return torch.sigmoid(F) * torch.sigmoid(-F)

    def conjugate(self, U: Tensor, Y: Tensor) -> Tensor:
        """Return the negative entropy of ``(p, 1 - p)``."""
        p = -Y * U
        inside = ((p >= -1e-12) & (p <= 1 + 1e-12)).all(1)
        p = p.clamp(0, 1)
        entropy = (torch.xlogy(p, p) + torch.special.xlog1py(1 - p, -p)).sum(1)
        return torch.where(inside, entropy, math.inf)

    def intercept_step(self, F: Tensor, Y: Tensor, w: Tensor, slope: Tensor, rows: Rows = LOCAL) -> Tensor:
        """``-h / h'``, of bounded length."""
        step = -slope / rows.weighted(w, self.second_derivative(F, Y)).clamp_min(1e-300)
        return step.clamp(-LONGEST_STEP, LONGEST_STEP)

    def balance(self, U: Tensor, Y: Tensor, w: Tensor, rows: Rows = LOCAL) -> Tensor:
        """Mix with a constant predictor: ``(1 - a) u + a (q - [y = 1])`` with ``q`` in (0, 1).

        With ``u = p - [y = 1]`` and ``p`` the probability of +1 this is cross-entropy's, see
        :func:`~convexformer.losses.simplex.mix_with_constant`: the classes +1 and -1 have the sums ``r`` and ``-r``.
        """
        r = imbalance(U, w, rows)
        if r is None:
            return U
        mass = torch.cat([rows.weighted(w, torch.eq(Y, label).to(w.dtype)) for label in (1.0, -1.0)])
        keep, a, q, others = mix_with_constant(torch.cat([r, -r]), mass, rows.sum(w))
        return keep * U + a * torch.where(Y > 0, -others[0], q[0])


LOSSES.register("logistic", Logistic)

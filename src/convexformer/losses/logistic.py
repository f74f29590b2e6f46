"""Logistic loss for two classes."""

from __future__ import annotations

import math
from typing import final

import torch
from torch import Tensor

from convexformer.losses.base import LOSSES, SeparableLoss, signs


@final
class Logistic(SeparableLoss):
    """``L(f, y) = log(1 + exp(-y f))`` for ``y`` in {-1, +1}.

    ``L*(u, y) = p log p + (1 - p) log(1 - p)`` with ``p = -y u`` in [0, 1].
    """

    name = "logistic"
    curvature = 0.25
    differences = False

    def encode(self, Y: Tensor) -> Tensor:
        """Labels -1 and +1, one output."""
        return signs(Y, self.name)

    def check_intercept(self, Y: Tensor, w: Tensor) -> None:
        """Both classes need some weight, or the intercept goes to infinity."""
        for label in (-1.0, 1.0):
            if not bool((w * (Y[:, 0] == label)).any()):
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

    def curvatures(self, F: Tensor, Y: Tensor) -> Tensor:
        """``p (1 - p)``."""
        p = torch.sigmoid(F)
        return p * (1 - p)

    def conjugate(self, U: Tensor, Y: Tensor) -> Tensor:
        """Return the negative entropy of ``(p, 1 - p)``."""
        p = -Y * U
        inside = ((p >= -1e-12) & (p <= 1 + 1e-12)).all(1)
        p = p.clamp(0, 1)
        entropy = (torch.xlogy(p, p) + torch.special.xlog1py(1 - p, -p)).sum(1)
        return torch.where(inside, entropy, math.inf)


LOSSES.register("logistic", Logistic)

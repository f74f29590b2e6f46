"""Limited-memory BFGS directions for vectors that live on any device."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor


@final
class InverseHessian:
    """The two-loop recursion in compact form (Byrd, Nocedal and Schnabel 1994): a few thin matrix products.

    Pairs ``s, y`` are rows of two matrices, so that a direction needs no host round trip. It never changes: with one pair
    more it is another, and a step that was in vain leaves the old one as it was.
    """

    def __init__(self, memory: int = 20, S: Tensor | None = None, Y: Tensor | None = None) -> None:
        self.memory = memory
        self._S, self._Y = S, Y

    def updated(self, s: Tensor, y: Tensor) -> InverseHessian:
        """Take in a step and the change of gradient along it; where curvature is not positive, only the change's size."""
        size, change = s.norm(), y.norm()
        bent = (s @ y) > 1e-10 * size * change
        y = torch.where(bent, y, (change / size.clamp_min(1e-300)) * s)
        if self._S is None or self._Y is None:
            return InverseHessian(self.memory, s[None], y[None])
        keep = self.memory - 1
        S, Y = torch.cat([self._S[-keep:], s[None]]), torch.cat([self._Y[-keep:], y[None]])
        return InverseHessian(self.memory, S, Y)

    def direction(self, g: Tensor) -> Tensor:
        """Return ``-H g``; ``-g`` before the first pair."""
        if self._S is None or self._Y is None:
            return -g
        S, Y = self._S, self._Y
        SY, YY = S @ Y.T, Y @ Y.T
        D = SY.diagonal()
        gamma = D[-1] / YY[-1, -1]
        R = SY.triu()
        Sg, Yg = S @ g, gamma * (Y @ g)
        inner = torch.linalg.solve_triangular(R, Sg[:, None], upper=True)[:, 0]
        p = D * inner + gamma * (YY @ inner) - Yg
        p = torch.linalg.solve_triangular(R.T, p[:, None], upper=False)[:, 0]
        return -(gamma * g + S.T @ p - gamma * (Y.T @ inner))

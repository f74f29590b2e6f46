"""Limited-memory BFGS directions for vectors that live on any device."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor


@final
class InverseHessian:
    """The two-loop recursion in compact form (Byrd, Nocedal and Schnabel 1994): a few thin matrix products.

    Pairs ``s, y`` are rows of two matrices, so that a direction needs no host round trip for each pair.
    """

    def __init__(self, memory: int = 20) -> None:
        self.memory = memory
        self._S: Tensor | None = None
        self._Y: Tensor | None = None

    def forget(self) -> None:
        """Drop all curvature pairs."""
        self._S = self._Y = None

    def update(self, s: Tensor, y: Tensor) -> None:
        """Take in a step and the change of gradient along it, if its curvature is positive."""
        if float(s @ y) <= 1e-10 * float(s.norm() * y.norm()):
            return
        if self._S is None or self._Y is None:
            self._S, self._Y = s[None], y[None]
            return
        keep = self.memory - 1
        self._S, self._Y = torch.cat([self._S[-keep:], s[None]]), torch.cat([self._Y[-keep:], y[None]])

    def direction(self, g: Tensor) -> Tensor | None:
        """Return ``-H g``; None before the first pair."""
        if self._S is None or self._Y is None:
            return None
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

"""Limited-memory BFGS directions for vectors that live on any device."""

from __future__ import annotations

from typing import NamedTuple, final

import torch
from torch import Tensor

from convexformer.solvers.cuda_graph import select


@final
class Pairs(NamedTuple):
    """Steps ``s`` and changes of the gradient ``y`` along them, rows of two matrices; the newest is the last.

    The inverse Hessian they stand for is the two-loop recursion in compact form (Byrd, Nocedal and Schnabel 1994): a few
    thin matrix products, and no host round trip. Rows of zeros stand for pairs that are still to come.
    """

    S: Tensor
    Y: Tensor

    @classmethod
    def none(cls, g: Tensor, places: int = 0) -> Pairs:
        """No pairs yet; room for ``places`` of them."""
        return cls(g.new_zeros((places, len(g))), g.new_zeros((places, len(g))))

    def updated(self, s: Tensor, y: Tensor, memory: int, *, sync_free: bool = False) -> Pairs:
        """Take in a pair if its curvature is positive; ``sync_free``: decide that on the device."""
        bent = (s @ y) > 1e-10 * s.norm() * y.norm()
        if not sync_free and not bent:
            return self
        keep = memory - 1
        longer = Pairs(torch.cat([self.S[-keep:], s[None]]), torch.cat([self.Y[-keep:], y[None]]))
        return select(bent, longer, self) if sync_free else longer

    def direction(self, g: Tensor) -> Tensor:
        """Return ``-H g``; ``-g`` before the first pair."""
        S, Y = self
        if not len(S):
            return -g
        SY, YY = S @ Y.T, Y @ Y.T
        D = SY.diagonal()
        gamma = torch.where(D[-1] > 0, D[-1] / YY[-1, -1], 1.0)
        R = SY.triu() + torch.diag((D == 0).to(D))  # a place without a pair says nothing
        Sg, Yg = S @ g, gamma * (Y @ g)
        inner = torch.linalg.solve_triangular(R, Sg[:, None], upper=True)[:, 0]
        p = D * inner + gamma * (YY @ inner) - Yg
        p = torch.linalg.solve_triangular(R.T, p[:, None], upper=False)[:, 0]
        return -(gamma * g + S.T @ p - gamma * (Y.T @ inner))

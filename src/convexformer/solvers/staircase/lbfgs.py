"""Limited-memory BFGS directions for vectors that live on any device."""

from __future__ import annotations

from typing import NamedTuple, final

import torch
from torch import Tensor

from convexformer.solvers.cuda_graph import select


@final
class Pairs(NamedTuple):
    """Steps ``s`` and changes of the gradient ``y`` along them, rows of two matrices; the newest is the last.

    On a CPU the inverse Hessian they stand for is applied by the two-loop recursion (Nocedal 1980), which reads each pair
    twice. Where no host round trip is allowed (``sync_free``) by its compact form (Byrd, Nocedal and Schnabel 1994), a few
    thin matrix products; rows of zeros stand for pairs that are still to come.
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
        if not sync_free:
            return Pairs(_appended(self.S, s, memory), _appended(self.Y, y, memory))
        keep = memory - 1
        longer = Pairs(torch.cat([self.S[-keep:], s[None]]), torch.cat([self.Y[-keep:], y[None]]))
        return select(bent, longer, self)

    def direction(self, g: Tensor, *, sync_free: bool = False) -> Tensor:
        """Return ``-H g``; ``-g`` before the first pair."""
        S, Y = self
        if not len(S):
            return -g
        if not sync_free:
            return self._two_loops(g)
        SY, YY = S @ Y.T, Y @ Y.T
        D = SY.diagonal()
        gamma = torch.where(D[-1] > 0, D[-1] / YY[-1, -1], 1.0)
        R = SY.triu() + torch.diag((D == 0).to(D))  # a place without a pair says nothing
        Sg, Yg = S @ g, gamma * (Y @ g)
        inner = torch.linalg.solve_triangular(R, Sg[:, None], upper=True)[:, 0]
        p = D * inner + gamma * (YY @ inner) - Yg
        p = torch.linalg.solve_triangular(R.T, p[:, None], upper=False)[:, 0]
        return -(gamma * g + S.T @ p - gamma * (Y.T @ inner))

    def _two_loops(self, g: Tensor) -> Tensor:
        S, Y = self
        curvature = torch.linalg.vecdot(S, Y).tolist()  # positive: other pairs are not taken in
        out, n = -g, len(S)
        steps = [0.0] * n
        for k in range(n - 1, -1, -1):
            steps[k] = float(S[k] @ out) / curvature[k]
            out.sub_(Y[k], alpha=steps[k])
        out.mul_(curvature[-1] / float(Y[-1] @ Y[-1]))
        for k in range(n):
            out.add_(S[k], alpha=steps[k] - float(Y[k] @ out) / curvature[k])
        return out


def _appended(rows: Tensor, new: Tensor, most: int) -> Tensor:
    """``rows`` and ``new``, the last ``most`` of them, in the same memory while it has room behind them.

    A view of the first rows does not see what is written behind it: of two successors of one matrix the later one counts.
    """
    n, width = rows.shape
    kept = rows[max(0, n + 1 - most) :]
    end = rows.storage_offset() + n * width
    if n == 0 or rows.untyped_storage().nbytes() < (end + width) * rows.itemsize:
        room = new.new_empty((2 * most, width))
        room[: len(kept)] = kept
        kept = room[: len(kept)]
    longer = kept.as_strided((len(kept) + 1, width), (width, 1), kept.storage_offset())
    longer[-1] = new
    return longer

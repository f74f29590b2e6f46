"""Bounds of singular values from few products: what is large is found and taken away, and the rest bounded loosely.

With orthonormal rows ``Q`` near the top right singular vectors of a block ``M``, ``W = M Q^T`` and ``E = M (I - Q^T Q)``,

    M^T M = [[W^T W, C^T], [C, E^T E]]  in the basis (Q, its complement),    C = (I - Q^T Q) M^T W,

so that ``|M|^2`` is at most the largest eigenvalue of the same matrix with ``e^2 I`` in place of ``E^T E``, for any
``e >= |E|``. Once ``C`` is small next to the distance of ``e`` from the top, that is ``|W|^2`` to second order in ``C``: a
bound of ``|E|`` that is a few times too large does no harm. It comes from random vectors: for a Gaussian ``w``,
``|... E E^T E w| >= |E|^p |v^T w|`` with ``p`` factors and ``v`` the top right singular vector of ``E``; ``|v^T w| <= t``
has probability at most ``t sqrt(2 / pi)`` (compare Halko, Martinsson and Tropp 2011, lemma 4.1, for ``p = 1``). With k
vectors ``|E| <= (max |... E w| / t)^(1/p)`` fails with the k-th power of that. Each further factor brings the norm that is
bounded nearer to the spectral norm, and takes a root of ``1 / t``.
"""

from __future__ import annotations

import math
from typing import final

import torch
from torch import Tensor

from convexformer.gauges.base import LinearMap
from convexformer.gauges.krylov import gram_orthonormal, random_rows
from convexformer.gauges.proof import PROBE_ROUNDING

RANK = 16
"""Directions that are taken away at first, and added at a time."""
PROBES, FACTORS = 4, 8
"""Random vectors, and the most products in a row that bound what is left: few vectors and many products are fewer in all."""
PROBE_SEED = 77_003
"""Of these vectors alone: surveys, which find what is taken away, begin with others."""
NEAR = 0.95
"""Share of the top below which the rest must be."""
TIGHT, LOOSE = 1e-6, 1e-3
"""More directions are taken away while the bound is above what has been seen by more than the first share, and the bound
is given up where it is by the second."""
ROUNDS = 4
"""Times that directions are taken away, at most."""
SHORTEST = 1e-9
"""Rows shorter than this, next to the longest, are no directions."""
ROUNDING = 1e-10
"""Relative to the top of a block, what float64 products and their differences may hide."""


def deflated(M: LinearMap, starts: dict[int, Tensor], failure: float) -> float | None:
    """Bound the largest singular value of any block of a float64 ``M`` by products with vectors alone.

    ``starts`` has rows near the top singular vectors on the short side of each block, which must not depend on this
    function's random vectors. ``failure`` is the probability for all blocks together that the bound is wrong. None where
    too much is left for the bound to be tight: many large singular values, or poor starts.
    """
    B, p, q = M.shape
    side = min(p, q)
    blocks = [_Block(M, b, starts[b]) for b in range(B)]
    if any(not math.isfinite(block.unit) for block in blocks):
        return None
    top = 0.0
    for block in sorted(blocks, key=lambda block: -block.unit * block.seen):
        probes = random_rows(PROBES, side, M.like, PROBE_SEED)
        if (found := block.bound(top / block.unit, probes, failure / (B * ROUNDS))) is None:
            return None
        top = max(top, block.unit * found)
    return top


@final
class _Block:
    """A block, what is taken away from it, and what is known of the rest."""

    def __init__(self, M: LinearMap, b: int, start: Tensor) -> None:
        _, p, q = M.shape
        forth, back = (lambda V: M.matvec(V, b)), (lambda U: M.rmatvec(U, b))
        if q > p:
            forth, back = back, forth
        self.Q = _independent(start[:RANK].to(M.like), 0.0)  # (r, n)
        W = forth(self.Q) if len(self.Q) else self.Q.new_zeros((1, max(p, q)))
        unit = float(W.abs().max())
        self.unit = unit if unit > 0 else 1.0  # squares neither overflow nor vanish
        self.there, self.back = (lambda V: forth(V) / self.unit), (lambda U: back(U) / self.unit)
        self.W = W[: len(self.Q)] / self.unit  # (r, m): M Q^T
        self.K = self.Q[:0]  # (j, n): M^T W of the first j directions

    @property
    def seen(self) -> float:
        """The largest singular value on the directions that are taken away, a lower bound, over the unit."""
        if not (len(self.W) and math.isfinite(self.unit)):
            return 0.0
        return math.sqrt(max(0.0, float(torch.linalg.eigvalsh(self.W @ self.W.T)[-1])))

    def bound(self, top: float, probes: Tensor, failure: float) -> float | None:
        """Bound the block over its unit, loosely where that is at most ``top``, which another one reaches.

        None where the bound is neither that low nor tight.
        """
        rest = None
        for _ in range(ROUNDS):  # what is left is another matrix in each, so that each may fail
            seen = self.seen
            rest = self._rest(max(top, seen), probes, failure) if rest is None else rest
            if rest is not None and seen == 0.0:
                return rest
            if rest is not None and math.hypot(seen, rest) <= top:
                return top
            self._couple()
            if rest is not None:
                found = self._joint(rest, seen)
                if found <= max(top, (1 + TIGHT) * seen):
                    return found
            if seen == 0.0 or not self._take_away(seen):
                break
        if rest is None:
            return None
        self._couple()
        found = self._joint(rest, self.seen)
        return found if found <= max(top, (1 + LOOSE) * self.seen) else None

    def _couple(self) -> None:
        """Find ``M^T W`` of the directions that were taken away last."""
        if len(self.W) > len(self.K):
            self.K = torch.cat([self.K, self.back(self.W[len(self.K) :])])

    def _rest(self, top: float, probes: Tensor, failure: float) -> float | None:
        """Bound ``|E|``; None where that is not below ``top``."""
        t = math.sqrt(math.pi / 2) * failure ** (1 / len(probes))
        u, size, rounding = probes, 0.0, ROUNDING * top
        for factor in range(1, FACTORS + 1):
            if factor % 2:
                whole = self.there(u)
                u = whole - (u @ self.Q.T) @ self.W
            else:
                whole = self.back(u)
                u = whole - (u @ self.W.T) @ self.Q
            longest = float((u.norm(dim=1) + PROBE_ROUNDING * whole.norm(dim=1)).max())
            if longest == 0.0:
                return rounding
            if not math.isfinite(longest):
                return None
            if factor > 1 and longest >= NEAR * top:  # |E u| <= |E| |u|, and the longest u has length one
                return None
            size += math.log(longest)
            u = u / longest
            found = math.exp((size - math.log(t)) / factor) + rounding
            if found < NEAR * top:
                return found
        return None

    def _joint(self, rest: float, seen: float) -> float:
        """The largest eigenvalue of the joint matrix, ``e^2 I`` for what is not known; its root."""
        W, K = self.W / seen, self.K / seen**2
        outside = K - (K @ self.Q.T) @ self.Q
        A, R = W @ W.T, torch.linalg.qr(outside.T)[1]
        corner = (rest / seen) ** 2 * torch.eye(len(R), dtype=A.dtype, device=A.device)
        joint = torch.cat([torch.cat([A, R.T], 1), torch.cat([R, corner], 1)])
        top = float(torch.linalg.eigvalsh(joint)[-1])
        return seen * (math.sqrt(max(0.0, top)) + ROUNDING)

    def _take_away(self, seen: float) -> bool:
        """Take away the directions along which ``C`` is largest as well; tell whether there are any."""
        outside = self.K - (self.K @ self.Q.T) @ self.Q
        new = _independent(outside, SHORTEST * seen**2)[-RANK:]
        new = new - (new @ self.Q.T) @ self.Q
        new = _independent(new, 0.5)[: self.Q.shape[1] - len(self.Q)]
        if not len(new):
            return False
        self.Q = torch.cat([self.Q, new])
        self.W = torch.cat([self.W, self.there(new)])
        return True


def _independent(rows: Tensor, least: float) -> Tensor:
    """Orthonormal rows of the same span, along the principal axes of the rows; without axes shorter than ``least``."""
    if not len(rows):
        return rows
    Q, lengths = gram_orthonormal(rows)
    keep = lengths > max(least, SHORTEST * float(lengths[-1]))
    Q = Q[keep.to(Q.device)]
    return gram_orthonormal(Q)[0] if len(Q) else Q

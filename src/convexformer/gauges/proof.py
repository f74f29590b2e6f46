"""Proofs that a singular value is no larger: of a matrix at hand, and of one that was formed in a lower precision."""

from __future__ import annotations

import math
from typing import final

import torch
from torch import Tensor

from convexformer.gauges.base import LinearMap
from convexformer.gauges.krylov import largest_eigenvalue, random_rows

PROBES = 16
"""Random vectors that verify a matrix formed in a lower precision."""
FEW_PROBES = 4
"""Those that are tried first: enough for a block that is not among the largest."""
FITTED = 2
"""Further ones from which its scale is corrected: products that cut digits off make all numbers smaller."""
SQUARES = 1e60
"""Numbers up to this, and down to one over it, are squared and added up as they are."""
PROBE_ROUNDING = 1e-12
"""The rounding of a float64 product with a random vector, relative to its length."""


def verified(M: LinearMap, failure: float) -> float | None:
    """Bound the largest singular value of any block of a float64 ``M`` that is formed in float32, or with TF32 products.

    With ``N_b`` the block as it was formed, ``|M_b| <= |N_b| + |M_b - N_b|``. The first is proven. For the second,
    whatever the errors are, ``|E w| <= t |E|`` for a Gaussian ``w`` has probability at most ``t sqrt(2 / pi)``, since
    ``|E w|`` is no smaller than ``|E|`` times one Gaussian number (Halko, Martinsson and Tropp 2011, lemma 4.1): k
    float64 products with independent vectors bound ``|E|`` by ``max |E w| / t`` except with the k-th power of that.
    ``failure`` is the probability for all blocks together. A block is tried with a few of the vectors first, which bound
    ``|E|`` loosely; that is enough where it is smaller than one before it. Each of the two bounds fails with half the
    probability. None where float32 overflows.
    """
    B, _, q = M.shape
    first, all_of_them = FITTED + FEW_PROBES, FITTED + PROBES
    probes = random_rows(all_of_them, q, M.like, seed=1)
    top = 0.0
    for b, block in enumerate(M.rough().blocks()):
        block = block.double()
        exact, formed = M.matvec(probes[:first], b), probes @ block.T
        size = float((formed[:FITTED] * formed[:FITTED]).sum())
        scale = float((exact[:FITTED] * formed[:FITTED]).sum()) / size if size > 0 else 1.0
        if not (math.isfinite(scale) and bool(formed.isfinite().all()) and bool(exact.isfinite().all())):
            return None
        gram = _Gram(block.mul_(scale))
        formed *= scale
        if gram.at_most(top - _error_bound(exact[FITTED:], formed[FITTED:first], 0.5 * failure / B)):
            continue
        exact = torch.cat([exact, M.matvec(probes[first:], b)])
        if not bool(exact.isfinite().all()):
            return None
        error = _error_bound(exact[FITTED:], formed[FITTED:], 0.5 * failure / B)
        top = gram.bound(max(0.0, top - error)) + error
    return top


def _error_bound(exact: Tensor, formed: Tensor, failure: float) -> float:
    """Bound ``|E|`` from ``E w = exact - formed`` for independent Gaussian vectors ``w``, one a row."""
    t = math.sqrt(math.pi / 2) * failure ** (1 / len(exact))
    misses = (exact - formed).norm(dim=1) + PROBE_ROUNDING * exact.norm(dim=1)
    return float(misses.max()) / t


def proven(block: Tensor, least: float) -> float:
    """Return an upper bound of the largest singular value, or ``least`` where that is one.

    A Cholesky factorisation of ``rho^2 I - K``, ``K`` the Gram matrix of the short side, proves it.
    """
    return _Gram(block.double()).bound(least)


@final
class _Gram:
    """The Gram matrix ``K`` of the short side of a float64 block, over ``scale^2``, and what its rounding may hide.

    ``slack`` counts the rounding of the Gram matrix (sums along the long side) and of a factorisation (along the short
    side), both relative to the trace: a factorisation proves a bound for a matrix perturbed by this much at most.
    """

    def __init__(self, block: Tensor) -> None:
        scale = float(block.abs().max())
        self.empty, self.finite = scale == 0.0, math.isfinite(scale)
        if self.empty or not self.finite:
            return
        # no copy where squares neither overflow nor vanish
        self.scale = 1.0 if 1 / SQUARES < scale < SQUARES else scale
        self.K = _lower_gram(block if self.scale == 1.0 else block / self.scale)
        self.trace = float(self.K.diagonal().sum())
        self.slack = 4 * (len(self.K) + max(block.shape)) * torch.finfo(torch.float64).eps * self.trace

    def at_most(self, value: float) -> bool:
        """Tell whether the largest singular value is proven to be at most ``value``; of a zero matrix it is."""
        if self.empty:
            return value >= 0
        return self.finite and value > 0 and _below(self.K, (value / self.scale) ** 2 - self.slack)

    def bound(self, least: float) -> float:
        """Return an upper bound of the largest singular value, or ``least`` where that is one."""
        if self.empty:
            return least
        if not self.finite:
            return math.inf
        if self.at_most(least):
            return least
        guess = largest_eigenvalue(self.K)
        for excess in (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0):
            rho2 = guess * (1 + excess) ** 2
            if _below(self.K, rho2):
                return max(least, self.scale * math.sqrt(rho2 + self.slack))
        return max(least, self.scale * math.sqrt(self.trace + self.slack))  # the Frobenius norm always bounds it


def _lower_gram(block: Tensor) -> Tensor:
    """Return the lower triangle of the Gram matrix of the short side, with zeros above it."""
    wide = block if block.shape[0] >= block.shape[1] else block.T
    side = wide.shape[1]
    K = block.new_empty((side, side))
    panel = max(256, -(-side // 8))
    for start in range(0, side, panel):
        columns = slice(start, start + panel)
        torch.mm(wide[:, start:].T, wide[:, columns], out=K[start:, columns])
    return K.tril_()


def _below(K: Tensor, rho2: float) -> bool:
    """Tell whether ``rho2 I - K`` has a Cholesky factorisation; the lower triangle of ``K`` is read."""
    if rho2 <= 0:
        return False
    shifted = -K
    shifted.diagonal().add_(rho2)
    return int(torch.linalg.cholesky_ex(shifted)[1]) == 0

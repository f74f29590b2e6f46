"""Proofs that a singular value is no larger: of a matrix at hand, and of one that was formed in a lower precision."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from convexformer.gauges.base import LinearMap
from convexformer.gauges.krylov import largest_eigenvalue, random_rows

PROBES = 16
"""Random vectors that verify a matrix formed in a lower precision."""
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
    ``failure`` is the probability for all blocks together. None where float32 overflows.
    """
    B, _, q = M.shape
    t = math.sqrt(math.pi / 2) * (failure / B) ** (1 / PROBES)
    probes = random_rows(PROBES + FITTED, q, M.like, seed=1)
    top = 0.0
    for b, block in enumerate(M.rough().blocks()):
        block = block.double()
        exact, formed = M.matvec(probes, b), probes @ block.T
        size = float((formed[:FITTED] * formed[:FITTED]).sum())
        scale = float((exact[:FITTED] * formed[:FITTED]).sum()) / size if size > 0 else 1.0
        if not (math.isfinite(scale) and bool(formed.isfinite().all()) and bool(exact.isfinite().all())):
            return None
        misses = (exact - scale * formed)[FITTED:].norm(dim=1) + PROBE_ROUNDING * exact[FITTED:].norm(dim=1)
        error = float(misses.max()) / t
        top = proven(block.mul_(scale), max(0.0, top - error)) + error
    return top


def proven(block: Tensor, least: float) -> float:
    """Return an upper bound of the largest singular value, or ``least`` where that is one.

    A Cholesky factorisation of ``rho^2 I - K``, ``K`` the Gram matrix of the short side, proves it.
    """
    block = block.double()
    scale = float(block.abs().max())
    if scale == 0.0:
        return least
    if not math.isfinite(scale):
        return math.inf
    scale = 1.0 if 1 / SQUARES < scale < SQUARES else scale  # no copy where squares neither overflow nor vanish
    K = _lower_gram(block if scale == 1.0 else block / scale)
    side, trace = len(K), float(K.diagonal().sum())
    # rounding of the Gram matrix (sums along the long side) and of the factorisation (along the short side), both
    # relative to the trace: the factorisation proves the bound for a matrix perturbed by this much at most
    slack = 4 * (side + max(block.shape)) * torch.finfo(torch.float64).eps * trace
    if _below(K, (least / scale) ** 2 - slack):
        return least
    guess = largest_eigenvalue(K)
    for excess in (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0):
        rho2 = guess * (1 + excess) ** 2
        if _below(K, rho2):
            return max(least, scale * math.sqrt(rho2 + slack))
    return max(least, scale * math.sqrt(trace + slack))  # the Frobenius norm always bounds it


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

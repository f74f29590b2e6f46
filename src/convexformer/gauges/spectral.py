"""Largest singular values of matrices met through products with vectors: estimates, and bounds that may certify."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import TypeAlias

import torch
from torch import Tensor

from convexformer.gauges.base import LinearMap, Polar, PolarKind
from convexformer.gauges.deflation import RANK, deflated
from convexformer.gauges.krylov import Krylov, random_rows
from convexformer.gauges.proof import proven, verified
from convexformer.threads import tensor_cores

Triples: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor]
"""Singular values, vectors ``U: (k, p)`` and ``V: (k, q)``, blocks."""

SMALL_SIDE = 1024  # the exact spectrum of the Gram matrix is taken for short sides up to this
EIGEN_SIDE = {"cpu": 384, "cuda": 1024}
"""Short sides up to which estimates take all eigenvectors of Gram matrices; beyond, a Krylov space of the formed matrix."""
CHOLESKY_SIDE = 20_000  # a Cholesky test proves the bound for short sides up to this
FORMED = 1 << 28  # all blocks of M are formed together if they have at most this many entries: 2 GiB in float64
MUCH_WORK = 1e11
"""Multiplications from which matrices are formed in float32: some three seconds on one core in float64."""
VERIFYING_COST = 36
"""Products with one vector that a block must cost more than: verifying takes half as many, in float64."""
FAILURE = 1e-6  # probability that a probabilistic bound is wrong
PROOF_WIDTH, PROOF_STEPS = 8, 250  # the Krylov space of a probabilistic bound
WIDTHS = {"one": 16, "formed": 8, "gated": 8}
"""Vectors in a block of an estimate: of a single matrix, of matrices that are formed, and of many that are not."""
SKETCH = 8
"""Cheap random combinations of rows for each vector that an estimate begins with."""
FORMED_COST = {"cpu": 32, "cuda": 128}
"""Products with one vector up to whose cost a block is formed for an estimate; a GPU forms with TF32 products."""
CONTENDERS = 0.98
"""Blocks whose value, found in a lower precision, is above this fraction of the largest are looked at again."""
ESTIMATE_STEPS = 10  # blocks of vectors of an estimate, at most
SETTLED = 1e-5  # an estimate is done when another block of vectors raises it by less than this
EXACT_STEPS, EXACTLY = 40, 1e-9  # the same where the matrix is at hand, so that blocks of vectors cost little


def unit_of(M: Tensor) -> Tensor:
    """Return the largest entry's size, one for zeros: squares of ``M / unit`` neither overflow nor vanish."""
    top = M.abs().amax()
    return torch.where(top > 0, top, 1.0)


def shrinkage(norms: Tensor, step: float | Tensor) -> Tensor:
    """``(1 - step / norm)_+``, exactly zero where the norm is at most ``step``."""
    return torch.where(norms > step, 1 - step / norms.clamp_min(torch.finfo(norms.dtype).tiny), 0.0)


def gram(M: Tensor) -> Tensor:
    """Return the Gram matrix of the short side of each slice."""
    return M.mT @ M if M.shape[-2] >= M.shape[-1] else M @ M.mT


def largest(M: Tensor) -> float:
    """Return the largest singular value of any slice; that of the Gram matrix is accurate to rounding."""
    M = M.double()
    unit = unit_of(M)
    if not bool(unit.isfinite()):
        return math.inf
    return float(unit * torch.linalg.eigvalsh(gram(M / unit))[..., -1].max().clamp_min(0).sqrt())


def bound(M: LinearMap) -> Polar:
    """Bound the largest singular value of an implicit ``M: (B, p, q)`` from above, as tightly as its size allows.

    Exact by eigenvalues when a side is small; proven by a Cholesky factorisation when a block can be formed, or where
    that is much work formed in float32 and verified, with the stated probability; otherwise by the Krylov space of
    random vectors, with that probability, too.
    """
    B, p, q = M.shape
    side = min(p, q)
    if side <= SMALL_SIDE and B * p * q <= FORMED:
        return Polar(largest(M.dense()))
    if side <= CHOLESKY_SIDE and M.formable:
        much = M.forming_work > MUCH_WORK and M.block_cost > VERIFYING_COST
        if much and (found := _deflated(M)) is not None:
            return Polar(found, PolarKind.PROBABILISTIC, confidence=1 - FAILURE)
        if much and (found := verified(M, 0.5 * FAILURE)) is not None:  # the other half is for what was tried before
            return Polar(found, PolarKind.PROBABILISTIC, confidence=1 - FAILURE)
        if side <= SMALL_SIDE:
            return Polar(max(largest(block) for block in M.blocks()))
        top = 0.0
        for block in M.blocks():
            top = proven(block, top)
        return Polar(top, PolarKind.UPPER)
    return Polar(max(_probable(M, b, B) for b in range(B)), PolarKind.PROBABILISTIC, confidence=1 - FAILURE)


def estimate(M: LinearMap) -> Polar:
    """Estimate the largest singular value quickly, from below: good for steering, never for a certificate."""
    if may_form(M):
        if not bool(M.dense().isfinite().all()):
            return Polar(math.inf, PolarKind.LOWER)
        if not _by_eigenvectors(M):
            return Polar(_survey(M), PolarKind.LOWER)
        values, _ = M.gram_spectrum()  # cached: the solver asks for the vectors next
        return Polar(float(values[..., -1].max()))
    return Polar(_survey(M), PolarKind.LOWER)


def _by_eigenvectors(M: LinearMap) -> bool:
    """Tell whether all eigenvectors are to be found of matrices that may be formed."""
    B, p, q = M.shape
    return B > 1 or min(p, q) <= EIGEN_SIDE["cuda" if M.like.is_cuda else "cpu"]


def top_pairs(M: LinearMap, k: int, start: Tensor | None = None, sweeps: int = 6) -> Triples:
    """Return the ``k`` largest singular triples over all blocks: values, ``U: (k, p)``, ``V: (k, q)``, blocks.

    By the SVD of small blocks. Of large ones those that an estimate of ``M`` has found, where they are enough; else by
    subspace iteration (``start: (j, q)`` seeds it).
    """
    B = M.shape[0]
    if may_form(M) and _by_eigenvectors(M):
        values, Q = M.gram_spectrum()
        return _gram_pairs(M.dense(), values, Q, k)
    if start is None:
        if M.pairs is None:
            _survey(M)
        assert M.pairs is not None
        if B > 1 or 2 * k <= len(M.pairs[0]):
            sigma, U, V, block = (part[:k] for part in M.pairs)
            return sigma, U, V, block
        start = M.pairs[2][:k]
    found = []
    for b in range(B):
        U, sigma, V = _subspace(M, b, k, start, sweeps)
        found.append((sigma, U, V, torch.full((len(sigma),), b, dtype=torch.int64, device=sigma.device)))
    return _sorted(found, k)


def may_form(M: LinearMap) -> bool:
    """Tell whether all blocks are small enough to be formed and decomposed, and cheap enough for an estimate."""
    B, p, q = M.shape
    return min(p, q) <= SMALL_SIDE and B * p * q <= FORMED and M.forming_work <= MUCH_WORK


def pairs_of(M: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the ``k`` largest singular triples over all blocks of ``M: (B, p, q)``, as :func:`top_pairs` does."""
    if len(M) == 1 and min(M.shape[1:]) > EIGEN_SIDE["cuda" if M.is_cuda else "cpu"]:
        return _krylov_pairs(M[0], k)
    unit = unit_of(M)
    squares, vectors = torch.linalg.eigh(gram(M / unit))
    return _gram_pairs(M, unit * squares.clamp_min(0).sqrt(), vectors, k)


def _krylov_pairs(M: Tensor, k: int) -> Triples:
    """The same of one matrix at hand, about: directions for a solver to try."""
    p, q = M.shape
    start = random_rows(min(k + 8, p, q), min(p, q), M, seed=0)
    wide = M if q <= p else M.T
    space = Krylov(lambda V: V @ wide.T, lambda U: U @ wide, start)
    _settle({0: space}, [0.0])
    sigma, near, far = space.ritz(k)
    block = torch.zeros(len(sigma), dtype=torch.int64, device=sigma.device)
    return (sigma, far, near, block) if q <= p else (sigma, near, far, block)


def _survey(M: LinearMap) -> float:
    """Find the top of every block by Krylov spaces; leave the pairs on ``M`` and the start of the next survey.

    Blocks that are cheap to form are formed, one after the other. Of others, which cost a pass over the data for every
    block of vectors, only those go on whose value rises and may still exceed the largest. Where all this is much work
    it is done in float32, and float32 products on a GPU with TF32 factors; the values are those of the vectors found, in
    the precision of ``M``.
    """
    if (top := M.recall()) is not None:
        return top
    rounded = M.like.is_cuda and M.like.dtype == torch.float32
    if M.forming_work > MUCH_WORK or rounded:
        with tensor_cores() if rounded else nullcontext():
            found = _surveyed(M.rough())
        if (top := _corrected(M, *found)) is not None:
            M.remember(top)
            return top
    values, triples = _surveyed(M)
    if not triples:
        raise torch.linalg.LinAlgError("numbers of the dual matrix overflow")
    M.pairs = _sorted(triples)
    return max(values)


def _surveyed(M: LinearMap) -> tuple[list[float], list[Triples]]:
    """The largest value and the triples of every block; no triples where numbers overflow."""
    B, p, q = M.shape
    formed = M.formable and M.block_cost <= FORMED_COST["cuda" if M.like.is_cuda else "cpu"]
    width = min(WIDTHS["one" if B == 1 else "formed" if formed else "gated"], p, q)
    spaces: dict[int, Krylov] = {}
    values, found = [0.0] * B, []
    if formed:
        for b, block in enumerate(M.blocks()):
            spaces = {b: _space(M, b, width, block)}
            _settle(spaces, values, *((EXACT_STEPS, EXACTLY) if B == 1 else (ESTIMATE_STEPS, SETTLED)))
            if values[b] == math.inf:
                return values, []
            found.append(_triples(M, b, spaces[b], len(spaces[b].basis) if B == 1 else width))
    else:
        spaces = {b: _space(M, b, width) for b in range(B)}
        _settle(spaces, values)
        if max(values) == math.inf:
            return values, []
        found = [_triples(M, b, space, len(space.basis) if B == 1 else width) for b, space in spaces.items()]
    M.note_leading()
    return values, found


def _corrected(M: LinearMap, values: list[float], found: list[Triples]) -> float | None:
    """Keep triples found in a lower precision, with the values that their first vectors have in that of ``M``.

    None where the precision was too low for the numbers of ``M``.
    """
    right, top = [], max(values)
    for b, triples in enumerate(found):
        sigma, U, V, block = (part.to(M.like) if part.is_floating_point() else part for part in triples)
        if values[b] > CONTENDERS * top:
            ratio = float(torch.linalg.vector_norm(M.matvec(V[:1], b)) / V[0].norm()) / values[b]
            if not abs(ratio - 1) < 1 - CONTENDERS:
                return None
            sigma, values[b] = ratio * sigma, ratio * values[b]
        right.append((sigma, U, V, block))
    if not right:
        return None
    M.pairs = _sorted(right)
    return max(values)


def _space(M: LinearMap, b: int, width: int, block: Tensor | None = None) -> Krylov:
    """The Krylov space of a block on its short side, from where the last survey ended and one random vector."""
    _, p, q = M.shape
    n = min(p, q)
    start = random_rows(width, n, M.like, seed=b)
    if (known := M.leading.get(b)) is not None:
        start = torch.cat([known.to(start)[: width - 1], start])[:width]
    elif block is None and q <= p and (rows := M.sketch(b, SKETCH * width)) is not None:
        start = _leading_rows(rows, start)
    if block is None:
        there, back = (lambda V: M.matvec(V, b)), (lambda U: M.rmatvec(U, b))
    else:
        there, back = (lambda V: V @ block.T), (lambda U: U @ block)
    return Krylov(there, back, start) if q <= p else Krylov(back, there, start)


def _leading_rows(rows: Tensor, otherwise: Tensor) -> Tensor:
    """The top right singular vectors of a sketch, as many as ``otherwise`` has rows, which serve after an overflow."""
    unit = unit_of(rows)
    if not bool(unit.isfinite()):
        return otherwise
    rows = (rows / unit).double()
    turn = torch.linalg.eigh(rows @ rows.T)[1].flip(1)[:, : len(otherwise)]
    return (turn.T @ rows).to(otherwise)


def _settle(
    spaces: dict[int, Krylov], values: list[float], steps: int = ESTIMATE_STEPS, settled: float = SETTLED
) -> None:
    """Grow the spaces until their largest value settles; ``values`` holds those of all blocks."""
    rise = dict.fromkeys(spaces, math.inf)
    for b, space in spaces.items():
        values[b] = space.top()
    for step in range(steps):
        best = max(values)
        # a value that rose by a fraction may rise by twice as much again
        active = [b for b in spaces if rise[b] > settled and (step < 1 or values[b] * (1 + 2 * rise[b]) > best)]
        active = [b for b in active if not spaces[b].full and 0 < values[b] < math.inf]
        if not active:
            return
        for b in active:
            spaces[b].grow()
            before, values[b] = values[b], spaces[b].top()
            rise[b] = values[b] / before - 1


def _triples(M: LinearMap, b: int, space: Krylov, k: int) -> Triples:
    """Return the top ``k`` triples of a block and keep their short sides for the next survey."""
    _, p, q = M.shape
    sigma, near, far = space.ritz(max(k, WIDTHS["one"]))
    M.leading[b] = near[: WIDTHS["one"]]
    sigma, near, far = sigma[:k], near[:k], far[:k]
    block = torch.full((len(sigma),), b, dtype=torch.int64, device=sigma.device)
    return (sigma, far, near, block) if q <= p else (sigma, near, far, block)


def _sorted(found: list[Triples], k: int | None = None) -> Triples:
    """Join triples of several blocks, the largest values first."""
    sigma, U, V, block = (torch.cat(parts) for parts in zip(*found, strict=True))
    order = sigma.argsort(descending=True)[:k]
    return sigma[order], U[order], V[order], block[order]


def _gram_pairs(M: Tensor, values: Tensor, Q: Tensor, k: int) -> Triples:
    """Return the top ``k`` triples of all blocks ``(B, p, q)`` by the eigenvectors of their small Gram matrices."""
    tall = M.shape[-2] >= M.shape[-1]
    order = values.flatten().argsort(descending=True)[:k]
    block, column = order // values.shape[1], order % values.shape[1]
    sigma = values[block, column]
    short = Q[block, :, column]  # (k, n)
    wide = M if tall else M.mT
    long = short @ wide[0].mT if len(M) == 1 else (wide[block] @ short[:, :, None])[:, :, 0]
    long = long / sigma.clamp_min(torch.finfo(sigma.dtype).tiny)[:, None]
    return (sigma, long, short, block) if tall else (sigma, short, long, block)


def _subspace(M: LinearMap, b: int, k: int, start: Tensor | None, sweeps: int) -> tuple[Tensor, Tensor, Tensor]:
    """Randomised subspace iteration (Halko, Martinsson, Tropp 2011) with batched products."""
    _, p, q = M.shape
    width = min(k + 8, p, q)
    V = random_rows(width, q, M.like, seed=0)
    if start is not None:
        V = torch.cat([start.to(V), V])[:width]
    for _ in range(sweeps):
        U = torch.linalg.qr(M.matvec(V, b).T)[0].T
        V = torch.linalg.qr(M.rmatvec(U, b).T)[0].T
    L, sigma, Rh = torch.linalg.svd(M.matvec(V, b).T, full_matrices=False)
    return L.T[:k], sigma[:k], (Rh @ V)[:k]


def _deflated(M: LinearMap) -> float | None:
    """Bound by what the last survey has found, or else a new one, in float64; None where that is not tight.

    On a CPU: a GPU forms blocks with TF32 products, at a small part of the cost of float64 ones.
    """
    if M.like.is_cuda or M.like.dtype != torch.float64:
        return None
    rough = M.rough()
    known = rough.surveyed and all(b in rough.leading for b in range(M.shape[0]))
    if not known and not _surveyed(rough)[1]:
        return None
    return deflated(M, {b: _starts(rough, b) for b in range(M.shape[0])}, 0.5 * FAILURE)


def _starts(M: LinearMap, b: int) -> Tensor:
    """The leading vectors of a block, and those of a sketch beside them: estimates look at the top alone."""
    _, p, q = M.shape
    known = M.leading[b][: RANK // 2]
    if q > p or (rows := M.sketch(b, SKETCH * RANK)) is None:
        return M.leading[b][:RANK]
    rows = rows - (rows @ known.T) @ known
    return torch.cat([known, _leading_rows(rows, known.new_zeros((RANK - len(known), q)))])


def _probable(M: LinearMap, b: int, n_blocks: int) -> float:
    """Return ``rho (1 - eps)^(-1/2)``, a bound with probability ``1 - FAILURE / n_blocks``.

    For j steps of Lanczos from a random vector Kuczynski and Wozniakowski (1992) bound the probability that
    ``rho^2 < (1 - eps) sigma^2`` by ``1.648 sqrt(n) exp(-sqrt(eps) (2 j - 1))``. The space of a block of k independent
    random vectors holds those of each of them: it fails only if all do, with the k-th power of that probability.
    """
    _, p, q = M.shape
    side = min(p, q)
    start = random_rows(min(PROOF_WIDTH, side), side, M.like, seed=1)
    there, back = (lambda V: M.matvec(V, b)), (lambda U: M.rmatvec(U, b))
    if q > p:
        there, back = back, there
    space, steps = Krylov(there, back, start, keep_images=False), 1
    while steps < PROOF_STEPS and not space.full:
        space.grow()
        steps += 1
    rho = space.top()
    if space.full:
        return rho * (1 + 1e-9)
    root = (math.log(1.648 * math.sqrt(side)) + math.log(n_blocks / FAILURE) / len(start)) / (2 * steps - 1)
    return rho / math.sqrt(max(1 - root**2, 1e-3))

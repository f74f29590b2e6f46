"""Largest singular values of matrices met through products with vectors: estimates, and bounds that may certify."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from convexformer.gauges.base import LinearMap, Polar, PolarKind

SMALL_SIDE = 1024  # the exact spectrum of the Gram matrix is taken for short sides up to this
CHOLESKY_SIDE = 20_000  # a Cholesky test proves the bound for short sides up to this
FORMED = 1 << 28  # M is formed for a bound if it has at most this many entries: 2 GiB in float64
FAILURE = 1e-6  # probability that a probabilistic bound is wrong
LANCZOS_STEPS = 1000


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

    Exact by eigenvalues when a side is small; proven by a Cholesky factorisation when ``M`` can be formed; otherwise
    Lanczos with the bound of Kuczynski and Wozniakowski (1992), which holds with the stated probability.
    """
    B, p, q = M.shape
    side = min(p, q)
    if side <= SMALL_SIDE and B * p * q <= FORMED:
        return Polar(largest(M.dense()))
    if side <= CHOLESKY_SIDE and p * q <= FORMED:
        return Polar(max(_proven(M, b) for b in range(B)), PolarKind.UPPER)
    top = max(_probable(M, b, B) for b in range(B))
    return Polar(top, PolarKind.PROBABILISTIC, confidence=1 - FAILURE)


def estimate(M: LinearMap) -> Polar:
    """Estimate the largest singular value quickly, from below: good for steering, never for a certificate."""
    B, p, q = M.shape
    if min(p, q) <= SMALL_SIDE and B * p * q <= FORMED:
        if not bool(M.dense().isfinite().all()):
            return Polar(math.inf, PolarKind.LOWER)
        values, _ = M.gram_spectrum()  # cached: the solver asks for the vectors next
        return Polar(float(values[..., -1].max()))
    return Polar(max(lanczos(M, b, steps=40) for b in range(B)), PolarKind.LOWER)


def lanczos(M: LinearMap, b: int, steps: int, seed: int = 0) -> float:
    """Return the largest singular value of block ``b`` after ``steps`` of Golub-Kahan-Lanczos from a random start."""
    _, p, q = M.shape
    like = M.like
    transposed = q > p  # iterate on the short side
    there, back = (M.rmatvec, M.matvec) if transposed else (M.matvec, M.rmatvec)
    generator = torch.Generator().manual_seed(seed)
    v = torch.randn((1, min(p, q)), generator=generator, dtype=torch.float64).to(like)
    v = v / v.norm()
    unit = unit_of(there(v, b))
    basis = [v]
    alphas: list[Tensor] = []
    betas: list[Tensor] = []
    previous, beta = None, None
    largest_yet = v.new_zeros(())
    for _ in range(min(steps, min(p, q))):
        u = there(v, b) / unit
        if previous is not None and beta is not None:
            u = u - beta * previous
        u, alpha = _normalised(u, largest_yet)
        w = back(u, b) / unit - alpha * v
        Q = torch.cat(basis)
        for _twice in range(2):  # full reorthogonalisation: rounding must not lose the top
            w = w - (w @ Q.T) @ Q
        largest_yet = torch.maximum(largest_yet, alpha)
        previous, (v, beta) = u, _normalised(w, largest_yet)
        alphas.append(alpha)
        betas.append(beta)
        basis.append(v)
    A, E = torch.stack(alphas).double(), torch.stack(betas).double()
    core = torch.diag(A) + torch.diag(E[:-1], 1)
    return float(unit) * float(torch.linalg.svdvals(core)[0]) if bool(core.isfinite().all()) else math.inf


def _normalised(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``x / |x|`` and ``|x|``; zeros where ``x`` is rounding, which means that the Krylov space is exhausted."""
    norm = x.norm()
    norm = torch.where(norm > 64 * torch.finfo(x.dtype).eps * scale, norm, 0.0)
    return torch.where(norm > 0, x / norm, 0.0), norm


def top_pairs(
    M: LinearMap, k: int, start: Tensor | None = None, sweeps: int = 6
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the ``k`` largest singular triples over all blocks: values, ``U: (k, p)``, ``V: (k, q)``, blocks.

    By the SVD of small blocks, by subspace iteration on large ones (``start: (j, q)`` seeds it).
    """
    B, p, q = M.shape
    if min(p, q) <= SMALL_SIDE and B * p * q <= FORMED:
        values, Q = M.gram_spectrum()
        return _gram_pairs(M.dense(), values, Q, k)
    found = []
    for b in range(B):
        U, sigma, V = _subspace(M, b, k, start, sweeps)
        found.append((sigma, U, V, torch.full((len(sigma),), b, dtype=torch.int64, device=sigma.device)))
    sigma, U, V, block = (torch.cat(parts) for parts in zip(*found, strict=True))
    order = sigma.argsort(descending=True)[:k]
    return sigma[order], U[order], V[order], block[order]


def _gram_pairs(M: Tensor, values: Tensor, Q: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the top ``k`` triples of all blocks ``(B, p, q)`` by the eigenvectors of their small Gram matrices."""
    tall = M.shape[-2] >= M.shape[-1]
    order = values.flatten().argsort(descending=True)[:k]
    block, column = order // values.shape[1], order % values.shape[1]
    sigma = values[block, column]
    short = Q[block, :, column]  # (k, n)
    long = (M if tall else M.mT)[block] @ short[:, :, None]
    long = long[:, :, 0] / sigma.clamp_min(torch.finfo(sigma.dtype).tiny)[:, None]
    return (sigma, long, short, block) if tall else (sigma, short, long, block)


def _subspace(M: LinearMap, b: int, k: int, start: Tensor | None, sweeps: int) -> tuple[Tensor, Tensor, Tensor]:
    """Randomised subspace iteration (Halko, Martinsson, Tropp 2011) with batched products."""
    _, p, q = M.shape
    generator = torch.Generator().manual_seed(0)
    width = min(k + 8, p, q)
    V = torch.randn((width, q), generator=generator, dtype=torch.float64).to(M.like)
    if start is not None and len(start):
        V = torch.cat([start.to(V), V])
        width = min(len(V), p, q)
        V = V[:width]
    for _ in range(sweeps):
        U = torch.linalg.qr(M.matvec(V, b).T)[0].T
        V = torch.linalg.qr(M.rmatvec(U, b).T)[0].T
    L, sigma, Rh = torch.linalg.svd(M.matvec(V, b).T, full_matrices=False)
    return L.T[:k], sigma[:k], (Rh @ V)[:k]


def _proven(M: LinearMap, b: int) -> float:
    """Return an upper bound that a Cholesky factorisation of ``rho^2 I - M M^T`` proves."""
    dense = M.dense()[b].double()
    scale = float(dense.abs().max())
    if scale == 0.0:
        return 0.0
    K = gram(dense / scale)
    side = K.shape[0]
    guess = lanczos(M, b, steps=min(60, side)) / scale
    # rounding of the Gram matrix (sums along the long side) and of the factorisation (along the short side), both
    # relative to the trace: the factorisation proves the bound for a matrix perturbed by this much at most
    slack = 4 * (side + max(dense.shape)) * torch.finfo(torch.float64).eps * float(K.diagonal().sum())
    for excess in (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0):
        rho2 = (guess * (1 + excess)) ** 2
        shifted = -K
        shifted.diagonal().add_(rho2)
        _, info = torch.linalg.cholesky_ex(shifted)
        if int(info) == 0:
            return scale * math.sqrt(rho2 + slack)
    return scale * math.sqrt(float(K.diagonal().sum()) + slack)  # the Frobenius norm always bounds it


def _probable(M: LinearMap, b: int, n_blocks: int) -> float:
    """Return ``rho (1 - eps)^(-1/2)``, a bound with probability ``1 - FAILURE / n_blocks``."""
    side = min(M.shape[1:])
    steps = min(LANCZOS_STEPS, side)
    rho = lanczos(M, b, steps, seed=1)
    if steps == side:
        return rho * (1 + 1e-9)
    root = math.log(1.648 * math.sqrt(side) * n_blocks / FAILURE) / (2 * steps - 1)
    return rho / math.sqrt(max(1 - root**2, 1e-3))

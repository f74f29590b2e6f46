"""Block Krylov spaces: the top singular values of a matrix from products with blocks of vectors.

A product with eight vectors reads the data once, as one with a single vector does: where products are bound by memory,
blocks cost little more than vectors and see more of the spectrum (Golub and Underwood 1977; Musco and Musco 2015).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import final

import torch
from torch import Tensor

Product = Callable[[Tensor], Tensor]

LOST = 1e3
"""Roundings: a new direction shorter than this many of them has run out."""
GRAM_SHORTEST = 1e-6
"""The same as a length relative to the whole where it is found by a Gram matrix in float64, which squares it."""


@final
class Krylov:
    """The space of ``Q, K Q, K^2 Q, ...`` with ``K = M^T M`` for a start ``Q: (k, n)`` (rows), and Rayleigh-Ritz on it.

    ``there`` is ``M`` and ``back`` its transpose, both on rows. ``K`` is block tridiagonal on the basis, which is kept
    orthonormal by full reorthogonalisation. Ritz values are never above the true ones, up to rounding.
    """

    def __init__(self, there: Product, back: Product, start: Tensor, *, keep_images: bool = True) -> None:
        self.there, self.back = there, back
        Q = _orthonormal(_orthonormal(start)[0])[0]
        image = there(Q)
        top = image.abs().amax()
        self.unit = torch.where((top > 0) & top.isfinite(), top, 1.0)  # squares neither overflow nor vanish
        self.basis, self.image = Q, image / self.unit
        self.images: list[Tensor] | None = [self.image] if keep_images else None
        self.core = self._gram(self.image)  # (m, m): K on the basis, in float64, on the host: it is small

    @property
    def full(self) -> bool:
        """Whether the basis is the whole space."""
        return len(self.basis) == self.basis.shape[1]

    def grow(self) -> None:
        """Add a block to the space."""
        m, width = len(self.basis), len(self.image)
        raw = self.back(self.image) / self.unit
        Q, lengths = _orthonormal(self._beside(raw))
        # where directions run out only rounding is left, most of it inside the space: random ones take their place, for
        # a basis that is not orthonormal would give values above the true ones
        lost = lengths <= _shortest(raw.dtype, raw.is_cuda) * raw.norm(dim=1).max().to(lengths)
        new = Q
        if bool(lost.any()):
            new = torch.where(lost.to(Q.device)[:, None], random_rows(len(raw), raw.shape[1], raw, seed=m), Q)
        for _ in range(2 if new is not Q else 1):  # twice in all is enough, unless nearly all of a row was in the space
            new = _orthonormal(self._beside(new))[0]
        new = new[: self.basis.shape[1] - m]
        self.image = self.there(new) / self.unit
        if self.images is not None:
            self.images.append(self.image)
        self.basis = torch.cat([self.basis, new])
        core = self.core.new_zeros((len(self.basis), len(self.basis)))
        core[:m, :m] = self.core
        core[m:, m - width : m] = (new.double() @ raw.double().T).cpu()
        core[m - width : m, m:] = core[m:, m - width : m].T
        core[m:, m:] = self._gram(self.image)
        self.core = core

    def top(self) -> float:
        """Return the largest Ritz value: a lower bound of the largest singular value; infinite after an overflow."""
        if not bool(self.core.isfinite().all()):
            return math.inf
        return float(self.unit) * float(torch.linalg.eigvalsh(self.core)[-1].clamp_min(0).sqrt())

    def ritz(self, k: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return at most ``k`` singular values, falling, with vectors on the side of the start and on the other side."""
        assert self.images is not None
        squares, C = torch.linalg.eigh(self.core)
        squares, C = squares.flip(0)[:k], C.flip(1)[:, :k].T.to(self.basis)
        sigma = squares.clamp_min(0).sqrt().to(self.basis.device)
        far = (C @ torch.cat(self.images)).double() / sigma.clamp_min(torch.finfo(sigma.dtype).tiny)[:, None]
        return self.unit * sigma.to(self.basis), C @ self.basis, far.to(self.basis)

    def _beside(self, rows: Tensor) -> Tensor:
        """Rows less their part in the space."""
        return rows - (rows @ self.basis.T) @ self.basis

    @staticmethod
    def _gram(rows: Tensor) -> Tensor:
        rows = rows.double()
        return (rows @ rows.T).cpu()


def _orthonormal(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Orthonormal rows of the same span, and ``(k,)`` how long each was beside those before it, or as an axis of all.

    On a GPU by the eigenvectors of the Gram matrix in float64, which are found on the host: a QR factorisation of a few
    long rows takes longer there than a product with the data. One such pass is as accurate as the root of a rounding.
    """
    if not rows.is_cuda:
        Q, R = torch.linalg.qr(rows.T)
        return Q.T, R.diagonal().abs()
    return gram_orthonormal(rows)


def gram_orthonormal(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows turned onto their principal axes, and the lengths of those."""
    wide = rows.double()
    squares, turn = torch.linalg.eigh((wide @ wide.T).cpu())
    lengths = squares.clamp_min(0).sqrt()
    turn = turn / lengths.clamp_min(GRAM_SHORTEST * float(lengths[-1]) + torch.finfo(torch.float64).tiny)
    return (turn.T.to(wide.device) @ wide).to(rows.dtype), lengths


def _shortest(dtype: torch.dtype, is_cuda: bool) -> float:
    """The length, relative to the whole, below which a direction has run out."""
    own = LOST * torch.finfo(dtype).eps
    return max(own, GRAM_SHORTEST) if is_cuda else own


def random_rows(k: int, n: int, like: Tensor, seed: int) -> Tensor:
    """``(k, n)`` Gaussian rows, the same on every machine."""
    return torch.randn((k, n), generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(like)


def largest_eigenvalue(K: Tensor, width: int = 8, steps: int = 40, tolerance: float = 1e-8) -> float:
    """Estimate the largest eigenvalue of a positive semidefinite matrix from below; ``K: (n, n)`` is its lower triangle."""
    n = len(K)
    diagonal = K.diagonal()

    def product(Q: Tensor) -> Tensor:
        return Q @ K + Q @ K.T - Q * diagonal

    space = Krylov(product, product, random_rows(min(width, n), n, K, 0), keep_images=False)
    value = space.top()
    for _ in range(steps):
        if space.full or not math.isfinite(value):
            break
        space.grow()
        before, value = value, space.top()
        if value - before <= tolerance * value:
            break
    return value

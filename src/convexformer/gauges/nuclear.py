"""Nuclear norms, one for each slice of a stack of matrices."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

import torch
from torch import Tensor

from convexformer.gauges.base import DualMatrix, Norm, Polar, WeightsLike
from convexformer.gauges.spectral import bound, estimate, gram, largest, shrinkage
from convexformer.gauges.thresholding import thresholding_derivative


@final
class NuclearNorm(Norm):
    """``g(Z) = scale * sum_b ||Z_b||_*`` over the leading axes of ``Z: (..., rows, cols)``.

    Per token, ``Z: (s, d, c)``: convex attention with ordinary weight decay on every factor, beyond Ergen et al.
    (2022; the atoms are ``e_k (x) w2 w3^T``). Per gate or block: the heads of Sahiner et al. (2022). ``scale`` is for exact
    reductions: a pooled linear mixer is an ``s x dc`` program with ``scale = sqrt(s)``. Low-rank weights and implicit
    dual matrices are used without forming them; the polar then states its kind.
    """

    sync_free = False  # torch's eigh syncs with the host on a GPU
    column_groups = False

    def __init__(self, scale: float = 1.0) -> None:
        self.scale = float(scale)

    def value(self, Z: WeightsLike) -> Tensor:
        """Sum of all singular values."""
        values = torch.linalg.svdvals(Z) if isinstance(Z, Tensor) else Z.singular_values()
        return self.scale * values.sum()

    def prox(self, Z: Tensor, step: float | Tensor) -> Tensor:
        """Singular-value thresholding of each slice, by the eigenvectors of its small Gram matrix.

        With ``Z = U S V^T`` and ``Z^T Z = V S^2 V^T``, the prox is ``Z V (1 - step/S)_+ V^T``: several times faster
        than the SVD, and as accurate where it matters, since values far below ``step`` vanish.
        """
        step = self.scale * step
        squares, V = torch.linalg.eigh(gram(Z.double()))  # squaring in float32 would lose the values near the step
        keep = shrinkage(squares.clamp_min(0).sqrt(), step)
        shrink = ((V * keep[..., None, :]) @ V.mT).to(Z.dtype)
        return Z @ shrink if Z.shape[-2] >= Z.shape[-1] else shrink @ Z

    def prox_derivative(self, Z: Tensor, step: float) -> Callable[[Tensor], Tensor]:
        """Return the derivative of singular-value thresholding, by products with the singular vectors."""
        return thresholding_derivative(Z, self.scale * step)

    def support(self, Z: Tensor) -> int:
        """Add the ranks of the slices."""
        squares = torch.linalg.eigvalsh(gram(Z.double()))
        return int((squares > 1e-14 * squares.max()).sum())

    def factor_weight(self) -> float:
        """``scale``: a nuclear norm is the least half sum of squares of factors."""
        return self.scale

    def polar(self, M: DualMatrix) -> Polar:
        """Return the largest singular value of any slice, over ``scale``: exact for a tensor, so it may certify."""
        found = Polar(largest(M)) if isinstance(M, Tensor) else bound(M)
        return Polar(found.value / self.scale, found.kind, found.confidence)

    def slice_polars(self, M: Tensor) -> Tensor:
        """Return the largest singular value of each slice."""
        return torch.linalg.eigvalsh(gram(M.double()))[..., -1].clamp_min(0).sqrt().to(M.dtype) / self.scale

    def quick_polar(self, M: DualMatrix) -> Polar:
        """Return an estimate for steering a solver; a lower bound where the exact value is expensive."""
        found = Polar(largest(M)) if isinstance(M, Tensor) else estimate(M)
        return Polar(found.value / self.scale, found.kind, found.confidence)

    def atom(self, M: Tensor) -> Tensor:
        """Return the top singular pair ``u v^T / scale`` of the best slice."""
        slices = M.reshape(-1, *M.shape[-2:])
        best = int(torch.linalg.svdvals(slices)[:, 0].argmax())
        U, _, Vh = torch.linalg.svd(slices[best], full_matrices=False)
        out = torch.zeros_like(slices)
        out[best] = torch.outer(U[:, 0], Vh[0]) / self.scale
        return out.view_as(M)

    def __repr__(self) -> str:
        return "NuclearNorm()" if self.scale == 1.0 else f"NuclearNorm(scale={self.scale:.6g})"

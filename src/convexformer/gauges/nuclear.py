"""Nuclear norms, one for each slice of a stack of matrices."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from convexformer.gauges.base import Gauge, Polar


@final
class NuclearNorm(Gauge):
    """``g(Z) = sum_b ||Z_b||_*`` over the leading axes of ``Z: (..., rows, cols)``.

    Per token, ``Z: (s, d, c)``: convex attention with ordinary weight decay on every factor, which the paper leaves out
    (the atoms are ``e_k (x) w2 w3^T``). Per gate or block, ``Z: (g, d, c)``: the MLP head (Sahiner et al. 2022).
    """

    def value(self, Z: Tensor) -> Tensor:
        """Sum of all singular values."""
        return torch.linalg.svdvals(Z).sum()

    def prox(self, Z: Tensor, step: float) -> Tensor:
        """Singular-value thresholding of each slice, by the eigenvectors of its small Gram matrix.

        With ``Z = U S V^T`` and ``Z^T Z = V S^2 V^T``, the prox is ``Z V (1 - step/S)_+ V^T``: several times faster than
        the SVD, and as accurate where it matters, since values far below ``step`` vanish.
        """
        if step <= 0:
            return Z
        tall = Z.shape[-2] >= Z.shape[-1]
        gram = Z.mT @ Z if tall else Z @ Z.mT
        squares, V = torch.linalg.eigh(gram)
        keep = 1 - step / squares.clamp_min(step**2).sqrt()
        shrink = (V * keep[..., None, :]) @ V.mT
        return Z @ shrink if tall else shrink @ Z

    def polar(self, M: Tensor) -> Polar:
        """Return the largest singular value of any slice: exact, so it may certify.

        The largest eigenvalue of the small Gram matrix is accurate to rounding (only the small ones are not).
        """
        gram = M.mT @ M if M.shape[-2] >= M.shape[-1] else M @ M.mT
        return Polar(float(torch.linalg.eigvalsh(gram)[..., -1].max().clamp_min(0).sqrt()))

    def atom(self, M: Tensor) -> Tensor:
        """Return the top singular pair ``u v^T`` of the best slice."""
        slices = M.reshape(-1, *M.shape[-2:])
        best = int(torch.linalg.svdvals(slices)[:, 0].argmax())
        U, _, Vh = torch.linalg.svd(slices[best], full_matrices=False)
        out = torch.zeros_like(slices)
        out[best] = torch.outer(U[:, 0], Vh[0])
        return out.view_as(M)

    def __repr__(self) -> str:
        return "NuclearNorm()"

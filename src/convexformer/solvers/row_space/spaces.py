"""For each block a few orthonormal rows that span the columns its weights may have, and the features that belong to them."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from convexformer.objective import Objective
from convexformer.operators import BilinearOperator, LowRank


@final
class Spaces:
    """Rows ``P_b: (r_b, p)`` and features ``(N, r_b, l)``, in the precision of ``objective``."""

    def __init__(self, objective: Objective, n_blocks: int) -> None:
        A = objective.operator
        assert isinstance(A, BilinearOperator)
        self.objective, self.operator = objective, A
        p, self.q = A.weight_shape[-2:]
        self.width = self.q // objective.n_outputs
        like = A.like
        self.rows = [like.new_zeros((0, p)) for _ in range(n_blocks)]
        self.features = [like.new_zeros((A.output_shape[0], 0, self.width)) for _ in range(n_blocks)]

    def extend(self, b: int, X: Tensor, least: float) -> Tensor:
        """Add what rows ``X`` have beyond the space of a block, where it is longer than ``least``; return its features."""
        P = self.rows[b]
        new = X.to(P)
        for _ in range(2):
            new = new - (new @ P.T) @ P
        # rows of the rest along its principal axes: those that are short are rounding, or nothing new
        squares, turn = torch.linalg.eigh(new.double() @ new.double().T)
        keep = squares.clamp_min(0).sqrt() > least
        new = (turn[:, keep].T / squares[keep].sqrt()[:, None]).to(new) @ new
        new = new - (new @ P.T) @ P
        new = torch.linalg.qr(new.T)[0].T.contiguous()
        if len(new) == 0:
            return self.features[b][:, :0]
        self.objective.begin_product()
        found = self.operator.row_features(new, b)
        assert found is not None
        self.rows[b] = torch.cat([P, new])
        self.features[b] = torch.cat([self.features[b], found], 1)
        return found

    def turn(self, b: int, R: Tensor) -> None:
        """Keep the rows ``R P_b`` for orthonormal rows ``R: (r', r)``: no product is needed."""
        self.rows[b] = R @ self.rows[b]
        self.features[b] = torch.einsum("jk,nkl->njl", R, self.features[b])

    def stacked(self, blocks: list[int]) -> Tensor:
        """``(N, len(blocks), r, l)`` features side by side, zero where a block has fewer rows."""
        depth = max(len(self.rows[b]) for b in blocks)
        out = self.features[0].new_zeros((len(self.features[0]), len(blocks), depth, self.width))
        for k, b in enumerate(blocks):
            out[:, k, : len(self.rows[b])] = self.features[b]
        return out

    def images(self, V: Tensor, b: int, features: Tensor | None = None) -> Tensor:
        """``P_b M_b`` for ``M = -A^T V``, ``(r_b, q)``, from the features; of other rows by theirs."""
        F = self.features[b] if features is None else features
        sums = torch.einsum("nrl,nc->rlc", F, V.to(F)).flatten(1)
        return -self.objective.rows.total(sums)

    def weights(self, Y: list[Tensor], shape: tuple[int, ...], like: Tensor, tolerance: float) -> LowRank:
        """Return ``Z_b = P_b^T Y_b`` as balanced factors, in the precision of ``like``."""
        pieces = [torch.linalg.svd(y.to(like), full_matrices=False) for y in Y]
        top = max(float(sigma.max()) if len(sigma) else 0.0 for _, sigma, _ in pieces)
        U, V, counts = [], [], []
        for P, (L, sigma, Rh) in zip(self.rows, pieces, strict=True):
            keep = sigma > tolerance * top
            root = sigma[keep].sqrt()[:, None]
            U.append(root * (L[:, keep].T @ P.to(like)))
            V.append(root * Rh[keep])
            counts.append(len(root))
        block = torch.arange(len(Y), device=like.device).repeat_interleave(torch.tensor(counts, device=like.device))
        return LowRank(torch.cat(U), torch.cat(V), block, shape, tuple(counts))

"""A diagonal that stands for the Hessian of a factored objective, along the principal axes of the features.

With features ``phi_i`` the block of ``U_j`` is ``sum_i w_i (V_j^T L''_i V_j) phi_i phi_i^T + beta``: nearly diagonal along
the principal axes of the features, with entries ``lambda_a mu_j + beta``. Nuclear norms are invariant under rotations, so
the axes cost nothing but the rotations themselves, and not those where the operator is turned to them once and for all
(:class:`~convexformer.solvers.staircase.frames.Products`). Where an operator knows no axes its own coordinates serve. Sizes
of terms and corrections of the spectrum are found by random probes, see :meth:`Curvature.squares`.
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from convexformer.solvers.staircase.curvature import Curvature
from convexformer.solvers.staircase.frames import Frame, Frames

PRIOR = 8.0  # how many probes the spectrum of the features is worth against those of the Hessian


@final
class Preconditioner:
    """``(lambda_a mu_j + beta)^-1`` for ``U``, and the like for ``V``, along their axes."""

    def __init__(self, frames: Frames, curvature: Curvature, probes: int) -> None:
        self.frames, self.curvature = frames, curvature
        self.Z = curvature.Z
        block = self.Z.block
        found = curvature.squares(probes)
        rows, columns = self.frames.rows, self.frames.columns
        self.U = self._diagonal(rows, rows.weights(block), [GU for GU, _ in found], curvature.beta)
        spread = columns.weights(block, _floored(curvature.output_weights().double()))
        self.V = self._diagonal(columns, spread, [GV for _, GV in found], curvature.beta)
        along = all(turn is None for turn in (*rows.turns, *columns.turns))
        self._inverse = curvature.join(1 / self.U, 1 / self.V) if along else None

    def __call__(self, x: Tensor) -> Tensor:
        """``P^-1 x``."""
        if self._inverse is not None:
            return self._inverse * x
        rows, columns, block = self.frames.rows, self.frames.columns, self.Z.block
        U, V = self.curvature.parts(x)
        U = rows.from_axes(rows.to_axes(U, block) / self.U, block)
        V = columns.from_axes(columns.to_axes(V, block) / self.V, block)
        return self.curvature.join(U, V)

    def _diagonal(self, frame: Frame, prior: Tensor, found: list[Tensor], beta: float) -> Tensor:
        """Fit ``spectrum_a mu_j`` to squares of probes; terms of a block share a correction of the spectrum."""
        block = self.Z.block
        squares = sum(frame.to_axes(G.double(), block).square() for G in found) / len(found)
        assert isinstance(squares, Tensor)
        tiny = torch.finfo(torch.float64).tiny
        size = (squares.sum(1) / prior.sum(1).clamp_min(tiny))[:, None]
        model = (size * prior).clamp_min(tiny)
        # the mean ratio of probes and model over the terms of a block, drawn towards one where there are few
        ratio = squares.new_zeros((self.Z.n_blocks, squares.shape[1])).index_add_(0, block, squares / model)
        count = squares.new_zeros(self.Z.n_blocks).index_add_(0, block, torch.ones_like(size[:, 0]))[:, None]
        seen = len(found)
        ratio = (PRIOR + seen * ratio) / (PRIOR + seen * count)
        return model * ratio[block] + beta


def _floored(h: Tensor) -> Tensor:
    """Keep every output's curvature above a small part of the largest one."""
    return h.clamp_min(1e-3 * float(h.max())) if float(h.max()) > 0 else torch.ones_like(h)

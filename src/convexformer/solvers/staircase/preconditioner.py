"""A diagonal that stands for the Hessian of a factored objective, along the principal axes of the features.

With features ``phi_i`` the block of ``U_j`` is ``sum_i w_i (V_j^T L''_i V_j) phi_i phi_i^T + beta``: nearly diagonal along
the principal axes of the features, with entries ``lambda_a mu_j + beta``. Nuclear norms are invariant under rotations, so
the axes cost nothing but the rotations themselves. Where an operator knows no axes its own coordinates serve. Sizes of terms
and corrections of the spectrum are found by random probes, see :meth:`Curvature.squares`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from convexformer.objective import Objective
from convexformer.operators import LowRank
from convexformer.operators.moments import Axis, Moments
from convexformer.solvers.base import Workspace
from convexformer.solvers.staircase.curvature import Curvature

PRIOR = 8.0  # how many probes the spectrum of the features is worth against those of the Hessian


@final
@dataclass(frozen=True)
class Frame:
    """Orthogonal axes for the rows (or columns) of all blocks, as a Kronecker product, and the spectrum along them."""

    sizes: tuple[int, ...]
    turns: tuple[Tensor | None, ...]
    """``(k, n, n)`` with eigenvectors in columns; None: the axis is left as it is."""
    spectrum: tuple[Tensor | None, ...]
    """``(k, n)``, of mean one."""

    @classmethod
    def of(cls, axes: tuple[Axis, ...]) -> Frame:
        """Find the axes of moments."""
        turns: list[Tensor | None] = []
        spectrum: list[Tensor | None] = []
        for axis in axes:
            if axis.moments is None or not bool(axis.moments.isfinite().all()):
                turns.append(None)
                spectrum.append(None)
                continue
            values, vectors = torch.linalg.eigh(axis.moments.double())
            values = values.clamp_min(0)
            values = values + 1e-12 * values.amax(1, keepdim=True)
            turns.append(vectors)
            spectrum.append(values / values.mean(1, keepdim=True).clamp_min(torch.finfo(values.dtype).tiny))
        return cls(tuple(axis.size for axis in axes), tuple(turns), tuple(spectrum))

    def to_axes(self, X: Tensor, block: Tensor) -> Tensor:
        """Coordinates along the axes of rows ``X: (m, n)``, each in its block."""
        return self._turned(X, block, back=False)

    def from_axes(self, X: Tensor, block: Tensor) -> Tensor:
        """Undo :meth:`to_axes`."""
        return self._turned(X, block, back=True)

    def weights(self, block: Tensor, last: Tensor | None = None) -> Tensor:
        """``(m, n)`` the spectrum for each row, times ``last`` along the last axis."""
        out = torch.ones((len(block), 1), dtype=torch.float64, device=block.device)
        for number, size in enumerate(self.sizes):
            own = self.spectrum[number]
            along = out.new_ones((len(block), size)) if own is None else own[block % len(own)]
            if last is not None and number == len(self.sizes) - 1 and size == len(last):
                along = along * last
            out = (out[:, :, None] * along[:, None, :]).flatten(1)
        return out

    def _turned(self, X: Tensor, block: Tensor, *, back: bool) -> Tensor:
        m = len(X)
        out = X.view(m, *self.sizes)
        for number, Q in enumerate(self.turns):
            if Q is None:
                continue
            Q = Q.mT if back else Q
            moved = out.movedim(number + 1, -1)
            flat = moved.reshape(m, -1, self.sizes[number])
            flat = flat @ (Q[0] if len(Q) == 1 else Q[block % len(Q)])
            out = flat.view(moved.shape).movedim(-1, number + 1)
        return out.reshape(m, -1)


@final
@dataclass(frozen=True)
class Frames:
    """Axes of both sides."""

    rows: Frame
    columns: Frame

    @classmethod
    def of(cls, objective: Objective) -> Frames:
        """Ask the operator for its moments; without any, coordinates are left as they are."""
        p, q = objective.weight_shape[-2:]
        w, rows = objective.sample_weight, objective.rows
        found = objective.operator.moments(w, rows, centred=objective.intercept)
        found = found or Moments((Axis(p),), (Axis(q),))
        return cls(Frame.of(found.rows), Frame.of(found.columns))


FRAMES: Workspace[Frames] = Workspace()


@final
class Preconditioner:
    """``(lambda_a mu_j + beta)^-1`` for ``U``, and the like for ``V``, along their axes."""

    def __init__(self, objective: Objective, curvature: Curvature, probes: int) -> None:
        self.frames = FRAMES.get(objective.operator, lambda: Frames.of(objective), objective.intercept, objective.rows)
        self.Z = curvature.Z
        block = self.Z.block
        found = curvature.squares(probes)
        rows, columns = self.frames.rows, self.frames.columns
        self.U = self._diagonal(rows, rows.weights(block), [GU for GU, _ in found], curvature.beta)
        spread = columns.weights(block, _floored(curvature.output_weights().double()))
        self.V = self._diagonal(columns, spread, [GV for _, GV in found], curvature.beta)

    def __call__(self, x: Tensor) -> Tensor:
        """``P^-1 x``."""
        Z: LowRank = self.Z
        cut = Z.U.numel()
        U, V = x[:cut].view_as(Z.U), x[cut:].view_as(Z.V)
        rows, columns, block = self.frames.rows, self.frames.columns, Z.block
        U = rows.from_axes(rows.to_axes(U, block) / self.U, block)
        V = columns.from_axes(columns.to_axes(V, block) / self.V, block)
        return torch.cat([U.flatten(), V.flatten()])

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

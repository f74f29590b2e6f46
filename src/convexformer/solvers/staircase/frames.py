"""Principal axes of the features, and an objective for Hessian products in coordinates along them.

Nuclear norms are invariant under rotations of the rows and of the columns of each block. Along the principal axes of the
features the Hessian is nearly diagonal, so there a diagonal preconditions it. Where an operator can be turned once and for
all, Hessian products take place in the turned coordinates, and the axes cost nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeAlias, final

import torch
from torch import Tensor

from convexformer.objective import Objective
from convexformer.operators import LowRank
from convexformer.operators.moments import Axis, Moments
from convexformer.solvers.base import Workspace


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
    def of(cls, axes: tuple[Axis, ...], known: dict[int, tuple[Tensor, Tensor] | None] | None = None) -> Frame:
        """Find the axes of moments; ``known`` keeps those of an :class:`Axis` that both sides share."""
        known = {} if known is None else known
        for axis in axes:
            if id(axis) not in known:
                known[id(axis)] = _principal(axis)
        found = [known[id(axis)] for axis in axes]
        turns = tuple(None if pair is None else pair[0] for pair in found)
        return cls(tuple(axis.size for axis in axes), turns, tuple(None if pair is None else pair[1] for pair in found))

    def unturned(self) -> Frame:
        """The same spectrum for coordinates that are along the axes already."""
        return Frame(self.sizes, (None,) * len(self.sizes), self.spectrum)

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

    def mean(self, X: Tensor, block: Tensor) -> Tensor:
        """``(m,)`` the spectrum that unit rows ``X: (m, n)`` meet."""
        return (self.to_axes(X.double(), block).square() * self.weights(block)).sum(1)

    def _turned(self, X: Tensor, block: Tensor, *, back: bool) -> Tensor:
        m = len(X)
        if m == 0:
            return X
        out = X.reshape(m, *self.sizes)
        for number, turn in enumerate(self.turns):
            if turn is None:
                continue
            Q = (turn.mT if back else turn).to(X)
            moved = out.movedim(number + 1, -1)
            flat = moved.reshape(m, -1, self.sizes[number])
            flat = flat @ (Q[0] if len(Q) == 1 else Q[block % len(Q)])
            out = flat.view(moved.shape).movedim(-1, number + 1)
        return out.reshape(m, -1)


def _principal(axis: Axis) -> tuple[Tensor, Tensor] | None:
    """Eigenvectors of moments and their values, of mean one."""
    if axis.moments is None or not bool(axis.moments.isfinite().all()):
        return None
    values, vectors = torch.linalg.eigh(axis.moments.double())
    values = values.clamp_min(0)
    values = values + 1e-12 * values.amax(1, keepdim=True)
    return vectors, values / values.mean(1, keepdim=True).clamp_min(torch.finfo(values.dtype).tiny)


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
        known: dict[int, tuple[Tensor, Tensor] | None] = {}
        return cls(Frame.of(found.rows, known), Frame.of(found.columns, known))

    def unturned(self) -> Frames:
        """The same spectra for coordinates that are along the axes already."""
        return Frames(self.rows.unturned(), self.columns.unturned())

    def enter(self, Z: LowRank) -> LowRank:
        """Factors along the axes."""
        return Z.with_factors(self.rows.to_axes(Z.U, Z.block), self.columns.to_axes(Z.V, Z.block))

    def leave(self, Z: LowRank) -> LowRank:
        """Undo :meth:`enter`."""
        return Z.with_factors(self.rows.from_axes(Z.U, Z.block), self.columns.from_axes(Z.V, Z.block))


@final
@dataclass(frozen=True)
class Products:
    """An objective for Hessian products, perhaps in turned coordinates and in a lower precision."""

    objective: Objective
    frames: Frames
    """Axes in the coordinates of this objective."""
    turn: Frames | None = None
    """From the solver's coordinates to those of this objective; None where they are the same."""

    @classmethod
    def of(cls, objective: Objective, dtype: torch.dtype) -> Products:
        """Return the objective in a precision for rough products, along its axes where it can be turned; kept for a path."""
        own, frames, turn = PRODUCTS.get(
            objective.operator,
            lambda: _made(objective, dtype),
            dtype,
            objective.targets,
            objective.sample_weight,
            objective.loss,
            objective.penalty,
            objective.intercept,
            objective.rows,
        )
        return cls((own or objective).at(objective.beta).guarded(objective.guard), frames, turn)

    def at(self, beta: float) -> Products:
        """The same at another beta."""
        return replace(self, objective=self.objective.at(beta))

    def inside(self) -> Products:
        """The same for a solver that works in these coordinates itself."""
        return replace(self, turn=None)

    def enter(self, Z: LowRank) -> LowRank:
        """Factors in the coordinates of the products."""
        return Z if self.turn is None else self.turn.enter(Z)

    def leave(self, Z: LowRank) -> LowRank:
        """Undo :meth:`enter`."""
        return Z if self.turn is None else self.turn.leave(Z)


def _made(objective: Objective, dtype: torch.dtype) -> _Kept:
    """The parts of :class:`Products`, without any reference to the operator that they are kept for."""
    frames = Frames.of(objective)
    rough = objective if objective.like.dtype == dtype else objective.to(dtype=dtype)
    turned = None
    if not objective.like.is_cuda:  # there a second copy of the features would cost more than it gains
        turned = rough.operator.turned(frames.rows.turns, frames.columns.turns)
    if turned is not None:
        return replace(rough, operator=turned, guard=None, derived=None), frames.unturned(), frames
    return None if rough is objective else replace(rough, guard=None, derived=None), frames, None


_Kept: TypeAlias = tuple[Objective | None, Frames, Frames | None]
PRODUCTS: Workspace[_Kept] = Workspace()

"""Nuclear norms of matrices too large to form: a small program on row spaces, and better spaces from its dual point.

With ``Z_b = P_b^T Y_b`` for fixed orthonormal rows ``P_b`` the program in ``Y`` is one with dense features and the same
penalty, and every iteration on it is free of products with the operator. At the optimum the columns of ``Z_b`` are left
singular vectors of ``M_b = -A^T V`` for the value beta. So the spaces take in ``M_b v`` for the right singular vectors
``v`` of ``P_b M_b`` with the largest values, which a product with the features gives: a block Davidson method for the top
of ``M``, whose ``V`` follows (compare the active subspaces of Hsieh and Olsen 2014). A round costs two products with the
operator for each direction, and the gap falls by a factor of about four in each.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import final

import torch
from torch import Tensor

from convexformer.certificates import DualPoint, dual_value
from convexformer.gauges import Factored, Polar, PolarKind
from convexformer.gauges.spectral import top_pairs
from convexformer.objective import Evaluation, Objective
from convexformer.operators import BilinearOperator, ImplicitMatrix, LowRank
from convexformer.solvers.base import Solver
from convexformer.solvers.monitor import Monitor, TimeUp
from convexformer.solvers.row_space.inner import solve_inner
from convexformer.solvers.row_space.options import RowSpaceOptions
from convexformer.solvers.row_space.spaces import Spaces
from convexformer.threads import few_threads
from convexformer.weights import Weights


@final
class RowSpace(Solver):
    """Rounds of a small program on fixed row spaces, and of growth of the spaces along its dual matrix."""

    name = "row_space"
    works_on = "nuclear norms of matrices too large to form, on few directions of their columns"
    uses_factors = True
    patience = 6  # rounds

    def __init__(self, options: RowSpaceOptions = RowSpaceOptions()) -> None:  # noqa: B008  (frozen)
        self.options = options

    def requires(self, objective: Objective) -> str | None:
        """Intermediates that depend on the rows alone, and a penalty that is the same on orthonormal rows."""
        if not isinstance(objective.penalty, Factored) or not objective.penalty.proximal:
            return f"works on nuclear norms; the penalty here is {objective.penalty!r}"
        A = objective.operator
        if not (isinstance(A, BilinearOperator) and A.has_row_features):
            return "works on pooled gated heads, whose terms leave behind a small intermediate"
        return None

    def solve(self, objective: Objective, start: Weights, monitor: Monitor) -> None:
        """Iterate until the monitor says to stop."""
        _Rounds(objective, monitor, self.options).run(start)


@final
class _Rounds:
    """One solve."""

    def __init__(self, objective: Objective, monitor: Monitor, options: RowSpaceOptions) -> None:
        self.objective, self.monitor, self.options = objective, monitor, options
        assert isinstance(objective.operator, BilinearOperator)
        self.operator, self.n_blocks = objective.operator, objective.operator.n_blocks
        self.spaces: Spaces
        self.Y: list[Tensor]
        self.active: list[int]
        self.intercept: Tensor | None = None
        self.aim, self.silent = options.first_gap, 0

    def run(self, start: Weights) -> None:
        """Check, solve the small program, look along its dual matrix, and again."""
        Z = start.Z.balanced() if isinstance(start.Z, LowRank) else LowRank.of(start.dense())
        self.intercept = start.intercept
        dual = self._exact_check(Z)
        if self.monitor.done:
            return
        self._enter(Z, dual)
        if not any(len(P) for P in self.spaces.rows):  # a dual matrix of zero: nothing to begin with
            self.monitor.stall()
            return
        gap = self.options.first_gap / self.options.inner
        for _ in self.monitor:
            try:
                self.aim = min(self.aim, max(self.options.inner * gap, self.options.floor * self.monitor.tolerance))
                gap = self._round(gap)
            except TimeUp:
                self.monitor.hold(self._weights(), None, self.intercept, -math.inf)
                raise
            if gap <= self.options.ready * self.monitor.tolerance and not self.monitor.done:
                dual = self._exact_check(self._weights())  # the certificate has found more: a survey says where
                gap = self.monitor.history[-1].relative_gap
                if not self.monitor.done:
                    self._take_in(dual, self.options.first)

    # ------------------------------------------------------------------ rounds

    def _round(self, gap: float) -> float:
        """Solve the small program and grow the spaces; return the gap, as far as the directions tried tell."""
        options, own = self.options, self.spaces.objective
        if gap <= options.single_gap and own.like.dtype != self.objective.like.dtype:
            self._widen()
            own = self.spaces.objective
        at, primal, late = self._solve_small(own, self.aim)
        if late:
            raise TimeUp
        polar = self._grow(own, at.V)
        limit = own.beta / polar if polar > 0 else math.inf
        value, scale = dual_value(own, at, limit)
        gap = (primal - value) / max(abs(primal), 1e-300)
        self.silent += 1
        if options.ready * self.monitor.tolerance < gap <= self.monitor.tolerance and self.silent <= options.silent:
            return gap  # a check would ask for a certificate too early
        self.silent = 0
        dual = DualPoint(value, scale, Polar(polar, PolarKind.LOWER), own.dual_matrix(at.V))
        self.monitor.check(self._weights(), at, dual)
        return gap

    def _solve_small(self, own: Objective, aim: float) -> tuple[Evaluation, float, bool]:
        """The program on the blocks that matter, from the weights of the last round; others join when they begin to."""
        while True:
            at, primal, late = self._solve_blocks(own, aim)
            idle = [b for b in range(self.n_blocks) if b not in self.active and len(self.Y[b])]
            limit = own.beta * (1 + aim) / self._scale()
            missing = [b for b in idle if _largest_value(self.spaces.images(at.V, b)) > limit]
            if late or not missing:
                return at, primal, late
            self.active = sorted([*self.active, *missing])

    def _solve_blocks(self, own: Objective, aim: float) -> tuple[Evaluation, float, bool]:
        """The program on the active blocks."""
        blocks = [b for b in self.active if len(self.spaces.rows[b])] or self._largest_spaces()
        features = self.spaces.stacked(blocks)
        operator = self.operator.on_row_features(features)
        small = replace(own, operator=operator, derived=None)
        Y = features.new_zeros(operator.weight_shape)
        for k, b in enumerate(blocks):
            Y[k, : len(self.Y[b])] = self.Y[b]
        with few_threads(features):
            Y, at, primal, late = solve_inner(small, Y, self.intercept, aim, self.options.longest)
        for k, b in enumerate(blocks):
            self.Y[b] = Y[k, : len(self.spaces.rows[b])]
        self.intercept = at.intercept
        return at, primal, late

    def _grow(self, own: Objective, V: Tensor) -> float:
        """Take in directions in which the dual matrix is large; return the largest value that was seen of it."""
        options, spaces, beta = self.options, self.spaces, own.beta
        M = own.dual_matrix(V)
        assert isinstance(M, ImplicitMatrix)
        scale = self._scale()
        seen, self.active = 0.0, []
        known = [spaces.images(V, b) for b in range(self.n_blocks)]
        for b, image in enumerate(known):
            _, sigma, Rh = torch.linalg.svd(image, full_matrices=False)
            top = float(sigma[0]) * scale if len(sigma) else 0.0
            rank, image = self._keep_rows(b, image)
            if rank or top > options.distant * beta:
                count = min(rank + options.extra, len(Rh))
                new = spaces.extend(b, M.matvec(Rh[:count].contiguous(), b), options.negligible * beta / scale)
                self.Y[b] = torch.cat([self.Y[b], self.Y[b].new_zeros((new.shape[1], spaces.q))])
                if new.shape[1]:
                    image = torch.cat([image, spaces.images(V, b, new)])
                    top = scale * _largest_value(image)
            if len(image):  # where estimates and the certificate begin
                self.operator.rough.leading[b] = _right_vectors(image, options.starts).to(self.operator.rough.like)
            seen = max(seen, top)
            if rank or top > options.idle * beta:
                self.active.append(b)
        self.active = self.active or [0]
        M.rough().note_leading()
        return seen

    def _keep_rows(self, b: int, image: Tensor) -> tuple[int, Tensor]:
        """Keep the rows that carry weights and those along which ``M`` is largest; return the rank and the image."""
        Y, n = self.Y[b], len(self.Y[b])
        if n == 0:
            return 0, image
        L, sigma, _ = torch.linalg.svd(Y, full_matrices=False)
        rank = int((sigma > self.options.rank * max(self._largest, float(sigma[0]))).sum()) if self._largest else 0
        most = rank + max(rank, self.options.kept)
        if n > most:
            own = L[:, :rank]
            rest = image - own @ (own.T @ image)
            other = torch.linalg.eigh(rest @ rest.T)[1].flip(1)[:, : most - rank]
            R = torch.linalg.qr(torch.cat([own, other], 1))[0].T.contiguous()
            self.spaces.turn(b, R)
            self.Y[b], image = R @ Y, R @ image
        return rank, image

    def _largest_spaces(self) -> list[int]:
        """A block that has rows, where none of the active ones does."""
        return [max(range(self.n_blocks), key=lambda b: len(self.spaces.rows[b]))]

    @property
    def _largest(self) -> float:
        """About the largest singular value of the weights."""
        return max((float(torch.linalg.matrix_norm(Y)) for Y in self.Y if len(Y)), default=0.0)

    def _scale(self) -> float:
        """The polar of a matrix over its largest singular value."""
        assert isinstance(self.objective.penalty, Factored)
        return 1.0 / self.objective.penalty.factor_weight()

    # ------------------------------------------------------------------ spaces

    def _enter(self, Z: LowRank, dual: DualPoint) -> None:
        """Begin with the columns of ``Z`` and the largest directions of each block."""
        own, reach = self.objective, self.options.float32_range
        if own.like.dtype == torch.float64 and 1 / reach < dual.polar.value < reach:
            own = replace(own, operator=self.operator.rough, derived=None)
        self._start(own, Z)
        self._take_in(dual, self.options.first)

    def _start(self, own: Objective, Z: LowRank) -> None:
        """Spaces that hold ``Z`` and nothing else."""
        self.spaces = Spaces(own, self.n_blocks)
        self.Y = [own.like.new_zeros((0, self.spaces.q)) for _ in range(self.n_blocks)]
        self.active = list(range(self.n_blocks))
        for b, span in Z.spans():
            unit = Z.U[span] / Z.U[span].norm(dim=1, keepdim=True)
            self.spaces.extend(b, unit, 0.0)
            rows = self.spaces.rows[b]
            self.Y[b] = (rows.to(Z.U) @ Z.U[span].T @ Z.V[span]).to(rows)

    def _take_in(self, dual: DualPoint, count: int) -> None:
        """Add the ``count`` largest directions of each block that the survey behind a dual point has found."""
        assert isinstance(dual.M, ImplicitMatrix)
        _, U, _, block = top_pairs(dual.M, 2 * count * self.n_blocks)
        for b in range(self.n_blocks):
            own = U[block == b][:count]
            if len(own):
                new = self.spaces.extend(b, own, 1e-3)
                self.Y[b] = torch.cat([self.Y[b], self.Y[b].new_zeros((new.shape[1], self.spaces.q))])
        self.active = list(range(self.n_blocks))

    def _widen(self) -> None:
        """Go on in the precision of the objective."""
        rows, old = [P.to(self.objective.like) for P in self.spaces.rows], self.Y
        self.spaces = Spaces(self.objective, self.n_blocks)
        for b, P in enumerate(rows):
            if len(P):
                self.spaces.extend(b, P, 0.0)
            self.Y[b] = self.spaces.rows[b] @ P.T @ old[b].to(P)

    def _weights(self) -> LowRank:
        """The weights of the last round."""
        shape = self.objective.weight_shape
        return self.spaces.weights(self.Y, shape, self.objective.like, self.options.rank)

    def _exact_check(self, Z: LowRank) -> DualPoint:
        """Check a point in the objective's own precision, with a survey of all blocks."""
        outputs = self.objective.apply(Z)
        return self.monitor.check(Z, self.objective.evaluate(outputs, self.intercept))


def _largest_value(image: Tensor) -> float:
    """The largest singular value of few long rows."""
    return float(torch.linalg.eigvalsh(image.double() @ image.double().T)[-1].clamp_min(0).sqrt())


def _right_vectors(image: Tensor, count: int) -> Tensor:
    """The top right singular vectors of few long rows."""
    rows = image.double()
    squares, turn = torch.linalg.eigh(rows @ rows.T)
    keep = squares > 1e-12 * squares[-1].clamp_min(torch.finfo(squares.dtype).tiny)
    return ((turn[:, keep].T @ rows) / squares[keep].sqrt()[:, None]).flip(0)[:count]

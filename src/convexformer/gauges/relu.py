"""The gauge of exact ReLU neurons: the sum of ``||Z_c||_{*,K_c}`` over all cells of the hidden layer's arrangement."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, cast, final

import numpy as np
import torch
from torch import Tensor

from convexformer.arrangements import Arrangement, Cells
from convexformer.gauges.base import Candidate, DualMatrix, Gauge, NeuronsLike, Polar, PolarKind, WeightsLike
from convexformer.gauges.cone_polar import (
    ConeProblem,
    branch_and_bound,
    column_polar,
    has_sdp,
    projected_power,
    sdp_bound,
)
from convexformer.gauges.planar_polar import PlanarMaxima, planar_maxima
from convexformer.gauges.relu_search import ascend, bound_without_cells, output_directions, responses
from convexformer.registry import one_of

THIN_CELLS = 1e-9
"""Allowance for cells too thin for linear programs in float64: this share of ``sigma_max(rows) |T|_F`` is added to a
bound."""


@final
@dataclass(frozen=True)
class PolarOptions:
    """How much work a polar may cost."""

    tolerance: float = 1e-7
    """Relative distance between the bounds on the polar of several outputs at which branch and bound stops."""
    branch_columns: int = 4
    """Output weights q up to which branch and bound is tried; its cost grows exponentially with q."""
    projections: int = 40_000
    """Projections that one branch and bound may take, some two seconds."""
    sdp_cells: int = 48
    """Cells for which a semidefinite program is solved, where CVXPY is installed and q is larger than that."""
    sdp_rows: int = 64
    """Rows and columns of a cone up to which it is."""
    starts: int = 24
    """Random directions from which the search climbs, besides the neurons in use."""
    steps: int = 60
    """Steps of each climb."""
    large: int = 1 << 19
    """Entries of the hidden rows beyond which climbs are fewer and shorter, and cells are not refined one by one."""
    kept: int = 12
    """Neurons of each block that an estimate of the polar keeps for the search after it."""
    refined_cells: int = 512
    """Cells whose own maximum the search takes, those of the largest ``sigma_max`` first."""


class DualParts(Protocol):
    """A dual matrix as pairs ``(rows, T)``: ``<M, (u, v)> = relu(rows u)^T T v``."""

    parts: tuple[tuple[Tensor, Tensor], ...]
    found: list[Candidate]
    """Neurons that an estimate found; a search for the same dual matrix starts from them."""
    guard: Callable[[], None] | None
    """Called before every step of a search; it may raise."""


@final
class ReLUNorm(Gauge):
    """``g = min sum_j |u_j|_2 |v_j|`` over neurons of one function: the gauge of ``{relu(rows u) v^T : |u|, |v| <= 1}``.

    On the cells ``D_c`` of the arrangement of the rows it is ``sum_c ||Z_c||_{*,K_c}`` with ``K_c = (2 D_c - 1) rows``, the
    penalty of Sahiner et al. (2022), theorems 3.3, 4.2, 4.5, 4.8 and C.6. ``outer="l2"``: ordinary weight decay.
    ``outer="l1"``: ``|v|_1``, as in Ergen et al. (2022); each neuron then writes one output, and the gauge bounds that of l2
    from above.

    The polar ``max |T^T relu(rows u)|`` is exact for one output weight (or l1) where all cells are known: a projection
    on each cone. Where the rows span a plane it is exact for any number of rows and outputs. For up to
    ``branch_columns`` output weights branch and bound gives an upper bound that is exact to its tolerance. Beyond, and
    without all cells, it is an upper bound that may be loose.
    """

    of_data = True
    sync_free = False

    def __init__(
        self,
        arrangements: Sequence[Arrangement],
        outer: str = "l2",
        options: PolarOptions = PolarOptions(),
        seed: int = 0,
    ) -> None:
        self.arrangements = tuple(arrangements)
        self.outer = one_of("outer", outer, ("l2", "l1"))
        self.options, self.seed = options, seed

    @property
    def complete(self) -> bool:
        """Whether all cells of all blocks are known."""
        return all(arrangement.planar or arrangement.cells is not None for arrangement in self.arrangements)

    def with_outer(self, outer: str) -> ReLUNorm:
        """Return the same gauge with another norm of the output weights; cells are shared."""
        return ReLUNorm(self.arrangements, outer, self.options, self.seed)

    # ------------------------------------------------------------------ values

    def output_norms(self, V: Tensor) -> Tensor:
        """``(m,)`` the norms of output weights."""
        return V.norm(dim=1) if self.outer == "l2" else V.abs().sum(1)

    def value(self, Z: WeightsLike) -> Tensor:
        """``sum_j |u_j| |v_j|`` of these neurons: the gauge of their function or more, and equal at an optimum."""
        neurons = cast(NeuronsLike, Z)
        return (neurons.U.norm(dim=1) * self.output_norms(neurons.V)).sum()

    # ------------------------------------------------------------------ the polar from above

    def polar(self, M: DualMatrix) -> Polar:
        """``max <M, (u, v)>`` over unit neurons, or an upper bound; its kind says which."""
        found = [self._block_polar(b, rows, T) for b, (rows, T) in enumerate(_parts(M))]
        exact = all(polar.kind is PolarKind.EXACT for polar in found)
        value = max((polar.value for polar in found), default=0.0)
        return Polar(value, PolarKind.EXACT if exact else PolarKind.UPPER)

    def _block_polar(self, b: int, rows: Tensor, T: Tensor) -> Polar:
        A, S = rows.numpy(), T.numpy()
        thin = THIN_CELLS * float(np.linalg.norm(A, 2) * np.linalg.norm(S)) if A.size else 0.0
        if self.arrangements[b].planar:
            return Polar(float(self._planar(b, A, S).values.max()) + thin, PolarKind.EXACT)
        free = bound_without_cells(rows, T, self.outer)
        cells = self.arrangements[b].cells
        if cells is None:
            return Polar(free, PolarKind.UPPER)
        if self.outer == "l1" or S.shape[1] == 1:
            value = max((self._column_bound(ConeProblem(*cell)) for cell in _cones(cells, A, S)), default=0.0)
            return Polar(value + thin, PolarKind.EXACT)
        lower = max((c.value for c in self._search_block(b, rows, T, None, 1)), default=0.0)
        problems = [ConeProblem(*cell) for cell in _cones(cells, A, S)]
        tops = np.array([np.linalg.norm(problem.M, 2) for problem in problems])
        rivals = [problems[k] for k in np.argsort(-tops) if tops[k] > lower * (1 + self.options.tolerance)]
        if not rivals:
            return Polar(max(lower, float(tops.max(initial=0.0))) + thin, PolarKind.UPPER)
        return Polar(min(free, self._rival_bound(rivals, lower)) + thin, PolarKind.UPPER)

    def _planar(self, b: int, A: np.ndarray, S: np.ndarray) -> PlanarMaxima:
        """The maxima of all cells of rows in a plane; with l1 those of each output weight by itself."""
        flat = A @ self.arrangements[b].basis.T
        flat = np.pad(flat, ((0, 0), (0, 2 - flat.shape[1])))
        columns = [S] if self.outer == "l2" else [S[:, l : l + 1] for l in range(S.shape[1])]
        found = [planar_maxima(flat, column) for column in columns]
        return PlanarMaxima(*(np.concatenate(parts) for parts in zip(*found, strict=True)))

    def _column_bound(self, problem: ConeProblem) -> float:
        """The largest ``|P(+-m)|`` over the columns ``m`` of ``M``: exact where a neuron writes one output."""
        eye = np.eye(problem.M.shape[1])
        return max((column_polar(problem, sign * e)[0] for e in eye for sign in (1.0, -1.0)), default=0.0)

    def _rival_bound(self, rivals: list[ConeProblem], lower: float) -> float:
        """Bound the maximum over the cells that ``sigma_max`` does not rule out."""
        options, q = self.options, rivals[0].M.shape[1]
        if q <= options.branch_columns:
            return branch_and_bound(rivals, lower, options.tolerance, options.projections).upper
        tops = [float(np.linalg.norm(problem.M, 2)) for problem in rivals]
        if has_sdp() and len(rivals) <= options.sdp_cells and max(rivals[0].K.shape) <= options.sdp_rows:
            tops = [sdp_bound(problem) for problem in rivals]
        return max(lower * (1 + options.tolerance), *tops)  # cells that are no rivals may be as large as that

    # ------------------------------------------------------------------ the polar from below

    def quick_polar(self, M: DualMatrix) -> Polar:
        """Return the value of the best neuron that a search finds: a lower bound, which steers and never certifies."""
        found = cast(DualParts, M).found
        if not found:
            found += self.search(M, None, self.options.kept)
        return Polar(max((c.value for c in found), default=0.0), PolarKind.LOWER)

    def critical_beta(self, M: DualMatrix, curvature: object) -> Polar:
        """Return the polar where all cells are known, else the best neuron that a search finds."""
        return self.polar(M) if self.complete else self.quick_polar(M)

    def search(self, M: DualMatrix, around: NeuronsLike | None, count: int) -> list[Candidate]:
        """Return up to ``count`` different neurons of a block with large ``<M, (u, v)>``, the best first.

        Climbs from random directions and from those of the neurons ``around``; then the maximum of each cell of a large
        ``sigma_max``, where cells are known, by projections. What an estimate of the polar found is not searched for again.
        """
        found: list[Candidate] = []
        known, guard = cast(DualParts, M).found, cast(DualParts, M).guard
        for b, (rows, T) in enumerate(_parts(M)):
            near = None if around is None else around.U[around.block == b]
            old = [c.u for c in known if c.block == b]
            found += self._search_block(b, rows, T, near, count, torch.stack(old) if old else None, guard)
        return sorted(found, key=lambda c: -c.value)[: count * max(1, len(self.arrangements))]

    def spread(self, M: DualMatrix, count: int, seed: int) -> list[Candidate]:
        """Return ``count`` neurons of each block after two steps from random directions: apart, and of some use."""
        found: list[Candidate] = []
        for b, (rows, T) in enumerate(_parts(M)):
            generator = torch.Generator().manual_seed(self.seed + 7919 * b + 104_729 * seed)
            draw = torch.randn((count, rows.shape[1]), generator=generator, dtype=torch.float64).to(rows)
            values, U, V = ascend(rows, T, draw, self.outer, 2, cast(DualParts, M).guard)
            found += [Candidate(float(values[j]), b, U[j], V[j]) for j in range(count) if float(values[j]) > 0]
        return found

    def _search_block(
        self,
        b: int,
        rows: Tensor,
        T: Tensor,
        near: Tensor | None,
        count: int,
        known: Tensor | None = None,
        guard: Callable[[], None] | None = None,
    ) -> list[Candidate]:
        options, p = self.options, rows.shape[1]
        starts = rows.new_zeros((0, p)) if near is None else near.to(rows)
        steps = options.steps
        if rows.numel() > options.large:  # fewer and shorter climbs
            steps = max(8, steps * options.large // rows.numel())
        if known is None:
            generator = torch.Generator().manual_seed(self.seed + 7919 * b)
            n = options.starts if rows.numel() <= options.large else options.starts // 3
            starts = torch.cat([starts, torch.randn((n, p), generator=generator, dtype=torch.float64).to(rows)])
        values, U, _ = ascend(rows, T, starts, self.outer, steps, guard)
        U = U[_different(U, values, count)]
        if known is not None:
            U = torch.cat([U, known.to(rows)])
        elif self.arrangements[b].planar:
            found = self._planar(b, rows.numpy(), T.numpy())
            best = found.angles[np.argsort(-found.values)[: 16 * count]]
            plane = np.stack([np.cos(best), np.sin(best)], 1)[:, : self.arrangements[b].rank]
            U = torch.cat([U, torch.from_numpy(plane @ self.arrangements[b].basis).to(rows)])
        elif (cells := self.arrangements[b].cells) is not None or rows.numel() <= options.large:
            own = cells if cells is not None else _cells_of(rows, U)
            refined = self._refine(own, rows.numpy(), T.numpy(), count, guard)
            U = torch.cat([U, torch.from_numpy(refined).to(rows)])
        values, V = output_directions(responses(rows, T, U), self.outer)
        return [Candidate(float(values[j]), b, U[j], V[j]) for j in _different(U, values, count)]

    def _refine(
        self, cells: Cells, A: np.ndarray, S: np.ndarray, count: int, guard: Callable[[], None] | None
    ) -> np.ndarray:
        """``(k, p)`` the maximisers of cells, those of the largest ``sigma_max`` first."""
        problems = [ConeProblem(*cell) for cell in _cones(cells, A, S)]
        tops = np.array([np.linalg.norm(problem.M, 2) for problem in problems])
        found: list[tuple[float, np.ndarray]] = []
        floor = 0.0
        for k in np.argsort(-tops)[: self.options.refined_cells]:
            if tops[k] <= floor:
                break
            if guard is not None:
                guard()
            found += [pair for pair in self._cell_maxima(problems[k]) if pair[0] > 0]
            found = sorted(found, key=lambda pair: -pair[0])[: 4 * count]
            floor = found[-1][0] if len(found) == 4 * count else 0.0
        return np.array([u for _, u in found]).reshape(-1, A.shape[1])

    def _cell_maxima(self, problem: ConeProblem) -> list[tuple[float, np.ndarray]]:
        q = problem.M.shape[1]
        if self.outer == "l1" or q == 1:
            return [column_polar(problem, sign * e) for e in np.eye(q) for sign in (1.0, -1.0)]
        _, _, Vh = np.linalg.svd(problem.M, full_matrices=False)
        return [projected_power(problem, sign * v) for v in Vh[:2] for sign in (1.0, -1.0)]

    def __repr__(self) -> str:
        return f"ReLUNorm(outer={self.outer!r})"


def _parts(M: DualMatrix) -> list[tuple[Tensor, Tensor]]:
    parts = cast(DualParts, M).parts
    return [(rows.detach().cpu().double(), T.detach().cpu().double()) for rows, T in parts]


def _cones(cells: Cells, A: np.ndarray, S: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """``(K_c, M_c) = ((2 D_c - 1) rows, rows^T D_c T)`` of each cell."""
    return [(np.where(D, 1.0, -1.0)[:, None] * A, A[D].T @ S[D]) for D in cells.patterns]


def _cells_of(rows: Tensor, U: Tensor) -> Cells:
    """The cells of some directions."""
    patterns = (U @ rows.T >= 0).numpy()
    return Cells(np.unique(patterns, axis=0), U.numpy(), False)


def _different(U: Tensor, values: Tensor, count: int) -> list[int]:
    """Indices of the best ``count`` directions of which no two are nearly parallel."""
    kept: list[int] = []
    unit = U / U.norm(dim=1, keepdim=True).clamp_min(torch.finfo(U.dtype).tiny)
    for j in torch.argsort(values, descending=True).tolist():
        if float(values[j]) > 0 and all(float(unit[j] @ unit[k]) < 1 - 1e-6 for k in kept):
            kept.append(j)
        if len(kept) == count:
            break
    return kept

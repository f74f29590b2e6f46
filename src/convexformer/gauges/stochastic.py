"""Gauges of attention with an output per token: matrices of attention weights, one for each (channel, output) pair."""

from __future__ import annotations

import math
from typing import NamedTuple, final

import torch
from torch import Tensor

from convexformer.gauges.base import DualMatrix, Norm, Polar, WeightsLike, as_tensor
from convexformer.registry import one_of

EQUAL_SUMS = 1e-9  # row sums of a pair that differ by this share of its largest row differ by rounding only
ROUNDING = 1e-13  # and so do those that differ by this share of the largest row of all pairs
NEWTON_STEPS = 100  # of the prox; a piecewise quadratic in two variables needs a handful
HALVINGS = 40  # of one step of it


@final
class StochasticNorm(Norm):
    """Gauge of ``+-W1 (x) e_a e_l^T``, ``W1`` an ``s x s`` matrix of attention weights; ``Z: (s, s, d, c)``.

    ``Z[r, k, a, l]`` is what token k's channel a adds to output l of token r. With ``Z_al = Z[:, :, a, l]``:

    ``rows="row"``: ``W1`` is row-stochastic (``W1 >= 0``, ``W1 1 = 1``), the model of Ergen et al. 2022, (34)::

        g(Z) = sum_{a,l} max_r sum_k |Z_al[r, k]|     if all rows of each Z_al have the same sum, else infinity

    ``rows="sub"``: ``W1`` is substochastic (``W1 >= 0``, ``W1 1 <= 1``), the penalty as printed in theorem A.1::

        g(Z) = sum_{a,l} max_r sum_k (Z_al[r, k])_+  +  max_r sum_k (-Z_al[r, k])_+

    which is a strict relaxation of the former. Polars, both exact, of ``M_al``: the larger of ``sum_r max_k M_al[r, k]``
    and the same of ``-M_al`` (for ``"sub"`` each maximum is at least zero); their atoms select one token in every row.
    """

    sync_free = False

    def __init__(self, rows: str = "row") -> None:
        self.rows = one_of("rows", rows, ("row", "sub"))

    def value(self, Z: WeightsLike) -> Tensor:
        """Sum over pairs (a, l) of the largest row sum."""
        up, down = self.masses(as_tensor(Z))
        if self.rows == "sub":
            return (up.amax(-1) + down.amax(-1)).sum()
        size, sums = (up + down).amax(-1), up - down
        # by pair: small weights of large channels count as much as large ones of small channels
        uneven = sums.amax(-1) - sums.amin(-1) > torch.maximum(EQUAL_SUMS * size, ROUNDING * size.amax())
        return torch.where(uneven.any(), math.inf, size.sum())

    def masses(self, Z: Tensor) -> tuple[Tensor, Tensor]:
        """``(d, c, s)`` twice: the sums of the positive and of the negated negative entries of each row."""
        return tuple(part.clamp_min(0).sum(1).movedim(0, -1) for part in (Z, -Z))  # type: ignore[return-value]

    def polar(self, M: DualMatrix) -> Polar:
        """Return the best selector of one token in every row: exact, so it may certify."""
        return Polar(float(self._pair_polars(as_tensor(M))[0].max()))

    def atom(self, M: Tensor) -> Tensor:
        """Return the selector most aligned with ``M``, at one channel and one output."""
        return self.atoms(M, 1)[0]

    def atoms(self, M: Tensor, most: int) -> list[Tensor]:
        """Return the best selector at each of the ``most`` pairs (a, l) of largest polar, best first."""
        polars, signs = self._pair_polars(M)
        found = []
        for flat in polars.flatten().topk(min(most, polars.numel())).indices.tolist():
            a, l = divmod(flat, polars.shape[1])
            sign = float(signs[a, l])
            best, token = (sign * M[:, :, a, l]).max(1)
            out = torch.zeros_like(M)
            kept = torch.ones_like(best) if self.rows == "row" else (best > 0).to(M.dtype)
            out[torch.arange(len(token), device=M.device), token, a, l] = sign * kept
            found.append(out)
        return found

    def _pair_polars(self, M: Tensor) -> tuple[Tensor, Tensor]:
        """``(d, c)`` the polar of each pair, and the sign of the selector that attains it."""
        best = torch.stack([M.amax(1), -M.amin(1)])  # (2, s, d, c)
        both = (best if self.rows == "row" else best.clamp_min(0)).sum(1)
        polars, which = both.max(0)
        return polars, 1.0 - 2.0 * which.to(M.dtype)

    def prox(self, Z: Tensor, step: float | Tensor) -> Tensor:
        """``argmin_W 1/2 ||W - Z||^2 + step g(W)``, each pair by itself, by thresholds of its rows.

        With row budgets ``t1`` and ``t2`` for positive and negative entries, row r of ``W`` is ``(z - m)_+ - (-z - n)_+``,
        its thresholds m, n those of projections onto simplices. The budgets minimise a convex piecewise quadratic in two
        variables with gradient ``(step - sum_r m_r, step - sum_r n_r)``: Newton's method finds them in a few steps.
        """
        s, _, d, c = Z.shape
        rows = Z.permute(2, 3, 0, 1).reshape(d * c, s, s).double()
        tau = torch.as_tensor(step, dtype=torch.float64, device=Z.device)
        tops, bottoms = _partial_sums(rows), _partial_sums(-rows)
        free = self.rows == "sub"  # rows may sum to less than the budget: thresholds are nonnegative
        budgets = torch.stack([_budget(tops, tau, free), _budget(bottoms, tau, free)], -1)  # (d c, 2)
        if not free:
            budgets = _joint_budgets(rows, tops, bottoms, budgets, tau)
        at = _thresholds(rows, tops, bottoms, budgets, free)
        m, n = at.m[..., None], at.n[..., None]
        W = torch.where(at.tied[..., None], rows - m, (rows - m).clamp_min(0) - (-rows - n).clamp_min(0))
        return W.reshape(d, c, s, s).permute(2, 3, 0, 1).to(Z.dtype)

    def __repr__(self) -> str:
        return f"StochasticNorm({self.rows!r})"


class _Thresholds(NamedTuple):
    """Thresholds ``m`` and ``n`` of all rows, ``(b, s)``, how many entries each has above it, and the rows that are shifted.

    A tied row has ``m = -n``: its entries all move by the same amount, and its absolute sum is below the budget.
    """

    m: Tensor
    n: Tensor
    above: Tensor
    below: Tensor
    tied: Tensor


def _partial_sums(rows: Tensor) -> Tensor:
    """``(b, s, s)`` sums of the largest 1, 2, ..., s entries of each row."""
    return rows.sort(-1, descending=True).values.cumsum(-1)


def _simplex_threshold(tops: Tensor, budget: Tensor, free: bool) -> tuple[Tensor, Tensor]:
    """The m with ``sum_k (z_k - m)_+ = budget``, as ``max_j (tops_j - budget) / j``, and the number j of entries above it.

    ``free``: at least zero, with none above where it is zero.
    """
    counts = torch.arange(1, tops.shape[-1] + 1, dtype=tops.dtype, device=tops.device)
    m, j = ((tops - budget[:, None, None]) / counts).max(-1)
    return (m.clamp_min(0), torch.where(m > 0, counts[j], math.inf)) if free else (m, counts[j])


def _budget(tops: Tensor, tau: Tensor, free: bool) -> Tensor:
    """``(b,)`` the budget at which thresholds add up to ``tau``: Newton from the left on a convex function, so finite."""
    budget = tops.new_zeros(len(tops))
    for _ in range(NEWTON_STEPS):
        m, above = _simplex_threshold(tops, budget, free)
        excess, slope = m.sum(-1) - tau, (1 / above).sum(-1)
        step = torch.where((excess > 0) & (slope > 0), excess / slope, 0.0)
        moved = budget + step
        if bool((moved <= budget).all()):
            break
        budget = moved
    return budget


def _thresholds(rows: Tensor, tops: Tensor, bottoms: Tensor, budgets: Tensor, free: bool) -> _Thresholds:
    """The thresholds of all rows at these budgets."""
    m, above = _simplex_threshold(tops, budgets[:, 0], free)
    n, below = _simplex_threshold(bottoms, budgets[:, 1], free)
    tied = m + n < 0
    if free or not bool(tied.any()):
        return _Thresholds(m, n, above, below, torch.zeros_like(tied))
    shift = (rows.sum(-1) - (budgets[:, 0] - budgets[:, 1])[:, None]) / rows.shape[-1]
    return _Thresholds(torch.where(tied, shift, m), torch.where(tied, -shift, n), above, below, tied)


def _joint_budgets(rows: Tensor, tops: Tensor, bottoms: Tensor, budgets: Tensor, tau: Tensor) -> Tensor:
    """Minimise over both budgets where rows tie them: projected Newton with halving, from the separate minima."""

    def state(t: Tensor) -> tuple[Tensor, Tensor, _Thresholds]:
        at = _thresholds(rows, tops, bottoms, t, False)
        m, n = at.m[..., None], at.n[..., None]
        left = torch.where(at.tied[..., None], m, torch.minimum(torch.maximum(rows, -n), m))  # rows - W
        value = 0.5 * left.square().sum((-1, -2)) + tau * t.sum(-1)
        return value, tau - torch.stack([at.m.sum(-1), at.n.sum(-1)], -1), at

    value, gradient, at = state(budgets)
    if not bool(at.tied.any()):
        return budgets
    for _ in range(NEWTON_STEPS):
        held = (budgets <= 0) & (gradient > 0)
        step = _newton_step(at, gradient, held)
        decrease = -(gradient * step).sum(-1)
        open_ = decrease > 1e-15 * value.clamp_min(torch.finfo(value.dtype).tiny)
        if not bool(open_.any()):
            break
        length = open_.to(rows.dtype)
        for _ in range(HALVINGS):
            trial = (budgets + length[:, None] * step).clamp_min(0)
            new_value, new_gradient, new_at = state(trial)
            worse = open_ & (new_value > value - 1e-4 * length * decrease + 1e-15 * value)
            if not bool(worse.any()):
                break
            length = torch.where(worse, length / 2, length)
        budgets, value, gradient, at = trial, new_value, new_gradient, new_at
    return budgets


def _newton_step(at: _Thresholds, gradient: Tensor, held: Tensor) -> Tensor:
    """``-H^{-1} gradient`` of the budgets that are not held at zero; ``H`` has entries of rows apart and of tied ones."""
    apart = (~at.tied).to(gradient.dtype)
    ties = at.tied.to(gradient.dtype).mean(-1)
    tiny = torch.where(at.tied.all(-1), 1e-9, 0.0)  # H is singular along (1, 1): budgets fall until a row is not tied
    first, second = (apart / at.above).sum(-1) + ties + tiny, (apart / at.below).sum(-1) + ties + tiny
    cross = torch.where(held.any(-1), 0.0, -ties)
    g1, g2 = torch.where(held, 0.0, gradient).unbind(-1)
    determinant = first * second - cross * cross
    return torch.stack([(-second * g1 + cross * g2) / determinant, (-first * g2 + cross * g1) / determinant], -1)

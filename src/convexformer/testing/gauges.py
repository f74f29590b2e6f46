"""The contracts of a penalty and of a gauge."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from convexformer.gauges import Atomic, Gauge, Penalty, PolarKind, Proximal, Sliced
from convexformer.testing.tools import at_most, equal, inner, normals, require, same_shape


def check_penalty(penalty: Penalty, shape: tuple[int, ...], seed: int = 0) -> None:
    """Convexity, Fenchel-Young for the conjugate, and a prox that is optimal and nonexpansive."""
    draw = normals(seed)
    Z, W, M, beta = inside(penalty, draw(shape)), inside(penalty, draw(shape)), draw(shape), 0.7
    zero = torch.zeros(shape, dtype=torch.float64)
    equal("g(0) and zero", penalty.value(zero), 0.0, 1e-12)
    middle, ends = penalty.value((Z + W) / 2), (penalty.value(Z) + penalty.value(W)) / 2
    at_most("g in the middle against the mean of its ends", middle, ends, 1e-12 * float(ends))
    limit, polar = penalty.max_dual_scale(M, beta)
    if polar.kind.certifies:
        for scale in (0.0, 0.5, 1.0, -1.0):
            N = scale * (limit if math.isfinite(limit) else 1.0) * M
            own = penalty.conjugate(N, beta)
            require(
                own == 0 or not penalty.indicator_conjugate,
                f"the conjugate is {own}; indicator_conjugate says that it is zero",
            )
            bound = beta * penalty.value(Z) + own
            at_most("<M, Z> against beta g(Z) + (beta g)*(M)", inner(N, Z), bound, 1e-10 * (1 + float(bound)))
    if not (penalty.proximal and isinstance(penalty, Proximal)):
        return
    equal("prox with step 0 and Z", penalty.prox(Z, 0.0), Z, 1e-12)
    for step in (0.05, 0.5, 2.0, 50.0):
        P, Q = penalty.prox(Z, step), penalty.prox(W, step)
        same_shape("prox", P, shape)
        at_most("|prox(Z) - prox(W)| against |Z - W|", (P - Q).norm(), (Z - W).norm(), 1e-10)
        _check_prox(penalty, Z, P, step, draw)


def check_gauge(gauge: Gauge, shape: tuple[int, ...], seed: int = 0) -> None:
    """All of :func:`check_penalty`, and what makes it a gauge: homogeneity, the polar and its atom."""
    check_penalty(gauge, shape, seed)
    draw = normals(seed + 1)
    Z, W, M = inside(gauge, draw(shape)), inside(gauge, draw(shape)), draw(shape)
    value = float(gauge.value(Z))
    at_most("g(Z + W) against g(Z) + g(W)", gauge.value(Z + W), value + gauge.value(W), 1e-10 * value)
    for t in (-1.0, 0.0, 1e-3, 7.0):
        equal(f"g({t} Z) and |{t}| g(Z)", gauge.value(t * Z), abs(t) * value, 1e-10 * value)
        scaled, one = gauge.polar(t * M).value, gauge.polar(M).value
        equal(f"polar({t} M) and |{t}| polar(M)", scaled, abs(t) * one, 1e-9 * one)
    if isinstance(gauge, Sliced):
        parts = gauge.slice_polars(M)
        same_shape("slice_polars", parts, tuple(shape[:-2]))
        equal(
            "the largest of slice_polars(M) and polar(M)", parts.max(), gauge.polar(M).value, 1e-9 * float(parts.max())
        )
    if isinstance(gauge, Sliced) and gauge.column_groups:
        columns = torch.linalg.vector_norm(Z, dim=-2).sum()
        equal("g(Z) and the sum of the norms of columns", gauge.value(Z), columns, 1e-10 * value)
    if not isinstance(gauge, Atomic):
        return
    for matrix in (M, Z, M * (M > 0.5)):
        polar, atom = gauge.polar(matrix), gauge.atom(matrix)
        same_shape("atom", atom, shape)
        at_most("g(atom) against 1", gauge.value(atom), 1.0, 1e-9)
        reached = inner(matrix, atom)
        if polar.kind is PolarKind.EXACT:
            equal("<M, atom(M)> and polar(M)", reached, polar.value, 1e-9 * polar.value)
        if not polar.kind.certifies:
            continue
        nearer = [gauge.prox(matrix, 0.3)] if gauge.proximal and isinstance(gauge, Proximal) else []
        for point in (Z, matrix, atom, gauge.atom(W), *nearer):
            bound = polar.value * float(gauge.value(point))
            at_most("|<M, Z>| against polar(M) g(Z)", abs(inner(matrix, point)), bound, 1e-9 * (1 + bound))


def inside(penalty: Penalty, Z: Tensor) -> Tensor:
    """Return ``Z``, or the nearest point where the penalty is finite, which its prox with step 0 gives."""
    if bool(penalty.value(Z).isfinite()) or not isinstance(penalty, Proximal):
        return Z
    return penalty.prox(Z, 0.0)


def _check_prox(penalty: Penalty, Z: Tensor, P: Tensor, step: float, draw: Callable[..., Tensor]) -> None:
    """``P = prox(Z)`` iff ``Z - P`` is a subgradient of ``step g`` at ``P``; and no neighbour does better."""
    R, scale = Z - P, float(Z.square().sum())
    limit, polar = penalty.max_dual_scale(R, step)
    if polar.kind.certifies:
        at_most("1 against max_dual_scale of Z - prox(Z): polar(Z - P) <= step", 1.0, limit, 1e-9)
        right = step * penalty.value(P) + penalty.conjugate(R, step)
        equal("<Z - P, P> and step g(P) + (step g)*(Z - P)", inner(R, P), right, 1e-9 * scale)
    least = 0.5 * R.square().sum() + step * penalty.value(P)
    for size in (1e-3, 0.3):
        N = P + size * draw(P.shape)
        other = 0.5 * (N - Z).square().sum() + step * penalty.value(N)
        at_most("objective of the prox against that of a neighbour", least, other, 1e-10 * scale)

"""More terms for a factored point, along the directions in which its dual point is infeasible."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from convexformer.gauges.spectral import may_form, pairs_of, top_pairs
from convexformer.objective import Objective
from convexformer.operators import ImplicitMatrix, LowRank
from convexformer.operators.lowrank import Stack
from convexformer.solvers.staircase.bursts import Point, factor_weight, line_minimum, point_at
from convexformer.solvers.staircase.frames import Frames
from convexformer.solvers.staircase.options import StaircaseOptions

if TYPE_CHECKING:
    from convexformer.operators.base import DualMatrix


def prune(objective: Objective, point: Point, options: StaircaseOptions) -> Point:
    """Drop small terms on which the loss pulls less than beta, where the objective agrees: they are dying.

    A term that dies leaves directions of no curvature behind, in which it turns into terms that live, and Newton's method
    would lose its time there. For balanced factors ``s_j = <M, u_j v_j^T>`` is the pull on term j.
    """
    if len(point.Z.U) == 0:
        return point
    Z, beta = point.Z, factor_weight(objective)
    GU, _ = objective.factor_gradients(point.evaluation.V, Z)
    size = Z.V.square().sum(1)
    pull = -(GU * Z.U).sum(1) / size.clamp_min(torch.finfo(size.dtype).tiny)
    dying = (pull < beta * (1 - options.weak_pull)) & (size < options.small_term * size.max())
    while bool(dying.any()):
        kept = Z.select(~dying)
        without = point_at(objective, kept, objective.apply(kept), point.evaluation.intercept)
        if float(without.value) <= float(point.value):
            return without
        if int(dying.sum()) == 1:
            break
        dying &= size <= size[dying].median() / 2
    return point


def grow(
    objective: Objective,
    point: Point,
    M: DualMatrix,
    gap: float,
    options: StaircaseOptions,
    frames: Frames | None = None,
) -> Point | None:
    """Append the top singular pairs of ``M`` above beta, scaled by the best common step; None when there is none.

    Pairs count as above beta beyond a fraction of the relative ``gap``: nearer to it they are terms that exist already.
    With ``frames``, for balanced factors that Newton steps move, only what those steps cannot do is asked for: pairs of the
    part of ``M`` that is orthogonal to the rows and columns of ``Z``, where ``M`` is small enough to be formed. Each is
    sized by the curvature that the spectrum of the features gives it.
    """
    assert isinstance(M, ImplicitMatrix)
    k = max(options.first_terms, point.Z.n_terms // 2)
    if objective.like.is_cuda and M.shape[0] > 1:  # many matrices: looking at them all costs more than terms do
        k = max(k, objective.n_outputs // options.outputs_a_term)
    formed = frames is not None and may_form(M)
    sigma, U, V, block = normal_pairs(M, point.Z, k) if formed else top_pairs(M, k, sweeps=2)
    beta, at = factor_weight(objective), point.evaluation
    excess = max(1e-7, 0.01 * min(gap, 1.0)) if math.isfinite(gap) else 1e-2
    above = sigma > beta * (1 + excess)
    if not bool(above.any()):
        above = sigma > beta * (1 + 1e-12)
        if not bool(above.any()):
            return None
    sigma, U, V, block = (part[above] for part in (sigma, U, V, block))
    sigma, U, V = (part.to(point.Z.U) for part in (sigma, U, V))  # the matrix may be in a higher precision
    square = (sigma - beta).clamp_min(0)[:, None]
    if frames is not None:
        square = square / (frames.rows.mean(U, block) * frames.columns.mean(V, block))[:, None].to(square)
    root = (square / square.max()).sqrt()
    new = LowRank(root * U, root * V, block, point.Z.shape)
    D, size, rest = objective.apply(new), float(root.square().sum()), float(point.value - at.value)
    slope = float((root[:, 0].square() * (sigma - beta)).sum())
    rows, w, wide = objective.rows, objective.sample_weight, D.double()
    largest = objective.loss.curvature * float(rows.weighted(w, wide.square()).sum())
    own = float(rows.dot(w[:, None] * objective.loss.hessian_product(at.outputs, objective.targets, wide), wide))
    curvature = min(max(own, 0.01 * largest), largest)  # a loss that is flat here may be curved a step away
    unit = slope / curvature if 0 < curvature < math.inf else 1.0

    def value(t: float) -> float:
        """At the intercept of the point: the best one can only be better."""
        data = rows.dot(w, objective.loss.value(at.outputs + t * unit * wide, objective.targets))
        return float(data) + objective.offset + beta * t * unit * size + rest

    t = line_minimum(value, float(point.value))
    if t is None:
        return None
    t *= unit
    Z = point.Z.append(math.sqrt(t) * new.U, math.sqrt(t) * new.V, new.block)
    Z = Z.balanced(0.0)
    return point_at(objective, Z, point.outputs + t * D, at.intercept)


def normal_pairs(M: ImplicitMatrix, Z: LowRank, k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the ``k`` largest singular triples of ``(I - P) M (I - Q)``, block by block, for balanced factors ``Z``.

    ``P`` and ``Q`` project on the columns ``U_j`` and the rows ``V_j`` of ``Z``: along them Newton steps descend anyway.
    """
    dense = M.dense()
    if Z.n_terms:
        stack = Stack(Z)
        U, V = (stack.put(part / part.norm(dim=1, keepdim=True).clamp_min(1e-300)).to(dense) for part in (Z.U, Z.V))
        own = dense[stack.numbers]
        own = own - U.mT @ (U @ own)
        own = own - (own @ V.mT) @ V
        dense = dense.index_copy(0, stack.numbers, own)
    return pairs_of(dense, k)

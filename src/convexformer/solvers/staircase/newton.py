"""Newton's method on the factors of a nuclear-norm program: conjugate gradients, then a search along a quadratic path."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple, final

import torch
from torch import Tensor

from convexformer.objective import Objective
from convexformer.operators import BilinearOperator, LowRank
from convexformer.solvers.staircase.bursts import Point, factor_weight, point_at
from convexformer.solvers.staircase.curvature import Curvature
from convexformer.solvers.staircase.frames import Products
from convexformer.solvers.staircase.options import StaircaseOptions
from convexformer.solvers.staircase.preconditioner import Preconditioner


@final
class Step(NamedTuple):
    """What a Newton step came to."""

    point: Point
    decrement: float
    """``<g, P^-1 g>`` before the step, over the objective: about twice the relative decrease that is left."""
    ended: bool
    """Whether iterations ran out."""
    length: float = 1.0
    """The fraction of the Newton step that was taken; zero where nothing descends."""


def newton_step(
    objective: Objective,
    products: Products,
    point: Point,
    steps: Iterator[int],
    options: StaircaseOptions,
    cross: float = 1.0,
    damping: float = 0.0,
) -> Step:
    """Take one step of truncated Newton from balanced factors; Hessian products in the precision of ``products``.

    Conjugate gradients end at a residual in proportion to the gradient (Dembo, Eisenstat and Steihaug 1982) or at
    negative curvature. Each product counts as an iteration. ``damping`` adds that multiple of the preconditioner to the
    Hessian (Levenberg and Marquardt). Factors are balanced after the step.
    """
    curvature = Curvature(products.objective, point, cross, products.enter(point.Z))
    precondition = Preconditioner(products.frames, curvature, options.probes)
    along_axes = products.enter(_gradient(objective, point))
    g = curvature.join(along_axes.U, along_axes.V).double()
    energy = float(g @ precondition(g))
    value = float(point.value)
    decrement = energy / abs(value) if value else 0.0
    if not energy > 0:
        return Step(point, 0.0, ended=False)
    residual = min(options.cg_residual, max(decrement, options.cg_residual_least)) * energy

    def may_go_on() -> bool:
        return next(steps, None) is not None

    A = products.objective.operator
    one_product = isinstance(A, BilinearOperator) and A.one_product
    longest = options.cg_steps if one_product else options.cg_steps_bilinear
    x, along, ended = _conjugate_gradients(curvature.product, precondition, g, residual, longest, may_go_on, damping)
    if along is None:
        return Step(point, decrement, ended)
    there, length = _search(objective, products, curvature, point, g, x, along, options)
    return Step(there, decrement, ended, length)


def _conjugate_gradients(
    product: Callable[[Tensor], tuple[Tensor, Tensor]],
    precondition: Callable[[Tensor], Tensor],
    g: Tensor,
    residual: float,
    longest: int,
    may_go_on: Callable[[], bool],
    damping: float = 0.0,
) -> tuple[Tensor, Tensor | None, bool]:
    """Solve ``(H + damping P) x = -g`` roughly; return ``x``, the change of outputs along it, and whether it was cut short.

    At negative curvature the steps so far are returned, or the direction itself if there are none.
    """
    x, r = torch.zeros_like(g), -g
    y = precondition(r)
    p, ry = y, float(r @ y)
    q = r  # P p, which follows the recurrence of p
    outputs: Tensor | None = None
    for _ in range(longest):
        if not may_go_on():
            return x, outputs, True
        Hp, along = product(p)
        if damping:
            Hp.add_(q, alpha=damping)
        bend = float(p @ Hp)
        if not bend > 1e-12 * ry:
            return (p, along, False) if outputs is None else (x, outputs, False)
        a = ry / bend
        x.add_(p, alpha=a)
        outputs = a * along if outputs is None else outputs.add_(along, alpha=a)
        r = torch.add(r, Hp, alpha=-a)
        y = precondition(r)
        ry, before = float(r @ y), ry
        if ry <= residual:
            break
        p = torch.add(y, p, alpha=ry / before)
        q = torch.add(r, q, alpha=ry / before) if damping else r
    return x, outputs, False


def _search(
    objective: Objective,
    products: Products,
    curvature: Curvature,
    point: Point,
    g: Tensor,
    x: Tensor,
    along: Tensor,
    options: StaircaseOptions,
) -> tuple[Point, float]:
    """Return the point at an Armijo step along ``x``, ``F0 + t F1 + t^2 F2`` in the outputs, so that steps cost little.

    The intercept moves along its tangent; it is minimised over at the end. The point itself, and zero, if nothing descends.
    """
    loss, rows, w, Y = objective.loss, objective.rows, objective.sample_weight, objective.targets
    beta, before = factor_weight(objective), float(point.value)
    b = curvature.intercept_along(along)
    F0, F2 = point.evaluation.outputs, curvature.outputs_across(x).double()
    F1 = (along if b is None else along + b).double()
    start = point.evaluation.intercept

    def value(t: float) -> tuple[float, LowRank]:
        Z, crossed = curvature.moved(t * x)
        Z = Z.balanced(options.dead)
        F = F0 + t * F1 + t * t * F2
        if crossed:
            F = curvature.objective.apply(Z.to(dtype=curvature.Z.dtype)).double()
            F = F + (0 if start is None else start + (0 if b is None else t * b))
        data = rows.dot(w, loss.value(F, Y)) + objective.offset
        return float(data) + beta * float(Z.V.square().sum()), Z

    noise = options.noise * torch.finfo(point.Z.dtype).eps * abs(before)
    slope = float(g @ x)
    t, (found, Z) = 1.0, value(1.0)
    while not found <= before + 1e-4 * t * slope + noise:
        t /= 2
        if t < options.shortest_step:
            return point, 0.0
        found, Z = value(t)
    # a direction of negative curvature has no length of its own; a gain that is rounding says nothing, and twice a step of
    # Newton's leads as far from the optimum as it was
    if t == 1.0:
        while (further := value(2 * t))[0] < found - noise and t < options.longest_step:
            t, (found, Z) = 2 * t, further
    while True:
        there = products.leave(Z.to(dtype=point.Z.dtype))
        intercept = start if b is None or start is None else start + t * b
        arrived = point_at(objective, there, objective.apply(there), intercept)
        if float(arrived.value) <= before + 1e-4 * t * slope + noise:
            return arrived, t
        t /= 2  # weights are those of the path up to third order, and products are rough
        if t < options.shortest_step:
            return point, 0.0
        Z = value(t)[1]


def _gradient(objective: Objective, point: Point) -> LowRank:
    """``A^T V V_j + beta U_j`` and the like for ``V``, in the blocks of the point's factors."""
    GU, GV = objective.factor_gradients(point.evaluation.V, point.Z)
    beta = factor_weight(objective)
    return point.Z.with_factors(GU + beta * point.Z.U, GV + beta * point.Z.V)

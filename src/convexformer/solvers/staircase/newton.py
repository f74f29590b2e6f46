"""Newton's method on the factors of a nuclear-norm program: conjugate gradients, then a search along a quadratic path."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple, final

import torch
from torch import Tensor

from convexformer.objective import Objective
from convexformer.solvers.monitor import Monitor
from convexformer.solvers.staircase.bursts import Point, factor_weight, point_at
from convexformer.solvers.staircase.curvature import Curvature
from convexformer.solvers.staircase.options import StaircaseOptions
from convexformer.solvers.staircase.preconditioner import Preconditioner


@final
class Step(NamedTuple):
    """What a Newton step came to."""

    point: Point
    decrement: float
    """``<g, P^-1 g>`` before the step, over the objective: about twice the relative decrease that is left."""
    ended: bool
    """Whether iterations or time ran out."""


def newton_step(
    objective: Objective,
    products: Objective,
    point: Point,
    monitor: Monitor,
    steps: Iterator[int],
    options: StaircaseOptions,
    cross: float = 1.0,
) -> Step:
    """Take one step of truncated Newton from balanced factors; Hessian products in the precision of ``products``.

    Conjugate gradients end at a residual in proportion to the gradient (Dembo, Eisenstat and Steihaug 1982) or at
    negative curvature. Each product counts as an iteration. Factors are balanced after the step.
    """
    curvature = Curvature(products, point, cross)
    precondition = Preconditioner(products, curvature, options.probes)
    g = _gradient(objective, point)
    energy = float(g @ precondition(g))
    value = float(point.value)
    decrement = energy / abs(value) if value else 0.0
    if not energy > 0:
        return Step(point, 0.0, ended=False)
    residual = min(options.cg_residual, max(decrement, options.cg_residual_least)) * energy

    def may_go_on() -> bool:
        return not monitor.late and next(steps, None) is not None

    x, along, ended = _conjugate_gradients(curvature.product, precondition, g, residual, options.cg_steps, may_go_on)
    if along is None:
        return Step(point, decrement, ended)
    return Step(_search(objective, curvature, point, g, x, along, options), decrement, ended)


def _conjugate_gradients(
    product: Callable[[Tensor], tuple[Tensor, Tensor]],
    precondition: Callable[[Tensor], Tensor],
    g: Tensor,
    residual: float,
    longest: int,
    may_go_on: Callable[[], bool],
) -> tuple[Tensor, Tensor | None, bool]:
    """Solve ``H x = -g`` roughly; return ``x``, the change of outputs along it, and whether iterations ran out.

    At negative curvature the steps so far are returned, or the direction itself if there are none.
    """
    x, r = torch.zeros_like(g), -g
    y = precondition(r)
    p, ry = y, float(r @ y)
    outputs: Tensor | None = None
    for _ in range(longest):
        if not may_go_on():
            return x, outputs, True
        Hp, along = product(p)
        bend = float(p @ Hp)
        if not bend > 1e-12 * ry:
            return (p, along, False) if outputs is None else (x, outputs, False)
        a = ry / bend
        x = x + a * p
        outputs = a * along if outputs is None else outputs.add_(along, alpha=a)
        r = r - a * Hp
        y = precondition(r)
        ry, before = float(r @ y), ry
        if ry <= residual:
            break
        p = y + (ry / before) * p
    return x, outputs, False


def _search(
    objective: Objective,
    curvature: Curvature,
    point: Point,
    g: Tensor,
    x: Tensor,
    along: Tensor,
    options: StaircaseOptions,
) -> Point:
    """Return the point at an Armijo step along ``x``: outputs are ``F0 + t F1 + t^2 F2``, so that steps cost nothing.

    The intercept moves along its tangent; it is minimised over at the end. The point itself if nothing descends.
    """
    loss, rows, w, Y = objective.loss, objective.rows, objective.sample_weight, objective.targets
    beta, before = factor_weight(objective), float(point.value)
    b = curvature.intercept_along(along)
    F0, F2 = point.evaluation.outputs, curvature.objective.apply(curvature.split(x)).double()
    F1 = (along if b is None else along + b).double()
    here = torch.cat([point.Z.U.flatten(), point.Z.V.flatten()]).double()
    size, cross, square = float(here @ here), float(here @ x), float(x @ x)

    def value(t: float) -> float:
        data = rows.dot(w, loss.value(F0 + t * F1 + t * t * F2, Y)) + objective.offset
        return float(data) + 0.5 * beta * (size + 2 * t * cross + t * t * square)

    noise = options.noise * torch.finfo(point.Z.dtype).eps * abs(before)
    slope = float(g @ x)
    t, found = 1.0, value(1.0)
    while not found <= before + 1e-4 * t * slope + noise:
        t /= 2
        if t < options.shortest_step:
            return point
        found = value(t)
    if t == 1.0:  # a direction of negative curvature has no length of its own
        while (further := value(2 * t)) < found and t < options.longest_step:
            t, found = 2 * t, further
    d, cut = t * x, point.Z.U.numel()
    U, V = (part.to(point.Z.dtype) for part in (d[:cut], d[cut:]))
    Z = point.Z.with_factors(point.Z.U + U.view_as(point.Z.U), point.Z.V + V.view_as(point.Z.V))
    Z = Z.balanced(options.dead)
    start = point.evaluation.intercept
    arrived = point_at(objective, Z, objective.apply(Z), start if b is None or start is None else start + t * b)
    return arrived if float(arrived.value) <= before + noise else point


def _gradient(objective: Objective, point: Point) -> Tensor:
    """``(A^T V V_j + beta U_j, ...)`` in float64, flat."""
    GU, GV = objective.factor_gradients(point.evaluation.V, point.Z)
    beta = factor_weight(objective)
    return torch.cat([(GU + beta * point.Z.U).flatten(), (GV + beta * point.Z.V).flatten()]).double()

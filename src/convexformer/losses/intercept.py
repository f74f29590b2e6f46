"""The exact intercept of a loss: roots of increasing functions, and Newton's method in a few variables.

Both searches make a bounded number of evaluations, take every decision from totals over all rows, and return ``start``
when the first evaluation is not finite.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

MAX_EVALUATIONS = 200  # of the slope, in one search
FARTHEST_START = 1e4  # in units of the data: bisections from farther away would take too long
PLAIN_STEPS = 6  # Newton steps before a root is bracketed
MANY_OUTPUTS = 32  # beyond this the Hessian of the intercept is used through products only
CG_STEPS, CG_TOLERANCE = 50, 1e-10
SUFFICIENT_DECREASE = 1e-4  # least decrease of the value for a step, as a fraction of the predicted one
VALUE_NOISE = 1e-8  # relative increase of the value that may be rounding where the slope has halved
TINY = 1e-300


def increasing_roots(
    slope: Callable[[Tensor], tuple[Tensor, Tensor]],
    bend: Callable[[Tensor], tuple[Tensor, Callable[[], Tensor]]],
    start: Tensor,
    reach: Callable[[], Tensor],
) -> Tensor:
    """Find the root of each of ``c`` increasing functions of one variable.

    ``slope(b)`` returns the functions and the sum of the moduli of their terms; ``bend(b)`` their derivatives and a function
    that bounds the rounding error in units of eps, all ``(c,)``; ``reach()`` bounds the data, in units of ``b``. Plain
    Newton steps while they are short and divide the functions by two; from then on inside a bracket.
    """
    eps = torch.finfo(start.dtype).eps
    b = start
    h, size = slope(b)
    for _ in range(PLAIN_STEPS):
        if bool((h.abs() <= 4 * eps * size).all()):
            return b
        derivative, noise = bend(b)
        step = h / derivative
        if not bool((step.abs() <= 1 + b.abs()).all()):
            break
        h_there, size_there = slope(b - step)
        if not bool((h_there.abs() <= torch.maximum(0.5 * h.abs(), 4 * eps * size_there)).all()):
            if bool((h.abs() <= 4 * eps * (size + noise())).all()):
                return b
            break
        b, h, size = b - step, h_there, size_there
    farthest = FARTHEST_START * (1 + reach())
    if not bool(torch.isfinite(farthest)):
        return start
    b = torch.minimum(torch.maximum(finite(b), -farthest), farthest)
    return _bracketed_roots(slope, bend, b, reach())


def _bracketed_roots(
    slope: Callable[[Tensor], tuple[Tensor, Tensor]],
    bend: Callable[[Tensor], tuple[Tensor, Callable[[], Tensor]]],
    b: Tensor,
    reach: Tensor,
) -> Tensor:
    """Take Newton steps that stay inside a bracket of each root.

    Steps are at most ``1 + |b| + reach`` long at first, twice as long at each evaluation, so that a flat function is left
    without overflow. A step that leaves the bracket, or that follows one which did not divide the function by four, is
    replaced by a bisection.
    """
    eps = torch.finfo(b.dtype).eps
    best, cap = b, 1 + b.abs() + reach
    h, size = slope(b)
    least, before = h.abs(), torch.full_like(h, torch.inf)
    low, high = torch.full_like(h, -torch.inf), torch.full_like(h, torch.inf)
    bisected = torch.zeros_like(h, dtype=torch.bool)
    for _ in range(MAX_EVALUATIONS):
        derivative, noise = bend(b)
        trial = b - torch.minimum(torch.maximum(h / derivative, -cap), cap)
        settled = (h.abs() <= 4 * eps * (size + noise())) | (trial == b) | (high - low <= 2 * eps * b.abs())
        if bool(settled.all()) or not bool(torch.isfinite(h).all()):
            break
        low, high = torch.where(h < 0, b, low), torch.where(h > 0, b, high)
        middle = 0.5 * low + 0.5 * high
        slow = (h.abs() > 0.25 * before) & ~bisected
        bisected = ((trial <= low) | (trial >= high) | slow) & torch.isfinite(middle)
        before, cap = h.abs(), 2 * cap
        b = torch.where(settled, b, torch.where(bisected, middle, trial))
        h, size = slope(b)
        better = h.abs() < least
        best, least = torch.where(better, b, best), torch.where(better, h.abs(), least)
    return best


def trust_region_newton(
    value: Callable[[Tensor], Tensor],
    slope: Callable[[Tensor], tuple[Tensor, Tensor]],
    hessian: Callable[[Tensor], Tensor | Callable[[Tensor], Tensor]],
    start: Tensor,
    reach: Callable[[], Tensor],
) -> Tensor:
    """Minimise a smooth convex function of ``b: (c,)`` by Newton's method in a trust region.

    ``slope(b)`` returns the gradient and the sum of the moduli of its terms; ``hessian(b)``, called at the point of the last
    slope, a matrix or products with it; ``reach()`` bounds the data, in units of ``b``. A step is taken if the value
    decreases sufficiently, or if it halves the slope and increases the value by rounding only: near the minimum it may.
    """
    eps = torch.finfo(start.dtype).eps
    b, evaluations = finite(start), 1
    radius = 1 + float(b.norm())
    g, size = slope(b)
    here = float(value(b))
    while math.isfinite(here) and bool(g.abs().max() > 4 * eps * size):
        step_within = _trust_region_solver(hessian(b), g, 4 * eps * float(size))
        worst, taken = float(g.abs().max()), False
        while not taken and evaluations < MAX_EVALUATIONS:
            step, predicted = step_within(radius)
            trial, length = b + step, float(step.norm())
            g_there, size_there = slope(trial)
            there = float(value(trial))
            evaluations += 1
            gain = here - there
            halved = float(g_there.abs().max()) <= 0.5 * worst and gain >= -VALUE_NOISE * abs(here)
            taken = halved or gain > SUFFICIENT_DECREASE * predicted
            if not halved and not gain > 0.25 * predicted:
                radius = 0.25 * min(radius, length)
            elif length > 0.9 * radius:
                radius = 4 * radius
            if not taken and (bool((trial == b).all()) or worst <= rounded_slope(b, float(size), reach)):
                return b
        if not taken:
            break
        b, g, size, here = trial, g_there, size_there, there
    return b


def finite(b: Tensor) -> Tensor:
    """Return a point with zeros where it is not finite."""
    return b.nan_to_num(0.0, 0.0, 0.0)


def rounded_slope(b: Tensor, size: float, reach: Callable[[], Tensor]) -> float:
    """Bound what rounding outputs and intercept leaves of a slope whose terms have moduli of sum ``size``."""
    return 4 * torch.finfo(b.dtype).eps * (1 + float(reach()) + float(b.abs().max())) * size


def _trust_region_solver(
    H: Tensor | Callable[[Tensor], Tensor], g: Tensor, noise: float
) -> Callable[[float], tuple[Tensor, float]]:
    """Return ``radius -> step, predicted decrease``: the minimiser of ``<g, s> + 1/2 <s, H s>`` over ``|s| <= radius``.

    By an eigendecomposition of a matrix, where parts of ``g`` below ``noise`` count as zero: else a loss that does not
    change under some shifts would drift along them. From products roughly, by conjugate gradients that stop at the boundary.
    """
    if not isinstance(H, Tensor):
        return partial(_steihaug, H, g)
    values, vectors = torch.linalg.eigh(torch.where(torch.isfinite(H).all(), 0.5 * (H + H.T), 0.0))
    bends = values.clamp_min(0).tolist()
    parts = [part if abs(part) > noise else 0.0 for part in (vectors.T @ g).tolist()]

    def step_within(radius: float) -> tuple[Tensor, float]:
        def solve(shift: float) -> list[float]:
            return [-part / max(bend + shift, TINY) for part, bend in zip(parts, bends, strict=True)]

        s = solve(0.0)
        if math.hypot(*s) > radius:
            low, high = 0.0, math.hypot(*parts) / radius  # of the shift that makes the step as long as the radius
            for _ in range(60):
                middle = math.sqrt(low * high) if low > 0 else 1e-6 * high
                low, high = (middle, high) if math.hypot(*solve(middle)) > radius else (low, middle)
                if low > 0.5 * high:
                    break
            s = solve(high)
        predicted = -sum(si * (part + 0.5 * bend * si) for si, part, bend in zip(s, parts, bends, strict=True))
        return vectors @ g.new_tensor(s), predicted

    return step_within


def _steihaug(H: Callable[[Tensor], Tensor], g: Tensor, radius: float) -> tuple[Tensor, float]:
    """Minimise ``<g, s> + 1/2 <s, H s>`` by conjugate gradients, up to the boundary of ``|s| <= radius``."""
    s, r, p = torch.zeros_like(g), -g, -g
    old = first = float(r @ r)
    gain = 0.0
    for _ in range(CG_STEPS):
        Hp = H(p)
        bend, pp, sp, ss = float(p @ Hp), float(p @ p), float(s @ p), float(s @ s)
        boundary = (math.sqrt(sp * sp + pp * max(radius * radius - ss, 0.0)) - sp) / pp
        t = min(old / bend, boundary) if bend > 0 else boundary
        s, r, gain = s + t * p, r - t * Hp, gain + t * old - 0.5 * t * t * max(bend, 0.0)
        new = float(r @ r)
        if t >= boundary or new <= CG_TOLERANCE**2 * first:
            break
        p, old = r + (new / old) * p, new
    return s, gain

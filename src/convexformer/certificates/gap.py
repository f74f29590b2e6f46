"""The duality gap: a bound on the distance to the global optimum that anyone can recompute.

    primal  P(Z) = F(A Z) + beta g(Z)
    dual    D(V) = -F*(V) - (beta g)*(-A^T V)        (for a gauge: -F*(V), if polar(-A^T V) <= beta)

``V = grad F(A Z)`` scaled into the feasible set gives ``D <= p* <= P``, at any ``Z``. With an unpenalised intercept the
dual asks for ``sum_i v_i = 0``: the loss balances the gradient before anything is computed from it, so that
feasibility, conjugate and scale refer to the same dual point.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

import torch
from scipy.optimize import minimize_scalar
from torch import Tensor

from convexformer.certificates.certificate import Certificate
from convexformer.gauges import Polar
from convexformer.objective import Evaluation, HasObjective, Objective, objective_of
from convexformer.operators import ImplicitMatrix, LowRank, Neurons, ReLUDual
from convexformer.weights import Operand, Weights

if TYPE_CHECKING:
    from convexformer.operators.base import DualMatrix

ADJOINT_TOLERANCE = 1e-6
"""``<V, A Z>`` and ``<A^T V, Z>`` may differ by this share of ``|V| |A Z| + sum |A^T V| |Z|``, or the adjoint is wrong."""
FLOAT64_TINY = torch.finfo(torch.float64).tiny
FLOAT64_EPS = torch.finfo(torch.float64).eps


@final
@dataclass(frozen=True)
class DualPoint:
    """A scaled dual point: its value, the scale, the polar that limits it, and ``M = -A^T V`` before scaling."""

    value: float
    scale: float
    polar: Polar
    M: DualMatrix


def dual_point(objective: Objective, at: Evaluation, *, quick: bool = False) -> DualPoint:
    """Scale ``V = grad F`` into the dual feasible set and evaluate the dual there.

    With ``quick`` the polar may be an estimate; its kind then says that it does not certify.
    """
    M = objective.dual_matrix(at.V)
    limit, polar = objective.penalty.max_dual_scale(M, objective.beta, quick=quick)
    if not quick and polar.value > 0:
        limit /= 1 + objective.cancellation_error(at) / polar.value
    value, scale = dual_value(objective, at, limit, M)
    return DualPoint(value, scale, polar, M)


def dual_value(objective: Objective, at: Evaluation, limit: float, M: DualMatrix | None = None) -> tuple[float, float]:
    """Return the dual value at the best scale of ``V`` up to ``limit``, and that scale.

    ``M = -A^T V`` is needed where the penalty's conjugate is more than an indicator.
    """
    loss, Y, w, rows, U = objective.loss, objective.targets, objective.sample_weight, objective.rows, at.U
    own = loss.dual_scale(U, Y, w, limit, rows)

    def value(t: float) -> float:
        dual = objective.offset - float(rows.dot(w, loss.conjugate(t * U, Y)))
        if not objective.penalty.indicator_conjugate and t != 0:
            assert M is not None
            dual -= objective.penalty.conjugate(t * M, objective.beta)
        return dual if not math.isnan(dual) else -math.inf

    if objective.penalty.indicator_conjugate:
        return value(own), own
    # the dual is concave in t, with its maximum at t = 1 at the optimum; loss.dual_scale ignores the penalty's conjugate
    furthest = min(limit, max(1.0, own))
    found = minimize_scalar(lambda t: -value(t), bounds=(0.0, furthest), method="bounded", options={"xatol": 1e-7})
    best = max((float(found.x), min(1.0, furthest)), key=value)
    return value(best), best


def certificate(problem: Objective | HasObjective, weights: Weights) -> Certificate:
    """Return the certificate of a point, recomputed in float64 from the weights and the data alone.

    ``problem`` is an objective, or a problem that has one.
    """
    objective = objective_of(problem).guarded(None).reference()
    weights = weights.to(device=objective.targets.device, dtype=torch.float64)
    if weights.shape != objective.weight_shape:
        raise ValueError(f"the weights have shape {weights.shape}; this problem expects {objective.weight_shape}.")
    return certificate_at(objective, weights, float(objective.penalty.value(weights.Z)))


def with_best_intercept(problem: Objective | HasObjective, weights: Weights) -> tuple[Weights, Certificate]:
    """Return weights with the intercept that suits them, and their certificate, at the cost of the certificate."""
    objective = objective_of(problem).guarded(None).reference()
    exact = weights.to(device=objective.targets.device, dtype=torch.float64)
    outputs = objective.apply(exact.Z)
    b = objective.evaluate(outputs, start=exact.intercept).intercept
    proof = certificate_at(objective, exact.with_intercept(b), float(objective.penalty.value(exact.Z)), outputs)
    return weights.with_intercept(None if b is None else b.to(weights.form.dtype)), proof


def certificate_at(
    objective: Objective, weights: Weights, penalty: float, outputs: Tensor | None = None
) -> Certificate:
    """Return the certificate of float64 weights whose penalty, ``g(Z)`` or more, is given; ``outputs`` are ``A Z``."""
    b, Z = weights.intercept, weights.Z
    if b is not None and not objective.intercept and bool((b != 0).any()):
        raise ValueError(
            "the weights have an intercept (the network a bias) but the problem has intercept=False; build the problem "
            "with intercept=True."
        )
    outputs = objective.apply(Z) if outputs is None else outputs
    own = outputs if b is None else outputs + b
    data = float(objective.rows.dot(objective.sample_weight, objective.loss.value(own, objective.targets)))
    primal = data + objective.offset + objective.beta * penalty
    at = objective.evaluate(outputs, start=b)
    point = dual_point(objective, at)
    residuals = _residuals(objective, at, point, outputs, penalty)

    def refused(reason: str) -> Certificate:
        return Certificate(primal, -math.inf, "none", 0.0, residuals, reason, point.polar.kind.value)

    if not point.polar.kind.certifies:
        return refused("only a lower bound on the polar is known, so the dual point may be infeasible")
    if _contradicts(objective, at, point.M, outputs, Z):
        return refused(
            "<V, A Z> and <A^T V, Z> differ: the operator's apply and adjoint contradict each other "
            "(convexformer.testing.check_operator tells where)"
        )
    slack = _rounding(objective, at, point, outputs, primal)
    dual = point.value - slack
    if not math.isfinite(dual) or not math.isfinite(primal):
        return refused("the gap is infinite: numbers overflow, or the dual point has no finite value")
    if dual > primal + slack:
        return refused(
            f"the dual value {dual:.8g} is above the primal value {primal:.8g} by more than rounding explains: operator, "
            "loss or gauge contradict each other (convexformer.testing has checks for each)"
        )
    kind = "exact" if point.polar.confidence == 1.0 else "probabilistic"
    confidence, polar = point.polar.confidence, point.polar.kind.value
    return Certificate(primal, min(dual, primal), kind, confidence, residuals, polar=polar)


def _contradicts(objective: Objective, at: Evaluation, M: DualMatrix, outputs: Tensor, Z: Operand) -> bool:
    """Tell whether ``<V, A Z> = <A^T V, Z>`` fails at this point: the adjoint is not the operator's."""
    rows, V = objective.rows, at.V
    forward, size = float(rows.dot(V, outputs)), float((rows.dot(V, V) * rows.dot(outputs, outputs)).sqrt())
    if size == 0.0 or not math.isfinite(size):
        return False
    backward, other = _inner(M, Z)  # M = -A^T V
    return math.isfinite(backward) and abs(forward + backward) > ADJOINT_TOLERANCE * (size + other)


def _inner(M: DualMatrix, Z: Operand) -> tuple[float, float]:
    """``<M, Z>``, and the sum of the absolute values of its terms."""
    if isinstance(Z, Neurons):
        assert isinstance(M, ReLUDual)
        terms = M.inner(Z)
    elif isinstance(Z, LowRank) and isinstance(M, (Tensor, ImplicitMatrix)):
        slices = M.reshape(-1, *M.shape[-2:]) if isinstance(M, Tensor) else None
        products = []
        for b, own in Z.spans():
            MV = Z.V[own] @ slices[b].T if slices is not None else M.matvec(Z.V[own], b)  # type: ignore[union-attr]
            products.append((MV * Z.U[own]).sum(1))
        terms = torch.cat(products) if products else Z.U.new_zeros(1)
    else:
        dense = Z.dense() if isinstance(Z, LowRank) else Z
        assert not isinstance(M, ReLUDual)
        terms = (M if isinstance(M, Tensor) else M.dense().reshape(dense.shape)) * dense
    return float(terms.sum()), float(terms.abs().sum())


def _rounding(objective: Objective, at: Evaluation, point: DualPoint, outputs: Tensor, primal: float) -> float:
    """Return an allowance for the rounding of float64 sums; the dual value is lowered by it."""
    rows, w = objective.rows, objective.sample_weight
    terms = float(rows.dot(w, objective.loss.conjugate(point.scale * at.U, objective.targets).abs()))
    # sums over samples and singular values of large matrices round more than small ones
    growth = math.sqrt(max(objective.n_rows, *objective.weight_shape))
    slack = (64 + growth) * FLOAT64_EPS * (abs(primal) + terms)
    if at.intercept is not None:
        # what rounding leaves of sum_i v_i = 0 is subtracted evenly from all rows; by convexity of the conjugate that
        # lowers the dual by at most its product with the mean output
        left = rows.weighted(w, at.U).abs()
        mean = rows.weighted(w, at.outputs.abs()) / rows.sum(w)
        slack += abs(point.scale) * float((left * (1 + mean)).sum())
        # A Z and b may cancel in the outputs
        slack += 8 * FLOAT64_EPS * float(rows.dot(at.V.abs().double(), outputs.abs() + at.intercept.abs()))
    return slack


def _residuals(
    objective: Objective, at: Evaluation, point: DualPoint, outputs: Tensor, penalty: float
) -> dict[str, float]:
    """Relative residuals of the optimality conditions: all zero at the optimum.

    ``feasibility``: how far the polar exceeds beta. ``alignment``: ``|<M, Z> - beta g(Z) - (beta g)*(M)|``, with ``M`` the
    negative gradient. ``intercept``: what is left of ``sum_i v_i = 0``.
    """
    beta, rows, w = objective.beta, objective.rows, objective.sample_weight
    value, inner = beta * penalty, -float(rows.dot(at.V, outputs))  # <M, Z> = -<V, A Z>
    conjugate = 0.0 if objective.penalty.indicator_conjugate else objective.penalty.conjugate(point.M, beta)
    size = max(abs(inner), abs(value), abs(float(at.value)), FLOAT64_TINY)
    residuals = {
        "feasibility": max(0.0, point.polar.value / beta - 1.0),
        "alignment": abs(inner - value - conjugate) / size,
        "scale": point.scale,
    }
    if at.intercept is not None:
        total = float(rows.dot(w, at.U.abs().sum(1)))
        residuals["intercept"] = float(rows.weighted(w, at.U).abs().max()) / total if total > 0 else 0.0
    return residuals

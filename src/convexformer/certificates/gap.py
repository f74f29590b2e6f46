"""The duality gap: a bound on the distance to the global optimum that anyone can recompute.

    primal  P(Z) = F(A Z) + beta g(Z)
    dual    D(V) = -F*(V) - (beta g)*(-A^T V)        (for a gauge: -F*(V), if polar(-A^T V) <= beta)

``V = grad F(A Z)`` scaled into the feasible set gives ``D <= p* <= P``, at any ``Z``. With an unpenalised intercept the
dual asks for ``sum_i v_i = 0``; the intercept is fitted exactly, so that it holds, and scaling keeps it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor, nn

from convexformer.architecture import Network, Weights
from convexformer.gauges import Polar
from convexformer.operators.bilinear import as_operand
from convexformer.problem import Fit, Problem

FAR = 100  # times the size of outputs and targets: how large the mean output of an optimum is taken to be at most


@final
@dataclass(frozen=True)
class Certificate:
    """How far from the global optimum a point can be at most.

    ``kind`` is ``"exact"``, ``"probabilistic"`` (the dual bound holds with probability ``confidence``) or ``"none"``
    (only a lower bound on the polar was had, so nothing is claimed: the dual value is minus infinity).
    """

    primal: float
    dual: float
    kind: str
    confidence: float
    kkt: dict[str, float] = field(default_factory=dict)

    @property
    def gap(self) -> float:
        """``primal - dual``: the point is at most this far above the optimum."""
        return self.primal - self.dual

    @property
    def relative_gap(self) -> float:
        """``gap / |primal|``."""
        return self.gap / max(abs(self.primal), torch.finfo(torch.float64).tiny)

    def meets(self, tolerance: float) -> bool:
        """Tell whether the relative gap is at most the tolerance."""
        return self.kind != "none" and self.relative_gap <= tolerance

    def to_dict(self) -> dict[str, Any]:
        """Return plain numbers, for JSON."""
        return {
            "primal": self.primal,
            "dual": self.dual,
            "gap": self.gap,
            "relative_gap": self.relative_gap,
            "kind": self.kind,
            "confidence": self.confidence,
            "kkt": dict(self.kkt),
        }

    def __str__(self) -> str:
        if self.kind == "none":
            return f"objective {self.primal:.8g}, not certified"
        odds = "" if self.kind == "exact" else f" with probability {self.confidence:.4g}"
        return (
            f"objective {self.primal:.8g}, at most {self.gap:.3g} above the global optimum "
            f"(relative {self.relative_gap:.2e}, {self.kind}{odds})"
        )


@final
@dataclass(frozen=True)
class DualPoint:
    """A scaled dual point: its value, the scale, the polar behind it, and ``M = -A^T V`` before scaling."""

    value: float
    scale: float
    polar: Polar
    M: Any


def dual_point(problem: Problem, fit: Fit, *, quick: bool = False) -> DualPoint:
    """Scale ``V = grad F`` into the dual feasible set and evaluate the dual there.

    With ``quick`` the polar may be an estimate; its kind then says that it does not certify.
    """
    M = problem.operator.dual_matrix(fit.V)
    limit, polar = problem.penalty.scale_limit(M, problem.beta, quick=quick)
    if not quick and problem.intercept and polar.value > 0:
        # V sums to zero, so that the mean of the features cancels in M, up to its rounding
        eps = torch.finfo(torch.float64).eps
        limit /= 1 + 8 * eps * problem.mean_size() * float(fit.V.abs().sum()) / polar.value
    value, scale = dual_value(problem, fit, limit)
    own = scale**2 * problem.penalty.conjugate(M, problem.beta)  # zero for a gauge, quadratic for a ridge
    return DualPoint(value - own, scale, polar, M)


def dual_value(problem: Problem, fit: Fit, limit: float) -> tuple[float, float]:
    """Return the loss's part of the dual at the best scale of ``V`` up to ``limit``, and that scale."""
    scale = problem.loss.dual_scale(fit.U, problem.Y, problem.w, limit)
    conjugate = float((problem.w * problem.loss.conjugate(scale * fit.U, problem.Y)).sum())
    return problem.offset - conjugate, scale


def certificate(problem: Problem, weights: Weights) -> Certificate:
    """Return the certificate of a point, recomputed in float64 from the weights and the data alone."""
    problem = problem.reference()
    weights = weights.to(device=problem.Y.device, dtype=torch.float64)
    expected = problem.operator.weight_shape
    if tuple(weights.Z.shape) != tuple(expected):
        raise ValueError(f"the weights have shape {tuple(weights.Z.shape)}; this problem expects {tuple(expected)}.")
    outputs = as_operand(problem.operator, weights.Z)
    penalty = float(problem.penalty.value(weights.Z))
    return _certificate(problem, outputs, weights.intercept, penalty)


def certify(thing: Any, problem: Problem) -> Certificate:
    """Certify a solution, weights, or any network of the problem's head, however it was trained.

    For a network the primal is its own objective, ``loss + beta * decay()``; the dual comes from its outputs. A solution of
    another head, other gates or other channel blocks is refused.
    """
    if isinstance(thing, nn.Module):
        return _certify_network(thing, problem)
    weights = thing if isinstance(thing, Weights) else getattr(thing, "weights", None)
    if isinstance(weights, Weights):
        weights.check_home(problem.head, problem.layout)
        return certificate(problem, weights)
    raise TypeError(
        f"cannot certify a {type(thing).__name__}; expected a Solution, Weights, or a network from convexformer.networks."
    )


def _certify_network(network: nn.Module, problem: Problem) -> Certificate:
    problem = problem.reference()
    # the lift checks that this network belongs to the problem; outputs then agree by construction
    weights = problem.head.lift(network, problem.layout).to(device=problem.Y.device, dtype=torch.float64)
    assert isinstance(network, Network)  # lift() has refused anything else
    # decay() is never below the gauge of the lift, except by the rounding that w1 in the simplex is granted
    penalty = max(float(network.decay().detach()), float(problem.penalty.value(weights.Z)))
    outputs = as_operand(problem.operator, weights.Z)
    return _certificate(problem, outputs, weights.intercept, penalty)


def _certificate(problem: Problem, outputs: Tensor, b: Tensor | None, penalty: float) -> Certificate:
    """Assemble the certificate from outputs without intercept, the intercept, and the value of the penalty."""
    if b is not None and not problem.intercept and bool((b != 0).any()):
        raise ValueError(
            "the weights have an intercept (the network a bias) but the problem has intercept=False; build the problem "
            "with intercept=True."
        )
    own = outputs if b is None else outputs + b
    data = float((problem.w * problem.loss.value(own, problem.Y)).sum())
    primal = data + problem.beta * penalty
    fit = problem.fit(outputs, start=b)
    point = dual_point(problem, fit)
    if not point.polar.kind.certifies:
        return Certificate(primal, -math.inf, "none", 0.0, _kkt(problem, fit, point, outputs, penalty))
    dual = point.value - _rounding(problem, fit, point, primal)
    if dual > primal:  # only rounding can do that, and by so much it may be wrong either way
        dual = primal - (dual - primal)
    kind = "exact" if point.polar.confidence == 1.0 else "probabilistic"
    return Certificate(primal, dual, kind, point.polar.confidence, _kkt(problem, fit, point, outputs, penalty))


def _rounding(problem: Problem, fit: Fit, point: DualPoint, primal: float) -> float:
    """Return an allowance for the rounding of float64 sums, so that the dual value errs on the safe side."""
    eps = torch.finfo(torch.float64).eps
    terms = float((problem.w * problem.loss.conjugate(point.scale * fit.U, problem.Y)).abs().sum())
    # sums over samples and singular values of large matrices round more than small ones
    growth = math.sqrt(max(problem.Y.shape[0], *problem.operator.weight_shape))
    slack = (64 + growth) * eps * (abs(primal) + terms)
    if fit.intercept is not None:
        V, b = problem.w[:, None] * fit.U, fit.intercept.abs()
        left = V.sum(0).abs()
        if float(left.max()) > 1e-6 * float(V.abs().sum()) + 1e-12 * float(problem.w.sum()):
            return math.inf  # the best intercept was not found, so V is not dual feasible and proves nothing
        # what is left of sum_i v_i = 0 costs its product with the best intercept of centred features, the mean output
        size = 1 + fit.outputs.abs().amax(0) + problem.Y.abs().amax(0) + abs(primal) / float(problem.w.sum())
        slack += abs(point.scale) * FAR * float((left * size).sum())
        # outputs are exact to the rounding of A Z and of b, which may cancel
        slack += 8 * eps * float((V.abs() * ((fit.outputs - fit.intercept).abs() + b)).sum())
    return slack


def _kkt(problem: Problem, fit: Fit, point: DualPoint, outputs: Tensor, penalty: float) -> dict[str, float]:
    """Relative residuals of the optimality conditions: all zero at the optimum.

    ``feasibility``: how far the polar exceeds beta. ``alignment``: ``|<M, Z> - beta g(Z) - (beta g)*(M)|``, with ``M`` the
    negative gradient. ``intercept``: what is left of ``sum_i v_i = 0``.
    """
    beta = problem.beta
    value, inner = beta * penalty, -float((fit.V * outputs).sum())  # <M, Z> = -<V, A Z>
    slack = abs(inner - value - problem.penalty.conjugate(point.M, beta))
    residuals = {
        "feasibility": max(0.0, point.polar.value / beta - 1.0),
        "alignment": slack / max(abs(inner), abs(value), abs(float(fit.value)), torch.finfo(torch.float64).tiny),
        "scale": point.scale,
    }
    if fit.intercept is not None:
        V = problem.w[:, None] * fit.U
        total = float(V.abs().sum())
        residuals["intercept"] = float(V.sum(0).abs().max()) / total if total > 0 else 0.0
    return residuals

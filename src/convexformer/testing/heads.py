"""The contract of a head, and weak duality along a solve."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from convexformer.certificates import Certificate, certificate
from convexformer.gauges import Proximal
from convexformer.heads.base import Head, Layout
from convexformer.losses import Loss
from convexformer.networks.base import Network
from convexformer.problem import Problem
from convexformer.solution import Solution
from convexformer.solvers.status import Record
from convexformer.solving import certify, solve
from convexformer.testing.gauges import inside
from convexformer.testing.operators import check_operator
from convexformer.testing.tools import at_most, equal, normals, require
from convexformer.weights import Weights

MakeNetwork = Callable[[Layout, int], Network]


def check_head(
    head: Head,
    X: Any,
    Y: Any,
    *,
    loss: str | Loss = "auto",
    mask: Any = None,
    sample_weight: Any = None,
    intercept: bool = False,
    make_network: MakeNetwork | None = None,
    seed: int = 0,
) -> None:
    """Operator, ``beta_max``, recovery and lift of a head, and the certificates of its networks.

    ``make_network(layout, seed)`` returns any network of the head, a random one say; with it the lift is checked
    not to raise the objective, and the certified gap not to be below the true one.
    """
    options: dict[str, Any] = {"loss": loss, "mask": mask, "sample_weight": sample_weight, "intercept": intercept}
    problem = Problem(head, X, Y, beta_ratio=0.3, **options)
    check_operator(problem.operator, seed)
    draw = normals(seed)
    Z = inside(problem.penalty, draw(problem.operator.weight_shape))
    b = draw((problem.layout.n_outputs,)) if intercept else None
    solution = solve(problem, tolerance=1e-7)
    penalty = problem.penalty
    sparse = penalty.prox(Z, 1.0) if isinstance(penalty, Proximal) and penalty.proximal else 0.5 * Z
    for weights in (Weights(0 * Z, b), Weights(Z, b), Weights(sparse, b), solution.weights):
        _check_recovery(problem, weights, X, mask)
    equal(
        "predict(X) and A Z + b",
        _rows(problem, solution.predict(X, mask)),
        problem.objective.outputs(solution.weights),
        1e-9,
    )
    if solution.certificate.kind == "none":
        return
    require(solution.certificate.meets(1e-6), f"not solved to 1e-6: {solution.certificate}")
    if problem.penalty.sparse:
        _check_beta_max(problem)
    if make_network is not None:
        for trial in range(3):
            _check_network(problem, make_network(problem.layout, seed + trial), solution, X, mask)


def check_weak_duality(problem: Problem, tolerance: float = 1e-6) -> Solution:
    """Solve, and assert at every gap check that the certificate encloses the optimum; return the solution."""
    seen: list[tuple[Record, Weights]] = []
    solution = solve(problem, tolerance=tolerance, callback=lambda record, weights: seen.append((record, weights)))
    objective = problem.objective
    slack = 1e-9 if objective.reference() is objective else 1e-4
    best = min(record.primal for record, _ in seen)
    require(len(seen) > 0, "the solver showed no point")
    for record, weights in seen:
        where = f"at iteration {record.iteration}: "
        proof = certificate(objective, weights)
        allowed = slack * (abs(best) + abs(record.primal))
        at_most(where + "dual of the history against the best primal", record.dual, best, allowed)
        equal(where + "primal of the history and of the certificate", record.primal, proof.primal, allowed)
        _encloses(proof, solution.certificate, where)
    return solution


def _check_recovery(problem: Problem, weights: Weights, X: Any, mask: Any) -> None:
    """The recovered network has the same outputs and objective, and lifts to the weights it came from."""
    network = problem.head.recover(weights, problem.layout)
    outputs, expected = _rows(problem, network(X, mask).detach()), problem.objective.outputs(weights)
    size = 1 + float(expected.abs().max())
    equal("outputs of the recovered network and A Z + b", outputs, expected, 1e-8 * size)
    value = float(problem.penalty.value(weights.Z))
    equal("decay() of the recovered network and g(Z)", network.decay(), value, 1e-8 * (1 + value))
    objective = problem.value(weights)
    proof = certify(network, problem)
    equal("primal of the recovered network and the objective of Z", proof.primal, objective, 1e-8 * abs(objective))
    back = problem.head.lift(network, problem.layout)
    Z = weights.dense()
    equal("lift(recover(Z)) and Z", back.dense(), Z, 1e-9 * (1 + float(Z.abs().max())))
    if weights.intercept is not None:
        require(back.intercept is not None, "the recovered network lost the intercept")
        equal("intercept of the lift and of the weights", back.intercept, weights.intercept, 1e-12 * size)


def _check_beta_max(problem: Problem) -> None:
    """``Z = 0`` is optimal and certified at ``beta_max``, and not optimal slightly below it."""
    top = problem.beta_max
    require(top > 0, f"beta_max is {top}: these targets leave nothing to learn, so beta_max cannot be checked")
    zero = problem.operator.zeros()
    weights = Weights(zero, problem.objective.zero_evaluation().intercept)
    proof = certificate(problem.objective.at(top), weights)
    at_most("relative gap of Z = 0 at beta_max against zero", proof.relative_gap, 0.0, 1e-9)
    below = solve(problem.with_beta(0.98 * top), tolerance=1e-7)
    require(float(below.dense().norm()) > 0, f"Z = 0 still at 0.98 beta_max = {0.98 * top}: beta_max is too large")
    require(below.objective < proof.primal, f"objective {below.objective} below beta_max, {proof.primal} at Z = 0")


def _check_network(problem: Problem, network: Network, solution: Solution, X: Any, mask: Any) -> None:
    """Outputs of network and lift agree; the lift costs no more; the certificate encloses the optimum."""
    lifted = problem.head.lift(network, problem.layout)
    outputs, expected = _rows(problem, network(X, mask).detach()), problem.objective.outputs(lifted)
    equal("outputs of the network and of its lift", outputs, expected, 1e-8 * (1 + float(expected.abs().max())))
    values = problem.loss.value(outputs, problem.objective.targets)
    data = float((problem.objective.sample_weight * values).sum())
    own = data + problem.beta * float(network.decay().detach())
    at_most("objective of the lift against that of the network", problem.value(lifted), own, 1e-9 * abs(own))
    proof = certify(network, problem)
    equal("primal of the certificate and loss + beta decay()", proof.primal, own, 1e-9 * abs(own))
    _encloses(proof, solution.certificate, "for a random network: ")


def _encloses(proof: Certificate, tight: Certificate, where: str) -> None:
    """``dual <= p* <= primal``, with ``p*`` known from a tight certificate."""
    allowed = 1e-9 * (abs(proof.primal) + abs(tight.primal))
    at_most(where + "dual against the objective of the solution", proof.dual, tight.primal, allowed)
    at_most(where + "dual of the solution against the primal", tight.dual, proof.primal, allowed)
    at_most(where + "true gap against the certified gap", proof.primal - tight.primal, proof.gap, allowed)


def _rows(problem: Problem, outputs: Tensor) -> Tensor:
    """Outputs in the shape of the targets, as the rows ``(R, c)`` of the loss."""
    if problem.layout.per_token:
        mask = problem.tokens.mask
        return outputs.flatten(0, 1) if mask is None else outputs[mask]
    return outputs.reshape(problem.objective.targets.shape)

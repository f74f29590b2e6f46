"""Local descent on the nonconvex objective of a ReLU network."""

from __future__ import annotations

import torch

from convexformer.networks.base import Network
from convexformer.operators import NeuronOperator, Neurons
from convexformer.problem import Problem
from convexformer.solvers.column_generation import descend
from convexformer.weights import Weights


def polish(network: Network, problem: Problem, steps: int = 500) -> Network:
    """Return the network after L-BFGS on ``loss + beta decay()``, all neurons at once; the objective does not rise.

    For networks that SGD trained, or that :func:`~convexformer.relu.from_gated` made. ``convexformer.certify`` says
    how far from the optimum the result is; ``solve(problem, warm_start=network)`` goes on with new neurons.
    """
    objective = problem.objective
    if not isinstance(objective.operator, NeuronOperator):
        raise ValueError(f"polish works on exact ReLU heads; the problem's head is {problem.head!r}.")
    start = problem.head.lift(network, problem.layout)
    Z = start.Z
    assert isinstance(Z, Neurons)
    with torch.no_grad():
        neurons, at = descend(objective, Z.to(dtype=objective.like.dtype), start.intercept, steps)
        polished = Weights(neurons, at.intercept)
        better = objective.value(polished) < objective.value(start)
    return problem.head.recover(polished if better else start, problem.layout)

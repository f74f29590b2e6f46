"""The baseline: the ordinary network, trained by Adam from a random start."""

from __future__ import annotations

import torch
from torch import Tensor

from convexformer.data import TokenDataset
from convexformer.networks import train_in_simplex
from convexformer.networks.base import Network
from convexformer.networks.simplex import SimplexNetwork
from convexformer.problem import Problem
from convexformer.threads import few_threads


def train_adam(
    problem: Problem, network: Network, steps: int = 1000, learning_rate: float = 0.02
) -> tuple[Network, list[float]]:
    """Full-batch Adam on ``loss + beta * decay()``; return the network and the objective at every step.

    Attention weights are the softmax of free parameters, so every step is a point of the nonconvex problem.
    """
    if isinstance(network, SimplexNetwork):
        network = train_in_simplex(network)
    optimiser = torch.optim.Adam(network.parameters(), lr=learning_rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    objectives = []
    with few_threads(_tokens(problem).X, problem.layout.n_outputs):
        for _ in range(steps):
            optimiser.zero_grad()
            objective = network_objective(problem, network)
            objective.backward()
            optimiser.step()
            schedule.step()
            objectives.append(float(objective.detach()))
    return network, objectives


def network_objective(problem: Problem, network: Network) -> Tensor:
    """``sum_i w_i L(f(X_i), y_i) + beta * decay()``, differentiable."""
    objective = problem.objective
    tokens = _tokens(problem)
    outputs = network(tokens.X, tokens.mask).reshape(objective.targets.shape)
    losses = objective.loss.value(outputs, objective.targets)
    return objective.rows.dot(objective.sample_weight, losses) + problem.beta * network.decay()


def _tokens(problem: Problem) -> TokenDataset:
    """Return the tokens, which full-batch training needs in memory."""
    return TokenDataset.of(problem.tokens, dtype=problem.tokens.dtype)

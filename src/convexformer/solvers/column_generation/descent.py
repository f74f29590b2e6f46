"""Local descent on ReLU neurons: the nonconvex objective, smooth on each face of the arrangement."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import cast, final

import numpy as np
import torch
from scipy.optimize import minimize
from torch import Tensor

from convexformer.gauges import NeuronOracle
from convexformer.objective import Evaluation, Objective
from convexformer.operators import Neurons
from convexformer.solvers.monitor import TimeUp

Closure = Callable[[np.ndarray], tuple[float, np.ndarray]]


def descend(
    objective: Objective,
    neurons: Neurons,
    intercept: Tensor | None,
    steps: int,
    *,
    projectors: Tensor | None = None,
    precision: float = 0.0,
) -> tuple[Neurons, Evaluation]:
    """L-BFGS on ``F(sum_j relu(rows u_j) v_j^T) + beta/2 sum_j (|u_j|^2 + |v_j|^2)`` from these neurons.

    ``projectors: (m, p, p)`` hold each ``u_j`` in a subspace, a face of the cells on which ReLU has a kink; gradients are
    projected, so that the iterates stay there. With an l1 norm of output weights each neuron keeps its one output. It ends
    where a step lowers the objective by less than ``precision``, relatively, or when the time is up.
    """
    oracle = cast(NeuronOracle, objective.penalty)
    neurons = neurons.balanced(oracle.output_norms(neurons.V))
    mask = (neurons.V != 0).to(neurons.V) if oracle.outer == "l1" else None
    m, p, size = neurons.n_terms, neurons.U.shape[1], neurons.U.numel()
    b, seen = intercept, _Seen()

    def unpack(x: np.ndarray) -> Neurons:
        numbers = torch.from_numpy(x).to(neurons.U)
        return neurons.with_factors(numbers[:size].view(m, p), numbers[size:].view(m, -1))

    def closure(x: np.ndarray) -> tuple[float, np.ndarray]:
        nonlocal b
        Z = unpack(x)
        at = objective.evaluate(objective.apply(Z), b)
        b = at.intercept
        seen.take(objective, Z, at)
        GU, GV = objective.factor_gradients(at.V, Z)
        GU, GV = GU + objective.beta * Z.U, GV + objective.beta * Z.V
        if projectors is not None:
            GU = torch.einsum("mpq,mq->mp", projectors, GU)
        if mask is not None:
            GV = GV * mask
        value = float(at.value) + 0.5 * objective.beta * float(Z.U.square().sum() + Z.V.square().sum())
        return value, torch.cat([GU.flatten(), GV.flatten()]).double().cpu().numpy()

    def run() -> tuple[Neurons, Evaluation]:
        start = torch.cat([neurons.U.flatten(), neurons.V.flatten()]).double().cpu().numpy()
        found = unpack(_lbfgs(closure, start, steps, precision)) if m else neurons
        return found, objective.evaluate(objective.apply(found), b)

    return seen.or_(run)


def reweigh(
    objective: Objective, neurons: Neurons, intercept: Tensor | None, steps: int, precision: float = 0.0
) -> tuple[Neurons, Evaluation]:
    """Choose the weights ``t_j >= 0`` of fixed directions: ``min_t F(sum_j t_j a_j) + beta sum_j t_j |a_j|``, convex."""
    oracle = cast(NeuronOracle, objective.penalty)
    sizes = (neurons.U.norm(dim=1) * oracle.output_norms(neurons.V)).double().cpu().numpy()
    b, seen = intercept, _Seen()

    def closure(t: np.ndarray) -> tuple[float, np.ndarray]:
        nonlocal b
        Z = neurons.with_factors(neurons.U, torch.from_numpy(t).to(neurons.V)[:, None] * neurons.V)
        at = objective.evaluate(objective.apply(Z), b)
        b = at.intercept
        seen.take(objective, Z, at)
        _, GV = objective.factor_gradients(at.V, neurons)
        gradient = (GV * neurons.V).sum(1).double().cpu().numpy() + objective.beta * sizes
        return float(at.value) + objective.beta * float(sizes @ t), gradient

    def run() -> tuple[Neurons, Evaluation]:
        if not neurons.n_terms:
            return neurons, objective.evaluate(objective.apply(neurons), b)
        t = _lbfgs(closure, np.ones(neurons.n_terms), steps, precision, bounds=[(0.0, None)] * neurons.n_terms)
        kept = torch.from_numpy(t > 0).to(neurons.U.device)
        scaled = neurons.with_factors(neurons.U, torch.from_numpy(t).to(neurons.V)[:, None] * neurons.V).select(kept)
        return scaled, objective.evaluate(objective.apply(scaled), b)

    return seen.or_(run)


def value_of(objective: Objective, neurons: Neurons, at: Evaluation) -> float:
    """Return the objective at neurons whose loss is ``at``."""
    return float(at.value) + objective.beta * float(objective.penalty.value(neurons))


def _lbfgs(
    closure: Closure,
    start: np.ndarray,
    steps: int,
    precision: float,
    bounds: list[tuple[float, None]] | None = None,
) -> np.ndarray:
    options = {"maxiter": steps, "maxfun": 2 * steps, "ftol": max(1e-16, precision), "gtol": 1e-12, "maxcor": 20}
    return np.asarray(minimize(closure, start, jac=True, method="L-BFGS-B", bounds=bounds, options=options).x)


@final
class _Seen:
    """The best neurons that a descent has evaluated: what it comes to where the time is up on the way."""

    def __init__(self) -> None:
        self._value = math.inf
        self._best: tuple[Neurons, Evaluation] | None = None

    def take(self, objective: Objective, neurons: Neurons, at: Evaluation) -> None:
        """Look at neurons."""
        value = value_of(objective, neurons, at)
        if value < self._value:
            self._value, self._best = value, (neurons, at)

    def or_(self, run: Callable[[], tuple[Neurons, Evaluation]]) -> tuple[Neurons, Evaluation]:
        """Return what ``run`` does; where the time is up, the best so far."""
        try:
            return run()
        except TimeUp:
            if self._best is None:
                raise
            return self._best

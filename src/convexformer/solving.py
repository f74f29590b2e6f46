"""The public functions ``solve``, ``certify`` and ``lift``."""

from __future__ import annotations

import os
from contextlib import nullcontext
from typing import Any

import torch
from sklearn.exceptions import ConvergenceWarning
from torch import Tensor, nn

from convexformer.certificates import Certificate, certificate, certificate_at
from convexformer.clock import Clock
from convexformer.data.tokens import check_finite
from convexformer.networks.base import Network
from convexformer.problem import Problem
from convexformer.progress import GapBar
from convexformer.registry import ZeroSolutionWarning, warn
from convexformer.solution import Solution
from convexformer.solvers.checkpoint import Checkpoint
from convexformer.solvers.monitor import Callback, is_true
from convexformer.solvers.run import Result, check_limits, minimise, pick
from convexformer.solvers.status import Status
from convexformer.weights import Operand, Weights


def solve(
    problem: Problem,
    tolerance: float = 1e-4,
    solver: str = "auto",
    max_iter: int | None = None,
    max_time: float | None = None,
    warm_start: Any = None,
    callback: Callback | None = None,
    progress: bool = False,
    checkpoint: str | os.PathLike[str] | None = None,
) -> Solution:
    """Solve a problem to a relative duality gap of ``tolerance`` and certify the answer.

    Ctrl-C returns the best point so far, certified, with a warning.

    Parameters
    ----------
    problem : Problem
        What to solve.
    tolerance : float
        The relative duality gap at which to stop.
    solver : str
        ``"auto"``, or a name of ``convexformer.solvers.SOLVERS``; ``convexformer.solvers.explain(problem)`` says which
        one auto takes and why, and who takes over if it stalls. A solver asked for by name runs alone.
    max_iter, max_time : optional
        Limits on iterations (by default 100,000, or none where ``max_time`` is given) and on seconds. The time counts
        from this call on, with set-up, compilation and gap checks; at most one product with the operator and the last
        certificate come after it.
    warm_start : Solution, network of the same head, Weights or Tensor, optional
        Where to start.
    callback : callable, optional
        ``callback(record, weights)`` is called at every gap check and stops the solve by returning True.
    progress : bool
        Whether to show a progress bar.
    checkpoint : path, optional
        A file for the best point so far; a solve of the same problem that finds the file resumes from it.
    """
    clock = Clock(max_time)
    limits = check_limits(tolerance, max_iter, max_time)
    objective = problem.objective
    seen = warm_start.solver if isinstance(warm_start, Solution) else ""
    bar = GapBar(f"{problem.head.name}, beta {problem.beta:.3g}", tolerance) if progress else None
    with bar or nullcontext():
        picked = pick(solver, objective, seen, clock)  # fail before any work if the solver cannot handle this objective
        start = None if warm_start is None else _start(problem, warm_start)
        result = minimise(
            objective,
            limits,
            solver=solver,
            picked=picked,
            start=start,
            callback=None if callback is None else lambda record, weights: is_true(callback(record, weights)),
            bar=bar,
            checkpoint=None if checkpoint is None else Checkpoint(checkpoint, problem.fingerprint(), objective),
            clock=clock,
        )
    _warn_of_zero(problem, result)
    _warn_of_gap(result, limits.tolerance)
    return Solution(
        weights=result.weights,
        head=problem.head,
        layout=problem.layout,
        loss=problem.loss,
        beta=problem.beta,
        certificate=result.certificate,
        status=result.status,
        history=result.history,
        n_iter=result.n_iter,
        seconds=result.seconds,
        solver=result.solver,
    )


def certify(thing: Any, problem: Problem) -> Certificate:
    """Certify a solution, weights, or any network of the problem's head, however it was trained.

    For a network the primal is its own objective, ``loss + beta * decay()``; the dual comes from its outputs. A solution of
    another head, other gates or other sizes is an error.
    """
    if isinstance(thing, nn.Module):
        return _certify_network(thing, problem)
    weights = thing if isinstance(thing, Weights) else getattr(thing, "weights", None)
    if isinstance(weights, Weights):
        weights.check_compatible(problem.identity())
        return certificate(problem.objective, weights)
    raise TypeError(
        f"cannot certify a {type(thing).__name__}; expected a Solution, Weights, or a network from convexformer.networks."
    )


def lift(network: Network, problem: Problem | None = None) -> Weights:
    """Return the point of the convex program that a network maps to: same outputs, no larger objective.

    With ``problem`` the network is checked to belong to it, and the point is one of that problem's program.
    """
    if not isinstance(network, Network):
        raise TypeError(f"cannot lift a {type(network).__name__}; expected a network from convexformer.networks.")
    return network.lift() if problem is None else problem.head.lift(network, problem.layout)


def _certify_network(network: nn.Module, problem: Problem) -> Certificate:
    # the lift checks that this network belongs to the problem; outputs then agree by construction
    lifted = problem.head.lift(network, problem.layout)
    assert isinstance(network, Network)  # lift() has refused anything else
    objective = problem.objective.reference()
    weights = lifted.to(device=objective.targets.device, dtype=torch.float64)
    # decay() >= gauge of the lift, up to the tolerance with which w1 lies in the simplex
    penalty = max(float(network.decay().detach()), float(objective.penalty.value(weights.Z)))
    return certificate_at(objective, weights, penalty)


def _start(problem: Problem, warm_start: Any) -> Weights:
    """Convert a warm start to weights of this problem; raise if it does not fit."""
    if isinstance(warm_start, Solution):
        warm_start = warm_start.weights
    elif isinstance(warm_start, nn.Module):
        warm_start = problem.head.lift(warm_start, problem.layout)
    elif isinstance(warm_start, Tensor):
        warm_start = Weights(warm_start)
    if not isinstance(warm_start, Weights):
        raise TypeError(
            f"warm_start is a {type(warm_start).__name__}; expected a Solution, Weights, a network of the head, or Z itself."
        )
    warm_start.check_compatible(problem.identity())
    like, expected = problem.objective.like, problem.objective.weight_shape
    if warm_start.shape != expected:
        raise ValueError(f"warm_start has weights of shape {warm_start.shape}; this problem expects {expected}.")
    moved = warm_start.to(device=like.device, dtype=like.dtype)
    for tensor in moved.tensors().values():
        check_finite(tensor, "warm_start")
    return moved


def _warn_of_zero(problem: Problem, result: Result) -> None:
    """Warn if beta is above beta_max; only weights of zero can say so, and ``beta_max`` costs a product."""
    if not problem.penalty.sparse or result.status is Status.MAX_TIME or not _is_zero(problem, result.weights.Z):
        return
    if problem.beta <= problem.beta_max * (1 + 1e-9):
        return
    if problem.beta_max > 0:
        message = (
            f"beta={problem.beta:.4g} is above beta_max, about {problem.beta_max:.4g}, so every weight is zero. "
            "Use a smaller beta, for example beta_ratio=0.1."
        )
    else:
        message = (
            "beta_max is zero: the tokens are uncorrelated with the targets, so every weight is zero at any beta. "
            "Check for constant tokens or targets and, in float32, for tokens whose mean is far larger than their spread."
        )
    warn(message, ZeroSolutionWarning)


def _is_zero(problem: Problem, Z: Operand) -> bool:
    """Tell whether weights are zero to the penalty. A gauge is positive elsewhere: a tensor need only be looked at."""
    if isinstance(Z, Tensor) and bool(Z.any()) and not problem.penalty.of_data:
        return False
    return float(problem.penalty.value(Z)) <= 0


def _warn_of_gap(result: Result, tolerance: float) -> None:
    """Warn if the tolerance was not met, unless a callback stopped the solve (Ctrl-C does warn)."""
    if result.status is Status.CONVERGED or (result.status is Status.INTERRUPTED and result.asked):
        return
    reason = f"; {result.certificate.reason}" if result.certificate.reason else ""
    warn(
        f"{result.status} (after {result.n_iter} iterations the relative gap is {result.certificate.relative_gap:.2e}, "
        f"the tolerance {tolerance:.2e}{reason})",
        ConvergenceWarning,
    )

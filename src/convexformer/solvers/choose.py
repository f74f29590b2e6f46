"""The entry point: pick a solver, run it under a monitor, certify what it returns."""

from __future__ import annotations

import math
import numbers
import os
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from sklearn.exceptions import ConvergenceWarning
from torch import Tensor, nn

from convexformer.architecture import Weights
from convexformer.data.tokens import check_finite
from convexformer.operators import BilinearOperator, LowRank
from convexformer.problem import Problem
from convexformer.registry import ZeroSolutionWarning, one_of, warn
from convexformer.solution import Solution, Status
from convexformer.solvers.checkpoint import Checkpoint
from convexformer.solvers.fista import fista
from convexformer.solvers.monitor import Callback, Monitor
from convexformer.solvers.progress import GapBar
from convexformer.solvers.staircase import staircase
from convexformer.solvers.working_set import working_set
from convexformer.threads import few_threads

Solver = Callable[[Problem, Weights, Monitor], None]

SOLVERS: dict[str, Solver] = {"fista": fista, "staircase": staircase, "working_set": working_set}
MAX_ITER = 20_000
LARGE = 1 << 20  # samples times weights from which on working sets pay
SMALL = 1 << 11  # a dense Z of so many numbers is FISTA's; beyond, factors pay


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

    ``warm_start`` takes a solution or a network of the same head, or weights. ``callback(record, weights)`` is called at
    every gap check and stops the solve by returning True. ``checkpoint`` names a file that keeps the best point so far; a
    solve that finds it there goes on from it. Ctrl-C returns the best point so far, certified, with a warning.
    """
    _check_options(tolerance, max_iter, max_time)
    name = one_of("solver", solver, ("auto", *SOLVERS))
    name = _choose(problem) if name == "auto" else name
    if name == "staircase" and problem.penalty.factor_weight() is None:
        raise ValueError(
            f"solver='staircase' works on factors of a nuclear norm; the penalty of this {problem.head.name} head is "
            f"{problem.penalty!r}. Use solver='fista' or 'auto'."
        )
    if name == "working_set" and not _slices(problem):
        raise ValueError(
            f"solver='working_set' works on heads with weights of their own for each token position or each gate, such as "
            f"'attention' or a gated 'mlp'; this {problem.head.name} head has none. Use solver='auto'."
        )
    if problem.penalty.sparse and problem.beta > problem.beta_max * (1 + 1e-9):
        warn(_why_zero(problem), ZeroSolutionWarning)
    keeper = None if checkpoint is None else Checkpoint(checkpoint, problem)
    start = _start(problem, warm_start, factors=name == "staircase")
    first = 0
    if keeper is not None and (found := keeper.resume()) is not None:
        start, first = found
    bar = GapBar(f"{problem.head.name}, beta {problem.beta:.3g}", tolerance) if progress else None
    look = None if callback is None else lambda record, weights: is_true(callback(record, weights))
    monitor = Monitor(problem, tolerance, max_iter or MAX_ITER, max_time, look, bar, keeper)
    asked = True  # a callback that stops the solve needs no warning; Ctrl-C in a loop of solves does
    with bar or nullcontext(), torch.no_grad(), few_threads(problem.tokens.X, problem.layout.n_outputs):
        try:
            _run_in_its_precision(name, problem, start, monitor)
            if monitor.status is Status.STALLED and problem.reference() is not problem:
                _finish(name, problem, monitor)
        except KeyboardInterrupt:
            monitor.status, asked = Status.INTERRUPTED, False
            if not monitor.history:
                raise
        if keeper is not None:
            keeper.keep(monitor.best, monitor.iteration, now=True)
        proof = monitor.proof()
    if monitor.status is not Status.CONVERGED and not (monitor.status is Status.INTERRUPTED and asked):
        warn(
            f"{monitor.status} (after {monitor.iteration} iterations the relative gap is {proof.relative_gap:.2e}, "
            f"the tolerance {tolerance:.2e})",
            ConvergenceWarning,
        )
    return Solution(
        weights=monitor.best,
        head=problem.head,
        layout=problem.layout,
        loss=problem.loss,
        beta=problem.beta,
        certificate=proof,
        status=monitor.status,
        history=tuple(monitor.history),
        n_iter=first + monitor.iteration,
        seconds=monitor.seconds,
        solver=name,
    )


def is_true(answer: object) -> bool:
    """Tell whether a callback's answer is True, be it Python's, NumPy's or torch's; anything else lets a solve go on."""
    if isinstance(answer, Tensor) and answer.dtype == torch.bool and answer.numel() == 1:
        return bool(answer)
    return isinstance(answer, (bool, np.bool_)) and bool(answer)


def _run(name: str, problem: Problem, start: Weights, monitor: Monitor) -> None:
    """Give the solver the problem in the form that suits it."""
    inner = {"fista": problem.compressed, "staircase": problem.factored}.get(name, lambda: problem)()
    monitor.watch(inner, problem)
    SOLVERS[name](inner, start, monitor)


def _run_in_its_precision(name: str, problem: Problem, start: Weights, monitor: Monitor) -> None:
    """Run; where float32 overflows so badly that a decomposition fails, that precision has given out."""
    try:
        _run(name, problem, start, monitor)
    except torch.linalg.LinAlgError:
        if problem.reference() is problem or not monitor.history:
            raise
        monitor.stall()


def _finish(name: str, problem: Problem, monitor: Monitor) -> None:
    """Go on in float64 from where float32 gave out, if there is memory for it."""
    exact = problem.reference()
    try:
        start = monitor.best.to(dtype=torch.float64)
        _run(name, exact, start, monitor)
    except torch.OutOfMemoryError:
        monitor.status = Status.STALLED


def _choose(problem: Problem) -> str:
    """Working sets for tokens, factors for large matrices (and on a GPU, where thresholding is slow), FISTA for the rest."""
    A = problem.operator
    if not A.like.is_cuda and _slices(problem) and A.output_shape[0] * math.prod(A.weight_shape) > LARGE:
        return "working_set"
    if problem.penalty.factor_weight() is None:
        return "fista"
    if isinstance(A, BilinearOperator):
        return "staircase" if A.size > SMALL else "fista"
    return "staircase" if A.like.is_cuda and min(A.weight_shape[-2:]) > 16 else "fista"


def _slices(problem: Problem) -> bool:
    """Tell whether the weights come in slices of tokens, and the penalty is a sum over them."""
    if problem.operator.token_features() is None:
        return False
    shape = problem.operator.weight_shape
    return problem.penalty.slice_polars(problem.operator.like.new_zeros(shape)) is not None


def _why_zero(problem: Problem) -> str:
    if problem.beta_max > 0:
        return (
            f"beta={problem.beta:.4g} is above beta_max={problem.beta_max:.4g}: every weight is zero. "
            "Use a smaller beta, for example beta_ratio=0.1."
        )
    return (
        "beta_max is zero: the tokens say nothing about the targets, and every weight is zero at any beta. "
        "Look for constant tokens or targets."
    )


def _start(problem: Problem, warm_start: Any, *, factors: bool) -> Weights:
    """Turn whatever the user has into weights of this problem, as factors or as one tensor."""
    if warm_start is None:
        A = problem.operator
        return Weights(LowRank.zeros(A.weight_shape, A.like) if factors else A.zeros())
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
    warm_start.check_home(problem.head, problem.layout)
    like, expected = problem.operator.like, problem.operator.weight_shape
    if tuple(warm_start.Z.shape) != tuple(expected):
        raise ValueError(
            f"warm_start has weights of shape {tuple(warm_start.Z.shape)}; this problem expects {tuple(expected)}."
        )
    moved = warm_start.to(device=like.device, dtype=like.dtype)
    for tensor in moved.tensors().values():
        check_finite(tensor, "warm_start")
    Z = moved.Z
    if isinstance(Z, LowRank) and not factors:
        Z = Z.dense()
    elif isinstance(Z, Tensor) and factors:
        Z = LowRank.of(Z)
    return Weights(Z, moved.intercept if problem.intercept else None)


def _check_options(tolerance: float, max_iter: int | None, max_time: float | None) -> None:
    if not isinstance(tolerance, numbers.Real) or not (math.isfinite(tolerance) and tolerance > 0):
        raise ValueError(f"tolerance={tolerance} was given; expected a positive relative duality gap such as 1e-4.")
    if max_iter is not None and (not isinstance(max_iter, numbers.Integral) or max_iter < 1):
        raise ValueError(f"max_iter={max_iter} was given; expected a positive whole number or None.")
    if max_time is not None and not max_time > 0:
        raise ValueError(f"max_time={max_time} was given; expected positive seconds or None.")

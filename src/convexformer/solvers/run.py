"""A solve in its steps: run the solver in the form and precision that suit it, go on in float64, certify."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass
from typing import final

import torch

from convexformer.certificates import Certificate
from convexformer.objective import Objective
from convexformer.operators import LowRank
from convexformer.progress import GapBar
from convexformer.registry import one_of
from convexformer.solvers.auto import SOLVERS, select, solver_for
from convexformer.solvers.base import Solver
from convexformer.solvers.checkpoint import Checkpoint
from convexformer.solvers.monitor import Callback, Monitor
from convexformer.solvers.status import Record, Status
from convexformer.threads import few_threads
from convexformer.weights import Weights

MAX_ITER = 20_000


@final
@dataclass(frozen=True)
class Result:
    """What came of a solve of an objective."""

    weights: Weights
    certificate: Certificate
    status: Status
    history: tuple[Record, ...]
    n_iter: int
    seconds: float
    solver: str
    asked: bool
    """Whether a callback ended it, rather than Ctrl-C, where the status says that it was interrupted."""


@final
@dataclass(frozen=True)
class Limits:
    """When a solve ends at the latest."""

    tolerance: float = 1e-4
    max_iter: int | None = None
    max_time: float | None = None


def minimise(
    objective: Objective,
    limits: Limits = Limits(),  # noqa: B008  (frozen)
    *,
    solver: str = "auto",
    start: Weights | None = None,
    callback: Callback | None = None,
    bar: GapBar | None = None,
    checkpoint: Checkpoint | None = None,
) -> Result:
    """Minimise an objective to a relative duality gap of ``limits.tolerance`` and certify the answer."""
    chosen = pick(solver, objective)
    first = 0
    if checkpoint is not None and (found := checkpoint.resume()) is not None:
        start, first = found
    monitor = Monitor(
        objective, limits.tolerance, limits.max_iter or MAX_ITER, limits.max_time, callback, bar, checkpoint
    )
    asked = True
    work = objective.operator.data_size * objective.n_outputs
    with bar or nullcontext(), torch.no_grad(), few_threads(objective.like, work):
        try:
            _run(chosen, objective, _formed(chosen, objective, start), monitor)
            if monitor.status is Status.STALLED and objective.like.dtype != torch.float64:
                _finish_in_double(chosen, objective, monitor)
        except KeyboardInterrupt:
            monitor.status, asked = Status.INTERRUPTED, False
            if not monitor.history:
                raise
        if checkpoint is not None:
            checkpoint.keep(monitor.best, monitor.iteration, now=True)
        proof = monitor.proof()
    history, n_iter = tuple(monitor.history), first + monitor.iteration
    return Result(monitor.best, proof, monitor.status, history, n_iter, monitor.seconds, chosen.name, asked)


def pick(name: str, objective: Objective) -> Solver:
    """Return the solver of that name, ``"auto"`` by the table; raise where it does not serve the objective."""
    one_of("solver", name, ("auto", *SOLVERS))
    return solver_for(select(objective) if name == "auto" else name, objective)


def _formed(solver: Solver, objective: Objective, start: Weights | None) -> Weights:
    """Return the start in the solver's form: low-rank factors, or one tensor; zero where none is given."""
    like = objective.like
    if start is None:
        shape = objective.weight_shape
        return Weights(LowRank.zeros(shape, like) if solver.uses_factors else objective.operator.zeros())
    Z = start.to(device=like.device, dtype=like.dtype).Z
    b = start.intercept if objective.intercept else None
    if isinstance(Z, LowRank):
        return Weights(Z if solver.uses_factors else Z.dense(), b)
    return Weights(LowRank.of(Z) if solver.uses_factors else Z, b)


def _run(solver: Solver, objective: Objective, start: Weights, monitor: Monitor) -> None:
    """Run the solver on the form that suits it; a decomposition that fails in float32 means that it has stalled."""
    suited = solver.prepare(objective)
    monitor.watch(suited, objective)
    try:
        solver.solve(suited, start, monitor)
    except torch.linalg.LinAlgError:
        if objective.like.dtype == torch.float64 or not monitor.history:
            raise
        monitor.stall()


def _finish_in_double(solver: Solver, objective: Objective, monitor: Monitor) -> None:
    """Go on in float64 from where float32 gave out, if there is memory for it."""
    try:
        exact = objective.reference()
        _run(solver, exact, monitor.best.to(dtype=torch.float64), monitor)
    except torch.OutOfMemoryError:
        monitor.status = Status.STALLED


def check_limits(tolerance: float, max_iter: int | None, max_time: float | None) -> Limits:
    """Raise unless the limits make sense."""
    if not isinstance(tolerance, (int, float)) or not (math.isfinite(tolerance) and tolerance > 0):
        raise ValueError(f"tolerance={tolerance} was given; expected a positive relative duality gap such as 1e-4.")
    if max_iter is not None and (not hasattr(max_iter, "__index__") or max_iter < 1):
        raise ValueError(f"max_iter={max_iter} was given; expected a positive whole number or None.")
    if max_time is not None and not max_time > 0:
        raise ValueError(f"max_time={max_time} was given; expected positive seconds or None.")
    return Limits(float(tolerance), max_iter, max_time)

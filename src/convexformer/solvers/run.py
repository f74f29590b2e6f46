"""A solve in its steps: run the solver in the form and precision that suit it, go on in float64, hand over, certify."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import final

import torch

from convexformer.certificates import Certificate
from convexformer.clock import Clock
from convexformer.jit import compile_in_time
from convexformer.objective import Objective
from convexformer.operators import LowRank, NeuronOperator, Neurons
from convexformer.progress import GapBar
from convexformer.registry import one_of
from convexformer.solvers.auto import SOLVERS, resumed, select, solver_for, successors, turn_of
from convexformer.solvers.base import Solver
from convexformer.solvers.checkpoint import Checkpoint
from convexformer.solvers.monitor import FASTER_ELSEWHERE, Callback, Monitor, TimeUp, timed
from convexformer.solvers.status import Record, Status
from convexformer.solvers.turn import Turn
from convexformer.threads import few_threads
from convexformer.weights import Weights

MAX_ITER = 100_000
"""Iterations after which a solve without limits of its own ends; with ``max_time`` alone, time decides."""
ROUNDING = 1e-10  # a float64 solve that stalls below this relative gap has met rounding, which no other solver escapes


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
    """The solvers that were at work, in their order: ``"fista"``, or ``"working_set, fista"`` after a stall."""
    asked: bool
    """Whether a callback ended it, rather than Ctrl-C, where the status says that it was interrupted."""


@final
@dataclass(frozen=True)
class Limits:
    """When a solve ends at the latest."""

    tolerance: float = 1e-4
    max_iter: int | None = None
    max_time: float | None = None

    @property
    def iterations(self) -> int:
        """Iterations at most: those asked for; without them as many as the time allows, or ``MAX_ITER``."""
        return self.max_iter or (MAX_ITER if self.max_time is None else sys.maxsize)


def minimise(
    objective: Objective,
    limits: Limits = Limits(),
    *,
    solver: str = "auto",
    picked: Solver | None = None,
    start: Weights | None = None,
    callback: Callback | None = None,
    bar: GapBar | None = None,
    checkpoint: Checkpoint | None = None,
    clock: Clock | None = None,
) -> Result:
    """Minimise an objective to a relative duality gap of ``limits.tolerance`` and certify the answer.

    ``clock`` is that of a call that began earlier; by default the time starts here. With ``solver="auto"`` a solver that
    stalls hands over, see :func:`~convexformer.solvers.auto.successors`; one asked for by name runs alone. ``picked`` is
    what :func:`pick` has said, where it was asked before.
    """
    clock = Clock(limits.max_time) if clock is None else clock
    chosen = picked or pick(solver, objective, clock=clock)
    line = [chosen, *(successors(chosen.name, objective) if solver == "auto" else ())]
    first = 0
    if checkpoint is not None and (found := checkpoint.resume()) is not None:
        start, first = found
    monitor = Monitor(objective, limits.tolerance, limits.iterations, clock, callback, bar, checkpoint)
    asked = True
    work = objective.operator.data_size * objective.n_outputs
    with torch.no_grad(), few_threads(objective.like, work):
        try:
            if not objective.like.is_cuda:  # where the time is up before this is done, plain code certifies the start
                compile_in_time({**objective.loss.kernels, **chosen.kernels(objective)}, lambda: clock.late)
            _run_line(line, objective, start, monitor, turn_of(line, objective) if solver == "auto" else None)
        except KeyboardInterrupt:
            asked = False
            if not monitor.history:
                raise
            monitor.interrupt()
        if checkpoint is not None:
            checkpoint.keep(monitor.best, monitor.iteration, now=True)
        proof = monitor.proof()
    history, n_iter = tuple(monitor.history), first + monitor.iteration
    seen = ", ".join(dict.fromkeys(record.solver for record in history))
    return Result(monitor.best, proof, monitor.status, history, n_iter, monitor.seconds, seen, asked)


def _run_line(
    line: list[Solver], objective: Objective, start: Weights | None, monitor: Monitor, turn: Turn | None
) -> None:
    """Run the first solver of the line and, where it stalls or its turn is over, the others, from the best point so far.

    A stall in float32 is first one of precision: the same solver goes on in float64, if there is memory for it. A solver
    whose turn was over has not stalled: it is asked again where those after it do.
    """
    line = list(line)
    for k, solver in enumerate(line):
        last = k + 1 == len(line)
        _run(solver, objective, start, monitor, last=last, turn=turn if k == 0 else None)
        if monitor.turn_over:
            start = monitor.best
            line.append(solver)
            continue
        if monitor.status is Status.STALLED and objective.like.dtype != torch.float64:
            try:
                objective = objective.reference()
                _run(solver, objective, monitor.best, monitor, last=last)
            except torch.OutOfMemoryError:
                monitor.stall()
                return
        if monitor.status is not Status.STALLED or monitor.best_gap <= ROUNDING:
            return
        start = monitor.best


def pick(name: str, objective: Objective, seen: str = "", clock: Clock | None = None) -> Solver:
    """Return the solver of that name, ``"auto"`` by the table; raise where it does not serve the objective.

    ``seen`` are the solvers behind the solution that the solve starts from. Where the time of ``clock`` is up before the
    table has its numbers, any solver that serves will do.
    """
    one_of("solver", name, ("auto", *SOLVERS))
    if name != "auto":
        return solver_for(name, objective)
    try:
        found = select(objective if clock is None else timed(objective, clock))
    except TimeUp:
        return next(each for each in SOLVERS.values() if each.requires(objective) is None)
    return resumed(solver_for(found, objective), objective, seen)


def _formed(solver: Solver, objective: Objective, start: Weights | None) -> Weights:
    """Return the start in the solver's form: low-rank factors, or one tensor; zero where none is given."""
    like = objective.like
    if isinstance(objective.operator, NeuronOperator):
        if start is not None and not isinstance(start.form, Neurons):
            raise TypeError("an exact ReLU head starts from neurons: pass a solution or a network of it as warm_start.")
        return Weights(Neurons.none(objective.weight_shape, like)) if start is None else start.to(dtype=like.dtype)
    if start is None:
        shape = objective.weight_shape
        return Weights(LowRank.zeros(shape, like) if solver.uses_factors else objective.operator.zeros())
    Z = start.to(device=like.device, dtype=like.dtype).Z
    assert not isinstance(Z, Neurons)  # neurons belong to the operators above
    b = start.intercept if objective.intercept else None
    if isinstance(Z, LowRank):
        return Weights(Z if solver.uses_factors else Z.dense(), b)
    return Weights(LowRank.of(Z) if solver.uses_factors else Z, b)


def _run(
    solver: Solver,
    objective: Objective,
    start: Weights | None,
    monitor: Monitor,
    *,
    last: bool,
    turn: Turn | None = None,
) -> None:
    """Run one solver on the form of the objective that suits it, until it is done, stalls, or the time is up.

    A decomposition that fails is a stall where there is something to go on with: another precision, another solver.
    """
    formed = _formed(solver, objective, start)
    suited = monitor.watched(solver.prepare(objective))
    least = 0.0 if last else FASTER_ELSEWHERE
    monitor.watch(suited, objective, solver.name, patience=solver.patience, least_gain=least, turn=turn)
    monitor.hold(formed.Z, None, formed.intercept)
    try:
        solver.solve(suited, formed, monitor)
    except TimeUp:
        monitor.end()
    except torch.linalg.LinAlgError:
        if (last and objective.like.dtype == torch.float64) or not monitor.history:
            raise
        monitor.stall()


def check_limits(tolerance: float, max_iter: int | None, max_time: float | None) -> Limits:
    """Raise unless the limits make sense."""
    if not isinstance(tolerance, (int, float)) or not (math.isfinite(tolerance) and tolerance > 0):
        raise ValueError(f"tolerance={tolerance} was given; expected a positive relative duality gap such as 1e-4.")
    if max_iter is not None and (not hasattr(max_iter, "__index__") or max_iter < 1):
        raise ValueError(f"max_iter={max_iter} was given; expected a positive whole number or None.")
    if max_time is not None and not max_time > 0:
        raise ValueError(f"max_time={max_time} was given; expected positive seconds or None.")
    return Limits(float(tolerance), max_iter, max_time)

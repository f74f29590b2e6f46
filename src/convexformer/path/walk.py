"""Regularisation paths: a family of certified solutions from ``beta_max`` down, each started from the last."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch
from rich.console import Console
from torch import Tensor

from convexformer.clock import Clock
from convexformer.heads.base import Head
from convexformer.html import table
from convexformer.path.storage import StoredSolutions, active_tokens
from convexformer.problem import Problem
from convexformer.progress import spinner, step_bar
from convexformer.registry import unknown
from convexformer.solution import Solution
from convexformer.solvers.monitor import is_true
from convexformer.solvers.status import Record, Status
from convexformer.solving import solve
from convexformer.weights import Weights

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PROBLEM_OPTIONS = tuple(inspect.signature(Problem).parameters)[3:]  # after head, X, Y
SOLVER_OPTIONS = tuple(inspect.signature(solve).parameters)[1:]  # after problem
DEFAULT_TOLERANCE: float = inspect.signature(solve).parameters["tolerance"].default
# glmnet's rule for stopping early
SATURATED = 0.999  # stop when this fraction of the loss at Z = 0 is explained,
SMALL_GAIN = 1e-5  # or when the last beta explains less than this fraction more,
FIRST_STOP = 5  # but not before this many betas


@final
@dataclass(frozen=True)
class Path:
    """Solutions along ``betas``, from the largest to the smallest.

    ``solutions`` behaves like a tuple; weights are kept without their zero groups and made dense when one is asked for.
    ``stopped`` says why the path ended early (``"interrupted"``, ``"saturated"``, ``"time"``), and is empty when it did not.

    Attributes
    ----------
    betas : tuple of float
        From the largest to the smallest.
    beta_max : float
        The smallest beta at which ``Z = 0`` is optimal.
    solutions : sequence of Solution
        One a beta.
    losses : tuple of float
        The loss at each beta, without the penalty.
    tolerance : float, optional
        The relative gap asked for.
    stopped : {"", "interrupted", "saturated", "time"}
        Why the path ended early.
    zero_loss : float, optional
        The loss at ``Z = 0``.
    """

    betas: tuple[float, ...]
    beta_max: float
    solutions: Sequence[Solution]
    losses: tuple[float, ...] = ()
    """The loss at each beta, without the penalty."""
    tolerance: float | None = None
    stopped: str = ""
    zero_loss: float | None = None
    """The loss at ``Z = 0``, with the best intercept; None for that at the first beta."""

    def __post_init__(self) -> None:
        if not isinstance(self.solutions, StoredSolutions):
            object.__setattr__(self, "solutions", StoredSolutions(self.solutions))

    @property
    def token_norms(self) -> Tensor:
        """``(n_betas, s)`` the weight of each token position at each beta."""
        norms = [solution.token_norms() for solution in self.solutions]
        if any(row is None for row in norms):
            name = self.solutions[0].head.name
            raise ValueError(
                f"the {name} head has no weights that belong to token positions, so it has no token norms."
            )
        return torch.stack([row for row in norms if row is not None]).cpu()

    @property
    def relative_gaps(self) -> tuple[float, ...]:
        """The certified relative gap at each beta."""
        return tuple(solution.certificate.relative_gap for solution in self.solutions)

    @property
    def explained(self) -> tuple[float, ...]:
        """The share of the loss at ``Z = 0`` that is explained at each beta."""
        zero = self.losses[0] if self.zero_loss is None and self.losses else self.zero_loss
        return tuple(_explained(loss, zero or 0.0) for loss in self.losses)

    def __len__(self) -> int:
        return len(self.betas)

    def summary(self) -> dict[str, Any]:
        """Return the path as plain numbers and text, for a JSON file; weights are left out."""
        solutions = list(self.solutions)
        table: dict[str, Any] = {
            "beta_max": self.beta_max,
            "tolerance": self.tolerance,
            "stopped": self.stopped,
            "betas": list(self.betas),
            "objectives": [solution.objective for solution in solutions],
            "duals": [solution.certificate.dual for solution in solutions],
            "relative_gaps": list(self.relative_gaps),
            "explained": list(self.explained),
            "iterations": [solution.n_iter for solution in solutions],
            "statuses": [solution.status.name for solution in solutions],
        }
        if solutions and solutions[0].token_norms() is not None:
            table["active_tokens"] = active_tokens(self.token_norms).tolist()
            table["token_norms"] = self.token_norms.tolist()
        return table

    def _repr_html_(self) -> str:
        header = ["beta", "beta / beta_max", "explained", "relative gap", "status"]
        explained = self.explained or (float("nan"),) * len(self)
        rows = [
            [f"{s.beta:.4g}", f"{s.beta / self.beta_max:.3g}" if self.beta_max else "", f"{share:.1%}",
             f"{s.certificate.relative_gap:.1e}", s.status.name]
            for s, share in zip(self.solutions, explained, strict=True)
        ]  # fmt: skip
        if len(self) and self.solutions[0].token_norms() is not None:
            header.append("active tokens")
            for row, count in zip(rows, active_tokens(self.token_norms).tolist(), strict=True):
                row.append(str(count))
        ended = f", stopped: {self.stopped}" if self.stopped else ""
        return table(rows, header, caption=f"Path of {len(self)} betas{ended}")

    def plot(self, n_labels: int = 8, token_names: Sequence[Any] | None = None) -> Figure:
        """Draw token norms against beta, as glmnet does, above the certified gap along the path.

        The ``n_labels`` largest tokens are named at the end of their curve, by position or by ``token_names``.
        """
        from convexformer.path.figure import draw_path

        return draw_path(self, n_labels, token_names)


def path(
    head: str | Head,
    X: Any,
    Y: Any,
    n_betas: int = 20,
    beta_min_ratio: float = 1e-3,
    *,
    stop_early: bool = False,
    early_tolerance: float | None = None,
    total_time: float | None = None,
    **problem_and_solver_options: Any,
) -> Path:
    """Solve at ``n_betas`` values from ``beta_max`` to ``beta_min_ratio * beta_max``, evenly in logarithm.

    Further options go to :class:`Problem` (loss, mask, sample_weight, intercept, device, dtype) and to :func:`solve`
    (tolerance, solver, max_iter, progress, ...); ``max_iter`` and ``max_time`` apply to each beta, ``total_time`` to the
    whole call: when it is up, the path ends where it is, ``stopped`` being ``"time"``. Every solution has its own
    certificate. ``early_tolerance`` is for all betas but the last, where the others only lead to it. ``stop_early`` ends the
    path where the fit is saturated, by glmnet's rule: 99.9% of the loss at zero explained, or less than 1e-5 of it gained
    by a beta. ``checkpoint`` names a folder, with a file for each beta; the same call resumes from them.
    Ctrl-C returns what has been solved so far.
    """
    clock = total_clock(total_time)
    problem_options, solver_options = _split(problem_and_solver_options)
    ratios = beta_ratios(n_betas, beta_min_ratio)
    with spinner("operator, beta_max", Console()) if solver_options.get("progress") else nullcontext():
        problem = Problem(head, X, Y, beta_ratio=1.0, **problem_options)
    return follow(
        problem, ratios, stop_early=stop_early, early_tolerance=early_tolerance, clock=clock, **solver_options
    )


def total_clock(total_time: float | None) -> Clock:
    """Start the clock of a whole path or search; raise unless the limit makes sense."""
    if total_time is not None and not total_time > 0:
        raise ValueError(f"total_time={total_time} was given; expected positive seconds or None.")
    return Clock(total_time)


def follow(
    problem: Problem,
    ratios: np.ndarray,
    *,
    stop_early: bool = False,
    clock: Clock | None = None,
    **walk_options: Any,
) -> Path:
    """Solve along a path and keep the solutions; the ``beta_ratio`` of ``problem`` is 1."""
    clock = Clock() if clock is None else clock
    solutions, betas, losses, stopped = StoredSolutions(), [], [], ""
    zero = float(problem.objective.zero_evaluation().value)
    try:
        for solution in walk(problem, ratios, clock=clock, **walk_options):
            solutions.append(solution)
            betas.append(solution.beta)
            losses.append(solution.objective - solution.beta * float(problem.penalty.value(solution.weights.Z)))
            if stop_early and len(losses) >= FIRST_STOP and _saturated(losses, zero):
                stopped = "saturated"
                break
    except KeyboardInterrupt:
        if not betas:
            raise
    if not stopped and clock.late and (len(betas) < len(ratios) or solutions[-1].status is Status.MAX_TIME):
        stopped = "time"
    elif not stopped and (len(betas) < len(ratios) or solutions[-1].status is Status.INTERRUPTED):
        stopped = "interrupted"
    tolerance = float(walk_options.get("tolerance", DEFAULT_TOLERANCE))
    return Path(tuple(betas), problem.beta_max, solutions, tuple(losses), tolerance, stopped, zero)


def walk(
    problem: Problem,
    ratios: np.ndarray,
    *,
    progress: bool = False,
    callback: Any = None,
    checkpoint: str | os.PathLike[str] | None = None,
    warm_start: Any = None,
    tolerance: float = DEFAULT_TOLERANCE,
    early_tolerance: float | None = None,
    max_time: float | None = None,
    clock: Clock | None = None,
    **solver_options: Any,
) -> Iterator[Solution]:
    """Yield the solution at each ratio of ``beta_max``, warm-started from the one before; stop after an interrupted one.

    All but the last may have a gap of ``early_tolerance``. ``max_time`` is for each of them, ``clock`` for all.
    """
    last = warm_start
    clock = Clock() if clock is None else clock
    early = tolerance if early_tolerance is None else max(tolerance, early_tolerance)
    top = problem.beta  # beta_ratio = 1, so this is beta_max (or any positive number where beta_max is zero)
    stopped = False  # set by the callback; the status is CONVERGED if the same check also met the tolerance

    with step_bar(f"{problem.head.name} path", len(ratios), shown=progress) as bar:

        def watch(record: Record, weights: Weights) -> bool:
            nonlocal stopped
            if bar is not None:
                bar.show(record)
            stopped = callback is not None and is_true(callback(record, weights))
            return stopped

        for k, ratio in enumerate(ratios):
            file = None if checkpoint is None else FilePath(checkpoint) / f"beta_{k:03d}.safetensors"
            at = problem.with_beta(top * float(ratio))
            last = solve(
                at,
                tolerance if k + 1 == len(ratios) else early,
                warm_start=last,
                callback=watch,
                checkpoint=file,
                max_time=clock.left(max_time),
                **solver_options,
            )
            if bar is not None:
                bar.advance()
            yield last
            if stopped or clock.late or last.status is Status.INTERRUPTED:
                return


def beta_ratios(n_betas: int, beta_min_ratio: float) -> np.ndarray:
    """``(n_betas,)`` from 1 down to ``beta_min_ratio``, evenly in logarithm."""
    if not isinstance(n_betas, (int, np.integer)) or n_betas < 1:
        raise ValueError(f"n_betas={n_betas} was given; expected a positive whole number.")
    if not 0 < beta_min_ratio < 1:
        raise ValueError(f"beta_min_ratio={beta_min_ratio} was given; expected a number strictly between 0 and 1.")
    return np.geomspace(1.0, beta_min_ratio, int(n_betas))


def _explained(loss: float, zero: float) -> float:
    return 1 - loss / zero if zero > 0 else 0.0


def _saturated(losses: list[float], zero: float) -> bool:
    now, before = (_explained(loss, zero) for loss in (losses[-1], losses[-2]))
    return now > SATURATED or now - before < SMALL_GAIN


def _split(options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Sort options into the problem's and the solver's; the path itself sets the betas."""
    known = {*PROBLEM_OPTIONS, *SOLVER_OPTIONS} - {"beta", "beta_ratio"}
    for name in options:
        if name not in known:
            raise TypeError(unknown("option of path", name, known))
    problem = {name: value for name, value in options.items() if name in PROBLEM_OPTIONS}
    return problem, {name: value for name, value in options.items() if name in SOLVER_OPTIONS}

"""Regularisation paths: a family of certified solutions from ``beta_max`` down, each started from the last."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch
from torch import Tensor

from convexformer.architecture import Head
from convexformer.problem import Problem
from convexformer.registry import unknown
from convexformer.solution import Solution
from convexformer.solvers import solve

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PROBLEM_OPTIONS = tuple(inspect.signature(Problem).parameters)[3:]  # after head, X, Y
SOLVER_OPTIONS = tuple(inspect.signature(solve).parameters)[1:]  # after problem


@final
@dataclass(frozen=True)
class Path:
    """Solutions along ``betas``, from the largest to the smallest."""

    betas: tuple[float, ...]
    beta_max: float
    solutions: tuple[Solution, ...]

    @property
    def token_norms(self) -> Tensor:
        """``(n_betas, s)`` the weight of each token position at each beta."""
        norms = [solution.token_norms() for solution in self.solutions]
        if any(row is None for row in norms):
            name = self.solutions[0].head.name
            raise ValueError(f"the {name} head treats all token positions alike, so it has no token norms.")
        return torch.stack([row for row in norms if row is not None]).cpu()

    @property
    def relative_gaps(self) -> tuple[float, ...]:
        """The certified relative gap at each beta."""
        return tuple(solution.certificate.relative_gap for solution in self.solutions)

    def __len__(self) -> int:
        return len(self.betas)

    def plot(self) -> Figure:
        """Draw token norms against beta, as for a lasso, above the certified gap along the path."""
        from matplotlib.figure import Figure

        ratios = np.array(self.betas) / self.beta_max
        norms = [solution.token_norms() for solution in self.solutions]
        positional = all(row is not None for row in norms)
        figure = Figure(figsize=(6.4, 5.2 if positional else 2.6), layout="constrained")
        axes = figure.subplots(
            2 if positional else 1, 1, sharex=True, squeeze=False, height_ratios=[3, 1][-1 - positional :]
        )
        if positional:
            top = axes[0, 0]
            top.plot(ratios, self.token_norms.numpy(), linewidth=1.2)
            top.set_ylabel("norm of each token's weights")
            top.set_title(f"{self.solutions[0].head.name} head: tokens enter as beta falls")
        bottom = axes[-1, 0]
        bottom.plot(ratios, np.maximum(self.relative_gaps, 1e-16), "k.-", linewidth=1)
        bottom.set_yscale("log")
        bottom.set_ylabel("relative gap")
        bottom.set_xscale("log")
        bottom.set_xlabel("beta / beta_max")
        bottom.invert_xaxis()
        return figure


def path(
    head: str | Head,
    X: Any,
    Y: Any,
    n_betas: int = 20,
    beta_min_ratio: float = 1e-3,
    **problem_and_solver_options: Any,
) -> Path:
    """Solve at ``n_betas`` values from ``beta_max`` to ``beta_min_ratio * beta_max``, evenly in logarithm.

    Further options go to :class:`Problem` (loss, mask, sample_weight, intercept, device, dtype) and to :func:`solve`
    (tolerance, solver, max_iter, ...). Every solution has its own certificate.
    """
    problem_options, solver_options = _split(problem_and_solver_options)
    ratios = beta_ratios(n_betas, beta_min_ratio)
    problem = Problem(head, X, Y, beta_ratio=1.0, **problem_options)
    solutions = tuple(walk(problem, ratios, **solver_options))
    return Path(tuple(solution.beta for solution in solutions), problem.beta_max, solutions)


def walk(problem: Problem, ratios: np.ndarray, **solver_options: Any) -> Iterator[Solution]:
    """Yield the solution at each ratio of ``beta_max``, warm-started from the one before."""
    last = solver_options.pop("warm_start", None)
    top = problem.beta  # beta_ratio = 1, so this is beta_max (or any positive number where beta_max is zero)
    for ratio in ratios:
        last = solve(problem.with_beta(top * float(ratio)), warm_start=last, **solver_options)
        yield last


def beta_ratios(n_betas: int, beta_min_ratio: float) -> np.ndarray:
    """``(n_betas,)`` from 1 down to ``beta_min_ratio``, evenly in logarithm."""
    if not isinstance(n_betas, (int, np.integer)) or n_betas < 1:
        raise ValueError(f"n_betas={n_betas} was given; expected a positive whole number.")
    if not 0 < beta_min_ratio < 1:
        raise ValueError(f"beta_min_ratio={beta_min_ratio} was given; expected a number strictly between 0 and 1.")
    return np.geomspace(1.0, beta_min_ratio, int(n_betas))


def _split(options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Sort options into the problem's and the solver's; the path itself sets the betas."""
    known = {*PROBLEM_OPTIONS, *SOLVER_OPTIONS} - {"beta", "beta_ratio", "checkpoint"}
    for name in options:
        if name not in known:
            raise TypeError(unknown("option of path", name, known))
    problem = {name: value for name, value in options.items() if name in PROBLEM_OPTIONS}
    return problem, {name: value for name, value in options.items() if name in SOLVER_OPTIONS}

"""Bounds on the optimum of an exact ReLU problem from both sides: gated <= ReLU <= split."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import final

import torch

from convexformer.certificates import Certificate
from convexformer.gauges import NuclearNorm, ReLUNorm
from convexformer.operators import CellOperator, ReLUOperator
from convexformer.problem import Problem
from convexformer.solution import Solution
from convexformer.solvers.run import Limits, minimise
from convexformer.solving import solve
from convexformer.weights import Weights

MAX_WEIGHTS = 1 << 20  # numbers in the weights of the gated program on all cells, beyond which it is not solved


@final
@dataclass(frozen=True)
class Sandwich:
    """``lower <= optimum <= upper``, and the three programs that say so."""

    lower: float
    upper: float
    relu: Solution
    """The exact ReLU program itself, with its certificate."""
    gated: Certificate | None
    """The gated program on all cells: nuclear norms without cones. None where cells are not all known, or too many."""
    split: Certificate
    """The program with ``|v|_1`` in place of ``|v|_2``: each neuron writes one output, and polars are exact on known
    cells."""

    def __str__(self) -> str:
        below = "not computed" if self.gated is None else f"{self.gated.dual:.8g}"
        return (
            f"the optimum lies in [{self.lower:.8g}, {self.upper:.8g}] (gated {below}, ReLU "
            f"{self.relu.certificate.dual:.8g} to {self.relu.objective:.8g}, split {self.split.primal:.8g})"
        )


def sandwich(problem: Problem, tolerance: float = 1e-5, max_time: float | None = None) -> Sandwich:
    """Bound the optimum of an exact ReLU problem: by the gated program on all cells from below, by the split one from above.

    The gated optimum is a lower bound since a cone only constrains; that of output weights in the l1 ball an upper one since
    ``|v|_2 <= |v|_1``. Each of the three programs contributes what its own certificate proves. ``max_time`` limits each.
    """
    objective = problem.objective.reference()
    operator, penalty = objective.operator, objective.penalty
    if not isinstance(operator, ReLUOperator) or not isinstance(penalty, ReLUNorm):
        raise ValueError(f"sandwich bounds exact ReLU problems; the problem's head is {problem.head!r}.")
    limits = Limits(tolerance, max_time=max_time)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # three programs, of which some may stop early; their certificates say so
        relu = solve(problem, tolerance=tolerance, max_time=max_time)
        split = minimise(replace(objective, penalty=penalty.with_outer("l1")), limits)
        gated = None
        if (cells := _cell_operator(operator, penalty)) is not None:
            gated = minimise(replace(objective, operator=cells, penalty=NuclearNorm()), limits).certificate
    upper = min(
        relu.objective, split.certificate.primal, objective.value(Weights(split.weights.form, split.weights.intercept))
    )
    lower = max(relu.certificate.dual, float("-inf") if gated is None else gated.dual)
    return Sandwich(lower, upper, relu, gated, split.certificate)


def _cell_operator(operator: ReLUOperator, penalty: ReLUNorm) -> CellOperator | None:
    patterns = [torch.from_numpy(cells.patterns) for a in penalty.arrangements if (cells := a.cells) is not None]
    if penalty.outer != "l2" or len(patterns) != len(penalty.arrangements):
        return None
    made = CellOperator(operator.layers, patterns, *operator.output_shape)
    return made if torch.Size(made.weight_shape).numel() <= MAX_WEIGHTS else None

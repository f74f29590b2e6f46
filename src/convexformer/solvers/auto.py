"""Which solver for which objective: the decision as a table that a user can print."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol, final

from convexformer.objective import Objective
from convexformer.operators import BilinearOperator
from convexformer.solvers.base import Solver
from convexformer.solvers.fista import Fista
from convexformer.solvers.staircase import Staircase
from convexformer.solvers.working_set import WorkingSet

SOLVERS: dict[str, Solver] = {solver.name: solver for solver in (Fista(), Staircase(), WorkingSet())}

SELECTION = """
penalty                operator             device  condition                            solver
sum over token slices  one slice a token    CPU     rows x weights > many_products       working_set
nuclear norm           bilinear             any     weights > few_weights                staircase
nuclear norm           any                  GPU     short side of Z > short_side         staircase
nuclear norm           any                  CPU     blocks of Z <= few_blocks            staircase
anything with a prox   any                  any     otherwise                            fista
"""

HAND_OVER = ("working_set", "staircase", "fista")
"""Who goes on when a solver stalls under ``solver="auto"``: see :func:`successors`."""


class HasObjective(Protocol):
    """A problem, as :func:`explain` takes it."""

    objective: Objective


@final
@dataclass(frozen=True)
class AutoOptions:
    """Where one solver overtakes another."""

    many_products: int = 1 << 20
    """Rows times weights from which working sets pay for their set-up (benchmarks/tokens/run.py, P1 to P3)."""
    few_weights: int = 1 << 11
    """Entries of a dense ``Z`` up to which thresholding it is cheaper than factors (benchmarks/heads.py, P4 small)."""
    few_blocks: int = 16
    """Blocks of ``Z`` up to which Newton steps on factors beat thresholding on a CPU, above all at small betas."""
    short_side: int = 16
    """Short side of ``Z`` up to which singular-value thresholding on a GPU is cheaper (benchmarks/gpu_heads.py)."""
    dense_entries: int = 1 << 26
    """Entries of ``Z`` up to which low-rank factors that have stalled are handed over to a solver on one tensor."""


def select(objective: Objective, options: AutoOptions = AutoOptions()) -> str:  # noqa: B008  (frozen)
    """Return the name of the solver that ``solver="auto"`` takes: the first row of ``SELECTION`` that applies."""
    A = objective.operator
    serves = {name: solver.requires(objective) is None for name, solver in SOLVERS.items()}
    weights = math.prod(A.weight_shape)
    if serves["working_set"] and not A.like.is_cuda and A.output_shape[0] * weights > options.many_products:
        return "working_set"
    if serves["staircase"]:
        if isinstance(A, BilinearOperator):
            if weights > options.few_weights:
                return "staircase"
        elif A.like.is_cuda:
            if min(A.weight_shape[-2:]) > options.short_side:
                return "staircase"
        elif math.prod(A.weight_shape[:-2]) <= options.few_blocks:
            return "staircase"
    if serves["fista"]:
        return "fista"
    for name, able in serves.items():
        if able:
            return name
    reasons = "; ".join(f"{name} {solver.requires(objective)}" for name, solver in SOLVERS.items())
    raise ValueError(f"no solver serves this objective: {reasons}.")


def successors(
    name: str,
    objective: Objective,
    options: AutoOptions = AutoOptions(),  # noqa: B008  (frozen)
) -> list[Solver]:
    """Return the solvers that go on, one after another, when the solver of that name stalls.

    They are the others of ``HAND_OVER`` that serve the objective, in that order: those that know the structure of the
    penalty first, FISTA, which needs a prox alone, last (and none on dense weights of more than ``dense_entries``). Each
    runs at most once, from the best point so far; the ``solver`` of each record of the history says who was at work. A
    stall is a number of gap checks (``Solver.patience``) in which neither the gap nor the objective fell by a share worth
    waiting for.
    """
    others = [SOLVERS[other] for other in HAND_OVER if other != name]
    fits = math.prod(objective.weight_shape) <= options.dense_entries
    return [solver for solver in others if (fits or solver.uses_factors) and solver.requires(objective) is None]


def solver_for(name: str, objective: Objective) -> Solver:
    """Return the solver of that name, or raise with what it misses and what to use instead."""
    solver = SOLVERS[name]
    if (missing := solver.requires(objective)) is not None:
        able = [other for other, candidate in SOLVERS.items() if candidate.requires(objective) is None]
        raise ValueError(f"solver={name!r} {missing}. Use solver='auto'{_or(able)}.")
    return solver


def explain(problem: Objective | HasObjective) -> str:
    """Say which solver ``solver="auto"`` takes for a problem, and why the others do not serve.

    The whole decision is the table ``SELECTION``, with the numbers of :class:`AutoOptions`.
    """
    objective = problem if isinstance(problem, Objective) else problem.objective
    chosen = select(objective)
    lines = [f"solver='auto' takes {chosen!r}: {SOLVERS[chosen].works_on}.", ""]
    for name, solver in SOLVERS.items():
        missing = solver.requires(objective)
        state = (
            f"does not serve: it {missing}" if missing is not None else "chosen" if name == chosen else "serves, too"
        )
        lines.append(f"{name:12} {state}")
    after = ", then ".join(repr(solver.name) for solver in successors(chosen, objective))
    lines += ["", f"If it stalls, it hands over to {after}."] if after else []
    values = ", ".join(f"{name} = {value:,}" for name, value in vars(AutoOptions()).items())
    return "\n".join([*lines, "", "The first row that applies:", SELECTION.strip("\n"), values])


def _or(names: list[str]) -> str:
    return f" or {' or '.join(map(repr, names))}" if names else ""

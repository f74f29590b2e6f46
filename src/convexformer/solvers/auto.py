"""Which solver for which objective: the decision as a table that a user can print."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

from convexformer.objective import HasObjective, Objective, objective_of
from convexformer.operators import BilinearOperator
from convexformer.solvers.base import Solver
from convexformer.solvers.block_newton import BlockNewton
from convexformer.solvers.by_position import ByPosition, parts_of
from convexformer.solvers.column_generation import ColumnGeneration
from convexformer.solvers.cost import EXACT_BLOCKS, explain_prediction, kind, predicted_seconds
from convexformer.solvers.fista import Fista
from convexformer.solvers.frank_wolfe import FrankWolfe
from convexformer.solvers.row_space import RowSpace
from convexformer.solvers.staircase import Staircase
from convexformer.solvers.turn import Turn
from convexformer.solvers.working_set import WorkingSet

SOLVERS: dict[str, Solver] = {
    solver.name: solver
    for solver in (
        Fista(),
        Staircase(),
        RowSpace(),
        WorkingSet(),
        BlockNewton(),
        ByPosition(lambda part: SOLVERS[select(part)]),
        FrankWolfe(),
        ColumnGeneration(),
    )
}

SELECTION = """
device  penalty               operator  condition                        solver
CPU     neurons               ReLU      always                           column_generation
any     norms and ridges      features  no prox, or more weights of one  block_newton
                                        output than rows, and not tiny
CPU     sums over slices      position  a part alone is not for fista    by_position
CPU     nuclear norm          gated     pooled, weights > formed         row_space
CPU     nuclear norm          bilinear  weights > few_weights            staircase
CPU     nuclear norm          filters   gated, rows x weights >          staircase
                                        few_filters
any     no nuclear norm       any       rows x weights <= few_products   fista
CPU     norms of columns      slices    loops can be compiled            working_set
CPU     nuclear norms of      slices    least predicted seconds          fista or working_set
        token slices                    (solvers.cost)
GPU     nuclear norm          bilinear  weights > few_weights            staircase
GPU     nuclear norm          any       short side of Z > short_side,    staircase
                                        or gated filters (FNO)
any     nuclear norm          any       weights > dense_entries          staircase
any     anything with a prox  any       otherwise                        fista
any     anything else         any       otherwise                        the first solver that serves
"""

HAND_OVER = ("staircase", "working_set", "fista")
"""Who goes on when a solver stalls, or its turn is over, under ``solver="auto"``: see :func:`successors`."""

TURNS = {
    "nuclear": {"fista": Turn(first=30, recent=20, worth=6)},
    "nuclear, bilinear": {"fista": Turn(first=60, recent=20, worth=6)},
    "nuclear, token slices": {
        "fista": Turn(first=60, recent=20, worth=6),
        "working_set": Turn(first=6, recent=2, worth=1),
    },
}
"""By kind of objective and solver: how long a solver goes on where the staircase could take over from its best
point. Factors are worth their set-up only where the gap falls slowly (small betas, unequal features), and that shows in the
first iterations; set on the histories of 156 fits (``benchmarks/real/turns.py``; those of bilinear operators, which begin so
only where they are small, on 15 of self-attention). Working sets pass larger betas first, in
a round or three, and with a hundred classes are twice as fast as factors: they have time."""


@final
@dataclass(frozen=True)
class AutoOptions:
    """Where one solver overtakes another, where that is not predicted (:mod:`convexformer.solvers.cost`)."""

    few_weights: int = 1 << 12
    """Entries of a dense ``Z`` up to which a solve begins with thresholding it (digits' self-attention has half as many:
    faster at .1 beta_max, and FISTA hands over where it is not)."""
    few_products: int = 1 << 14
    """Rows times weights up to which FISTA is done before other solvers have set up their parts; it works in float64
    throughout, so that samples of weight two and samples given twice lead to the same digits. Not for nuclear norms."""
    formed: int = 1 << 24
    """Entries of a dense ``Z`` beyond which pooled gated heads work on row spaces; up to it Hessian products are dense."""
    few_filters: int = 1 << 22
    """Rows times weights up to which gated Fourier heads are quicker on dense filters on a CPU, on digits by two times; at
    N = 300, s = 16, d = 32, 8 gates (6 million) and beyond factors are, by two to three (benchmarks/real/filters.py)."""
    short_side: int = 4
    """Short side of ``Z`` up to which a GPU begins with singular-value thresholding. At 6 to 100 factors are about as
    fast at beta .1, and faster at .001 (``benchmarks/gpu_path.py --solvers fista staircase`` compares)."""
    dense_entries: int = 1 << 26
    """Entries of ``Z`` up to which a nuclear norm begins on one tensor, or is handed over to it by factors that stall."""


def select(objective: Objective, options: AutoOptions = AutoOptions()) -> str:
    """Return the name of the solver that ``solver="auto"`` takes: the first row of ``SELECTION`` that applies."""
    missing = {name: solver.requires(objective) for name, solver in SOLVERS.items()}
    serving = [name for name, reason in missing.items() if reason is None]
    if not serving:
        raise ValueError(f"no solver serves this objective: {'; '.join(f'{n} {r}' for n, r in missing.items())}.")
    shape = objective.weight_shape
    tiny = objective.n_rows * math.prod(shape) <= options.few_products
    wide = objective.n_rows * objective.n_outputs <= math.prod(shape)
    if serving == ["column_generation"]:
        return "column_generation"
    if "block_newton" in serving and ((wide and not tiny) or not objective.penalty.proximal):
        return "block_newton"
    if "by_position" in serving and not tiny and not objective.like.is_cuda:
        first = next(part for _, part in parts_of(objective))
        if select(first, options) != "fista":  # FISTA takes all positions at once
            return "by_position"
    if isinstance(objective.operator, BilinearOperator):
        pays = math.prod(shape) > options.few_weights
    else:
        on_factors = objective.operator.on_factors() is not None
        pays = objective.like.is_cuda and (on_factors or min(shape[-2:]) > options.short_side)
        pays |= on_factors and objective.n_rows * math.prod(shape) > options.few_filters
        pays |= math.prod(shape) > options.dense_entries
    if "row_space" in serving and not objective.like.is_cuda and math.prod(shape) > options.formed:
        return "row_space"
    if "staircase" in serving and pays:
        return "staircase"
    if "staircase" not in serving and "fista" in serving and tiny:
        return "fista"
    if "working_set" in serving and not objective.like.is_cuda and kind(objective) in EXACT_BLOCKS:
        return "working_set"
    predicted = _predicted(objective)
    priced = {name: predicted[name] for name in serving if name in predicted}
    if priced:
        return min(priced, key=lambda name: priced[name])
    return "fista" if "fista" in serving else serving[0]


def successors(
    name: str,
    objective: Objective,
    options: AutoOptions = AutoOptions(),
) -> list[Solver]:
    """Return the solvers that go on, one after another, when the solver of that name stalls.

    They are the others of ``HAND_OVER`` that serve the objective, in that order: those that know the structure of the
    penalty first, FISTA, which needs a prox alone, last (and none on dense weights of more than ``dense_entries``). Each
    runs at most once, from the best point so far (the first again, where it left before a stall); the ``solver`` of each
    record of the history says who was at work. A
    stall is a number of gap checks (``Solver.patience``) in which neither the gap nor the objective fell by a share worth
    waiting for.
    """
    others = [SOLVERS[other] for other in HAND_OVER if other != name]
    fits = math.prod(objective.weight_shape) <= options.dense_entries
    return [solver for solver in others if (fits or solver.uses_factors) and solver.requires(objective) is None]


def turn_of(line: list[Solver], objective: Objective) -> Turn | None:
    """Return how long the first of ``line`` goes on before the second takes over without a stall; None: for ever."""
    if [solver.name for solver in line[1:2]] != ["staircase"]:
        return None
    return TURNS.get(kind(objective), {}).get(line[0].name)


def resumed(first: Solver, objective: Objective, seen: str) -> Solver:
    """Return who begins from a solution that the solvers ``seen`` have made: who took over there begins here, too."""
    names = seen.split(", ")
    taken_over = (
        len(names) > 1 and names[0] == first.name and TURNS.get(kind(objective), {}).get(first.name) is not None
    )
    serves = names[-1] in SOLVERS and SOLVERS[names[-1]].requires(objective) is None
    return SOLVERS[names[-1]] if taken_over and serves else first


def solver_for(name: str, objective: Objective) -> Solver:
    """Return the solver of that name, or raise with what it misses and what to use instead."""
    solver = SOLVERS[name]
    if (missing := solver.requires(objective)) is not None:
        able = [other for other, candidate in SOLVERS.items() if candidate.requires(objective) is None]
        raise ValueError(f"solver={name!r} {missing}. Use solver='auto'{_or(able)}.")
    return solver


def explain(problem: Objective | HasObjective) -> str:
    """Say which solver ``solver="auto"`` takes for a problem, and why the others do not serve.

    The whole decision is the table ``SELECTION``, with the prices of :mod:`convexformer.solvers.cost` on a CPU and the
    numbers of :class:`AutoOptions` on a GPU.
    """
    objective = objective_of(problem)
    chosen = select(objective)
    predicted = _predicted(objective)
    lines = [f"solver='auto' takes {chosen!r}: {SOLVERS[chosen].works_on}.", ""]
    for name, solver in SOLVERS.items():
        missing = solver.requires(objective)
        state = (
            f"does not serve: it {missing}" if missing is not None else "chosen" if name == chosen else "serves, too"
        )
        seconds = f", predicted {predicted[name]:.2g} s" if missing is None and name in predicted else ""
        lines.append(f"{name:12} {state}{seconds}")
    after = ", then ".join(repr(solver.name) for solver in successors(chosen, objective))
    own_turn = turn_of([SOLVERS[chosen], *successors(chosen, objective)], objective)
    when = "If it stalls" if own_turn is None else f"If it stalls, or {own_turn}"
    lines += ["", f"{when}, it hands over to {after}."] if after else []
    values = ", ".join(f"{name} = {value:,}" for name, value in vars(AutoOptions()).items())
    if predicted:
        lines += ["", *explain_prediction(objective)]
    return "\n".join([*lines, "", "The first row that applies:", SELECTION.strip("\n"), values])


def _predicted(objective: Objective) -> dict[str, float]:
    """Predicted seconds by solver; none on a GPU, whose prices are others."""
    return {} if objective.like.is_cuda else predicted_seconds(objective)


def _or(names: list[str]) -> str:
    return f" or {' or '.join(map(repr, names))}" if names else ""

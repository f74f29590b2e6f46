"""Fully corrective Frank-Wolfe: add the atoms that the dual asks for, then find the best combination of all.

For ``min_Z F(A Z) + beta g(Z)`` with the gauge g of a set of atoms. A round takes the atoms most aligned with
``M = -A^T grad F``, those that violate ``<M, a> <= beta``, and minimises ``F(sum_j t_j A a_j) + beta sum_j |t_j|`` over the
coefficients of all atoms at hand; atoms whose coefficient is zero are dropped. It needs a linear minimisation oracle but no
prox.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor

from convexformer.gauges import FiniteAtoms, Gauge
from convexformer.objective import Evaluation, Objective
from convexformer.operators import BilinearOperator
from convexformer.solvers.base import Solver
from convexformer.solvers.fista import fista
from convexformer.solvers.frank_wolfe.atoms import AtomOperator, AtomSet, CoefficientNorm
from convexformer.solvers.monitor import Monitor, TimeUp
from convexformer.solvers.watch import GapWatch
from convexformer.weights import Weights


@final
@dataclass(frozen=True)
class FrankWolfeOptions:
    """Set on random problems of attention with an output per token (tests/test_token_attention.py)."""

    atoms_per_round: int = 16
    """Atoms added in a round, at most."""
    gap_share: float = 0.1
    """A round ends at this fraction of the gap of the whole problem."""
    inner_iterations: int = 2000
    """Iterations of FISTA on the coefficients in a round, at most."""


@final
class FrankWolfe(Solver):
    """Combinations of few atoms, for gauges of finitely many.

    Group and nuclear norms have a continuum of atoms, on which it would take thousands of rounds; other solvers serve them.
    """

    name = "frank_wolfe"
    works_on = "gauges of finitely many atoms, on combinations of few of them"
    patience = 30  # rounds, each a solve over coefficients

    def __init__(self, options: FrankWolfeOptions = FrankWolfeOptions()) -> None:
        self.options = options

    def requires(self, objective: Objective) -> str | None:
        """A gauge of finitely many atoms, and a dual matrix that is one tensor."""
        penalty = objective.penalty
        if not (isinstance(penalty, Gauge) and isinstance(penalty, FiniteAtoms)):
            return f"works on a gauge of finitely many atoms; {penalty!r} is none"
        if isinstance(objective.operator, BilinearOperator):
            return "forms the dual matrix as one tensor; this operator works on factors"
        return None

    def solve(self, objective: Objective, start: Weights, monitor: Monitor) -> None:
        """Iterate until the monitor says to stop."""
        Z, atoms = start.dense(), AtomSet(objective)
        at = objective.evaluate(objective.apply(Z), start.intercept)
        point = monitor.check(Z, at)
        t = Z.new_zeros(0)
        if bool(Z.any()):  # the start as an atom of its own: g(Z / g(Z)) = 1
            size = objective.penalty.value(Z)
            atoms.add([Z / size])
            t = size.to(Z.dtype)[None]
        for _ in monitor:
            assert isinstance(point.M, Tensor)
            found = self._violators(objective, point.M)
            if found:
                atoms.add(found)
                t = torch.cat([t, t.new_zeros(len(found))])
            elif not len(atoms):  # Z = 0 is optimal to rounding
                monitor.stall()
                break
            primal = float(at.value) + objective.beta * float(objective.penalty.value(Z))
            goal = self.options.gap_share * max(primal - point.value, monitor.tolerance * abs(primal))
            t = self._correct(objective, atoms, t, at, goal, monitor)
            used = t != 0
            atoms.keep(used)
            t, Z = t[used], atoms.combine(t[used])
            monitor.hold(Z, (t @ atoms.outputs).view(at.outputs.shape), at.intercept)
            at = objective.evaluate(objective.apply(Z), at.intercept)
            point = monitor.check(Z, at)

    def _violators(self, objective: Objective, M: Tensor) -> list[Tensor]:
        """Return the atoms of largest ``<M, a>``, above beta."""
        assert isinstance(objective.penalty, FiniteAtoms)
        best = objective.penalty.atoms(M, self.options.atoms_per_round)
        return [atom for atom in best if float((M * atom).sum()) > objective.beta]

    def _correct(
        self, objective: Objective, atoms: AtomSet, t: Tensor, at: Evaluation, goal: float, monitor: Monitor
    ) -> Tensor:
        """Minimise over the coefficients of all atoms, from ``t``, to an absolute gap of ``goal`` on them."""
        operator = AtomOperator(atoms.outputs, objective.operator.output_shape)
        inner = replace(objective, operator=operator, penalty=CoefficientNorm(), derived=None)
        watch = GapWatch(inner, goal, lambda: monitor.late, self.options.inner_iterations)
        watch.hold(t, None, None)
        with suppress(TimeUp):
            fista(inner, Weights(t, at.intercept), watch)
        assert isinstance(watch.best, Tensor)
        return watch.best

"""Column generation: add the neurons that a dual point asks for, then optimise all of them."""

from __future__ import annotations

from contextlib import suppress
from typing import cast, final

import torch
from torch import Tensor

from convexformer.gauges import Candidate, NeuronOracle
from convexformer.objective import Evaluation, Objective
from convexformer.operators import NeuronOperator, Neurons
from convexformer.solvers.base import Solver
from convexformer.solvers.column_generation.descent import descend, reweigh, value_of
from convexformer.solvers.column_generation.options import OPTIONS, ColumnOptions
from convexformer.solvers.monitor import Monitor, TimeUp
from convexformer.weights import Weights


@final
class ColumnGeneration(Solver):
    """Frank-Wolfe over neurons with full corrections (as the sliding Frank-Wolfe of Denoyelle et al. 2019).

    A round asks the penalty for the neurons of the largest ``<-A^T V, (u, v)>``, chooses the weights of all directions (a
    convex program), descends on all neurons from there, and merges those that became parallel. Descents are repeated on
    the faces of cells that neurons are close to: ReLU has its kinks there, and optima often lie on them. The objective
    never rises. Whether the result is optimal is for the certificate to say: the search for neurons is local where there
    are too many cells.
    """

    name = "column_generation"
    works_on = "exact ReLU neurons"
    patience = 6

    def __init__(self, options: ColumnOptions = OPTIONS) -> None:
        self.options = options

    def requires(self, objective: Objective) -> str | None:
        """Neurons, and a penalty that finds them."""
        fits = isinstance(objective.operator, NeuronOperator) and isinstance(objective.penalty, NeuronOracle)
        return None if fits else "works on the neurons of exact ReLU heads only"

    def solve(self, objective: Objective, start: Weights, monitor: Monitor) -> None:
        """Add neurons until the monitor says to stop."""
        assert isinstance(start.Z, Neurons)
        oracle = cast(NeuronOracle, objective.penalty)
        neurons = _one_output_each(start.Z) if oracle.outer == "l1" else start.Z
        at = objective.evaluate(objective.apply(neurons), start.intercept)
        point = monitor.check(neurons, at)
        for round_ in monitor:
            count = max(self.options.new_neurons, int(self.options.growth * neurons.n_terms))
            found = oracle.search(point.M, neurons, count)
            more = [candidate for candidate in found if candidate.value > objective.beta * (1 - 1e-6)]
            value = value_of(objective, neurons, at)
            precision = self.options.precision * max(0.0, min(1.0, (value - point.value) / abs(value)))
            best = _Best(objective, neurons, at)
            with suppress(TimeUp):  # the check below ends it, with the best so far
                if more:
                    every = neurons.append(_made(more, neurons))
                    best.keep(*reweigh(objective, every, at.intercept, self.options.weight_steps, precision))
                wide = _Best(objective, best.neurons, best.at)
                if more and not oracle.complete:
                    count = max(self.options.wide // neurons.shape[0], 1)
                    spread = oracle.spread(objective.dual_matrix(best.at.V), count, round_)
                    wide = _Best(objective, *_widened(objective, best.neurons, best.at, _made(spread, neurons)))
                try:
                    self._correct(objective, wide, precision)
                finally:
                    best.keep(wide.neurons, wide.at)
            neurons, at = best.neurons, best.at
            point = monitor.check(neurons, at)

    def _correct(self, objective: Objective, best: _Best, precision: float) -> None:
        """Descend freely and on faces, and merge neurons that became parallel."""
        options = self.options
        few = best.neurons.U.numel() + best.neurons.V.numel() <= options.exact_numbers
        steps = 10 * options.descent_steps if few else options.descent_steps
        best.keep(*descend(objective, best.neurons, best.at.intercept, steps, precision=precision))
        best.keep(*self._tidy(objective, best.neurons, best.at))
        operator = cast(NeuronOperator, objective.operator)
        if sum(len(rows) for rows in operator.hidden_rows()) <= options.face_rows:
            for tolerance in options.face_tolerances:
                held = best.neurons.balanced(cast(NeuronOracle, objective.penalty).output_norms(best.neurons.V))
                projectors = face_projectors(held, operator.hidden_rows(), tolerance)
                if projectors is not None:
                    U = torch.einsum("mpq,mq->mp", projectors, held.U)
                    on_face, b = held.with_factors(U, held.V), best.at.intercept
                    best.keep(*descend(objective, on_face, b, steps, projectors=projectors, precision=precision))
        best.keep(*self._tidy(objective, best.neurons, best.at))

    def _tidy(self, objective: Objective, neurons: Neurons, at: Evaluation) -> tuple[Neurons, Evaluation]:
        """Merge parallel neurons and drop negligible ones."""
        oracle = cast(NeuronOracle, objective.penalty)
        merged = _merged(neurons, self.options.parallel, oracle.outer)
        sizes = merged.U.norm(dim=1) * oracle.output_norms(merged.V)
        least = self.options.negligible if oracle.complete else self.options.faint
        merged = merged.select(sizes > least * sizes.max()) if merged.n_terms else merged
        return merged, objective.evaluate(objective.apply(merged), at.intercept)


@final
class _Best:
    """The neurons of the lowest objective so far."""

    def __init__(self, objective: Objective, neurons: Neurons, at: Evaluation) -> None:
        self.objective, self.neurons, self.at = objective, neurons, at

    def keep(self, neurons: Neurons, at: Evaluation) -> None:
        """Take these neurons where they are better."""
        if value_of(self.objective, neurons, at) < value_of(self.objective, self.neurons, self.at):
            self.neurons, self.at = neurons, at


def _made(candidates: list[Candidate], like: Neurons) -> Neurons:
    """Return candidates as neurons of unit factors, beside others."""
    return Neurons(
        torch.stack([candidate.u for candidate in candidates]).to(like.U),
        torch.stack([candidate.v for candidate in candidates]).to(like.V),
        torch.tensor([candidate.block for candidate in candidates], device=like.device),
        like.shape,
    )


def _widened(objective: Objective, neurons: Neurons, at: Evaluation, more: Neurons) -> tuple[Neurons, Evaluation]:
    """Add many neurons at the common scale of the least loss: a start for a descent, which is global more often from many.

    The objective may rise for now; a round is kept by what it ends with.
    """
    best = (neurons, at)
    for scale in 10.0 ** torch.arange(-3.0, 2.0, 0.5, dtype=torch.float64):
        trial = neurons.append(more.with_factors(more.U, float(scale) / more.n_terms * more.V))
        there = objective.evaluate(objective.apply(trial), at.intercept)
        if best[0] is neurons or float(there.value) < float(best[1].value):
            best = (trial, there)
    return best


def face_projectors(neurons: Neurons, hidden_rows: list[Tensor], tolerance: float) -> Tensor | None:
    """``(m, p, p)`` projections on the hyperplanes that neurons are within ``tolerance`` of; None if there are none."""
    p = neurons.U.shape[1]
    projectors = torch.eye(p, dtype=neurons.dtype, device=neurons.device).repeat(neurons.n_terms, 1, 1)
    some = False
    for j in range(neurons.n_terms):
        rows = hidden_rows[int(neurons.block[j])]
        sizes = rows.norm(dim=1)
        near = (rows @ neurons.U[j]).abs() <= tolerance * sizes * neurons.U[j].norm()
        near &= sizes > 0
        if bool(near.any()):
            _, sigma, Vh = torch.linalg.svd(rows[near] / sizes[near, None], full_matrices=False)
            normal = Vh[sigma > 1e-10 * sigma[0]]
            if len(normal) < p:  # all of space: the neuron would vanish
                projectors[j] -= normal.T @ normal
                some = True
    return projectors if some else None


def _merged(neurons: Neurons, parallel: float, outer: str) -> Neurons:
    """Add the output weights of neurons with parallel inner weights; with l1 only where they write the same output."""
    left = list(range(neurons.n_terms))
    inner = neurons.U.norm(dim=1)
    unit = neurons.U / inner.clamp_min(torch.finfo(neurons.dtype).tiny)[:, None]
    U, V, block = [], [], []
    while left:
        j = left.pop(0)
        same = [
            k
            for k in left
            if neurons.block[k] == neurons.block[j]
            and float(unit[k] @ unit[j]) > 1 - parallel
            and (outer == "l2" or bool(((neurons.V[k] != 0) == (neurons.V[j] != 0)).all()))
        ]
        left = [k for k in left if k not in same]
        U.append(unit[j])
        V.append(sum((inner[k] * neurons.V[k] for k in same), inner[j] * neurons.V[j]))
        block.append(neurons.block[j])
    if not U:
        return neurons
    return Neurons(torch.stack(U), torch.stack(V), torch.stack(block), neurons.shape)


def _one_output_each(neurons: Neurons) -> Neurons:
    """Split neurons that write several outputs: ``|u| |v|_1`` is the sum over them."""
    where, column = (neurons.V != 0).nonzero(as_tuple=True)
    V = torch.zeros((len(where), neurons.V.shape[1]), dtype=neurons.dtype, device=neurons.device)
    V[torch.arange(len(where)), column] = neurons.V[where, column]
    return Neurons(neurons.U[where], V, neurons.block[where], neurons.shape)

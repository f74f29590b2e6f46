"""What a solve costs: predicted CPU seconds of each solver, from counts of operations and a look at the features.

A prediction is a sum of a few counts at measured prices, times a growth of the iterations::

    seconds = growth (overhead + a * products + b * passes + c * outputs + d * spectra + e * thresholds)
    growth = anisotropy^p depth^(q (1 + log anisotropy))

First-order methods take more iterations the further the features are from equal singular values, and the more so the
smaller beta is; solvers that use the curvature hardly do. Prices are those of a solve to a relative gap of 1e-3 on one
thread; ``benchmarks/real/run.py --fit-auto`` fits them to a race on real tokens and prints the table ``PRICES``. They need
not be right on another machine: only their ratios decide.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import final

import torch

from convexformer.gauges import Factored, Sliced
from convexformer.objective import Objective
from convexformer.operators import BilinearOperator
from convexformer.solvers.base import Workspace
from convexformer.solvers.working_set import compiled


@final
@dataclass(frozen=True)
class Counts:
    """How large an objective is, in the units that prices are for."""

    overhead: float = 1.0
    """One solve."""
    products: float = 0.0
    """1e9 multiply-adds of a product with dense weights, rows x weights; of the data of a bilinear operator x outputs."""
    passes: float = 0.0
    """The same, of the rows before the squared loss is compressed: working sets need the samples themselves."""
    outputs: float = 0.0
    """1e6 outputs, rows x c: the loss, its intercept and its curvature."""
    spectra: float = 0.0
    """1e9 multiply-adds of the Gram matrices of all token slices and of their spectra, ``s d^2 (R + d)``."""
    thresholds: float = 0.0
    """1e9 multiply-adds of the singular values of dense weights, weights x short side; zero without a nuclear norm."""
    anisotropy: float = 1.0
    """See :func:`anisotropy`."""
    depth: float = 1.0
    """``beta_max / beta``, at least 1: how far the solution is from zero."""


@final
@dataclass(frozen=True)
class Prices:
    """Seconds of a solver for one of each of :class:`Counts`, and how its iterations grow with anisotropy and depth."""

    overhead: float = 0.0
    products: float = 0.0
    passes: float = 0.0
    outputs: float = 0.0
    spectra: float = 0.0
    thresholds: float = 0.0
    power: float = 0.0
    deepening: float = 0.0

    def growth(self, counts: Counts) -> float:
        """Return the factor that all counts have in common."""
        return math.prod(self.factors(counts).values())

    def factors(self, counts: Counts) -> dict[str, float]:
        """Return the growth by anisotropy, and by depth."""
        by_depth = self.deepening * (1 + math.log(counts.anisotropy))
        return {"anisotropy": counts.anisotropy**self.power, "depth": counts.depth**by_depth}

    def shares(self, counts: Counts) -> dict[str, float]:
        """Return the seconds of each count, by name."""
        growth = self.growth(counts)
        return {name: growth * getattr(counts, name) * getattr(self, name) for name in PRICED}

    def seconds(self, counts: Counts) -> float:
        """Return all seconds."""
        return sum(self.shares(counts).values())


PRICED = tuple(field.name for field in fields(Prices))[:-2]

PRICES: dict[str, dict[str, Prices]] = {
    "nuclear, token slices": {
        "fista": Prices(overhead=0.01, passes=5.3, outputs=0.37, spectra=0.027, thresholds=32, deepening=0.12),
        "working_set": Prices(overhead=0.016, passes=4.2, outputs=0.73, spectra=0.014, thresholds=33, deepening=0.12),
    },
}
"""By kind of objective and solver, from 132 problems and betas of ``benchmarks/real/run.py`` (suites quick, default and
sizes, on TREC-6, CIFAR-10, MRPC, digits and made-up tokens): the solver chosen is the best to 1.4% in the geometric mean."""

EXACT_BLOCKS = ("groups", "groups, squared loss")
"""Kinds that need no prices: working sets are as fast as any other solver, or faster (benchmarks/real/run.py)."""

_ANISOTROPY: Workspace[float] = Workspace()
_CRITICAL_BETA: Workspace[float] = Workspace()


def predicted_seconds(objective: Objective) -> dict[str, float]:
    """Return the predicted CPU seconds of each solver that ``PRICES`` has for this kind of objective."""
    table = PRICES.get(kind(objective), {})
    if not table:
        return {}
    counts = count(objective)
    return {name: prices.seconds(counts) for name, prices in table.items()}


def kind(objective: Objective) -> str:
    """Return the row of ``PRICES`` that an objective belongs to."""
    penalty = objective.penalty
    if isinstance(penalty, Sliced) and penalty.column_groups:
        if not compiled.available:  # working sets then have no block descent
            return "groups, nothing compiled"
        return "groups, squared loss" if objective.loss.quadratic else "groups"
    if not isinstance(penalty, Factored):
        return "other"
    if isinstance(objective.operator, BilinearOperator):
        return "nuclear, bilinear"
    return "nuclear, token slices" if objective.operator.token_features() is not None else "nuclear"


def count(objective: Objective) -> Counts:
    """Count the operations of an objective; costs three products with the operator the first time."""
    rows, c = objective.n_rows, objective.n_outputs
    shape, parts = objective.weight_shape, objective.operator.token_features()
    weights, bilinear = math.prod(shape), isinstance(objective.operator, BilinearOperator)
    features = weights // c
    if objective.loss.quadratic and not objective.intercept and 2 * features <= rows:
        rows = features  # the squared loss is compressed
    products = objective.operator.data_size * c if bilinear else rows * weights
    passes = 0 if bilinear else objective.n_rows * weights
    spectra = 0
    if parts is not None:
        _, s, d = parts.features.shape
        spectra = s * d * d * (rows + d)
    thresholds = weights * min(shape[-2:]) if isinstance(objective.penalty, Factored) else 0
    return Counts(
        products=products / 1e9,
        passes=passes / 1e9,
        outputs=rows * c / 1e6,
        spectra=spectra / 1e9,
        thresholds=thresholds / 1e9,
        anisotropy=1.0 if bilinear else anisotropy(objective),
        depth=1.0 if bilinear else depth(objective),
    )


def anisotropy(objective: Objective) -> float:
    """Estimate ``r tr(K^2) / tr(K)^2`` of ``K = A^T A``, the features centred where there is an intercept; at least 1.

    ``r`` is the largest rank that ``K`` can have. One for features with equal singular values, ``r`` where a single one
    dwarfs the others. By one random probe ``z``
    (Hutchinson 1990): ``|A z|^2`` is ``tr(K)`` and ``|A^T A z|^2`` is ``tr(K^2)`` on average.
    """

    def estimate() -> float:
        generator = torch.Generator().manual_seed(0)
        z = torch.randn(objective.weight_shape, generator=generator, dtype=torch.float64).to(objective.like)
        outputs = objective.apply(z)
        if objective.intercept:
            total = objective.rows.sum(outputs.new_ones(len(outputs)))
            outputs = outputs - objective.rows.sum(outputs) / total
        trace = float(objective.rows.dot(outputs, outputs))
        square = float(objective.adjoint(outputs).square().sum())
        rank = min(z.numel(), outputs.numel())
        found = rank * square / trace**2 if 0 < trace**2 < math.inf else 1.0
        return max(1.0, found) if math.isfinite(found) else 1.0

    with torch.no_grad():
        return _ANISOTROPY.get(objective.operator, estimate, objective.intercept)


def depth(objective: Objective) -> float:
    """Return ``beta_max / beta``, at least 1, by the polar at ``Z = 0``."""

    def critical() -> float:
        zero = objective.like.new_zeros(objective.targets.shape)
        at = objective.evaluate(zero, inexact_intercept=True)
        return objective.penalty.critical_beta(objective.dual_matrix(at.V), objective.curvature).value

    formula = (id(objective.loss), id(objective.penalty), objective.intercept)
    depends_on = (objective.targets, objective.sample_weight, *formula)
    with torch.no_grad():
        found = _CRITICAL_BETA.get(objective.operator, critical, *depends_on) / objective.beta
    return max(1.0, found) if math.isfinite(found) else 1.0


def explain_prediction(objective: Objective) -> list[str]:
    """Return the terms of the predictions, line by line: the counts, and the seconds that they cost each solver."""
    counts, table = count(objective), PRICES.get(kind(objective), {})
    shares = {name: prices.shares(counts) for name, prices in table.items()}
    lines = [
        f"CPU seconds to a relative gap of 1e-3 on one thread, objectives of the kind '{kind(objective)}':",
        f"{'':12}{'count':>10}" + "".join(f"{name:>14}" for name in table),
    ]
    lines += [
        f"{name:12}{getattr(counts, name):10.3g}" + "".join(f"{shares[solver][name]:14.2g}" for solver in table)
        for name in PRICED
    ]
    for name in ("anisotropy", "depth"):
        cells = "".join(f"{prices.factors(counts)[name]:14.2g}" for prices in table.values())
        lines.append(f"{name:12}{getattr(counts, name):10.3g}{cells}  (a factor, counted in the lines above)")
    return lines

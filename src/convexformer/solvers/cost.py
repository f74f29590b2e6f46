"""What a solve costs: predicted CPU seconds of each solver, from sizes that are known before it runs.

A prediction is a sum of a few terms, each a count of operations times a measured constant::

    seconds = overhead + a * products + b * outputs + c * spectra + d * thresholds

The constants are those of a solve to a relative gap of 1e-3 on one thread; ``benchmarks/real/run.py --fit-auto`` fits them
to the race on real tokens and prints the table below. They need not be right on another machine: only their ratios count.
"""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass, fields
from typing import final

from convexformer.gauges import Factored, Sliced
from convexformer.objective import Objective
from convexformer.operators import BilinearOperator


@final
@dataclass(frozen=True)
class Terms:
    """Counts of operations of an objective, or what each of them costs a solver, in seconds."""

    overhead: float = 1.0
    """One solve."""
    products: float = 0.0
    """1e9 multiply-adds of a product with dense weights: rows x weights, as often as outputs read them."""
    outputs: float = 0.0
    """1e6 outputs, rows x c: the loss, its intercept and its curvature."""
    spectra: float = 0.0
    """1e9 multiply-adds of the Gram matrices of all token slices, and of their spectra: ``s d^2 (R + d)``."""
    thresholds: float = 0.0
    """1e9 multiply-adds of the singular values of dense weights: weights x short side; zero without a nuclear norm."""

    def dot(self, prices: Terms) -> float:
        """Seconds at these prices."""
        return sum(count * price for count, price in zip(astuple(self), astuple(prices), strict=True))


def terms(objective: Objective) -> Terms:
    """Count the operations of an objective."""
    rows, c = objective.targets.shape
    shape = objective.weight_shape
    weights, columns = math.prod(shape), shape[-1]
    parts = objective.operator.token_features()
    spectra = 0.0
    if parts is not None:
        _, s, d = parts.features.shape
        spectra = s * d * d * (rows + d) / 1e9
    bilinear = isinstance(objective.operator, BilinearOperator)
    # the weights of a bilinear operator meet the samples through its data, not one by one
    products = objective.operator.data_size * c if bilinear else rows * weights
    nuclear = isinstance(objective.penalty, Factored)
    return Terms(
        products=products / 1e9,
        outputs=rows * c / 1e6,
        spectra=spectra,
        thresholds=weights * min(shape[-2:]) / 1e9 if nuclear and columns > 1 else 0.0,
    )


def kind(objective: Objective) -> str:
    """Return the row of ``PRICES`` that an objective belongs to."""
    penalty = objective.penalty
    if isinstance(penalty, Sliced) and penalty.column_groups:
        return "groups, squared loss" if objective.loss.quadratic else "groups"
    if isinstance(objective.operator, BilinearOperator):
        return "nuclear, bilinear"
    return "nuclear" if isinstance(penalty, Factored) else "other"


PRICES: dict[str, dict[str, Terms]] = {
    "groups": {
        "fista": Terms(overhead=0.1, products=60),
        "working_set": Terms(overhead=0.1, products=15, spectra=0.2),
    },
    "groups, squared loss": {
        "fista": Terms(overhead=0.01, products=30),
        "working_set": Terms(overhead=0.01, products=10),
    },
    "nuclear": {
        "fista": Terms(overhead=0.05, products=60, thresholds=10),
        "staircase": Terms(overhead=0.1, products=60),
        "working_set": Terms(overhead=0.1, products=40, thresholds=10),
    },
    "nuclear, bilinear": {
        "fista": Terms(overhead=0.1, products=100, thresholds=100),
        "staircase": Terms(overhead=0.2, products=100),
    },
}
"""By kind of objective and solver."""


def predicted_seconds(objective: Objective) -> dict[str, float]:
    """Return the predicted CPU seconds of each solver that the table knows for this kind of objective."""
    counts = terms(objective)
    return {name: counts.dot(prices) for name, prices in PRICES.get(kind(objective), {}).items()}


def explain_prediction(objective: Objective) -> list[str]:
    """Return the terms of the predictions, line by line: counts of operations, and the seconds they cost each solver."""
    counts, table = terms(objective), PRICES.get(kind(objective), {})
    lines = [f"CPU seconds to a relative gap of 1e-3, one thread, for objectives of the kind '{kind(objective)}':"]
    lines.append(f"{'term':12}{'count':>12}" + "".join(f"{name:>14}" for name in table))
    for field in fields(Terms):
        count = getattr(counts, field.name)
        costs = "".join(f"{count * getattr(prices, field.name):14.2g}" for prices in table.values())
        lines.append(f"{field.name:12}{count:12.3g}{costs}")
    return lines

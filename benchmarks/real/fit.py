"""The constants of ``auto``: nonnegative least squares on the relative errors of predicted seconds, by kind and solver."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import asdict, replace
from itertools import product
from typing import Any

import numpy as np
from report import NEGLIGIBLE, pooled
from scipy.optimize import nnls

from cases import MAIN_GOAL
from convexformer.solvers.cost import EXACT_BLOCKS, PRICED, PRICES, Counts, Prices

GOAL = f"{MAIN_GOAL:g}"
POWERS = (0.0, 0.25, 0.5)  # of the anisotropy
DEEPENINGS = tuple(0.02 * k for k in range(13))  # powers of beta_max / beta, times 1 + log anisotropy
UNPRICED = ("nuclear", "nuclear, bilinear", *EXACT_BLOCKS)
"""``auto`` has rules for them."""
TAKES_OVER = "staircase"  # never chosen first where prices decide: see turns.py
FACTORS = 2.0 ** np.linspace(-1, 1, 17)


def observations(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each case and beta: kind, counts, and seconds by solver; a solve that did not end counts as long as it
    took, twice.
    """
    rows = []
    for run in runs:
        for entry in run["entries"]:
            facts = entry["facts"].get("features")
            if not facts or facts["kind"] in UNPRICED:
                continue
            for ratio in sorted({row["ratio"] for row in entry["cold"]}, reverse=True):
                seconds = {}
                for tool, row in pooled(entry, ratio).items():
                    if tool not in entry["facts"]["solvers"] or tool == TAKES_OVER:
                        continue
                    done = row["seconds"].get(GOAL)
                    seconds[tool] = done if done is not None else 2 * row.get("total", run["limit"])
                if seconds:
                    name, counts = f"{entry['name']}, {ratio:g}", Counts(**{**facts["counts"], "depth": 1 / ratio})
                    rows.append({"name": name, "kind": facts["kind"], "counts": counts, "seconds": seconds})
    return rows


def fit(rows: list[dict[str, Any]]) -> dict[str, dict[str, Prices]]:
    """Prices by kind and solver: nonnegative, and of least squared error in the logarithm."""
    groups: dict[tuple[str, str], list[tuple[Counts, float]]] = defaultdict(list)
    for row in rows:
        for solver, seconds in row["seconds"].items():
            groups[row["kind"], solver].append((row["counts"], seconds))
    prices: dict[str, dict[str, Prices]] = defaultdict(dict)
    for (kind, solver), pairs in sorted(groups.items()):
        t = np.array([seconds for _, seconds in pairs])
        tried = product(POWERS, DEEPENINGS)
        found = [_fit_one(pairs, t, power, deepening) for power, deepening in tried]
        prices[kind][solver] = min(found, key=lambda pair: pair[0])[1]
    for kind in prices:
        _settle(prices, kind, [row for row in rows if row["kind"] == kind])
    return dict(prices)


def _settle(prices: dict[str, dict[str, Prices]], kind: str, rows: list[dict[str, Any]]) -> None:
    """Scale each solver's prices by the factor, near one, at which the choices are best: what a wrong choice costs is
    not what a wrong prediction costs.
    """
    for solver, found in prices[kind].items():
        scaled = {factor: _scaled(found, factor) for factor in FACTORS}

        def regret(factor: float, solver: str = solver, scaled: dict[float, Prices] = scaled) -> float:
            tried = {kind: {**prices[kind], solver: scaled[factor]}}
            return sum(math.log(row[0]) for row in judge(rows, tried)) + 0.1 * len(rows) * math.log(factor) ** 2

        prices[kind][solver] = scaled[min(FACTORS, key=regret)]


def _scaled(prices: Prices, factor: float) -> Prices:
    given = {name: float(f"{factor * getattr(prices, name):.2g}") for name in PRICED}
    return replace(prices, **given)


def _fit_one(pairs: list[tuple[Counts, float]], t: np.ndarray, power: float, deepening: float) -> tuple[float, Prices]:
    """The error and the prices for given powers; rows reweighted until errors count in the logarithm."""
    grown = Prices(power=power, deepening=deepening)
    A = np.array([[getattr(counts, name) * grown.growth(counts) for name in PRICED] for counts, _ in pairs])
    scale = t.copy()
    for _ in range(20):
        x, _ = nnls(A / scale[:, None], t / scale)
        scale = np.sqrt(t * np.maximum(A @ x, 1e-3 * t))
    error = float(np.square(np.log(np.maximum(A @ x, 1e-9) / t)).sum())
    return error, Prices(*(float(f"{value:.2g}") for value in x), power=power, deepening=deepening)


def judge(rows: list[dict[str, Any]], prices: dict[str, dict[str, Prices]]) -> list[tuple[float, str, str, str]]:
    """For each row: the chosen solver's seconds over the best one's, with names; worst first."""
    found = []
    for row in rows:
        table = prices.get(row["kind"], {})
        predicted = {name: table[name].seconds(row["counts"]) for name in row["seconds"] if name in table}
        if not predicted:
            continue
        chosen = min(predicted, key=lambda name: predicted[name])
        best = min(row["seconds"], key=lambda name: row["seconds"][name])
        ratio = row["seconds"][chosen] / row["seconds"][best]
        found.append(
            (1.0 if row["seconds"][chosen] - row["seconds"][best] < NEGLIGIBLE else ratio, row["name"], chosen, best)
        )
    return sorted(found, reverse=True)


def report(runs: list[dict[str, Any]]) -> str:
    """The table for ``solvers/cost.py``, and what it would have chosen in these runs."""
    rows = observations(runs)
    if not rows:
        return "these runs hold no counts of operations: run the race again"
    prices = fit(rows)
    lines = ["PRICES: dict[str, dict[str, Prices]] = {"]
    for kind, table in prices.items():
        lines.append(f'    "{kind}": {{')
        for solver, found in table.items():
            given = ", ".join(f"{name}={value:g}" for name, value in asdict(found).items() if value)
            lines.append(f'        "{solver}": Prices({given}),')
        lines.append("    },")
    lines.append("}")
    for title, table in (("these constants", prices), ("the constants in use", PRICES)):
        found = judge(rows, table)
        if not found:
            continue
        above = [row for row in found if row[0] > 1.2]
        mean = math.exp(sum(math.log(row[0]) for row in found) / len(found))
        lines.append(
            f"\n{title}: chosen / best solver above 1.2 in {len(above)} of {len(found)} fits, geometric mean {mean:.3f}"
        )
        lines += [f"  {ratio:.2f}  {name}: {chosen} instead of {best}" for ratio, name, chosen, best in above]
    return "\n".join(lines)

"""The constants of ``auto``: nonnegative least squares on the relative errors of predicted seconds, by kind and solver."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import astuple, fields
from typing import Any

import numpy as np
from report import NEGLIGIBLE, pooled
from scipy.optimize import nnls

from cases import MAIN_GOAL
from convexformer.solvers.cost import PRICES, Terms

GOAL = f"{MAIN_GOAL:g}"
NAMES = [field.name for field in fields(Terms)]


def observations(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each case and beta: kind, counts, and seconds by solver; a solve that did not end counts as long as it
    took, twice.
    """
    rows = []
    for run in runs:
        for entry in run["entries"]:
            facts = entry["facts"].get("features")
            if not facts:
                continue
            for ratio in sorted({row["ratio"] for row in entry["cold"]}, reverse=True):
                seconds = {}
                for tool, row in pooled(entry, ratio).items():
                    if tool not in entry["facts"]["solvers"]:
                        continue
                    done = row["seconds"].get(GOAL)
                    seconds[tool] = done if done is not None else 2 * row.get("total", run["limit"])
                if seconds:
                    counts = Terms(**facts["terms"])
                    rows.append(
                        {"name": f"{entry['name']}, {ratio:g}", "kind": facts["kind"], "counts": counts}
                        | {"seconds": seconds}
                    )
    return rows


def fit(rows: list[dict[str, Any]]) -> dict[str, dict[str, Terms]]:
    """Prices by kind and solver: the nonnegative ones of least squared relative error."""
    groups: dict[tuple[str, str], list[tuple[Terms, float]]] = defaultdict(list)
    for row in rows:
        for solver, seconds in row["seconds"].items():
            groups[row["kind"], solver].append((row["counts"], seconds))
    prices: dict[str, dict[str, Terms]] = defaultdict(dict)
    for (kind, solver), pairs in sorted(groups.items()):
        A = np.array([astuple(counts) for counts, _ in pairs])
        t = np.array([seconds for _, seconds in pairs])
        # iteratively reweighted towards symmetric errors in the logarithm: 1/t alone rewards predictions that are too low
        scale = t.copy()
        for _ in range(20):
            x, _ = nnls(A / scale[:, None], t / scale)
            scale = np.sqrt(t * np.maximum(A @ x, 1e-3 * t))
        prices[kind][solver] = Terms(*(float(f"{value:.2g}") for value in x))
    return dict(prices)


def judge(rows: list[dict[str, Any]], prices: dict[str, dict[str, Terms]]) -> list[tuple[float, str, str, str]]:
    """For each row: the chosen solver's seconds over the best one's, with names; worst first."""
    found = []
    for row in rows:
        table = prices.get(row["kind"], {})
        predicted = {name: row["counts"].dot(table[name]) for name in row["seconds"] if name in table}
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
    lines = ["PRICES: dict[str, dict[str, Terms]] = {"]
    for kind, table in prices.items():
        lines.append(f'    "{kind}": {{')
        for solver, terms in table.items():
            given = ", ".join(
                f"{name}={value:g}"
                for name, value in zip(NAMES, astuple(terms), strict=True)
                if value or name == "overhead"
            )
            lines.append(f'        "{solver}": Terms({given}),')
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

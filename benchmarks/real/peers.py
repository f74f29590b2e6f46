"""What a user would take instead, each as a function that returns plain numbers. CPU seconds, this process's threads."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from data import TokenSet
from scipy.optimize import minimize
from sklearn.linear_model import LogisticRegression, LogisticRegressionCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import convexformer as cf
from cases import GOALS
from convexformer.experiments.adam import train_adam
from convexformer.gauges import Factored
from convexformer.operators import BilinearOperator, LowRank
from convexformer.weights import Weights

MEMORY = 50  # pairs of L-BFGS
RANK = 64  # terms of a block, at most
KEPT = 60  # iterates of L-BFGS kept for certificates, at most
ADAM_RATES = (0.1, 0.02)


class TimeIsUp(Exception):  # noqa: N818
    """Raised out of scipy's loop."""


# ---------------------------------------------------------------------- L-BFGS on factors


def factored_lbfgs(problem: cf.Problem, limit: float, lower_bound: float | None = None) -> dict[str, Any]:
    """scipy's L-BFGS on ``F(A(U^T V) + b) + beta a/2 (|U|^2 + |V|^2)``, certified afterwards by the library.

    The intercept is one more variable. Iterates are kept on the way, and certificates are computed when the time has
    been taken, so a goal's time is that of an oracle which certifies for nothing: it favours the peer. ``certificate`` is
    what a single one takes.
    """
    objective = problem.objective.factored()
    A, penalty, rows = objective.operator, objective.penalty, objective.rows
    assert isinstance(A, BilinearOperator)
    assert isinstance(penalty, Factored)
    p, q = objective.weight_shape[-2:]
    rank, c = min(p, q, RANK), objective.n_outputs
    block = torch.arange(A.n_blocks).repeat_interleave(rank)
    m, weight = len(block), objective.beta * penalty.factor_weight()
    fixed = replace(objective, intercept=False)
    generator = np.random.default_rng(0)
    x = np.concatenate([generator.standard_normal(m * (p + q)) / math.sqrt(p + q), np.zeros(c)])

    def unpack(x: np.ndarray) -> tuple[LowRank, torch.Tensor]:
        flat = torch.from_numpy(np.array(x))
        U, V, b = flat[: m * p].view(m, p), flat[m * p : m * (p + q)].view(m, q), flat[m * (p + q) :]
        return LowRank(U, V, block, objective.weight_shape, counts=(rank,) * A.n_blocks), b

    def value_and_gradient(x: np.ndarray) -> tuple[float, np.ndarray]:
        Z, b = unpack(x)
        with torch.no_grad():
            at = fixed.evaluate(fixed.apply(Z) + b)
            GU, GV = fixed.factor_gradients(at.V, Z)
        Gb = rows.sum(at.V) if objective.intercept else torch.zeros_like(b)
        value = float(at.value) + weight / 2 * float(Z.U.square().sum() + Z.V.square().sum())
        gradient = torch.cat([(GU + weight * Z.U).flatten(), (GV + weight * Z.V).flatten(), Gb])
        return value, gradient.numpy()

    kept: list[tuple[float, int, np.ndarray]] = []
    started, every = time.process_time(), 1

    def look(x: np.ndarray) -> None:
        nonlocal every
        look.calls += 1  # type: ignore[attr-defined]
        seconds = time.process_time() - started
        if look.calls % every == 0:  # type: ignore[attr-defined]
            kept.append((seconds, look.calls, x.copy()))  # type: ignore[attr-defined]
        if len(kept) >= KEPT:
            del kept[::2]
            every *= 2
        if seconds > limit:
            raise TimeIsUp

    look.calls = 0  # type: ignore[attr-defined]
    options = {"maxcor": MEMORY, "maxiter": 100_000, "maxfun": 200_000, "ftol": 1e-14, "gtol": 1e-12}
    try:
        x = minimize(value_and_gradient, x, jac=True, method="L-BFGS-B", callback=look, options=options).x
        kept.append((time.process_time() - started, look.calls, x))  # type: ignore[attr-defined]
        status = "ENDED"
    except TimeIsUp:
        status = "MAX_TIME"

    spent: list[float] = []

    def gap(place: int) -> float:
        Z, b = unpack(kept[place][2])
        weights = Weights(Z.balanced(), b if objective.intercept else None)
        begun = time.process_time()
        found = cf.certify(weights, problem).relative_gap
        spent.append(time.process_time() - begun)
        return found

    found = _first_below(gap, len(kept), GOALS)
    return {
        "seconds": {f"{goal:g}": None if k is None else kept[k][0] for goal, k in found.items()},
        "iterations": {f"{goal:g}": None if k is None else kept[k][1] for goal, k in found.items()},
        "gap": gap(len(kept) - 1),
        "certificate": min(spent),
        "status": status,
    }


def _first_below(gap: Callable[[int], float], n: int, goals: tuple[float, ...]) -> dict[float, int | None]:
    """The first place whose gap is at most each goal, by bisection: gaps fall, but for noise."""
    known: dict[int, float] = {}

    def at(k: int) -> float:
        if k not in known:
            known[k] = gap(k)
        return known[k]

    found: dict[float, int | None] = {}
    for goal in goals:
        low, high = 0, n - 1
        if at(high) > goal:
            found[goal] = None
            continue
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if at(middle) <= goal else (middle + 1, high)
        found[goal] = high
    return found


# ---------------------------------------------------------------------- Adam


def adam(problem: cf.Problem, limit: float, lower_bound: float | None) -> dict[str, Any]:
    """Adam on the ordinary network at the better of two rates; goals are met by an oracle that knows our lower bound."""
    heads = max(32, 2 * problem.layout.n_outputs)
    best: dict[str, Any] = {}
    for rate in ADAM_RATES:
        network = problem.head.random_network(problem.layout, heads, bias=problem.intercept)  # type: ignore[attr-defined]
        train = lambda steps, network=network, rate=rate: train_adam(problem, network, steps, rate)  # noqa: E731
        started = time.process_time()
        with torch.enable_grad():
            train(5)
            each = (time.process_time() - started) / 5
            steps = int(max(20, min(2000, limit / len(ADAM_RATES) / each)))
            started = time.process_time()
            _, values = train(steps)
        seconds = time.process_time() - started
        lowest = np.minimum.accumulate(values)
        if best and lowest[-1] >= best["objective"]:
            continue
        gaps = (lowest - lower_bound) / np.abs(lowest) if lower_bound is not None else np.full(steps, np.inf)
        met = {goal: int(np.argmax(gaps <= goal)) if gaps[-1] <= goal else None for goal in GOALS}
        best = {
            "seconds": {f"{g:g}": None if k is None else seconds * (k + 1) / steps for g, k in met.items()},
            "iterations": {f"{g:g}": k if k is None else k + 1 for g, k in met.items()},
            "gap": float(gaps[-1]),
            "objective": float(lowest[-1]),
            "status": f"{steps} steps in {seconds:.1f} s, rate {rate:g}",
        }
    return best


# ---------------------------------------------------------------------- scikit-learn's probes and whole searches


def probes(tokens: TokenSet, limit: float) -> list[dict[str, Any]]:
    """Fit scikit-learn's linear probes and our own estimators with their defaults: seconds and test accuracy."""
    flat = lambda part: part.X.reshape(len(part.y), -1)  # noqa: E731
    real = lambda part: np.ones(part.X.shape[:2]) if part.mask is None else part.mask  # noqa: E731
    mean = lambda part: part.X.sum(1) / real(part).sum(1, keepdims=True).clip(1)  # noqa: E731
    plain = lambda model: make_pipeline(StandardScaler(), model)  # noqa: E731
    search = {"Cs": 10, "cv": 5, "max_iter": 1000}
    tools: list[tuple[str, Callable[[], Any], Callable[[TokenSet], Any]]] = [
        ("LogisticRegression, mean token", lambda: plain(LogisticRegression(max_iter=1000)), mean),
        ("LogisticRegression, flattened", lambda: plain(LogisticRegression(max_iter=1000)), flat),
        ("LogisticRegressionCV, mean token", lambda: plain(LogisticRegressionCV(**search)), mean),
        ("LogisticRegressionCV, flattened", lambda: plain(LogisticRegressionCV(**search)), flat),
    ]
    rows = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, make, view in tools:
            rows.append(_fitted(name, make(), view(tokens), view(tokens.test), tokens))
        for name, ours in (
            ("TokenClassifier", cf.TokenClassifier(max_time=limit)),
            ("TokenClassifierCV", cf.TokenClassifierCV(max_time=limit)),
        ):
            masks = {} if tokens.mask is None else {"mask": tokens.mask}
            rows.append(_fitted(name, ours, tokens.X, tokens.test.X, tokens, **masks))
    return rows


def _fitted(name: str, model: Any, X: np.ndarray, X_test: np.ndarray, tokens: TokenSet, **fit: Any) -> dict[str, Any]:
    cpu, wall = time.process_time(), time.perf_counter()
    model.fit(X, tokens.y, **fit)
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    assert tokens.test is not None
    score = {} if not fit or tokens.test.mask is None else {"mask": tokens.test.mask}
    accuracy = float(np.mean(model.predict(X_test, **score) == tokens.test.y))
    row = {"tool": name, "seconds": cpu, "wall": wall, "accuracy": accuracy}
    if hasattr(model, "certificate_"):
        row |= {"gap": model.certificate_.relative_gap, "beta_ratio": float(model.beta_ / model.beta_max_)}
    return row

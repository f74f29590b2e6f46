"""The demo: one program over many maps, and the papers' heads, beside everyday tools, on one screen and in four figures."""

from __future__ import annotations

import time
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression

from convexformer.certificates import Certificate
from convexformer.data import TokenDataset, digits
from convexformer.data.files import write_json
from convexformer.estimators import TokenClassifierCV
from convexformer.experiments import figures
from convexformer.experiments.adam import train_adam
from convexformer.heads import MLP, Attention, Linear, MLPMixer, PoolFormer, SelfAttention
from convexformer.heads.base import Head
from convexformer.path import Path as BetaPath
from convexformer.path import beta_ratios, walk
from convexformer.problem import Problem
from convexformer.progress import spinner
from convexformer.solution import Solution
from convexformer.solving import certify, solve

DEMO_TOLERANCE = 1e-4  # certified relative gap of every solve
ACTIVE_SHARE = 1e-6  # a token counts as active above this fraction of the largest token norm
LEARNING_RATES = (0.005, 0.02, 0.08)  # of Adam; the best one counts, for each seed
DEMO_HEADS: dict[str, Head] = {
    "attention, l1": Attention(),
    "attention, l2": Attention(decay="l2"),
    "attention, l1, gated": Attention(activation="gated_relu", gates=4),
    "self-attention": SelfAttention(),
    "mixer": MLPMixer(),
    "poolformer, gated": PoolFormer(activation="gated_relu", gates=16, grid=(4, 4)),
    "mlp": MLP(),
    "mlp, gated": MLP(activation="gated_relu", gates=16),
    "linear (ridge)": Linear(),
}
AUTO = "auto"
FEATURED = "attention, l1"  # the head of the figures and of the comparison with Adam


@dataclass(frozen=True)
class Split:
    """Standardised tokens and labels of the three parts."""

    train: TokenDataset
    valid: TokenDataset
    test: TokenDataset
    y_train: torch.Tensor
    y_valid: torch.Tensor
    y_test: torch.Tensor


@dataclass(frozen=True)
class Row:
    """One line of the leaderboard."""

    head: str
    test_accuracy: float
    relative_gap: float | None
    seconds: float
    active_tokens: str
    beta_ratio: float | None


def run(output: Path, *, quick: bool = False, console: Console | None = None) -> dict[str, Any]:
    """Run the demo, print its tables, write figures and ``demo.json`` to ``output``; return the numbers."""
    console = console or Console()
    output = Path(output)
    output.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    data = _split(0.3 if quick else 0.6)
    ratios = beta_ratios(5 if quick else 8, 1e-2 if quick else 5e-3)
    rows: list[Row] = []
    paths_by_head: dict[str, tuple[BetaPath, list[float], int]] = {}
    with spinner("digits", console) as say:
        say(f"{AUTO}, beta by five folds of the training part")
        row, portfolio = _auto(data)
        rows.append(row)
        for name, head in DEMO_HEADS.items():
            say(f"{name}: {len(ratios)} betas, each certified")
            row, path, accuracies, best = _fit_path(name, head, data, ratios)
            rows.append(row)
            paths_by_head[name] = (path, accuracies, best)
        for name, flat in (("logistic, mean token", False), ("logistic, all tokens", True)):
            say(name)
            rows.append(_logistic(name, flat, data))
        say("Adam from three seeds")
        path, accuracies, best = paths_by_head[FEATURED]
        adam, curves, cold = _adam(data, path.solutions[best], steps=150 if quick else 700)
        say("figures")
        level = {row.head: row.test_accuracy for row in rows if row.head not in DEMO_HEADS}
        files = [
            figures.block_norms(portfolio, output / "blocks.png"),
            figures.token_map(path, best, output / "token_importance.png"),
            figures.path_curves({key: paths_by_head[key][:2] for key in DEMO_HEADS}, level, output / "path.png"),
            figures.convergence(
                cold, curves, output / "convergence.png", {str(run["run"]): run["seconds"] for run in adam}
            ),
        ]
    rows.sort(key=lambda row: -row.test_accuracy)
    gaps = [gap for path, _, _ in paths_by_head.values() for gap in path.relative_gaps]
    gaps.append(portfolio.certificate.relative_gap)
    _print(console, rows, adam, files, len(gaps), max(gaps))
    result = {
        "leaderboard": [asdict(row) for row in rows],
        "adam": adam,
        "solves": len(gaps),
        "worst_relative_gap": max(gaps),
        "certified": max(gaps) <= DEMO_TOLERANCE,
        "figures": [str(file) for file in files],
        "seconds": time.perf_counter() - started,
    }
    write_json(output / "demo.json", result)
    console.print(f"[dim]{result['seconds']:.0f} s in all; numbers in {output / 'demo.json'}[/]")
    return result


def _split(train: float) -> Split:
    """Split the digits; standardise each channel with the training tokens."""
    X, y = digits(patch=2)
    order = torch.from_numpy(np.random.default_rng(0).permutation(len(y)))
    cuts = [int(train * len(y)), int(0.2 * len(y))]
    parts = torch.split(order, [*cuts, len(y) - sum(cuts)])
    raw = [TokenDataset.of(X[rows]) for rows in parts]
    mean, scale = raw[0].moments()
    tokens = [part.standardized(mean, scale) for part in raw]
    return Split(tokens[0], tokens[1], tokens[2], y[parts[0]], y[parts[1]], y[parts[2]])


def _auto(data: Split) -> tuple[Row, Solution]:
    """``head="auto"`` on the training part: its folds choose beta, so that it needs no validation part."""
    started = time.perf_counter()
    # tokens are standardised already
    search = TokenClassifierCV(head="auto", tolerance=DEMO_TOLERANCE, standardize=False, device="cpu")
    search.fit(data.train, data.y_train.numpy())
    seconds = time.perf_counter() - started
    norms = search.solution_.block_norms
    used = f"{sum(norm > 0 for norm in norms.values())} of {len(norms)} maps"
    accuracy = float(search.score(data.test, data.y_test.numpy()))
    return Row(AUTO, accuracy, search.certificate_.relative_gap, seconds, used, search.beta_ratio_), search.solution_


def _fit_path(name: str, head: Head, data: Split, ratios: np.ndarray) -> tuple[Row, BetaPath, list[float], int]:
    """Walk the path on the training part, choose beta on the validation part, report the test part."""
    started = time.perf_counter()
    problem = Problem(head, data.train, data.y_train, beta_ratio=1.0, intercept=True)
    solutions = tuple(walk(problem, ratios, tolerance=DEMO_TOLERANCE))
    seconds = time.perf_counter() - started
    path = BetaPath(tuple(solution.beta for solution in solutions), problem.beta_max, solutions)
    valid = [_accuracy(solution, data.valid, data.y_valid) for solution in solutions]
    test = [_accuracy(solution, data.test, data.y_test) for solution in solutions]
    best = int(np.argmax(valid))
    chosen = solutions[best]
    row = Row(name, test[best], chosen.certificate.relative_gap, seconds, _active(chosen), float(ratios[best]))
    return row, path, test, best


def _accuracy(solution: Solution, tokens: TokenDataset, y: torch.Tensor) -> float:
    return float((solution.predict(tokens).argmax(1) == y).double().mean())


def _active(solution: Solution) -> str:
    norms = solution.token_norms()
    if norms is None:
        return "pooled"
    return f"{int((norms > ACTIVE_SHARE * norms.max()).sum())} of {len(norms)}"


def _logistic(name: str, flat: bool, data: Split) -> Row:
    """Scikit-learn's logistic regression on the same tokens, C chosen on the same validation part."""

    def features(tokens: TokenDataset) -> np.ndarray:
        return (tokens.X.flatten(1) if flat else tokens.mean_token).numpy()

    started = time.perf_counter()
    train, valid = features(data.train), features(data.valid)
    fits = []
    for C in np.geomspace(1e-3, 1e2, 6):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            model = LogisticRegression(C=C, max_iter=2000).fit(train, data.y_train.numpy())
        fits.append((model.score(valid, data.y_valid.numpy()), -C, model))
    model = max(fits, key=lambda entry: entry[:2])[2]
    seconds = time.perf_counter() - started
    accuracy = float(model.score(features(data.test), data.y_test.numpy()))
    return Row(name, accuracy, None, seconds, "all" if flat else "pooled", None)


def _adam(data: Split, chosen: Solution, steps: int) -> tuple[list[dict[str, Any]], dict[str, list[float]], Solution]:
    """Solve once more from zero; train the same network by Adam from three seeds, and certify each.

    Adam gets the best of ``LEARNING_RATES`` for each seed, and its seconds count the whole sweep.
    """
    head = chosen.head
    assert isinstance(head, Attention)
    problem = Problem(head, data.train, data.y_train, beta=chosen.beta, intercept=True)
    cold = solve(problem, tolerance=DEMO_TOLERANCE)
    n_heads = head.recover(cold.weights, cold.layout).w1.shape[0]  # as many heads as the optimum needs
    results = [_adam_entry("certified optimum", cold.certificate, cold.objective, cold.seconds, n_heads)]
    results[0]["test_accuracy"] = _accuracy(cold, data.test, data.y_test)
    curves: dict[str, list[float]] = {}
    for seed in range(3):
        started = time.perf_counter()
        runs = []
        for rate in LEARNING_RATES:
            start = head.random_network(cold.layout, n_heads, seed=seed, bias=True)
            network, curve = train_adam(problem, start, steps=steps, learning_rate=rate)
            runs.append((certify(network, problem), network, curve))
        proof, network, curve = min(runs, key=lambda run: run[0].primal)
        seconds = time.perf_counter() - started
        entry = _adam_entry(f"Adam, seed {seed}", proof, cold.objective, seconds, n_heads)
        with torch.no_grad():
            hits = network(data.test.X).argmax(1) == data.y_test
        entry["test_accuracy"] = float(hits.double().mean())
        results.append(entry)
        curves[f"Adam, seed {seed}"] = curve
    return results, curves, cold


def _adam_entry(name: str, proof: Certificate, optimum: float, seconds: float, heads: int) -> dict[str, Any]:
    return {
        "run": name,
        "objective": proof.primal,
        "above_optimum": proof.primal / optimum - 1,
        "certified_gap": proof.relative_gap,
        "seconds": seconds,
        "heads": heads,
    }


def _print(
    console: Console, rows: list[Row], adam: list[dict[str, Any]], files: list[Path], solves: int, worst: float
) -> None:
    board = Table(title="Digits as 16 tokens of 2x2 pixels; gap: certified, relative")
    for title, justify in (
        ("head", "left"),
        ("test acc.", "right"),
        ("gap", "right"),
        ("fits, s", "right"),
        ("uses", "right"),
        ("ratio", "right"),
    ):
        board.add_column(title, justify=justify)  # type: ignore[arg-type]
    for row in rows:
        gap = "-" if row.relative_gap is None else f"{row.relative_gap:.1e}"
        ratio = "-" if row.beta_ratio is None else f"{row.beta_ratio:.2g}"
        board.add_row(row.head, f"{row.test_accuracy:.3f}", gap, f"{row.seconds:.1f}", row.active_tokens, ratio)
    console.print(board)
    console.print(f"{solves} problems solved, no learning rate; the largest certified gap is {worst:.1e}.")
    console.print(
        "logistic: scikit-learn. uses: token positions or maps with weights. ratio: beta / beta_max, chosen on a "
        "validation part, for auto by folds of the training part. mlp, linear and logistic (mean token) are one model.\n",
        style="dim",
    )
    table = Table(title=f"The {FEATURED!r} network ({adam[0]['heads']} heads) trained by Adam")
    for title in ("run", "objective", "above opt.", "certify gap", "test acc.", "s"):
        table.add_column(title, justify="left" if title == "run" else "right")
    for entry in adam:
        table.add_row(
            entry["run"],
            f"{entry['objective']:.3f}",
            f"{entry['above_optimum']:.2%}",
            f"{entry['certified_gap']:.1e}",
            f"{entry['test_accuracy']:.3f}",
            f"{entry['seconds']:.1f}",
        )
    console.print(table)
    rates = ", ".join(str(rate) for rate in LEARNING_RATES)
    console.print(f"Adam: the best of the learning rates {rates} for each seed; seconds of the sweep.", style="dim")
    console.print("Figures: " + ", ".join(str(file) for file in files))

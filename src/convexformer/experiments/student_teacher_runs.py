"""The students: the convex program with its solver, and ordinary networks with Adam, by learning rate, beta and seed."""

from __future__ import annotations

import json
import math
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, final

import torch
from sklearn.exceptions import ConvergenceWarning
from torch import Tensor

from convexformer.data import TokenDataset
from convexformer.data.files import write_json
from convexformer.experiments.student_teacher_data import Lesson, Part, mean_map
from convexformer.heads import Attention, Layout
from convexformer.networks import Network, PositionAttentionNetwork, SoftmaxAttentionNetwork, train_in_simplex
from convexformer.problem import Problem
from convexformer.solvers.status import Record
from convexformer.solving import certify, solve
from convexformer.weights import Weights

CONVEX = "convex"
HEAD = Attention(stochastic="independent")  # (10) of Ergen et al. with all tokens as outputs
POINTS = 50  # of a curve
GRID_TOLERANCE = 0.02  # relative gap of the convex solves that choose beta


@final
@dataclass(frozen=True)
class Config:
    """All that the numbers depend on besides the data."""

    ratios: tuple[float, ...]
    """Betas, as fractions of the ``beta_max`` of the convex program; the same for every student."""
    more_ratios: tuple[float, ...]
    """Smaller ones, for networks only: their decay is another one, and the best beta may be as well."""
    learning_rates: tuple[float, ...]
    grid_steps: int
    steps: int
    seeds: int
    heads: int
    """Heads of the alternative attention."""
    tolerance: float
    iterations: int
    """Of the last convex solve, at most; a quarter of them for each beta of the grid."""

    @classmethod
    def of(cls, quick: bool) -> Config:
        """Return the settings of a quick run, for a CPU, or of a full one, for a GPU."""
        if quick:
            return cls((0.3, 0.1, 0.03), (0.003,), (0.003, 0.01, 0.03), 100, 400, 3, 64, 1e-3, 1000)
        return cls((0.03, 0.015, 0.0075), (0.001,), (0.0001, 0.0003, 0.001, 0.003), 200, 1000, 3, 512, 5e-3, 1000)


@final
@dataclass(frozen=True)
class Run:
    """One training run: its settings, its curve, and where it ended."""

    student: str
    beta: float
    learning_rate: float
    seed: int
    steps: int
    seconds: float
    objective: float
    train_r2: float
    validation_r2: float
    test_r2: float
    curve: list[tuple[float, float, float]] = field(default_factory=list)
    """Seconds, objective, test loss: half the mean square over real tokens and outputs."""
    attention_map: list[list[float]] | None = None
    certificate: dict[str, Any] | None = None
    groups: int | None = None
    """Nonzero (token, token, output) groups of a convex solution."""


@final
class Students:
    """Trains students on a lesson; every run is kept in ``runs.json`` and not done twice."""

    def __init__(self, lesson: Lesson, config: Config, file: Path, say: Callable[[str], None]) -> None:
        self.lesson, self.config, self.file, self.say = lesson, config, file, say
        self.kept: dict[str, dict[str, Any]] = {}
        self.facts: dict[str, Any] = {}
        self.new_runs = 0
        stamp = {"lesson": lesson.name, **lesson.sizes, **asdict(config)}
        self.stamp = json.loads(json.dumps(stamp))
        if file.exists():
            found = json.loads(file.read_text())
            if found["settings"] == self.stamp:
                self.kept, self.facts = found["runs"], found["facts"]
        self.beta_max = float(self.fact("beta_max", lambda: self.problem.beta_max))
        targets = lesson.train.Y[lesson.train.mask].double()
        self.at_zero = 0.5 * float(targets.square().sum())
        self.networks: dict[str, Callable[[int], Any]] = self._networks()
        self._last: Weights | None = None

    @cached_property
    def problem(self) -> Problem:
        """The convex program, at a beta that runs replace; not built where all runs are kept."""
        train = self.lesson.train
        return Problem(HEAD, train.X, train.Y, beta=1.0, mask=train.mask, dtype=train.X.dtype)

    def fact(self, name: str, make: Callable[[], Any]) -> Any:
        """Return a number that is kept beside the runs, or make it."""
        if name not in self.facts:
            self.facts[name] = make()
            self._write()
        return self.facts[name]

    def add_seconds(self, seconds: float) -> float:
        """Add the seconds of a call that made new runs to those of the calls before; return all."""
        if self.new_runs:
            self.facts["seconds"] = self.facts.get("seconds", 0.0) + seconds
            self._write()
        return float(self.facts["seconds"])

    def _write(self) -> None:
        write_json(self.file, {"settings": self.stamp, "facts": self.facts, "runs": self.kept}, None)

    def _networks(self) -> dict[str, Callable[[int], Any]]:
        d, c, n = self.lesson.sizes["d"], self.lesson.sizes["c"], self.lesson.n_heads
        layout, head = Layout(self.lesson.sizes["s"], d, c, per_token=True), HEAD
        found: dict[str, Callable[[int], Any]] = {
            "alternative": lambda seed: _balanced(head.random_network(layout, self.config.heads, seed)),
            "standard": lambda seed: SoftmaxAttentionNetwork.random(d, c, seed=seed),
            f"standard, {n} heads, scaled": lambda seed: SoftmaxAttentionNetwork.random(
                d, c, n_heads=n, head_width=max(1, d // n), seed=seed, scaled=True
            ),
        }
        if c == d:
            found["standard, LayerNorm and skip"] = lambda seed: SoftmaxAttentionNetwork.random(
                d, c, seed=seed, norm=True, skip=True
            )
        return found

    # ------------------------------------------------------------------ runs

    def convex(self, beta: float, final: bool) -> Run:
        """Solve the convex program at a beta: from zero in a ``final`` run, else from the last solution, to a larger gap."""
        return self._once(
            f"{CONVEX}, beta {beta:.6g}, {'final' if final else 'grid'}", lambda: self._solve(beta, final)
        )

    def network(self, student: str, beta: float, rate: float, seed: int, steps: int, final: bool) -> Run:
        """Train a network; a ``final`` run has a curve, a map and, where there is a program, a certificate."""
        key = f"{student}, beta {beta:.6g}, rate {rate:g}, seed {seed}, {steps} steps"
        return self._once(key, lambda: self._train(student, beta, rate, seed, steps, final))

    def _once(self, key: str, make: Callable[[], Run]) -> Run:
        if key not in self.kept:
            self.say(key)
            self.kept[key] = json.loads(json.dumps(asdict(make())))
            self.new_runs += 1
            self._write()
        kept: dict[str, Any] = {name: _number(value) for name, value in self.kept[key].items()}
        return Run(**kept)

    def _solve(self, beta: float, final: bool) -> Run:
        problem = self.problem.with_beta(beta)
        operator = problem.head.operator(_tokens(self.lesson.test), problem.layout)
        curve: list[tuple[float, float, float]] = []
        watching = 0.0

        def watch(record: Record, weights: Weights) -> None:
            nonlocal watching
            start = time.perf_counter()
            outputs = _grid(operator.apply(weights.dense()), self.lesson.test)
            curve.append((record.seconds - watching, record.primal, _test_loss(outputs, self.lesson.test)))
            watching += time.perf_counter() - start

        tolerance, iterations = self.config.tolerance, self.config.iterations
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # the gap that was reached is in the tables
            if final:
                solution = solve(problem, tolerance, max_iter=iterations, callback=watch)
            else:
                solution = solve(problem, GRID_TOLERANCE, max_iter=iterations // 4, warm_start=self._last)
        self._last, proof = solution.weights, solution.certificate
        scores = {
            f"{name}_r2": part.r_squared(solution.predict(part.X, part.mask))
            for name, part in (
                ("train", self.lesson.train),
                ("validation", self.lesson.validation),
                ("test", self.lesson.test),
            )
        }
        Z = solution.dense()
        return Run(
            CONVEX,
            beta,
            0.0,
            0,
            solution.n_iter,
            solution.seconds - watching,
            proof.primal,
            **scores,
            curve=_thinned(curve),
            attention_map=solution.attention_map().double().tolist() if final else None,
            certificate={
                "dual": proof.dual,
                "relative_gap": proof.relative_gap,
                "kind": proof.kind,
                "solver": solution.solver,
            },
            groups=int((torch.linalg.vector_norm(Z, dim=-2) > 0).sum()),
        )

    def _train(self, student: str, beta: float, rate: float, seed: int, steps: int, final: bool) -> Run:
        train, lesson = self.lesson.train, self.lesson
        network = self.networks[student](seed)
        if isinstance(network, PositionAttentionNetwork):
            network = train_in_simplex(network)
        network = network.to(train.X.device, train.X.dtype)
        optimiser = torch.optim.Adam(network.parameters(), lr=rate)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
        X, Y, keep = train.X, train.Y, train.mask[..., None]
        curve: list[tuple[float, float, float]] = []
        every, seconds, start = max(1, steps // POINTS), 0.0, time.perf_counter()
        for step in range(steps):
            optimiser.zero_grad(set_to_none=True)
            loss = 0.5 * ((network(X, train.mask) - Y) * keep).square().flatten(1).sum(1).double().sum()
            objective = loss + beta * network.decay().double()
            objective.backward()
            optimiser.step()
            schedule.step()
            if final and step % every == 0:
                value = float(objective.detach())  # waits for the device
                seconds += time.perf_counter() - start
                with torch.no_grad():
                    curve.append((seconds, value, _test_loss(network(lesson.test.X, lesson.test.mask), lesson.test)))
                start = time.perf_counter()
        with torch.no_grad():
            outputs = network(X, train.mask)
            value = 0.5 * float(((outputs - Y) * keep).double().square().sum()) + beta * float(network.decay())
            seconds += time.perf_counter() - start
            test = network(lesson.test.X, lesson.test.mask)
            curve.append((seconds, value, _test_loss(test, lesson.test)))
            return Run(
                student,
                beta,
                rate,
                seed,
                steps,
                seconds,
                value,
                train.r_squared(outputs),
                lesson.validation.r_squared(network(lesson.validation.X, lesson.validation.mask)),
                lesson.test.r_squared(test),
                curve=curve,
                attention_map=self._map(network).double().tolist() if final else None,
                certificate=self._certificate(network, beta) if final else None,
            )

    def _map(self, network: Any) -> Tensor:
        if isinstance(network, SoftmaxAttentionNetwork):
            test = self.lesson.test
            return mean_map(network.attention(test.X, test.mask), test.mask)
        found: Tensor = network.attention_map()
        return found

    def _certificate(self, network: Any, beta: float) -> dict[str, Any] | None:
        if isinstance(network, SoftmaxAttentionNetwork):
            return None
        proof = certify(network, self.problem.with_beta(beta))
        return {"dual": proof.dual, "relative_gap": proof.relative_gap, "kind": proof.kind}

    # ------------------------------------------------------------------ a baseline without attention

    def linear_map(self) -> dict[str, float]:
        """R2 of the best linear map of each token by itself: ridge regression, its weight chosen on validation samples."""
        train, found = self.lesson.train, []
        R, T = train.X[train.mask].double(), train.Y[train.mask].double()
        for power in range(-2, 5):
            ridge = 10.0**power * torch.eye(R.shape[1], dtype=R.dtype, device=R.device)
            B = torch.linalg.solve(R.T @ R + ridge, R.T @ T)
            scores = [part.r_squared(part.X.double() @ B) for part in (self.lesson.validation, self.lesson.test)]
            found.append((*scores, 10.0**power))
        validation, test, ridge_weight = max(found)
        return {"validation_r2": validation, "test_r2": test, "ridge": ridge_weight}


def _balanced(network: Network) -> PositionAttentionNetwork:
    """Scale ``w3`` so that both factors of a head have about the same norm, 1: at random its l1 norm is far larger."""
    assert isinstance(network, PositionAttentionNetwork)
    with torch.no_grad():
        network.w3.div_(network.w3.abs().sum((1, 2), keepdim=True))
    return network


def _tokens(part: Part) -> TokenDataset:
    return TokenDataset.of(part.X, part.mask, device=part.X.device, dtype=part.X.dtype)


def _grid(rows: Tensor, part: Part) -> Tensor:
    """``(N, s, c)`` from the rows of real tokens."""
    grid = rows.new_zeros(part.Y.shape)
    grid[part.mask] = rows
    return grid


def _test_loss(outputs: Tensor, part: Part) -> float:
    missed = (outputs[part.mask] - part.Y[part.mask]).double().square().mean()
    value = 0.5 * float(missed)
    return value if math.isfinite(value) else math.inf


def _thinned(curve: list[tuple[float, float, float]]) -> list[tuple[float, float, float]]:
    """Keep about ``POINTS`` points, the last one among them."""
    stride = max(1, len(curve) // POINTS)
    return [*curve[:-1:stride], *curve[-1:]]


def _number(value: Any) -> Any:
    """Undo what :func:`~convexformer.data.files.strict_json` makes of infinities and NaN."""
    return float(value) if value in ("inf", "-inf", "nan") else value

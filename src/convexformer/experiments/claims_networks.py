"""Checks of the equivalence theorems: the certified convex optimum against the nonconvex network of each head.

For a small random problem of every head: the convex program is solved and certified; the network recovered from it must have
its outputs and its objective, and no more heads than printed; networks trained from random starts must never end below it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch

from convexformer import heads
from convexformer.data import TokenDataset
from convexformer.experiments.adam import network_objective, train_adam
from convexformer.experiments.deep_study import Measured
from convexformer.experiments.study import Verdict
from convexformer.heads import Head
from convexformer.networks.base import Network
from convexformer.problem import Problem
from convexformer.solution import Solution
from convexformer.solving import certify, solve

SIZES = N, S, D, C = 6, 4, 2, 2  # samples, tokens, channels, outputs of the problems
SMALL = {  # of exact ReLU heads whose cells must all be known for an exact polar
    "self_attention": (2, 2, 2, 1),
    "mlp_mixer": (3, 2, 1, 1),
    "fno": (4, 2, 1, 2),
    "block_fno": (4, 2, 2, 2),
}
TOLERANCE = 1e-8  # certified relative gap of the convex optimum
RELU_TOLERANCE = 1e-4  # of exact ReLU heads, whose polars are bounds
SAME = 1e-6  # relative difference below which two objectives agree
STARTS, STEPS, RATE = 3, 200, 0.03  # of Adam on the nonconvex network
LBFGS_STEPS = 300  # iterations of L-BFGS that follow
BETA_RATIO = 0.15  # strength of the penalty, relative to the least that gives zero weights

PRINTED: dict[str, int] = {  # the printed bound m* on the number of heads, at the sizes above
    "self_attention": min(D * D, D * C),
    "mlp_mixer": min(S * S, D * C),
    "fno": min(S * D, C),
    "block_fno": 2 * (min(S * D, C) // 2),  # m* is for each of two blocks
    "mlp": min(D, C),
    "poolformer": min(D, C),
    "fnet": min(D, C),
}
HEADS: dict[str, Callable[[str], Head]] = {
    "attention": lambda activation: heads.Attention(activation, gates=3),
    "attention_l2": lambda activation: heads.Attention(activation, "l2", gates=3),
    "row_attention": lambda activation: heads.Attention(activation, stochastic="row"),
    "self_attention": lambda activation: heads.SelfAttention(activation, gates=3),
    "mlp_mixer": lambda activation: heads.MLPMixer(activation, gates=3),
    "fno": lambda activation: heads.FNO(activation, gates=3),
    "block_fno": lambda activation: heads.BlockFNO(activation, blocks=2, gates=3),
    "mlp": lambda activation: heads.MLP(activation, gates=3),
    "poolformer": lambda activation: heads.PoolFormer(activation, window=3, gates=3),
    "fnet": lambda activation: heads.FNet(activation, gates=3),
}


def problem_of(head: str, activation: str, targets: str, seed: int = 0) -> Problem:
    """Draw a problem; a gated head has three gates.

    ``targets`` are ``scalar``, ``vector``, ``labels`` (all pooled) or ``tokens``.
    """
    rng = np.random.default_rng(seed)
    n, s, d, c = SMALL.get(head, SIZES) if activation == "relu" else SIZES
    X = rng.standard_normal((n, s, d))
    Y: Any = {
        "scalar": lambda: rng.standard_normal(n),
        "vector": lambda: rng.standard_normal((n, c)),
        "labels": lambda: np.arange(n) % c,
        "tokens": lambda: rng.standard_normal((n, s, c)),
    }[targets]()
    made = HEADS[head](activation) if activation == "gated_relu" else _plain(head, activation)
    return Problem(made, X, Y, beta_ratio=BETA_RATIO)


def _plain(head: str, activation: str) -> Head:
    made = HEADS[head]("gated_relu").config()
    made.pop("gates", None)
    made.pop("seed", None)
    return type(HEADS[head]("gated_relu"))(**{**made, "activation": activation})


@final
@dataclass(frozen=True)
class Comparison:
    """The numbers of one problem, relative to the optimum."""

    gap: float
    recovered: float
    """Difference of the recovered network's objective."""
    outputs: float
    """Largest difference of its outputs."""
    best: float
    """Least excess of the trained networks over the optimum; below ``-gap`` would refute the theorem."""
    heads: int


def compare(problem: Problem, tolerance: float = TOLERANCE) -> Comparison:
    """Solve, recover, and train networks with twice the heads of the recovered one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a ReLU solve may stall at the looseness of its bound, which its gap shows
        solution = solve(problem, tolerance=tolerance)
    optimum = solution.objective
    network = solution.network()
    X = TokenDataset.of(problem.tokens).X
    with torch.no_grad():
        own = float(network_objective(problem, network))
        off = float((network(X) - solution.predict(X)).abs().max())
    trained = [_trained(problem, heads_of(network), seed) for seed in range(STARTS)]
    return Comparison(
        solution.certificate.relative_gap,
        abs(own / optimum - 1),
        off,
        min(trained) / optimum - 1,
        heads_of(network),
    )


def heads_of(network: Network) -> int:
    """Count the heads, or neurons, of a network."""
    return len(next(iter(network.parameters())))


def _trained(problem: Problem, count: int, seed: int) -> float:
    """Train a network by Adam, then by L-BFGS; return its objective at the end."""
    network = random_network(problem, max(2 * count, 4), seed)
    network, _ = train_adam(problem, network, STEPS, RATE)
    return lbfgs(problem, network, LBFGS_STEPS)


def random_network(problem: Problem, count: int, seed: int) -> Network:
    """Draw a network with so many heads; every head of :data:`HEADS` can."""
    head: Any = problem.head
    network: Network = head.random_network(problem.layout, count, seed=seed)
    return network


def lbfgs(problem: Problem, network: Network, steps: int) -> float:
    """Train a network by L-BFGS; return its objective at the end."""
    optimiser = torch.optim.LBFGS(network.parameters(), max_iter=steps, history_size=20, line_search_fn="strong_wolfe")

    def objective() -> float:
        optimiser.zero_grad()
        value = network_objective(problem, network)
        value.backward()
        return float(value.detach())

    optimiser.step(objective)
    return objective()


def equivalence(head: str, activation: str, targets: str) -> Measured:
    """The optimum of the network is that of the convex program: never below, and attained by the recovered network."""
    problem = problem_of(head, activation, targets)
    tolerance = RELU_TOLERANCE if activation == "relu" else TOLERANCE
    found = compare(problem, tolerance)
    attained = found.recovered <= SAME and found.outputs <= 1e-6
    holds = attained and found.gap <= tolerance and found.best >= -found.gap - 1e-12
    text = (
        f"certified gap {found.gap:.0e}; recovered network ({found.heads} heads): objective off by {found.recovered:.0e}, "
        f"outputs by {found.outputs:.0e}; best of {STARTS} networks trained by Adam and L-BFGS {found.best:+.1e}"
    )
    return Measured(text, Verdict.YES if holds else Verdict.NO)


def printed_heads(head: str) -> Measured:
    """The recovered network of a linear head needs no more heads than the printed bound, over ten problems."""
    counts = []
    for seed in range(10):
        solution = solve(problem_of(head, "linear", "tokens", seed), tolerance=1e-6)
        counts.append(heads_of(solution.network()))
    text = f"at most {max(counts)} heads in ten problems, printed bound {PRINTED[head]}"
    return Measured(text, Verdict.YES if max(counts) <= PRINTED[head] else Verdict.NO)


def attention_heads() -> Measured:
    """One output: heads of the optimum against N + 1, more tokens than samples (twelve and four)."""
    counts = []
    for seed in range(10):
        rng = np.random.default_rng(seed)
        X, y = rng.standard_normal((4, 12, 2)), rng.standard_normal(4)
        problem = Problem(heads.Attention(), X, y, beta_ratio=0.02)
        counts.append(heads_of(solve(problem, tolerance=1e-7).network()))
    text = f"{min(counts)} to {max(counts)} heads in ten problems of N = 4 samples, 12 tokens; bound 5 (min(n, N) = 4 holds)"
    return Measured(text, Verdict.YES if max(counts) <= 5 else Verdict.NO)


def rescaled() -> Measured:
    """At the best scale of each head both factors have one norm, and the decay is the sum of products."""
    solution = _attention("scalar")
    network: Any = solution.network()
    first, second = network.w2.detach().norm(dim=1), network.w3.detach().abs().sum(1)
    products = float((first * second).sum())
    unbalanced = type(network)(network.w1, 3 * network.w2, network.w3 / 3, **network.config())
    ratio, off = float(unbalanced.decay().detach()) / products, abs(float(network.decay().detach()) / products - 1)
    text = f"decay over sum of products: {1 + off:.9f} where balanced, {ratio:.2f} for a head scaled by 3 and 1/3"
    return Measured(text, Verdict.YES if off <= 1e-9 and ratio > 1 else Verdict.NO)


def _attention(targets: str) -> Solution:
    return solve(problem_of("attention", "linear", targets), tolerance=TOLERANCE)


def half_on_the_loss() -> Measured:
    """Equation (8) with its factor 1/2 has another optimum than the network (6)."""
    problem = problem_of("attention", "linear", "scalar")
    optimum = solve(problem, tolerance=TOLERANCE).objective
    rng = np.random.default_rng(0)
    X = rng.standard_normal((N, S, D))
    y = rng.standard_normal(N)
    half = Problem(heads.Attention(), X, y, beta=problem.beta, sample_weight=np.full(N, 0.5))
    printed = solve(half, tolerance=TOLERANCE).objective
    agrees = abs(printed / optimum - 1) <= SAME
    return Measured(
        f"network and program without it {optimum:.6f}, with it {printed:.6f}", Verdict.YES if agrees else Verdict.NO
    )


def duality(head: str, targets: str) -> Measured:
    """The dual value of the certificate meets the primal one: strong duality, with the dual constraint as printed."""
    problem = problem_of(head, "linear", targets)
    proof = solve(problem, tolerance=TOLERANCE).certificate
    text = f"primal {proof.primal:.9f}, dual {proof.dual:.9f}"
    return Measured(text, Verdict.YES if proof.relative_gap <= TOLERANCE else Verdict.NO)


def token_sparsity() -> Measured:
    """Rows of Z are zero for tokens that do not matter: two of eight tokens carry the target."""
    rng = np.random.default_rng(0)
    X = rng.standard_normal((60, 8, 3))
    y = X[:, 2] @ rng.standard_normal(3) + X[:, 5] @ rng.standard_normal(3) + 0.1 * rng.standard_normal(60)
    norms = solve(Problem(heads.Attention(), X, y, beta_ratio=0.1), tolerance=TOLERANCE).token_norms()
    assert norms is not None
    used = [int(k) for k in (norms > 1e-9 * norms.max()).nonzero().flatten()]
    return Measured(
        f"tokens in use {used}, the target depends on [2, 5]", Verdict.YES if used == [2, 5] else Verdict.NO
    )


def direct_training() -> Measured:
    """Adam on the weights of the convex program itself approaches the certified optimum."""
    problem = problem_of("attention", "linear", "scalar")
    optimum = solve(problem, tolerance=TOLERANCE).objective
    X, y = TokenDataset.of(problem.tokens).X, problem.objective.targets[:, 0]
    excess = []
    for kind in (torch.optim.Adam, torch.optim.SGD):
        Z = torch.zeros(S, D, dtype=X.dtype, requires_grad=True)
        optimiser = kind([Z], lr=0.02)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, 3000)
        for _ in range(3000):
            optimiser.zero_grad()
            value = (
                0.5 * ((X * Z).sum((1, 2)) - y).square().sum() + problem.beta * (Z.square().sum(1) + 1e-30).sqrt().sum()
            )
            value.backward()
            optimiser.step()
            schedule.step()
        excess.append(float(value.detach()) / optimum - 1)
    text = f"excess over the optimum after 3,000 steps: Adam {excess[0]:.1e}, SGD {excess[1]:.1e}"
    return Measured(text, Verdict.YES if max(excess) <= 1e-3 and min(excess) >= -1e-7 else Verdict.NO)


def trained_certificates() -> Measured:
    """Condition (122): networks that satisfy it are global optima, over random problems and starts."""
    certified, wrong = 0, 0
    for seed in range(3):
        problem = problem_of("fno", "linear", "tokens", seed)
        optimum = solve(problem, tolerance=TOLERANCE).objective
        for start in range(STARTS):
            network, _ = train_adam(problem, random_network(problem, 4, start), 800, RATE)
            proof = certify(network, problem)
            passes = proof.kkt["scale"] >= 1 - 1e-4
            certified += passes
            wrong += passes and float(network_objective(problem, network).detach()) > optimum * (1 + 1e-3)
    text = f"{certified} of {3 * STARTS} trained networks satisfy it (to 1e-4), {wrong} of these are above the optimum"
    return Measured(text, Verdict.YES if certified and not wrong else Verdict.NO)

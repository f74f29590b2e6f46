"""Checks of statements that fail: the smallest instance that shows it, solved, and trained from many starts."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from convexformer import heads, relu
from convexformer.arrangements import Arrangement
from convexformer.counts import cost
from convexformer.experiments.adam import network_objective, train_adam
from convexformer.experiments.claims_networks import LBFGS_STEPS, heads_of, lbfgs, random_network
from convexformer.experiments.deep_study import Measured
from convexformer.experiments.study import Verdict
from convexformer.heads import Head
from convexformer.problem import Problem
from convexformer.solving import solve

BINDING = 0.999  # singular values of the gradient above this share of beta may belong to the optimum
CLEAR = 1e-4  # relative excess that refutes an equivalence


def best_network(problem: Problem, n_heads: int, starts: int = 20) -> float:
    """Return the lowest objective of networks with so many heads, trained from random starts."""
    values = []
    for seed in range(starts):
        network, _ = train_adam(problem, random_network(problem, n_heads, seed), 100, 0.05)
        values.append(lbfgs(problem, network, LBFGS_STEPS))
    return min(values)


def _refuted(text: str, refuted: bool) -> Measured:
    """State a counterexample: not reproduced where it refutes the statement."""
    return Measured(text, Verdict.NO if refuted else Verdict.YES)


def one_head_a_gate() -> Measured:
    """As many heads as gates, one each: one open gate, two samples, targets 3 I."""
    X, Y = np.eye(2)[:, None, :], 3 * np.eye(2)
    opened = (np.zeros((1, 1)), np.zeros((1, 2)))
    problem = Problem(heads.Attention("gated_relu", gates=opened), X, Y, beta=1.0, loss="squared")
    solution = solve(problem, tolerance=1e-9)
    one, several = best_network(problem, 1), heads_of(solution.network())
    return _refuted(
        f"one gate: convex program {solution.objective:.4f} ({several} heads), best network with one head {one:.4f}",
        one > solution.objective * (1 + CLEAR),
    )


def gated_heads(head: str) -> Measured:
    """Gated networks of Sahiner et al. with one neuron for each gate: one gate, targets of every token."""
    rng = np.random.default_rng(0)
    options: dict[str, int] = {"poolformer": {"window": 3}, "block_fno": {"blocks": 2}}.get(head, {})
    makers: dict[str, Callable[..., Head]] = {
        "mlp": heads.MLP,
        "poolformer": heads.PoolFormer,
        "self_attention": heads.SelfAttention,
        "mlp_mixer": heads.MLPMixer,
        "fno": heads.FNO,
        "block_fno": heads.BlockFNO,
    }
    made = makers[head]("gated_relu", gates=1, **options)
    c = 4 if head == "block_fno" else 2
    problem = Problem(
        made, rng.standard_normal((6, 4, 2)), rng.standard_normal((6, 4, c)), beta_ratio=0.01, loss="squared"
    )
    solution = solve(problem, tolerance=1e-9)
    gates = 2 if head == "block_fno" else 1  # one for each block
    one, several = best_network(problem, gates), heads_of(solution.network())
    return _refuted(
        f"{gates} gate{'s' if gates > 1 else ''}: convex program {solution.objective:.4f} ({several} heads), best of 20 "
        f"networks with one head a gate {one:.4f}",
        one > solution.objective * (1 + CLEAR),
    )


def row_stochastic() -> Measured:
    """Theorem A.1: the printed program against row-stochastic attention, two equal tokens."""
    X, Y = np.ones((1, 2, 1)), np.array([[[1.0], [0.0]]])
    values = {
        kind: solve(
            Problem(heads.Attention(stochastic=kind), X, Y, beta=0.05, loss="squared"), tolerance=1e-8
        ).objective
        for kind in ("row", "sub")
    }
    return _refuted(
        f"optimum of row-stochastic attention {values['row']:.6f}, of the printed program {values['sub']:.6f}",
        values["row"] > values["sub"] * (1 + CLEAR),
    )


def rank_one_value_matrices() -> Measured:
    """Remark A.2: heads ``w2 w3^T`` have the same convex program as heads ``W2 w3`` with the entrywise norm."""
    rng = np.random.default_rng(0)
    problem = Problem(
        heads.Attention(stochastic="row"),
        rng.standard_normal((4, 3, 2)),
        rng.standard_normal((4, 3, 2)),
        beta_ratio=0.1,
        loss="squared",
    )
    solution = solve(problem, tolerance=1e-7)
    with torch.no_grad():
        own = float(network_objective(problem, solution.network()))
    off = abs(own / solution.objective - 1)
    text = f"with equal row sums (corrected theorem A.1) a network of rank-one heads attains the optimum to {off:.0e}"
    return Measured(text, Verdict.PARTLY if off <= 1e-6 else Verdict.NO)


def relu_heads(head: str) -> Measured:
    """The printed number of neurons of ReLU heads lacks the number of tokens: one sample, printed bound one."""
    x = np.array([1.0, -2.0])
    scores = np.outer(x, x)
    unit, apart = np.array([[[1.0], [0.0]]]), np.array([[[1.0], [-1.0]]])
    made: dict[str, tuple[Head, Any, Any, float]] = {
        "self_attention": (
            heads.SelfAttention("relu"),
            x.reshape(1, 2, 1),
            (np.maximum(scores, 0) @ x - 0.5 * np.maximum(-scores, 0) @ x).reshape(1, 2, 1),
            0.05,
        ),
        "mlp_mixer": (heads.MLPMixer("relu"), unit, apart, 0.1),
        "fno": (heads.FNO("relu"), unit, apart, 0.1),
        "block_fno": (
            heads.BlockFNO("relu", blocks=2),
            np.repeat(unit, 2, axis=2),
            np.repeat(apart, 2, axis=2),
            0.1,
        ),
        "mlp": (heads.MLP("relu"), np.eye(2)[None], apart, 0.1),
    }
    attention_head, X, Y, beta = made[head]
    printed = 2 if head == "block_fno" else 1
    problem = Problem(attention_head, X, Y, beta=beta, loss="squared")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        solution = solve(problem, tolerance=1e-7)
    few, needed = best_network(problem, printed), heads_of(solution.network())
    return _refuted(
        f"optimum {solution.objective:.4f} with {needed} heads; best of 20 networks with the printed {printed}: {few:.4f}",
        few > solution.objective * (1 + CLEAR),
    )


def cell_count(head: str) -> Measured:
    """The printed bound on the number of arrangements has n for the number of rows; n = s = d = 2."""
    rng = np.random.default_rng(0)
    X = rng.standard_normal((2, 2, 2))
    rows = {
        "self_attention": np.array(
            [np.outer(x[a], x[b]).ravel() for x in X for a, b in itertools.product(range(2), repeat=2)]
        ),
        "mlp_mixer": np.concatenate([np.kron(x.T, np.eye(2)) for x in X]),
        "fno": np.concatenate([np.concatenate([x, np.roll(x, 1, axis=0)], 1) for x in X]),
        # of one block of one channel
        "block_fno": np.concatenate([np.concatenate([x, np.roll(x, 1, axis=0)], 1) for x in X[..., :1]]),
        "mlp": X.reshape(4, 2),
    }[head]
    cells = Arrangement(rows).cells
    assert cells is not None
    rank = np.linalg.matrix_rank(rows)
    printed = 2 * rank * (np.e * (2 - 1) / rank) ** rank
    right = 2 * rank * (np.e * (len(rows) - 1) / rank) ** rank
    count = len(cells.patterns)
    return _refuted(
        f"{count} arrangements, printed bound {printed:.2f}; with the {len(rows)} rows in place of n: {right:.0f}",
        count > printed,
    )


def plain_cells() -> Measured:
    """The bound of section 2.1, where the rows are the samples: eight samples in two to four dimensions."""
    counts = []
    for d in (2, 3, 4):
        cells = Arrangement(np.random.default_rng(d).standard_normal((8, d))).cells
        assert cells is not None
        counts.append((len(cells.patterns), 2 * d * (np.e * 7 / d) ** d))
    text = ", ".join(f"{count} of at most {bound:.0f}" for count, bound in counts)
    return Measured(f"r = 2, 3, 4: {text}", Verdict.YES if all(c <= b for c, b in counts) else Verdict.NO)


# weights, targets and a local minimum of ``1/2 |W^(1/2) (U V^T - T)|^2 + beta/2 (|U|^2 + |V|^2)`` with two columns
WEIGHTS = np.array(
    [
        [12.857878, 11.483737, 0.707506, 27.002737],
        [3.752836, 0.955697, 0.34869, 152.397884],
        [9.904085, 76.394335, 253.279648, 0.539117],
        [0.438064, 0.000636, 38.897763, 58.236847],
    ]
)
TARGETS = np.outer([1.0, -0.265644, 0.243428, -0.563518], [0.175668, -0.865807, 0.622694, -0.356606])
LEFT = np.array([[-0.734166, 0.099192], [0.193958, -0.020274], [0.371655, 0.427062], [-0.862805, 1.374858]])
RIGHT = np.array([[-0.171997, 0.131731], [0.990465, -1.353907], [0.399574, 0.000587], [0.537511, 0.482129]])
FACTOR_BETA = 0.017913


def spurious_minimum() -> Measured:
    """More columns than the rank of the optimum, and yet a local minimum above it: weighted least squares, 4 x 4."""
    W, T = (torch.from_numpy(each) for each in (WEIGHTS, TARGETS))

    def objective(both: torch.Tensor) -> torch.Tensor:
        left, right = both[:8].view(4, 2), both[8:].view(4, 2)
        return 0.5 * (W * (left @ right.mT - T).square()).sum() + 0.5 * FACTOR_BETA * both.square().sum()

    point = torch.from_numpy(np.concatenate([LEFT.ravel(), RIGHT.ravel()]))
    for _ in range(20):  # Newton steps to the stationary point; rotations of the columns are a zero eigenvalue
        gradient = torch.autograd.functional.jacobian(objective, point)
        hessian = torch.autograd.functional.hessian(objective, point)
        point = point - torch.linalg.pinv(hessian, rtol=1e-9, hermitian=True) @ gradient
    curvature = torch.linalg.eigvalsh(torch.autograd.functional.hessian(objective, point))
    slope = float(torch.autograd.functional.jacobian(objective, point).norm())
    best, rank = _weighted_optimum()
    local = float(objective(point))
    text = (
        f"optimum {best:.6f} of rank {rank}; with two columns a local minimum {local:.6f} (gradient {slope:.0e}, smallest "
        f"curvature {float(curvature[0]):.0e} of {float(curvature[-1]):.0e}, the rotation)"
    )
    strict = slope < 1e-9 and float(curvature[0]) > -1e-7 and rank < 2
    return _refuted(text, strict and local > best * (1 + CLEAR))


def _weighted_optimum() -> tuple[float, int]:
    """The least value of four columns, where every second-order point is optimal, and a bound on its rank.

    The rank is at most the number of singular values of the gradient that equal beta: the others are below it.
    """
    W, T = (torch.from_numpy(each) for each in (WEIGHTS, TARGETS))
    generator = torch.Generator().manual_seed(0)
    best, rank = np.inf, 0
    for _ in range(4):
        both = torch.randn((2, 4, 4), generator=generator, dtype=T.dtype).requires_grad_()
        optimiser = torch.optim.LBFGS(
            [both],
            max_iter=2000,
            history_size=30,
            tolerance_grad=1e-12,
            tolerance_change=1e-16,
            line_search_fn="strong_wolfe",
        )

        def objective(both: torch.Tensor = both, optimiser: torch.optim.Optimizer = optimiser) -> float:
            optimiser.zero_grad()
            value = 0.5 * (W * (both[0] @ both[1].mT - T).square()).sum() + 0.5 * FACTOR_BETA * both.square().sum()
            value.backward()
            return float(value.detach())

        optimiser.step(objective)
        if (value := objective()) < best:
            pull = torch.linalg.svdvals(W * ((both[0] @ both[1].mT).detach() - T)) / FACTOR_BETA
            best, rank = value, int((pull > BINDING).sum())
    return best, rank


def factorised() -> Measured:
    """(121) with more columns than the rank has the optimum of (120): linear FNO, four columns for at most two."""
    rng = np.random.default_rng(0)
    problem = Problem(
        heads.FNO(), rng.standard_normal((6, 4, 2)), rng.standard_normal((6, 4, 2)), beta_ratio=0.3, loss="squared"
    )
    solution = solve(problem, tolerance=1e-9)
    excess = best_network(problem, 4, starts=5) / solution.objective - 1
    text = f"rank {heads_of(solution.network())}, four columns: best of 5 trained {excess:+.0e}"
    return Measured(text, Verdict.YES if abs(excess) <= 1e-6 else Verdict.NO)


PRINTED_MILLIONS = {  # table 2 of Sahiner et al.: millions of parameters by head and activation
    ("self_attention", "linear"): 50.5,
    ("mlp_mixer", "linear"): 98.9,
    ("block_fno", "linear"): 0.392,
    ("fno", "linear"): 1.96,
    ("mlp", "linear"): 1.96,
    ("linear", "linear"): 0.01,
    ("self_attention", "gated_relu"): 253.0,
    ("mlp_mixer", "gated_relu"): 196.0,
    ("block_fno", "gated_relu"): 39.2,
    ("fno", "gated_relu"): 196.0,
    ("mlp", "gated_relu"): 196.0,
}
EQUAL = ("self_attention", "mlp_mixer", "fno", "mlp")  # "roughly equal", appendix B
ROUGHLY = 2.0  # largest over smallest, to be called roughly equal


def _program_millions(name: str, activation: str) -> float:
    """Millions of weights of a printed program, s = 196, d = c = 100; 100 gates, five for self-attention."""
    if name == "linear":
        return cost("linear", 196, 100, 100)["convex"].parameters / 1e6
    makers: dict[str, Any] = {
        "self_attention": heads.SelfAttention,
        "mlp_mixer": heads.MLPMixer,
        "block_fno": partial(heads.BlockFNO, blocks=5),
        "fno": heads.FNO,
        "mlp": heads.MLP,
    }
    gates = 1 if activation == "linear" else 5 if name == "self_attention" else 100
    return cost(makers[name](), 196, 100, 100, per_token=True)["convex"].parameters * gates / 1e6


def parameter_counts() -> Measured:
    """Table 2 of Sahiner et al. against the sizes of the printed programs, s = 196, d = c = 100."""
    wrong = []
    for (name, activation), millions in PRINTED_MILLIONS.items():
        count = _program_millions(name, activation)
        if abs(count / millions - 1) > 0.02:
            wrong.append(f"{name} {activation} {millions:g}M printed, {count:.4g}M in the program")
    right = len(PRINTED_MILLIONS) - len(wrong)
    verdict = Verdict.YES if not wrong else Verdict.PARTLY if right else Verdict.NO
    return Measured(f"{right} of {len(PRINTED_MILLIONS)} agree; " + "; ".join(wrong), verdict)


def equal_parameters() -> Measured:
    """Appendix B of Sahiner et al.: ReLU heads have roughly equal numbers of parameters; largest over smallest."""
    printed, programs = (
        max(sizes) / min(sizes)
        for sizes in (
            [PRINTED_MILLIONS[name, "gated_relu"] for name in EQUAL],
            [_program_millions(name, "gated_relu") for name in EQUAL],
        )
    )
    text = (
        f"largest over smallest of four gated heads: {printed:.2f} as printed, {programs:,.0f} in the printed programs"
    )
    right = sum(ratio <= ROUGHLY for ratio in (printed, programs))
    return Measured(text, Verdict.YES if right == 2 else Verdict.PARTLY if right else Verdict.NO)


def attention_counts() -> Measured:
    """Table 2 of Ergen et al.: weights and FLOPs as counted from the models, n = 16, d = 32, h = 8, c = 10."""
    table = cost(heads.Attention(), 16, 32, 10, heads=8)
    n, d, h, c = 16, 32, 8, 10
    weights = {"convex": n * d * c, "alternative": h * (n + d + c), "standard": h * (3 * d * d + d * c)}
    agree = all(table[model].parameters == count for model, count in weights.items())
    differs = "; ".join(f"{row.model}: {row.formula} (printed {row.printed})" for row in table.rows if row.printed)
    text = f"weights {'agree' if agree else 'differ'}; multiply-adds that differ: {differs or 'none'}"
    return Measured(text, Verdict.NO if not agree else Verdict.PARTLY if differs else Verdict.YES)


def gated_and_relu() -> Measured:
    """Small gap of optima between gated ReLU (all cells) and ReLU, and ReLU networks formed from gated solutions."""
    rng = np.random.default_rng(1)
    X, Y = rng.standard_normal((3, 2, 2)), rng.standard_normal((3, 2, 2))
    found = relu.sandwich(Problem(heads.MLP("relu"), X, Y, beta=0.2), tolerance=1e-6)
    gated = solve(Problem(heads.MLP("gated_relu", gates=8), X, Y, beta=0.2), tolerance=1e-8)
    made = relu.from_gated(gated, X)
    off = float((made.network(torch.from_numpy(X)).detach() - gated.predict(X)).abs().max())
    assert found.gated is not None
    text = (
        f"a gated solution becomes a ReLU network of the same outputs (off by {off:.0e}), {made.price:.2f} times its norm; "
        f"optima on the same cells: gated {found.gated.primal:.4f}, ReLU {found.relu.objective:.4f}"
    )
    close = found.relu.objective <= 1.05 * found.gated.primal
    return Measured(text, Verdict.NO if off > 1e-6 else Verdict.YES if close else Verdict.PARTLY)

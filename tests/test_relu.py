"""Exact ReLU heads: arrangements, cones and their polars, training, recovery, certificates against brute force."""

import math
from types import SimpleNamespace

import cvxpy as cp
import numpy as np
import pytest
import torch

import convexformer as cf
from convexformer.arrangements import (
    Arrangement,
    cell_bound,
    cells,
    enumerate_cells,
    least_distance,
    project_on_cone,
    sample_cells,
    split_in_cone,
)
from convexformer.arrangements.cones import _active_set
from convexformer.gauges import ConeNuclearNorm, PolarKind, ReLUNorm
from convexformer.gauges.cone_polar import ConeProblem
from convexformer.gauges.planar_polar import planar_maxima
from convexformer.operators.relu import CellOperator
from convexformer.solvers.column_generation.descent import descend, value_of
from convexformer.testing import check_operator

pytestmark = pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")


def random_cone(rng, H, p):
    """Rows of an activation pattern: a cone with interior."""
    K = rng.standard_normal((H, p))
    return K * np.sign(K @ rng.standard_normal(p))[:, None]


def brute_polar(problem, weights, n=20_000, seed=0):
    """The largest ``|T^T relu(rows u)|`` over many random directions."""
    objective = problem.objective
    M = objective.dual_matrix(objective.evaluate(objective.apply(weights.Z), weights.intercept).V)
    best = 0.0
    for rows, T in M.parts:
        U = np.random.default_rng(seed).standard_normal((n, rows.shape[1]))
        U /= np.linalg.norm(U, axis=1, keepdims=True)
        R = np.maximum(rows.numpy() @ U.T, 0).T @ T.numpy()
        best = max(best, np.linalg.norm(R, axis=1).max())
    return best


def best_of_runs(problem, runs, n_heads, steps=1500, enough=-math.inf):
    """The best objective of L-BFGS on the nonconvex problem from random networks; the first below ``enough`` will do."""
    found = []
    for run in range(runs):
        network = problem.head.random_network(problem.layout, n_heads, seed=run)
        start = problem.head.lift(network, problem.layout)
        found.append(value_of(problem.objective, *descend(problem.objective, start.Z, None, steps)))
        if found[-1] <= enough:
            break
    return min(found)


def cell_program(rows, pool, Y, beta, outputs):
    """The convex program of the theorems by CVXPY, cells by dense sampling, output directions from a list."""
    patterns = sample_cells(rows, 20_000).patterns
    constraints, penalty, prediction = [], 0, 0
    for D in patterns:
        U = cp.Variable((rows.shape[1], len(outputs)))
        constraints.append((np.where(D, 1.0, -1.0)[:, None] * rows) @ U >= 0)
        penalty += cp.sum(cp.norm(U, 2, axis=0))
        prediction = prediction + (pool @ (D[:, None] * rows)) @ U @ outputs
    program = cp.Problem(cp.Minimize(0.5 * cp.sum_squares(prediction - Y) + beta * penalty), constraints)
    return program.solve(solver=cp.CLARABEL, tol_gap_abs=1e-9, tol_gap_rel=1e-9, tol_feas=1e-9)


# ---------------------------------------------------------------------- arrangements and cones


def test_generic_rows_have_as_many_cells_as_the_bound_says():
    rows = np.random.default_rng(0).standard_normal((7, 3))
    cells = enumerate_cells(rows, 1000)
    assert len(cells) == cell_bound(7, 3) == 44
    assert len(np.unique(cells.patterns, axis=0)) == 44
    np.testing.assert_array_equal(cells.points @ rows.T >= 0, cells.patterns)


def test_self_attention_of_two_tokens_has_108_cells():
    X = np.random.default_rng(7).standard_normal((2, 2, 2))
    problem = cf.Problem(cf.heads.SelfAttention("relu"), X, np.ones((2, 2, 1)), beta=1.0)
    arrangement = problem.penalty.arrangements[0]
    assert len(arrangement.cells) == 108
    assert arrangement.bound == 128
    assert 2 * 4 * (math.e * (2 - 1) / 4) ** 4 < 2  # the bound as printed, with n in place of n s^2


def test_enumeration_finds_every_pattern_that_sampling_finds_also_for_degenerate_rows():
    rng = np.random.default_rng(1)
    rows = rng.standard_normal((4, 3))
    rows = np.vstack([rows, 2 * rows[:1], -rows[1:2], np.zeros((1, 3)), rows[0] + rows[1]])
    cells = enumerate_cells(rows, 1000)
    sampled = sample_cells(rows, 50_000)
    every = {tuple(D) for D in cells.patterns.tolist()}
    assert {tuple(D) for D in sampled.patterns.tolist()} <= every
    assert len(every) == len(cells) == len(sampled)


def test_too_many_cells_are_not_enumerated():
    rows = np.random.default_rng(0).standard_normal((40, 6))
    assert Arrangement(rows).cells is None
    assert enumerate_cells(rows[:12], limit=50) is None
    assert not sample_cells(rows, 10).complete


@pytest.mark.parametrize("seed", range(5))
def test_projections_agree_with_each_other_and_with_their_conditions(seed):
    rng = np.random.default_rng(seed)
    K, m = random_cone(rng, 12, 4), rng.standard_normal(4)
    K = np.vstack([K, 2 * K[:2], -K[:1] if seed % 2 else K[:1]])
    found = project_on_cone(K, m)
    np.testing.assert_allclose(found.point, _active_set(K, m).point, atol=1e-11)
    assert (K @ found.point).min() > -1e-10
    assert (found.multipliers >= 0).all()
    assert abs(found.point @ (found.point - m)) < 1e-10


def test_a_cone_of_sparse_rows_on_which_scipy_errs():
    a, b = [0.7940623252643618, 1.553468972276535], [0.26371136830383884, 1.890204958305701]
    K = np.array([[a[0], 0, a[1], 0], [0, -a[0], 0, -a[1]], [b[0], 0, b[1], 0], [0, b[0], 0, b[1]]])
    m = np.array([0, -0.33581797097076477, 0, -0.6569796622226912])
    found = project_on_cone(K, m)
    assert (K @ found.point).min() > -1e-12
    assert np.linalg.norm(found.point) == pytest.approx(0.24181758447834284)


def test_cone_decomposition_is_feasible_and_as_short_as_cvxpy_finds():
    rng = np.random.default_rng(0)
    K, u = random_cone(rng, 9, 3), rng.standard_normal(3)
    a, b = split_in_cone(K, u, steps=500, tolerance=1e-14)
    np.testing.assert_allclose(a - b, u, atol=1e-12)
    assert min((K @ a).min(), (K @ b).min()) > -1e-10
    w = cp.Variable(3)
    best = cp.Problem(cp.Minimize(cp.norm(w) + cp.norm(w - u)), [K @ w >= np.maximum(K @ u, 0)]).solve()
    assert np.linalg.norm(a) + np.linalg.norm(b) == pytest.approx(best, rel=1e-5)
    centre = rng.standard_normal(3)
    nearest = least_distance(K, np.maximum(K @ u, 0), centre)
    cp.Problem(cp.Minimize(cp.sum_squares(w - centre)), [K @ w >= np.maximum(K @ u, 0)]).solve()
    np.testing.assert_allclose(nearest, w.value, atol=1e-6)


# ---------------------------------------------------------------------- the gauge of one cone


def test_kinds_of_the_polar_of_a_cone_are_right():
    rng = np.random.default_rng(3)
    for _ in range(4):
        K, M = random_cone(rng, 6, 3), torch.from_numpy(rng.standard_normal((3, 2)))
        U = rng.standard_normal((40_000, 3))
        U = U[(U @ K.T >= 0).all(1)]
        brute = np.linalg.norm(U @ M.numpy(), axis=1) / np.linalg.norm(U, axis=1)
        brute = brute.max() if len(U) else 0.0
        polars = {method: ConeNuclearNorm(K, method).polar(M) for method in ("power", "branch", "sdp", "sigma")}
        assert polars["power"].kind is PolarKind.LOWER
        assert not polars["power"].kind.certifies
        for method in ("branch", "sdp", "sigma"):
            assert polars[method].kind is PolarKind.UPPER
            assert polars[method].value >= max(brute, polars["power"].value) * (1 - 1e-12)
        assert polars["branch"].value <= polars["power"].value * (1 + 1e-6)  # here the local search is global
        assert polars["sdp"].value <= polars["sigma"].value * (1 + 1e-12)


def test_cells_that_a_failing_linear_program_leaves_open_are_not_all_cells(monkeypatch):
    rows = np.random.default_rng(0).standard_normal((5, 3))
    assert enumerate_cells(rows, 100) is not None
    monkeypatch.setattr(cells, "linprog", lambda *args, **options: SimpleNamespace(status=4, fun=0.0, message="no"))
    assert enumerate_cells(rows, 100) is None


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("seed", [3, 9, 5])
def test_channels_of_very_different_scales_have_a_polar(seed):
    """CVXPY's solver fails on such cones, or warns: the bound is then that of ``sigma_max``."""
    rng = np.random.default_rng(seed)
    K = random_cone(rng, 4, 4) * 10.0 ** rng.uniform(-8, 8, 4)
    polar = ConeNuclearNorm(torch.from_numpy(K), "sdp").polar(torch.from_numpy(K.T @ rng.standard_normal((4, 5))))
    assert polar.kind is PolarKind.UPPER
    assert math.isfinite(polar.value)


def test_a_bound_of_rivals_covers_the_cells_that_are_none():
    """Cells within the tolerance above the best neuron are not looked at, so the bound is no smaller than that."""
    gauge = ReLUNorm([Arrangement(np.eye(3))])
    small = ConeProblem(np.eye(3), 1e-3 * np.ones((3, 5)))
    assert gauge._rival_bound([small], 1.0) >= 1 + gauge.options.tolerance


def test_one_column_is_exact_and_dual_to_its_value():
    rng = np.random.default_rng(5)
    K, z = random_cone(rng, 5, 3), torch.from_numpy(rng.standard_normal((3, 1)))
    gauge = ConeNuclearNorm(K)
    assert gauge.polar(z).kind is PolarKind.EXACT
    m = cp.Variable(3)
    lam, mu = cp.Variable(5, nonneg=True), cp.Variable(5, nonneg=True)
    fits = [cp.norm(m + K.T @ lam) <= 1, cp.norm(-m + K.T @ mu) <= 1]  # |P(+-m)| <= 1
    dual = cp.Problem(cp.Maximize(z.numpy()[:, 0] @ m), fits).solve()
    assert float(gauge.value(z)) == pytest.approx(dual, rel=1e-5)
    with pytest.raises(ValueError, match="NP-hard"):
        gauge.value(torch.ones(3, 2))


@pytest.mark.parametrize(("H", "q"), [(1, 1), (2, 3), (9, 2), (60, 3)])
def test_rows_in_a_plane_have_an_exact_polar(H, q):
    rng = np.random.default_rng(H)
    rows, T = rng.standard_normal((H, 2)), rng.standard_normal((H, q))
    if H == 9:  # parallel, opposite and zero rows, and events that round to a whole turn
        rows = np.round(rows) + 1e-16 * rng.standard_normal((H, 2))
    found = planar_maxima(rows, T)
    t = np.linspace(0, 2 * np.pi, 100_001)
    circle = np.stack([np.cos(t), np.sin(t)])
    brute = np.linalg.norm(np.maximum(rows @ circle, 0).T @ T, axis=1).max()
    best = found.values.argmax()
    u = np.array([np.cos(found.angles[best]), np.sin(found.angles[best])])
    assert np.linalg.norm(np.maximum(rows @ u, 0) @ T) == pytest.approx(found.values[best], rel=1e-12)
    assert brute <= found.values[best] * (1 + 1e-12)
    assert brute >= found.values[best] * (1 - 1e-4)


def test_many_tokens_of_two_channels_are_solved_exactly():
    rng = np.random.default_rng(0)
    X = rng.standard_normal((40, 4, 2))
    y = (np.abs(X[:, :, 0]).mean(1) > 0.8).astype(int) + (X[:, :, 1].mean(1) > 0)
    solution = cf.solve(cf.Problem(cf.heads.MLP("relu"), X, y, beta_ratio=0.4, intercept=True), tolerance=1e-3)
    assert solution.certificate.meets(1e-3)
    assert solution.certificate.polar == "exact"


# ---------------------------------------------------------------------- training


HEADS = {
    "mlp": (cf.heads.MLP("relu"), (4, 2, 2), (4,)),
    "mlp per token, 2 outputs": (cf.heads.MLP("relu"), (3, 2, 2), (3, 2, 2)),
    "fno": (cf.heads.FNO("relu"), (3, 2, 1), (3,)),
    "block fno": (cf.heads.BlockFNO("relu", blocks=2), (3, 2, 2), (3, 2)),
    "poolformer": (cf.heads.PoolFormer("relu"), (3, 3, 2), (3,)),
    "fnet": (cf.heads.FNet("relu"), (3, 2, 2), (3,)),
    "mixer": (cf.heads.MLPMixer("relu"), (2, 2, 1), (2, 2, 1)),
    "self-attention": (cf.heads.SelfAttention("relu"), (2, 2, 2), (2,)),
    "attention l1": (cf.heads.Attention("relu", "l1"), (5, 2, 2), (5, 2)),
    "attention l2": (cf.heads.Attention("relu", "l2"), (4, 2, 2), (4, 2)),
}


@pytest.mark.parametrize("name", HEADS)
def test_every_head_is_solved_certified_and_recovered(name, tmp_path):
    head, shape, targets = HEADS[name]
    rng = np.random.default_rng(11)
    X, Y = rng.standard_normal(shape), rng.standard_normal(targets)
    problem = cf.Problem(head, X, Y, beta_ratio=0.2)
    solution = cf.solve(problem, tolerance=1e-5)
    assert solution.certificate.kind == "exact"
    assert solution.certificate.meets(1e-5)
    network = solution.network()
    torch.testing.assert_close(network(X).detach(), solution.predict(X), rtol=0, atol=1e-12)
    assert cf.certify(network, problem).primal == pytest.approx(solution.objective, rel=1e-10)
    assert float(network.decay().detach()) == pytest.approx(float(problem.penalty.value(solution.weights.Z)), rel=1e-10)
    # a random network of the same head: its outputs are those of its lift, and its certificate encloses the optimum
    other = head.random_network(problem.layout, 5, seed=3)
    lifted = head.lift(other, problem.layout)
    outputs = problem.objective.outputs(lifted)
    torch.testing.assert_close(other(X).detach().reshape(outputs.shape), outputs, rtol=0, atol=1e-10)
    proof = cf.certify(other, problem)
    assert proof.dual <= solution.objective * (1 + 1e-9)
    assert solution.certificate.dual <= proof.primal
    loaded = cf.load(cf.save(solution, tmp_path / "model"))
    torch.testing.assert_close(loaded.predict(X), solution.predict(X))
    assert loaded.certificate == solution.certificate
    again = cf.load(cf.save(network, tmp_path / "network"))
    torch.testing.assert_close(again(X), network(X))


@pytest.mark.parametrize("head", [cf.heads.MLP("relu"), cf.heads.FNO("relu")], ids=["mlp", "fno"])
def test_one_output_equals_the_convex_program_and_the_best_of_many_runs(head):
    rng = np.random.default_rng(5)
    X, y = rng.standard_normal((3, 2, 1 if head.name == "fno" else 2)), rng.standard_normal((3, 2, 1))
    problem = cf.Problem(head, X, y, beta=0.1)
    solution = cf.solve(problem, tolerance=1e-7)
    rows = problem.operator.hidden_rows()[0].numpy()
    convex = cell_program(rows, np.eye(6), y.reshape(6, 1), 0.1, np.array([[1.0], [-1.0]]))
    assert solution.objective == pytest.approx(convex, rel=1e-5)
    best = best_of_runs(problem, 30, 12, steps=600, enough=solution.objective * (1 + 5e-6))
    assert best == pytest.approx(solution.objective, rel=1e-5)
    assert solution.certificate.polar == "exact"


def test_one_head_is_not_enough_where_the_printed_bound_says_so():
    """``m* <= n min(d^2, d c) = 1`` is printed; two heads are needed at n = d = c = 1, s = 2, X = (1, -2)."""
    x = np.array([1.0, -2.0])
    scores = np.outer(x, x)
    Y = (np.maximum(scores, 0) @ x - 0.5 * np.maximum(-scores, 0) @ x).reshape(1, 2, 1)
    problem = cf.Problem(cf.heads.SelfAttention("relu"), x.reshape(1, 2, 1), Y, beta=0.05)
    solution = cf.solve(problem, tolerance=1e-8)
    assert solution.objective == pytest.approx(0.074937, abs=1e-6)
    assert solution.weights.Z.n_terms == 2
    assert best_of_runs(problem, 20, 1) == pytest.approx(1.788442, abs=1e-6)
    assert best_of_runs(problem, 20, 2) == pytest.approx(0.074937, abs=1e-6)
    mlp = cf.Problem(cf.heads.MLP("relu"), np.eye(2)[None], np.array([1.0, -1.0]).reshape(1, 2, 1), beta=0.1)
    assert best_of_runs(mlp, 20, 1) == pytest.approx(0.595, abs=1e-6)
    assert cf.solve(mlp, tolerance=1e-8).objective == pytest.approx(0.19, abs=1e-6)


def test_intercepts_masks_and_classes():
    rng = np.random.default_rng(2)
    X, y = rng.standard_normal((7, 3, 2)), np.array([0, 1, 0, 1, 1, 0, 1])
    mask = np.ones((7, 3), dtype=bool)
    mask[::2, 2] = False
    signs = 2.0 * y - 1
    problem = cf.Problem(cf.heads.MLP("relu"), X, signs, beta_ratio=0.3, loss="logistic", mask=mask, intercept=True)
    solution = cf.solve(problem, tolerance=1e-5)
    assert solution.certificate.meets(1e-5)
    torch.testing.assert_close(solution.network()(X, mask).detach(), solution.predict(X, mask))
    attention = cf.Problem(cf.heads.SelfAttention("relu"), X, signs, beta_ratio=0.5, mask=mask)
    network = attention.head.random_network(attention.layout, 3)
    outputs = attention.objective.outputs(attention.head.lift(network, attention.layout))
    torch.testing.assert_close(network(X, mask).detach().reshape(outputs.shape), outputs)
    fitted = cf.TokenClassifier("mlp", activation="relu", beta_ratio=0.3, tolerance=1e-2).fit(X, y)
    assert fitted.score(X, y) > 0.5


def test_zero_neurons_are_optimal_at_beta_max_and_not_below():
    rng = np.random.default_rng(4)
    X, y = rng.standard_normal((5, 2, 2)), rng.standard_normal(5)
    problem = cf.Problem(cf.heads.MLP("relu"), X, y, beta_ratio=1.0)
    at_top = cf.solve(problem, tolerance=1e-7)
    assert at_top.certificate.meets(1e-7)
    assert at_top.weights.Z.n_terms == 0
    below = cf.solve(problem.with_beta(0.95 * problem.beta_max), tolerance=1e-7)
    assert below.objective < at_top.objective
    with pytest.raises(ValueError, match="neurons"):
        below.dense()
    with pytest.raises(TypeError, match="neurons"):
        cf.solve(problem, warm_start=torch.zeros(1, 2, 1))


# ---------------------------------------------------------------------- certificates against brute force


def random_problem(seed):
    """A tiny ReLU problem: some head, one or two outputs, some beta."""
    rng = np.random.default_rng(1000 + seed)
    kind = ["mlp", "mlp", "token", "fno", "mixer", "attention"][seed % 6]
    c = 1 + seed % 2
    N, s, d = int(rng.integers(2, 5)), 2, 2
    if seed % 12 >= 6:  # more than a plane: cells and cones
        d = 3
    if kind == "fno":
        head, s, d = cf.heads.FNO("relu"), 3 if seed % 12 >= 6 else 2, 1
    elif kind == "mixer":
        head, N, d = cf.heads.MLPMixer("relu"), 2, 1  # p = s^2 = 4
    elif kind == "attention":
        head, N = cf.heads.Attention("relu", "l1" if seed % 4 < 2 else "l2"), N + 2
    else:
        head = cf.heads.MLP("relu")
    X = rng.standard_normal((N, s, d))
    Y = rng.standard_normal((N, s, c) if kind == "token" else (N, c))
    return cf.Problem(head, X, Y, beta_ratio=float(rng.uniform(0.05, 0.5)))


def check_against_brute_force(seed):
    problem = random_problem(seed)
    solution = cf.solve(problem, tolerance=1e-5)
    proof = solution.certificate
    low, high = proof.interval
    assert proof.kind == "exact"
    assert low <= high
    _, p, q = problem.operator.weight_shape
    exact = q == 1 or p <= 2 or getattr(problem.head, "decay", "l2") == "l1"
    assert proof.polar == ("exact" if exact else "upper bound")
    # the optimum is below every network, so no network may be below the interval; and the solution is as good as the best
    best = best_of_runs(problem, 3, 6, steps=200)
    assert low <= best * (1 + 1e-9)
    assert high <= best * (1 + 2e-5)
    assert proof.relative_gap <= 1e-5
    # the dual point is feasible: no direction of many exceeds the polar that scaled it
    if getattr(problem.head, "decay", "l2") == "l2":
        assert proof.kkt["scale"] * brute_polar(problem, solution.weights, 4000, seed) <= problem.beta * (1 + 1e-9)
    # at a bad point the interval must hold the optimum as well
    bad = problem.head.random_network(problem.layout, 3, seed=seed)
    other = cf.certify(bad, problem)
    assert other.dual <= high * (1 + 1e-9)
    assert low * (1 - 1e-9) <= other.primal


@pytest.mark.parametrize("seed", [0, 1, 3, 4, 7, 9])
def test_certificates_against_brute_force(seed):
    check_against_brute_force(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(200))
def test_certificates_against_brute_force_on_many_problems(seed):
    check_against_brute_force(seed)


def test_without_all_cells_the_interval_is_valid_and_says_that_it_may_be_loose():
    rng = np.random.default_rng(0)
    X, Y = rng.standard_normal((30, 3, 4)), rng.standard_normal((30, 2))
    problem = cf.Problem(cf.heads.MLP("relu"), X, Y, beta_ratio=0.5)
    assert not problem.penalty.complete
    solution = cf.solve(problem, tolerance=1e-4, max_iter=1)
    proof = solution.certificate
    assert (proof.kind, proof.polar) == ("exact", "upper bound")
    assert proof.kkt["scale"] * brute_polar(problem, solution.weights) <= problem.beta
    assert -math.inf < proof.dual < proof.primal <= float(problem.objective.zero_evaluation().value)
    quick = problem.penalty.quick_polar(problem.objective.dual_matrix(problem.objective.zero_evaluation().V))
    assert quick.kind is PolarKind.LOWER


def test_gated_below_relu_below_split():
    rng = np.random.default_rng(1)
    X, Y = rng.standard_normal((3, 2, 2)), rng.standard_normal((3, 2, 2))
    problem = cf.Problem(cf.heads.MLP("relu"), X, Y, beta=0.2)
    found = cf.relu.sandwich(problem, tolerance=1e-6)
    assert found.gated.dual <= found.gated.primal <= found.relu.objective
    assert found.relu.objective <= found.split.primal * (1 + 1e-9)
    assert found.lower <= found.upper
    assert found.upper - found.lower <= 1e-5 * found.upper
    circle = np.stack([np.cos(t := 2 * np.pi * np.arange(24) / 24), np.sin(t)], 1)
    inner = cell_program(X.reshape(6, 2), np.eye(6), Y.reshape(6, 2), 0.2, circle)  # directions on a grid: from above
    assert found.lower <= inner <= found.upper * 1.01
    split = cell_program(X.reshape(6, 2), np.eye(6), Y.reshape(6, 2), 0.2, np.vstack([np.eye(2), -np.eye(2)]))
    assert found.split.primal == pytest.approx(split, rel=1e-5)


# ---------------------------------------------------------------------- from gated to ReLU


GATED = [
    cf.heads.MLP,
    cf.heads.PoolFormer,
    cf.heads.FNet,
    cf.heads.FNO,
    cf.heads.BlockFNO,
    cf.heads.SelfAttention,
    cf.heads.MLPMixer,
]


@pytest.mark.parametrize("make", GATED, ids=lambda make: make.name)
def test_a_gated_head_becomes_a_relu_network_of_the_same_function(make):
    rng = np.random.default_rng(9)
    X, Y = rng.standard_normal((6, 4, 2)), rng.standard_normal((6, 2))
    problem = cf.Problem(make("gated_relu", gates=2), X, Y, beta_ratio=0.2)
    gated = cf.solve(problem, tolerance=1e-4)
    found = cf.relu.from_gated(gated, X)
    torch.testing.assert_close(found.network(X).detach(), gated.predict(X), rtol=0, atol=1e-8)
    assert found.gated_decay == pytest.approx(float(problem.penalty.value(gated.weights.Z)), rel=1e-8)
    assert found.price >= 1 - 1e-9
    exact = cf.Problem(found.head, X, Y, beta=problem.beta)
    before = cf.certify(found.network, exact)
    after = cf.certify(cf.relu.polish(found.network, exact, steps=50), exact)
    assert after.primal <= before.primal
    assert before.primal == pytest.approx(
        gated.objective + problem.beta * (found.relu_decay - found.gated_decay), rel=1e-8
    )


def test_what_cannot_be_converted_is_refused():
    rng = np.random.default_rng(0)
    X, y = rng.standard_normal((6, 2, 2)), rng.standard_normal(6)
    linear = cf.solve(cf.Problem("mlp", X, y, beta_ratio=0.5))
    with pytest.raises(ValueError, match="gated_relu"):
        cf.relu.from_gated(linear, X)
    gated = cf.solve(cf.Problem(cf.heads.Attention("gated_relu", gates=2), X, y, beta_ratio=0.5))
    with pytest.raises(ValueError, match="attention"):
        cf.relu.from_gated(gated, X)
    with pytest.raises(ValueError, match="exact ReLU"):
        cf.relu.sandwich(cf.Problem("mlp", X, y, beta_ratio=0.5))


def test_a_gated_head_on_digits_becomes_a_relu_network_of_the_same_accuracy():
    X, y = cf.data.digits(patch=2)
    X, y = torch.as_tensor(X)[:400], torch.as_tensor(y)[:400]
    problem = cf.Problem(cf.heads.MLP("gated_relu", gates=6), X, y, beta_ratio=0.05, intercept=True)
    gated = cf.solve(problem, tolerance=1e-2)
    found = cf.relu.from_gated(gated, X)
    outputs, expected = found.network(X).detach(), gated.predict(X)
    assert float((outputs - expected).abs().max()) <= 1e-8
    assert torch.equal(outputs.argmax(1), expected.argmax(1))
    assert float((outputs.argmax(1) == y).double().mean()) > 0.5


@pytest.mark.parametrize("head", ["mlp", "block_fno", "self_attention"])
def test_the_gated_program_on_cells_has_its_adjoint(head):
    rng = np.random.default_rng(0)
    name = {"mlp": cf.heads.MLP, "block_fno": lambda **own: cf.heads.BlockFNO(blocks=2, **own)}
    made = name.get(head, cf.heads.SelfAttention)(activation="relu")
    problem = cf.Problem(made, rng.standard_normal((3, 2, 2)), rng.standard_normal((3, 2)), beta=1.0)
    operator = problem.objective.operator
    patterns = [torch.from_numpy(rng.integers(0, 2, (4, len(layer.rows)))).double() for layer in operator.layers]
    check_operator(CellOperator(operator.layers, patterns, *operator.output_shape))

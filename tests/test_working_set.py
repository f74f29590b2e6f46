"""The working-set solver: the same optimum as FISTA, no token lost, whatever the sizes of the sets."""

import os
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.exceptions import ConvergenceWarning

import convexformer as cf
import convexformer.threads as threads_module
from cases import HEADS, LOSSES, random_data
from convexformer.operators import DenseOperator
from convexformer.solvers import SOLVERS
from convexformer.solvers.frank_wolfe import frank_wolfe
from convexformer.solvers.monitor import TimeUp
from convexformer.solvers.working_set import WorkingSet, WorkingSetOptions, accelerated, compiled
from convexformer.solvers.working_set.accelerated import AcceleratedStep
from convexformer.solvers.working_set.prox_newton import ProxNewtonDescent
from convexformer.solvers.working_set.squared import SquaredDescent
from convexformer.solvers.working_set.store import BlockStore
from convexformer.solvers.working_set.token_sweep import token_gradients
from convexformer.threads import limited_threads

RNG = np.random.default_rng(31)
ATTENTION = {name: case for name, case in HEADS.items() if "attention" in name}


def sparse_data(rng, n=60, s=24, d=3, c=3, used=3):
    """Tokens of which ``used`` positions decide the outputs, shifted so that an intercept matters."""
    X = rng.standard_normal((n, s, d)) + 0.3
    Z = np.zeros((s, d, c))
    Z[rng.choice(s, used, replace=False)] = rng.standard_normal((used, d, c))
    return X, np.einsum("nsd,sdc->nc", X, Z) + 0.3 * rng.standard_normal((n, c))


def support(solution):
    """The groups that are not zero, ``([g,] s, c)``."""
    return solution.dense().norm(dim=-2) > 0


SMALL_SETS = WorkingSetOptions(fewest_slices=1, first_part=10**9)


@pytest.fixture
def small_sets(monkeypatch):
    """Working sets of a single slice at first, so that everything has to be found out."""
    monkeypatch.setitem(SOLVERS, "working_set", WorkingSet(SMALL_SETS))


@pytest.mark.parametrize("option", ["plain", "all"])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("head", ATTENTION)
def test_working_sets_reach_the_optimum_of_fista(head, loss, option, small_sets):
    data = random_data(HEADS[head], LOSSES[loss], option, np.random.default_rng(5), n=30, s=7)
    head = HEADS[head].build(data.gates)
    tolerance = 1e-6 if "0.3" in loss else 1e-8  # nearly linear: slow for both
    for ratio in (0.5, 0.03):
        problem = cf.Problem(head, data.X, data.Y, beta_ratio=ratio, **data.options)
        ours, theirs = (cf.solve(problem, tolerance, solver=name) for name in ("working_set", "fista"))
        assert ours.status is cf.Status.CONVERGED
        assert ours.certificate.relative_gap <= tolerance
        assert ours.objective == pytest.approx(theirs.objective, rel=2 * tolerance)


@settings(max_examples=40)
@given(
    seed=st.integers(0, 10**6),
    loss=st.sampled_from(["squared", "huber", "cross_entropy", "logistic", "squared_hinge"]),
    ratio=st.floats(0.02, 0.9),
    gated=st.booleans(),
    intercept=st.booleans(),
    first=st.integers(1, 8),
)
def test_screening_never_discards_an_active_group(seed, loss, ratio, gated, intercept, first):
    rng = np.random.default_rng(seed)
    X, F = sparse_data(rng)
    sign = np.where(F[:, 0] > np.median(F[:, 0]), 1.0, -1.0)
    Y = {"squared": F, "huber": F[:, 0], "cross_entropy": F.argmax(1)}.get(loss, sign)
    head = cf.heads.Attention(activation="gated_relu" if gated else "linear", gates=2)
    problem = cf.Problem(head, X, Y, beta_ratio=ratio, loss=loss, intercept=intercept)
    reference = cf.solve(problem, tolerance=1e-9, solver="fista", max_iter=60_000)
    with pytest.MonkeyPatch.context() as patch:
        options = WorkingSetOptions(fewest_slices=first, first_part=10**9)
        patch.setitem(SOLVERS, "working_set", WorkingSet(options))
        solution = cf.solve(problem, tolerance=1e-9, solver="working_set")
    # by strong convexity of the dual, a group at beta may be zero or not; one well inside is surely active
    norms = reference.dense().norm(dim=-2)
    surely = norms > 1e-3 * norms.max()
    assert bool(support(solution)[surely].all())
    assert solution.objective == pytest.approx(reference.objective, rel=2e-9)


def test_blocks_are_minimised_exactly():
    X = torch.from_numpy(RNG.standard_normal((50, 1, 6)))
    y = torch.from_numpy(RNG.standard_normal(50))
    problem = cf.Problem("attention", X, y, beta_ratio=0.3)
    solution = cf.solve(problem, tolerance=1e-12, solver="working_set")
    z = solution.dense()[0, :, 0]
    gradient = X[:, 0].T @ (X[:, 0] @ z - y)
    assert torch.allclose(gradient, -problem.beta * z / z.norm(), atol=1e-9 * problem.beta)
    assert solution.n_iter <= 4  # one block: a sweep is the solution, the rest is float32


@pytest.mark.parametrize("loss", ["squared", "cross_entropy"])
def test_sweeps_never_raise_the_objective(loss):
    X, F = sparse_data(RNG)
    problem = cf.Problem("attention", X, F if loss == "squared" else F.argmax(1), beta_ratio=0.1, intercept=True)
    kind = SquaredDescent if loss == "squared" else ProxNewtonDescent
    Z = problem.operator.zeros()
    descent = kind(problem.objective, Z, problem.objective.zero_evaluation(), WorkingSetOptions())
    groups = np.arange(len(descent.Z))
    descent.store.load(np.arange(24))
    values = [descent._value(descent.S, descent.Z, groups)]
    for _ in range(12):
        descent._sweep(groups)
        values.append(descent._value(descent.S, descent.Z, groups))
    assert all(b <= a + 1e-12 * values[0] for a, b in pairwise(values))
    weights = descent.weights()
    exact = float(problem.objective.evaluate(problem.operator.apply(weights)).value) + problem.beta * float(
        problem.penalty.value(weights)
    )
    assert values[-1] == pytest.approx(exact, rel=1e-6)  # the state has kept up with the weights


@pytest.mark.parametrize("loss", ["squared", "cross_entropy"])
@pytest.mark.parametrize("tolerance", [1e-4, 1e-9])
def test_wide_tokens_meet_any_tolerance_whatever_their_spectra_are_computed_in(loss, tolerance):
    rng = np.random.default_rng(1)
    X = rng.standard_normal((40, 3, 130)) * np.arange(1, 131) ** -1.0
    F = X[:, 0, :3] + 0.1 * rng.standard_normal((40, 3))
    problem = cf.Problem("attention", X, F if loss == "squared" else F.argmax(1), beta_ratio=0.05, intercept=True)
    solution = cf.solve(problem, tolerance=tolerance, solver="working_set")
    assert solution.certificate.meets(tolerance)
    store = BlockStore.of(problem.objective, single_spectra=tolerance == 1e-4)
    assert store.filled.any()  # the one that the solve used


def test_a_warm_start_in_the_channels_of_the_tokens_is_where_a_descent_begins():
    X, F = sparse_data(RNG)
    problem = cf.Problem("attention", X, F, beta_ratio=0.1)
    weights = cf.solve(problem, tolerance=1e-6).weights
    at = problem.objective.evaluate(problem.operator.apply(weights.dense()))
    descent = SquaredDescent(problem.objective, weights.dense(), at, WorkingSetOptions())
    torch.testing.assert_close(descent.weights(), weights.dense(), rtol=1e-12, atol=1e-12)
    assert not np.allclose(descent.Z, weights.dense().transpose(-1, -2).reshape(-1, 3))  # its channels are other ones


def test_only_tokens_that_were_in_a_working_set_are_copied():
    X, F = sparse_data(RNG, n=200, s=80, used=2)
    problem = cf.Problem("attention", X, F[:, 0], beta_ratio=0.7)
    solution = cf.solve(problem, tolerance=1e-6, solver="working_set")
    filled = BlockStore.of(problem.objective).filled
    assert 0 < filled.sum() <= 40
    assert bool(filled[support(solution).any(1).numpy()].all())


def test_a_path_shares_its_features_and_starts_where_it_stopped(small_sets):
    X, F = sparse_data(RNG)
    problem = cf.Problem("attention", X, F[:, 0], beta_ratio=0.1)
    first = cf.solve(problem, tolerance=1e-6, solver="working_set")
    store = BlockStore.of(problem.objective)
    near = problem.with_beta(0.95 * problem.beta)
    warm = cf.solve(near, tolerance=1e-6, solver="working_set", warm_start=first)
    assert BlockStore.of(near.objective) is store
    assert warm.history[0].relative_gap < 0.1
    cold = cf.solve(near, tolerance=1e-6, solver="working_set")
    assert warm.n_iter < cold.n_iter
    assert warm.objective == pytest.approx(cold.objective, rel=2e-6)


def test_float32_tokens_end_with_a_float64_certificate():
    X, F = sparse_data(RNG)
    for loss, Y in (("squared", F), ("cross_entropy", F.argmax(1))):
        problem = cf.Problem("attention", X, Y, beta_ratio=0.1, loss=loss, dtype=torch.float32)
        solution = cf.solve(problem, tolerance=1e-6, solver="working_set")
        assert solution.status is cf.Status.CONVERGED
        assert cf.certify(solution, problem).relative_gap <= 1e-6


def watched(function, calls):
    def wrapper(self, *args, **options):
        calls.append(type(self).__name__)
        return function(self, *args, **options)

    return wrapper


@pytest.mark.parametrize("why", ["no compiler", "wide tokens"])
def test_without_blocks_the_rounds_are_accelerated(why, monkeypatch, small_sets):
    if why == "no compiler":
        monkeypatch.setattr(compiled, "available", False)
    else:
        narrow = replace(SMALL_SETS, widest_token=2)
        monkeypatch.setitem(SOLVERS, "working_set", WorkingSet(narrow))
    X, F = sparse_data(RNG)
    problem = cf.Problem("attention", X, F.argmax(1), beta_ratio=0.1, intercept=True)
    made = []
    monkeypatch.setattr(AcceleratedStep, "__init__", watched(AcceleratedStep.__init__, made))
    monkeypatch.setattr(BlockStore, "__init__", watched(BlockStore.__init__, made))
    solution = cf.solve(problem, tolerance=1e-7, solver="working_set")
    assert solution.objective == pytest.approx(cf.solve(problem, 1e-7, solver="fista").objective, rel=2e-7)
    assert made == ["AcceleratedStep"]


@pytest.mark.parametrize(("regression", "threads"), [(False, {1}), (True, {2})])
def test_sweeps_over_a_model_run_on_one_thread(regression, threads, monkeypatch):
    X, F = sparse_data(RNG)
    seen, kind = set(), SquaredDescent if regression else ProxNewtonDescent

    def watched(*args):
        seen.add(torch.get_num_threads())
        return sweep(*args)

    sweep = kind._sweep
    monkeypatch.setattr(kind, "_sweep", watched)
    monkeypatch.setattr(threads_module, "SINGLE_THREAD_WORK", 0)
    with limited_threads(2):
        problem = cf.Problem("attention", X, F[:, :1] if regression else F.argmax(1), beta_ratio=0.1)
        cf.solve(problem, tolerance=1e-4, solver="working_set")
        assert torch.get_num_threads() == 2
    assert seen == threads


@pytest.mark.parametrize("solver", ["working_set", "frank_wolfe"])
def test_a_round_may_be_late_before_its_first_look(solver, monkeypatch):
    def late(objective, start, watch, **options):
        raise TimeUp

    monkeypatch.setattr(compiled, "available", False)
    for module in (accelerated, frank_wolfe):
        monkeypatch.setattr(module, "fista", late)
    X, F = sparse_data(RNG)
    if solver == "frank_wolfe":
        problem = cf.Problem(cf.heads.Attention(stochastic="row"), X, X[..., :2] ** 2, beta_ratio=0.1)
    else:
        problem = cf.Problem("attention", X, F.argmax(1), beta_ratio=0.1, intercept=True)
    with pytest.warns(ConvergenceWarning):
        solution = cf.solve(problem, tolerance=1e-7, solver=solver, max_iter=3)
    assert solution.certificate.relative_gap > 1e-7  # no progress, and no error


def test_auto_takes_working_sets_for_many_tokens_and_fista_for_few():
    X = RNG.standard_normal((300, 40, 100))
    Y = RNG.standard_normal(300)
    assert cf.solve(cf.Problem("attention", X, Y, beta_ratio=0.5)).solver == "working_set"
    assert cf.solve(cf.Problem("attention", X[:, :4, :3], Y, beta_ratio=0.5)).solver == "fista"
    assert cf.solve(cf.Problem("mlp", X, Y, beta_ratio=0.5)).solver != "working_set"


def many_classes(rng, n=150, s=6, d=5, c=12):
    """Few samples a class and a spectrum that falls: the curvature of a class sits on few samples."""
    X = rng.standard_normal((n, s, d)) / np.arange(1, d + 1) + 0.5
    scores = np.einsum("nsd,sdc->nc", X, rng.standard_normal((s, d, c)))
    return X, np.concatenate([np.arange(c), scores[c:].argmax(1)])


@pytest.mark.parametrize("intercept", [False, True])
def test_many_classes_at_small_betas_do_not_freeze(intercept):
    X, y = many_classes(np.random.default_rng(3))
    for ratio in (0.02, 0.002):
        problem = cf.Problem("attention", X, y, beta_ratio=ratio, intercept=intercept)
        solution = cf.solve(problem, 1e-6, solver="working_set", max_time=60)
        assert solution.status is cf.Status.CONVERGED
        assert solution.n_iter <= 30


def test_ill_conditioned_tokens_need_few_rounds():
    rng = np.random.default_rng(4)
    X = rng.standard_normal((200, 5, 12))
    y = (X.mean(1) @ rng.standard_normal((12, 4))).argmax(1)
    problem = cf.Problem("attention", X / np.arange(1, 13) ** 2, y, beta_ratio=1e-3, intercept=True)
    solution = cf.solve(problem, 1e-5, solver="working_set", max_time=60)
    assert solution.status is cf.Status.CONVERGED
    assert solution.n_iter <= 30


def test_directions_along_which_a_token_is_constant_stay_zero():
    X, y = many_classes(np.random.default_rng(5), c=4)
    X[:, :, 4] = 1.5  # the intercept takes it; no curvature, and no gradient once that is exact
    problem = cf.Problem("attention", X, y, beta_ratio=0.01, intercept=True)
    solution = cf.solve(problem, 1e-6, solver="working_set", max_time=60)
    assert solution.status is cf.Status.CONVERGED
    assert float(solution.dense()[:, 4].abs().max()) < 1e-3 * float(solution.dense().abs().max())


def test_whole_slices_and_single_columns_sweep_to_the_same_point():
    X, y = many_classes(np.random.default_rng(6), c=5)
    problem = cf.Problem("attention", X, y, beta_ratio=0.05, intercept=True)
    found = []
    for columns in (1, 10**9):
        options = WorkingSetOptions(columns_at_once=columns)
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(SOLVERS, "working_set", WorkingSet(options))
            found.append(cf.solve(problem, 1e-8, solver="working_set").dense())
    assert torch.allclose(*found, atol=1e-3 * float(found[0].abs().max()))


@pytest.mark.parametrize(("loss", "c"), [("squared", 1), ("squared", 3), ("logistic", 1), ("cross_entropy", 3)])
@pytest.mark.parametrize(
    "options", [{"rows_turned": 0}, {"rows_at_once": 1}, {"rows_turned": 0, "rows_at_once": 1}], ids=str
)
def test_neither_the_axes_nor_the_precision_of_sweeps_moves_the_optimum(loss, c, options, monkeypatch):
    X, Y = sparse_data(np.random.default_rng(12), c=c)
    y = {
        "squared": Y if c > 1 else Y[:, 0],
        "logistic": np.where(Y[:, 0] > Y.mean(), 1, -1),
        "cross_entropy": Y.argmax(1),
    }[loss]
    problem = cf.Problem("attention", X, y, loss=loss, beta_ratio=0.05, intercept=True)
    usual = cf.solve(problem, 1e-9, solver="working_set")
    monkeypatch.setitem(SOLVERS, "working_set", WorkingSet(WorkingSetOptions(**options)))
    other = cf.solve(
        cf.Problem("attention", X, y, loss=loss, beta_ratio=0.05, intercept=True), 1e-9, solver="working_set"
    )
    assert other.certificate.relative_gap <= 1e-9
    assert other.objective == pytest.approx(usual.objective, rel=2e-9)
    assert torch.equal(support(other), support(usual))


def test_tokens_stay_as_they_are_where_rows_are_many():
    X, Y = sparse_data(np.random.default_rng(13))
    objective = cf.Problem("attention", X, Y, beta_ratio=0.1).objective
    stores = [BlockStore.of(objective, rotated=rotated) for rotated in (False, True)]
    for store in stores:
        store.load(np.array([0]))
        store.prepare(np.array([0]))
    np.testing.assert_allclose(stores[0].X[0], X[:, 0], rtol=1e-6)
    axes = stores[1].spectra[1][0]
    np.testing.assert_allclose(stores[1].X[0], X[:, 0] @ axes, atol=1e-5)
    np.testing.assert_allclose(stores[0].spectra[0][0], stores[1].spectra[0][0], rtol=1e-5)


@pytest.mark.parametrize("gated", [False, True])
def test_gradients_of_whole_slices_are_those_of_columns(gated):
    X, Y = sparse_data(np.random.default_rng(14))
    head = cf.heads.Attention(activation="gated_relu" if gated else "linear", gates=3)
    store = BlockStore.of(cf.Problem(head, X, Y, beta_ratio=0.1).objective)
    store.load(np.arange(24))
    R = np.random.default_rng(15).standard_normal((3, 60))
    groups = np.flatnonzero(np.random.default_rng(16).random(len(store.slice)) < 0.4)
    ours, theirs = np.zeros((2, len(store.slice), 3))
    token_gradients(groups, store.starts(groups), store.index, store.X, store.gates, store.gated, R, ours)
    compiled.gradients(groups, store.index, store.data, R, theirs)
    np.testing.assert_allclose(ours, theirs, atol=1e-5 * np.abs(theirs).max())


@pytest.mark.slow
def test_a_new_installation_compiles_without_warnings(tmp_path):
    code = """
import convexformer as cf
X, y = cf.data.digits(patch=2)
for head in ("attention", "self_attention", cf.heads.Attention(activation="gated_relu", gates=4)):
    cf.TokenClassifier(head=head, beta_ratio=0.1).fit(X[:300], y[:300])
cf.TokenRegressor(head="attention").fit(X[:300], y[:300])
"""
    run = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)},
        check=True,
    )
    assert run.stderr == ""


def test_a_solver_that_gains_nothing_says_so(monkeypatch):
    X, y = many_classes(np.random.default_rng(7), c=4)
    problem = cf.Problem("attention", X, y, beta_ratio=0.05, intercept=True)
    monkeypatch.setattr(ProxNewtonDescent, "_sweep", lambda self, groups: None)
    monkeypatch.setattr(ProxNewtonDescent, "_newton", lambda self, *args: None)
    with pytest.warns(Warning, match="no further progress"):
        solution = cf.solve(problem, 1e-6, solver="working_set", max_time=60)
    assert solution.status is cf.Status.STALLED
    assert solution.n_iter <= 20


def test_heads_without_token_slices_are_refused():
    problem = cf.Problem("mlp", RNG.standard_normal((10, 3, 2)), RNG.standard_normal(10), beta_ratio=0.1)
    with pytest.raises(ValueError, match="weights of their own for each token position"):
        cf.solve(problem, solver="working_set")


def test_time_limits_and_callbacks_hold_within_rounds():
    X, F = sparse_data(RNG, n=300, s=60, d=8)
    problem = cf.Problem("attention", X, F, beta_ratio=1e-3)
    with pytest.warns(Warning, match="max_time"):
        solution = cf.solve(problem, tolerance=1e-13, solver="working_set", max_time=0.05)
    assert solution.status is cf.Status.MAX_TIME
    stopped = cf.solve(problem, solver="working_set", callback=lambda record, weights: record.iteration == 1)
    assert stopped.status is cf.Status.INTERRUPTED
    assert stopped.n_iter == 1


def test_sparse_weights_are_applied_token_by_token():
    A = DenseOperator(torch.from_numpy(RNG.standard_normal((9, 20 * 3))), (20, 3), 2)
    Z = A.zeros()
    Z[[2, 11]] = torch.from_numpy(RNG.standard_normal((2, 3, 2)))
    assert torch.allclose(A.apply(Z), A.features @ Z.reshape(60, 2))
    assert torch.equal(A.apply(A.zeros()), torch.zeros(9, 2, dtype=torch.float64))


def test_a_sweep_survives_tokens_of_zeros_and_repeated_columns():
    X, F = sparse_data(RNG)
    X[:, 3] = 0.0
    X[:, 5, 1] = X[:, 5, 0]
    X[:, 6] = 1.0  # constant: the intercept takes it all
    for intercept in (False, True):
        problem = cf.Problem("attention", X, F, beta_ratio=0.05, intercept=intercept)
        solution = cf.solve(problem, tolerance=1e-8, solver="working_set")
        assert solution.certificate.relative_gap <= 1e-8
        assert not bool(support(solution)[3].any())


def test_rounds_give_up_when_nothing_is_gained(monkeypatch):
    monkeypatch.setitem(SOLVERS, "working_set", WorkingSet(WorkingSetOptions(patience=1)))
    X, F = sparse_data(RNG)
    problem = cf.Problem("attention", X, F, beta_ratio=0.05)
    assert cf.solve(problem, tolerance=1e-8, solver="working_set").certificate.relative_gap <= 1e-8


def test_saturated_softmax_paths_stay_quick():
    X, y = cf.data.digits(patch=2)
    estimator = cf.TokenClassifier()
    problem = estimator.path_problem(X[:600], y[:600])
    start = cf.solve(problem.with_beta(0.02 * problem.beta_max), 1e-3, solver="working_set")
    small = problem.with_beta(0.01 * problem.beta_max)  # steps of the model overshoot here, far into saturation
    solution = cf.solve(small, 1e-4, solver="working_set", warm_start=start, max_time=20)
    assert solution.status is cf.Status.CONVERGED
    assert solution.objective == pytest.approx(cf.solve(small, 1e-4).objective, rel=2e-4)

"""Limits bind: what may come after max_time is one product with the operator and the last certificate."""

import os
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch
from sklearn.exceptions import ConvergenceWarning

import convexformer as cf
from convexformer import clock as clock_module
from convexformer import jit
from convexformer.operators import Operator
from convexformer.solvers import SOLVERS, Limits, auto, minimise
from convexformer.solvers.base import Solver
from convexformer.solvers.staircase import Staircase
from convexformer.solvers.status import Record
from convexformer.solvers.turn import Turn

CERTIFICATE = 4  # products of a certificate: A Z, A^T V, and those of the rounding allowance


class Wall:
    """A clock that moves by one second at each product with the operator, and not at all otherwise."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(clock_module.time, "perf_counter", lambda: self.now)

    def slow(self, problem, monkeypatch):
        A = problem.operator
        for name in ("apply", "adjoint"):
            plain = getattr(A, name)
            monkeypatch.setattr(A, name, lambda Z, plain=plain: (self.tick(), plain(Z))[1])
        return problem

    def tick(self):
        self.now += 1.0


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(5)
    X = rng.standard_normal((60, 5, 4))
    y = X[:, 1] @ rng.standard_normal(4) + X[:, 3, 0] + 0.5 * rng.standard_normal(60)
    return X, y


@pytest.mark.parametrize("solver", ["fista", "working_set", "staircase"])
@pytest.mark.parametrize("max_time", [0.5, 5.0, 12.0])
def test_nothing_but_a_product_and_the_certificate_comes_after_the_limit(data, monkeypatch, solver, max_time):
    X, y = data
    head = cf.heads.MLP() if solver == "staircase" else "attention"
    Y = np.stack([y, y**2, X[:, 0, 0]], 1)
    problem = cf.Problem(head, X, Y, beta_ratio=1e-3, intercept=True)
    wall = Wall(monkeypatch)
    wall.slow(problem, monkeypatch)
    with pytest.warns(ConvergenceWarning, match="max_time"):
        solution = cf.solve(problem, tolerance=1e-15, solver=solver, max_time=max_time)
    assert solution.status is cf.Status.MAX_TIME
    assert solution.certificate.kind == "exact"
    assert wall.now <= max_time + 1 + CERTIFICATE


def test_beta_max_is_on_the_clock_of_a_fit(data, monkeypatch):
    X, y = data
    wall = Wall(monkeypatch)
    monkeypatch.setattr(clock_module.time, "perf_counter", lambda: (wall.tick(), wall.now)[1])
    found = cf.Problem.beta_max.fget

    def beta_max(self):
        wall.now += 100.0
        return found(self)

    monkeypatch.setattr(cf.Problem, "beta_max", property(beta_max))
    probe = cf.TokenRegressor(head="attention", beta_ratio=0.1, tolerance=1e-15, max_time=90.0)
    with pytest.warns(ConvergenceWarning, match="max_time"):
        probe.fit(X, y)
    assert probe.solution_.n_iter == 0
    assert len(probe.solution_.history) == 1


def test_a_solve_at_a_given_beta_needs_no_beta_max(data, monkeypatch):
    X, y = data
    problem = cf.Problem("attention", X, y, beta=0.1, intercept=True)
    monkeypatch.setattr(cf.Problem, "beta_max", property(lambda self: pytest.fail("beta_max was computed")))
    assert cf.solve(problem, tolerance=1e-3).status is cf.Status.CONVERGED


def test_a_step_length_that_runs_away_meets_the_clock(data, monkeypatch):
    """Doubling the curvature until it overflows takes a thousand products."""
    X, y = data
    problem = cf.Problem("attention", X, y, beta_ratio=0.1, intercept=True)
    wall = Wall(monkeypatch)
    wall.slow(problem, monkeypatch)
    endless = torch.tensor(torch.inf, dtype=torch.float64)
    module = sys.modules["convexformer.solvers.fista.fista"]
    monkeypatch.setattr(module, "_bregman", lambda *args, **options: endless)
    with pytest.warns(ConvergenceWarning, match="max_time"):
        cf.solve(problem, solver="fista", max_time=20.0)
    assert wall.now <= 20.0 + 2 + CERTIFICATE


def test_a_fit_counts_what_comes_before_its_solve(data, monkeypatch):
    wall = Wall(monkeypatch)
    build = cf.TokenRegressor._problem

    def slow(self, *args, **options):
        wall.now += 100.0
        return wall.slow(build(self, *args, **options), monkeypatch)

    monkeypatch.setattr(cf.TokenRegressor, "_problem", slow)
    with pytest.warns(ConvergenceWarning, match="max_time"):
        model = cf.TokenRegressor(max_time=50.0, tolerance=1e-15).fit(*data)
    assert model.solution_.status is cf.Status.MAX_TIME
    assert model.n_iter_ == 0


def test_a_path_has_a_time_of_its_own(data, monkeypatch):
    X, y = data
    wall = Wall(monkeypatch)
    plain = cf.path("attention", X, y, n_betas=6, beta_min_ratio=0.01, total_time=1e-3)  # the clock stands still
    assert (len(plain), plain.stopped) == (6, "")

    def step(record, weights):
        wall.now += 1.0

    path = cf.path("attention", X, y, n_betas=6, beta_min_ratio=0.01, total_time=4.5, callback=step)
    assert path.stopped == "time"
    assert 1 <= len(path) < 6
    with pytest.raises(ValueError, match="total_time=0"):
        cf.path("attention", X, y, total_time=0)


def test_a_search_has_a_time_of_its_own(data, monkeypatch):
    X, y = data
    model = cf.TokenRegressorCV(n_betas=3, beta_min_ratio=0.1, cv=2, total_time=600.0).fit(X, y)
    assert model.certificate_.meets(1e-3)
    with pytest.raises(ValueError, match="total_time=-1"):
        cf.TokenRegressorCV(total_time=-1).fit(X, y)
    from convexformer.estimators import folds

    monkeypatch.setattr(folds.Share, "clock", lambda self: clock_module.Clock(0.0))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        tight = {"tolerance": 1e-17, "fold_tolerance": 1e-17, "total_time": 600.0}
        with pytest.raises(TimeoutError, match="before any fold"):
            cf.TokenRegressorCV(n_betas=3, beta_min_ratio=0.1, cv=2, **tight).fit(X, y)


# ---------------------------------------------------------------------- every solver and head

PRODUCTS = (
    "apply",
    "apply_dense",
    "apply_factors",
    "adjoint",
    "adjoint_block",
    "dense_adjoint",
    "factor_gradients",
    "matvec",
    "rmatvec",
)


def count_products(wall, monkeypatch):
    """Let the wall's clock tick at every product of every operator; one that others are made of counts once."""
    inside = []

    def counted(plain):
        def product(*args, **options):
            if inside:
                return plain(*args, **options)
            wall.tick()
            inside.append(plain)
            try:
                return plain(*args, **options)
            finally:
                inside.pop()

        return product

    classes = [Operator]
    for cls in classes:
        classes += [sub for sub in cls.__subclasses__() if sub not in classes]
        for name in PRODUCTS:
            if name in vars(cls):
                monkeypatch.setattr(cls, name, counted(vars(cls)[name]))


HEADS = {
    "attention l2": lambda: cf.heads.Attention(decay="l2"),
    "gated attention": lambda: cf.heads.Attention(activation="gated_relu", gates=3),
    "self-attention": lambda: cf.heads.SelfAttention(),
    "gated self-attention": lambda: cf.heads.SelfAttention(activation="gated_relu", gates=2),
    "mixer": lambda: cf.heads.MLPMixer(),
    "gated mixer": lambda: cf.heads.MLPMixer(activation="gated_relu", gates=2),
    "mlp": lambda: cf.heads.MLP(),
    "gated fno": lambda: cf.heads.FNO(activation="gated_relu", gates=2),
    "relu mlp": lambda: cf.heads.MLP(activation="relu"),
    "linear": lambda: cf.heads.Linear(),
    "sum": lambda: cf.heads.Sum([cf.heads.Linear(), cf.heads.MLP()]),
    "learned sum": lambda: cf.heads.Sum(
        [
            cf.heads.Feature(cf.features.MeanPooling(), decay="frobenius"),
            cf.heads.Feature(cf.features.Flatten(), decay="frobenius"),
        ],
        weights="learned",
    ),
}
SERVING = {
    "fista": ("attention l2", "gated attention", "mlp", "gated fno", "linear", "sum"),
    "working_set": ("attention l2", "gated attention"),
    "staircase": ("attention l2", "self-attention", "gated self-attention", "mixer", "gated mixer", "mlp", "gated fno"),
    "row_space": ("gated self-attention", "gated mixer"),
    "block_newton": ("linear", "learned sum"),
    "column_generation": ("relu mlp",),
    "auto": tuple(HEADS),
}


def overrun(make, wall, monkeypatch, **options):
    """Products after ``max_time``, beyond those of a certificate."""
    problem = make()
    count_products(wall, monkeypatch)
    with pytest.warns(ConvergenceWarning, match="max_time|no further progress"):
        solution = cf.solve(problem, tolerance=1e-15, **options)
    took = wall.now
    proof = cf.certify(solution, make())
    assert solution.certificate.dual == pytest.approx(proof.dual, rel=1e-9)
    return took - options["max_time"] - (wall.now - took)


@pytest.mark.parametrize("max_time", [0.5, 6.5, 25.5])
@pytest.mark.parametrize(("solver", "name"), [(solver, name) for solver, names in SERVING.items() for name in names])
def test_limits_bind_for_every_solver_and_head(data, monkeypatch, name, solver, max_time):
    X, y = data

    def make():
        return cf.Problem(HEADS[name](), X, y > 0, beta=0.05, intercept=True)

    assert overrun(make, Wall(monkeypatch), monkeypatch, solver=solver, max_time=max_time) <= 1


@pytest.mark.parametrize("max_time", [0.5, 8.5, 30.5])
@pytest.mark.parametrize(("solver", "kind"), [("by_position", "independent"), ("frank_wolfe", "row"), ("fista", "row")])
def test_limits_bind_for_outputs_per_token(data, monkeypatch, solver, kind, max_time):
    X, _ = data

    def make():
        return cf.Problem(cf.heads.Attention(stochastic=kind), X, X[..., :2] ** 2, beta=1.0)

    assert overrun(make, Wall(monkeypatch), monkeypatch, solver=solver, max_time=max_time) <= 1


@pytest.mark.parametrize("total_time", [4.5, 40.5])
def test_the_time_of_a_path_binds(data, monkeypatch, total_time):
    X, y = data
    wall = Wall(monkeypatch)
    count_products(wall, monkeypatch)
    options = {"n_betas": 6, "beta_min_ratio": 0.01, "tolerance": 1e-12, "intercept": True}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        path = cf.path(cf.heads.MLP(), X, y > 0, total_time=total_time, solver="staircase", **options)
    took = wall.now
    assert path.stopped == "time"
    fresh = cf.Problem(cf.heads.MLP(), X, y > 0, beta=path.betas[-1], intercept=True)
    cf.certify(path.solutions[-1], fresh)
    assert took <= total_time + 1 + (wall.now - took)


# ---------------------------------------------------------------------- hand-over


class Frozen(Solver):
    """Shows the same point for ever."""

    name = "frozen"
    works_on = "nothing"
    patience = 3

    def requires(self, objective):
        return None

    def solve(self, objective, start, monitor):
        Z = start.dense()
        at = objective.evaluate(objective.apply(Z))
        for _ in monitor:
            monitor.check(Z, at)


def test_a_solver_that_stalls_hands_over_by_rule_and_the_history_says_so(data, monkeypatch):
    X, y = data
    problem = cf.Problem("attention", X, y, beta_ratio=0.1)
    monkeypatch.setitem(SOLVERS, "frozen", Frozen())
    monkeypatch.setattr(auto, "HAND_OVER", ("frozen", "staircase", "fista"))
    monkeypatch.setattr("convexformer.solvers.run.select", lambda objective: "frozen")
    solution = cf.solve(problem, tolerance=1e-6)
    assert solution.status is cf.Status.CONVERGED
    assert solution.solver == "frozen, fista"  # the staircase does not serve
    names = [record.solver for record in solution.history]
    assert names == ["frozen"] * (Frozen.patience + 1) + ["fista"] * (len(names) - Frozen.patience - 1)
    with pytest.warns(ConvergenceWarning, match="no further progress"):
        alone = cf.solve(problem, tolerance=1e-6, solver="frozen")
    assert alone.status is cf.Status.STALLED  # asked for by name, it runs alone
    assert alone.solver == "frozen"


def test_a_solver_whose_pace_promises_no_end_hands_over(monkeypatch):
    """Factors go on from its best point, and the optimum is the same; a solution of theirs is theirs to go on with."""
    rng = np.random.default_rng(3)
    X = rng.standard_normal((80, 3, 6)) * 0.3 ** np.arange(6)
    problem = cf.Problem("mlp", X, rng.integers(0, 3, 80), beta_ratio=0.02)
    line = [SOLVERS["fista"], SOLVERS["staircase"]]
    assert auto.turn_of(line, problem.objective) == auto.TURNS["nuclear"]["fista"]
    assert auto.turn_of(line[::-1], problem.objective) is None
    assert auto.turn_of(line, cf.Problem("attention", X, X[:, 0, 0], beta_ratio=0.1).objective) is None
    alone = cf.solve(problem, tolerance=1e-8, solver="fista")
    assert alone.n_iter > 30
    assert alone.solver == "fista"  # asked for by name, it runs alone
    impatient = Turn(first=20, recent=10, worth=0)
    monkeypatch.setattr(auto, "TURNS", {"nuclear": {"fista": impatient}})
    solution = cf.solve(problem, tolerance=1e-8)
    assert solution.solver == "fista, staircase"
    assert solution.status is cf.Status.CONVERGED
    assert max(record.iteration for record in solution.history if record.solver == "fista") == 20
    assert solution.objective == pytest.approx(alone.objective, rel=1e-7)
    again = cf.solve(problem.with_beta(0.8 * problem.beta), tolerance=1e-8, warm_start=solution)
    assert again.solver == "staircase"
    with pytest.warns(ConvergenceWarning, match="iterations"):
        limited = cf.solve(problem, tolerance=1e-8, max_iter=20)
    assert limited.status is cf.Status.MAX_ITER
    assert limited.solver == "fista"


def test_a_solver_whose_turn_was_over_is_asked_again_where_the_others_stall(monkeypatch):
    rng = np.random.default_rng(3)
    X = rng.standard_normal((80, 3, 6)) * 0.3 ** np.arange(6)
    problem = cf.Problem("mlp", X, rng.integers(0, 3, 80), beta_ratio=0.02)
    monkeypatch.setattr(auto, "TURNS", {"nuclear": {"fista": Turn(first=20, recent=10, worth=0)}})
    monkeypatch.setattr(Staircase, "solve", lambda self, objective, start, monitor: monitor.stall())
    solution = cf.solve(problem, tolerance=1e-8)
    assert solution.status is cf.Status.CONVERGED
    assert solution.solver == "fista"
    assert solution.n_iter > 20


def test_turns_are_judged_by_the_pace_of_the_last_checks():
    turn = Turn(first=30, recent=20, worth=2)
    steady = [Record(k, 0.0, 1.0, 1.0, 0.1 * 10 ** (-k / 30)) for k in range(0, 70, 10)]
    assert turn.remaining(steady[:4], 0, 1e-4) == pytest.approx(60)
    assert not turn.over(steady[:3], 0, 1e-4)  # not judged yet
    assert not turn.over(steady[:4], 0, 2e-4)
    assert turn.over(steady[:4], 0, 5e-5)
    assert turn.over([Record(k, 0.0, 1.0, 1.0, 0.1) for k in (0, 10, 20, 30)], 0, 1e-3)  # no pace at all
    late = [record._replace(iteration=record.iteration + 100) for record in steady]
    assert turn.over(late[:4], 100, 5e-5)
    assert turn.remaining(steady, 0, 1.0) == 0.0
    uneven = [Record(k, 0.0, 1.0, 1.0, gap) for k, gap in ((0, 1.0), (40, 0.3), (60, 0.1), (80, 0.02), (100, 0.03))]
    assert not turn.over(uneven, 0, 1e-3)  # a step that went wrong is no end of progress
    wild = [Record(0, 0.0, 1.0, 1.0, np.inf), Record(30, 0.0, 1.0, 1.0, np.inf)]
    assert turn.over(wild, 0, 1e-3)


def test_rounding_is_no_reason_to_hand_over(data):
    X, y = data
    objective = cf.Problem("attention", X, y, beta_ratio=0.1).objective
    result = minimise(objective, Limits(1e-18))
    assert result.status is cf.Status.STALLED
    assert result.solver == "fista"


def test_solvers_are_an_option_of_the_estimators(data):
    for name in ("fista", "working_set"):
        assert cf.TokenRegressor(solver=name).fit(*data).solution_.solver == name
    search = cf.TokenRegressorCV(solver="working_set", n_betas=2, beta_min_ratio=0.2, cv=2).fit(*data)
    assert search.solution_.solver == "working_set"
    for model in (cf.TokenRegressor(solver="fitsa"), cf.TokenRegressorCV(solver="fitsa", cv=2)):
        with pytest.raises(ValueError, match="Did you mean 'fista'"):
            model.fit(*data)
    with pytest.raises(ValueError, match="solver='staircase' works on factors"):
        cf.TokenRegressor(solver="staircase").fit(*data)


FRESH = """
import os, threading
import numpy as np
import convexformer as cf

rng = np.random.default_rng(0)
X, y = rng.normal(size=(60, 4, 3)), np.arange(60) % 3
problem = cf.Problem("attention", X, y, beta_ratio=0.1, intercept=True)
solution = cf.solve(problem, max_time=0.05, solver="working_set")
compiling = [thread.name for thread in threading.enumerate() if thread.name.startswith("compiling")]
print(solution.status.name, solution.certificate.kind, bool(compiling), flush=True)
os._exit(0)  # without waiting for the compiler
"""


def test_compilation_on_a_new_machine_does_not_outlast_the_limit(tmp_path):
    pytest.importorskip("numba")
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    told = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FRESH], env=environment, capture_output=True, text=True, check=True
    )
    assert told.stdout.split() == ["MAX_TIME", "exact", "True"]


def test_a_solve_compiles_everything_before_it_begins():
    pytest.importorskip("numba")
    from convexformer.losses import softmax_compiled
    from convexformer.solvers.working_set import compiled, conjugate, spectra, token_sweep

    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(60, 4, 3)), np.arange(60) % 3
    for targets, sweeps in (
        (y, (compiled.prox_newton_sweep, token_sweep.token_sweep)),
        (X[:, 0, 0], (compiled.sweep, token_sweep.token_sweep)),
        (X[:, 0, :2], (compiled.sweep, token_sweep.token_sweep)),
    ):
        problem = cf.Problem("attention", X, targets, beta_ratio=0.001, intercept=True)
        jit.compile_in_time(
            {**problem.objective.loss.kernels, **cf.solvers.SOLVERS["working_set"].kernels(problem.objective)}
        )
        loops = (*sweeps, compiled.gradients, compiled.load, conjugate.iterate, conjugate.precondition)
        loops = (*loops, spectra.prepare_slices)
        loops = (*loops, softmax_compiled._newton, softmax_compiled._evaluate, softmax_compiled._value_and_gradient)
        before = [len(loop.signatures) for loop in loops]
        assert min(before) >= 1
        cf.solve(problem, tolerance=1e-7, solver="working_set")
        assert [len(loop.signatures) for loop in loops] == before


def test_beta_max_is_the_same_before_and_after_compilation():
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(60, 4, 3)), np.arange(60) % 3
    with jit.interpreted():
        before = cf.Problem("attention", X, y, beta_ratio=0.1, intercept=True).beta_max
    cf.solve(cf.Problem("attention", X, y, beta_ratio=0.1, intercept=True))
    assert cf.Problem("attention", X, y, beta_ratio=0.1, intercept=True).beta_max == before


def test_loops_compile_where_no_cache_can_be_kept(monkeypatch):
    """A read-only installation and a user without a home: numba then refuses to cache when a function is decorated."""
    caching = pytest.importorskip("numba.core.caching")
    monkeypatch.setattr(caching.CacheImpl, "_locator_classes", [])

    @jit.njit(cache=True)
    def twice(x):
        return 2 * x

    assert twice(3) == 6

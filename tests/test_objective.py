"""The objective and its relatives: each is whole, evaluates and certifies by itself, for anybody's parts."""

import math
from dataclasses import FrozenInstanceError, replace

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

import convexformer as cf
from cases import ALL_HEADS, LOSSES, random_data
from convexformer.certificates import certificate, dual_point
from convexformer.gauges import Factored, Gauge, GroupNorm, Penalty, Polar, Ridge, Sliced, spectral
from convexformer.heads.base import Head, Program
from convexformer.losses import Logistic, Loss
from convexformer.operators import DenseOperator, Operator
from convexformer.solvers import SOLVERS, explain, minimise, select
from convexformer.solvers.run import Limits
from convexformer.testing import check_loss, check_penalty
from convexformer.weights import Dense, GroupSparse, Weights

QUIET = pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")


def squared_problem(n=60, s=4, d=3, c=2, seed=0, **options):
    rng = np.random.default_rng(seed)
    X, Y = rng.standard_normal((n, s, d)), rng.standard_normal((n, c))
    return cf.Problem("attention", X, Y, beta_ratio=0.1, **options)


# ---------------------------------------------------------------------- relatives


def test_an_objective_is_frozen():
    objective = squared_problem().objective
    with pytest.raises(FrozenInstanceError):
        objective.beta = 2.0
    for beta in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="positive"):
            objective.at(beta)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("case", ALL_HEADS.values(), ids=ALL_HEADS.keys())
def test_every_relative_certifies_the_same_point_alike(case, dtype):
    data = random_data(case, LOSSES["squared, 2 outputs"], "weights", np.random.default_rng(3), 12, 4, 2)
    problem = cf.Problem(case.build(data.gates), data.X, data.Y, beta=0.3, dtype=dtype, **data.options)
    objective = problem.objective
    weights = cf.solve(problem, tolerance=1e-3).weights
    expected = certificate(objective, weights)
    relatives = [objective.compressed(), objective.to(dtype=torch.float32), objective.to(dtype=torch.float64)]
    relatives += [objective.at(1.0).at(0.3), objective.reference(), objective.compressed().to(dtype=torch.float32)]
    relatives += [objective.factored()] if isinstance(objective.penalty, Factored) else []
    for relative in relatives:
        found = certificate(relative, weights)
        assert found.primal == pytest.approx(expected.primal, rel=1e-9)
        assert expected.dual * (1 - 1e-3) <= found.dual <= expected.primal  # a compressed residual scales better
        assert found.kind == "exact"


def test_a_compressed_objective_says_the_truth():
    """It used to leave out the part of the loss that no weights can change, and still to say "exact"."""
    problem = squared_problem()
    weights = cf.solve(problem, tolerance=1e-9).weights
    small = problem.objective.compressed()
    assert len(small.targets) == 12 < len(problem.objective.targets)
    for objective in (small, squared_problem(dtype=torch.float32).objective.compressed()):
        proof = certificate(objective, weights)
        assert proof.primal == pytest.approx(problem.value(weights), rel=1e-6)
        assert 0 <= proof.relative_gap < 1e-6


def test_a_restricted_objective_stays_restricted_in_every_precision():
    problem = squared_problem(dtype=torch.float32)
    tokens = torch.tensor([0, 2])
    part = problem.objective.restricted(tokens)
    exact = part.reference()
    assert exact.like.dtype == torch.float64
    assert exact.weight_shape == part.weight_shape == (2, 3, 2)
    alone = cf.Problem("attention", problem.tokens.X[:, tokens].double(), problem.objective.targets, beta=problem.beta)
    best = cf.solve(alone, tolerance=1e-9)
    proof = certificate(part, best.weights)
    assert proof.primal == pytest.approx(best.objective, rel=1e-12)
    assert proof.meets(1e-8)


def test_a_replaced_operator_brings_nothing_derived_from_the_old_one():
    objective = squared_problem().objective
    objective.compressed()
    twice = replace(objective, operator=DenseOperator(2 * objective.operator.features, (4, 3), 2))
    weights = Weights(torch.ones(4, 3, 2, dtype=torch.float64))
    assert twice.compressed().value(weights) == pytest.approx(twice.value(weights), rel=1e-10)
    assert twice.compressed().value(weights) != pytest.approx(objective.value(weights), rel=1e-3)
    single = replace(objective.to(dtype=torch.float32), operator=twice.operator.to(dtype=torch.float32))
    assert certificate(single, weights).primal == pytest.approx(twice.value(weights), rel=1e-6)


def test_weights_come_in_forms_with_one_interface():
    Z = torch.zeros(5, 3, 2, dtype=torch.float64)
    Z[1, :, 0] = 1.0
    objective = squared_problem(s=5).objective
    values = []
    for form in (Dense(Z), GroupSparse.of(Z)):
        weights = Weights(form, torch.ones(2).double())
        again = Weights.of_tensors(weights.tensors(), form.shape)
        assert torch.equal(again.dense(), Z)
        assert again.to(dtype=torch.float32).form.dtype == torch.float32
        assert torch.equal(again.intercept, weights.intercept)
        values.append(objective.value(Weights(form)))
    assert values[0] == values[1]
    assert GroupSparse.of(Z).nbytes < Dense(Z).nbytes


# ---------------------------------------------------------------------- solvers declare


def test_the_choice_of_a_solver_can_be_read():
    attention, mlp = squared_problem(), cf.Problem("mlp", np.eye(4)[:, None], np.arange(4.0), beta_ratio=0.1)
    text = explain(attention)
    assert "takes 'fista'" in text
    assert "staircase    does not serve: it works on factors of a nuclear norm" in text
    assert "working_set  serves, too" in text
    assert "predicted" in text
    assert "few_weights" in text
    assert "needs" in explain(mlp) or "does not serve" in explain(mlp)
    assert select(attention.objective) == "fista"
    for name, solver in SOLVERS.items():
        assert solver.name == name
        missing = solver.requires(attention.objective)
        assert missing is None or missing[0].islower()


def test_a_penalty_without_a_prox_is_told_what_is_missing():
    class Bare(Gauge):
        def value(self, Z):
            return GroupNorm().value(Z)

        def polar(self, M):
            return GroupNorm().polar(M)

    objective = replace(squared_problem().objective, penalty=Bare())
    with pytest.raises(ValueError, match=r"fista needs a penalty with a prox.*staircase works on factors"):
        minimise(objective)
    proof = certificate(objective, Weights(objective.operator.zeros()))
    assert proof.kind == "exact"


# ---------------------------------------------------------------------- A: anybody's penalty


class ElasticNet(Penalty):
    """``|Z|_1 + 1/2 |Z|^2``; ``(beta g)*(M) = sum (|M| - beta)_+^2 / (2 beta)``."""

    def value(self, Z):
        return Z.abs().sum() + 0.5 * Z.square().sum()

    def prox(self, Z, step):
        return torch.sign(Z) * (Z.abs() - step).clamp_min(0) / (1 + step)

    def max_dual_scale(self, M, beta, *, quick=False):
        return math.inf, Polar(0.0)

    def conjugate(self, M, beta):
        return float((M.abs() - beta).clamp_min(0).square().sum()) / (2 * beta)

    def critical_beta(self, M, curvature):
        return Polar(float(M.abs().max()))


class ElasticHead(Head):
    """A linear head on flattened tokens with the elastic net."""

    name, per_token, positional = "elastic", False, True

    def program(self, tokens, layout):
        features = tokens.X.flatten(1)
        return Program(DenseOperator(features, (features.shape[1],), layout.n_outputs), ElasticNet())

    def recover(self, weights, layout):
        raise NotImplementedError

    lift = recover

    def config(self):
        return {}


def test_a_user_s_elastic_net_is_certified_truly_and_its_gap_closes():
    check_penalty(ElasticNet(), (4, 3))
    rng = np.random.default_rng(0)
    X, y = rng.standard_normal((40, 3, 4)), rng.standard_normal(40)
    for loss, Y in (("squared", y), ("logistic", np.sign(y)), ("huber", y)):
        for intercept in (False, True):
            problem = cf.Problem(ElasticHead(), X, Y, beta_ratio=0.2, loss=loss, intercept=intercept)
            solution = cf.solve(problem, tolerance=1e-8)
            assert solution.status is cf.Status.CONVERGED
            lasso = replace(problem.objective, penalty=cf.gauges.L1Norm())
            start = minimise(lasso, Limits(1e-8)).weights
            for weights in (start, Weights(problem.operator.zeros())):
                assert certificate(problem.objective, weights).dual <= solution.objective * (1 + 1e-12)


def test_the_scale_of_a_ridge_is_chosen_on_the_whole_dual():
    rng = np.random.default_rng(1)
    X, y = rng.standard_normal((30, 2, 3)), rng.standard_normal(30)
    problem = cf.Problem("linear", X, y, beta_ratio=0.1)
    best = cf.solve(problem, tolerance=1e-10)
    assert best.certificate.kkt["scale"] == pytest.approx(1.0, abs=1e-4)
    objective = problem.objective
    at = objective.zero_evaluation()
    found, grid = dual_point(objective, at), np.linspace(0, 3, 301)
    M = objective.dual_matrix(at.V)

    def dual(t):
        own = float(objective.loss.conjugate(t * at.U, objective.targets).sum())
        return -own - Ridge().conjugate(t * M, objective.beta)

    assert found.value >= max(map(dual, grid)) - 1e-9
    assert found.value <= best.objective


# ---------------------------------------------------------------------- B: contradictions


class WrongAdjoint(Operator):
    """An operator whose adjoint is too small by a fifth."""

    def __init__(self, inner):
        self.inner = inner
        self.weight_shape, self.output_shape = inner.weight_shape, inner.output_shape

    @property
    def like(self):
        return self.inner.like

    def apply(self, Z):
        return self.inner.apply(Z)

    def adjoint(self, V):
        return 0.8 * self.inner.adjoint(V)

    def to(self, *, device=None, dtype=None):
        return WrongAdjoint(self.inner.to(device=device, dtype=dtype))


def test_a_wrong_adjoint_is_no_certificate():
    problem = squared_problem()
    weights = cf.solve(problem, tolerance=1e-8).weights
    wrong = replace(problem.objective, operator=WrongAdjoint(problem.operator))
    proof = certificate(wrong, weights)
    assert (proof.kind, proof.dual, proof.confidence) == ("none", -math.inf, 0.0)
    assert "contradict" in proof.reason
    assert "contradict" in str(proof)
    assert not proof.meets(math.inf)


def test_a_loss_whose_conjugate_is_too_small_is_no_certificate():
    class Wrong(cf.losses.Squared.__mro__[1]):
        name, curvature, quadratic = "wrong", 1.0, False
        inner = cf.losses.Squared()

        def encode(self, Y):
            return self.inner.encode(Y)

        def value(self, F, Y):
            return self.inner.value(F, Y)

        def gradient(self, F, Y):
            return self.inner.gradient(F, Y)

        def second_derivative(self, F, Y):
            return torch.ones_like(F)

        def domain(self, U, Y):
            return torch.ones_like(U, dtype=torch.bool)

        def scale_range(self, U, rows=None):
            return -math.inf, math.inf

        def conjugate(self, U, Y):
            return self.inner.conjugate(U, Y) - 1.0

        def balance(self, U, Y, w, rows=None):
            return self.inner.balance(U, Y, w)

    problem = squared_problem()
    weights = cf.solve(problem, tolerance=1e-8).weights
    proof = certificate(replace(problem.objective, loss=Wrong()), weights)
    assert proof.kind == "none"
    assert "above the primal value" in proof.reason


def test_an_infinite_gap_is_no_certificate():
    proof = cf.Certificate(primal=1.0, dual=-math.inf, kind="exact", confidence=1.0)
    assert proof.kind == "none"
    assert proof.reason
    assert "not certified" in str(proof)


# ---------------------------------------------------------------------- D, E, G, H, I of the audit


def test_a_constant_feature_of_huge_size_is_not_certified_above_the_optimum():
    """Feasibility and conjugate used to speak of two different dual points here: dual 6.18, optimum 4.35."""
    rng = np.random.default_rng(2)
    x = rng.normal(size=9)
    X, y = np.zeros((10, 2, 1)), np.ones(10)
    X[:9, 0, 0] = x
    y[:9] = np.sign(x)
    y[0] = -y[0] if rng.random() < 0.5 else y[0]
    X[9, 0, 0] = 1e8
    X[:, 1, 0] = 1e9
    problem = cf.Problem("attention", X, y, beta=1.0, loss="logistic", intercept=True)
    Z = torch.tensor([[[24 / 1e8]], [[1.2]]]).double()
    b = torch.tensor([-1.2e9]).double()
    # the constant token is the intercept's: two numbers are left, and any value found for them is an upper bound
    values = X[:, 0, 0]
    starts = [(slope, b) for slope in (0.1, 1.0) for b in (0.0, 1.0)]
    optimum = min(
        minimize(
            lambda t: np.logaddexp(0, -y * (values * t[0] + t[1])).sum() + abs(t[0]), start, method="Nelder-Mead"
        ).fun
        for start in starts
    )
    assert 4.3 < optimum < 4.4
    for weights in (Weights(Z, b), Weights(Z), Weights(0 * Z, b), Weights(torch.randn_like(Z), b)):
        assert certificate(problem.objective, weights).dual <= optimum


@pytest.mark.parametrize("shape", [(1100, 40_000), (30_000, 1200)])
def test_the_cholesky_bound_counts_the_long_side(shape, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    M = torch.randn((1, *shape), generator=generator, dtype=torch.float64)[:, :: shape[0] // 60, :: shape[1] // 500]
    monkeypatch.setattr(spectral, "SMALL_SIDE", 1)

    class Map:
        like, formable, forming_work, block_cost = M, True, 0.0, 0.0

        def __init__(self):
            self.shape = tuple(M.shape)

        def blocks(self):
            return iter(M)

        def matvec(self, V, b):
            return V @ M[b].T

        def rmatvec(self, U, b):
            return U @ M[b]

        def dense(self):
            return M

    found = spectral.bound(Map())
    assert found.value >= float(torch.linalg.matrix_norm(M[0], 2))
    assert found.value <= float(torch.linalg.matrix_norm(M[0], 2)) * (1 + 1e-4)


@QUIET
def test_an_intercept_that_starts_far_away_comes_back_and_the_clock_is_heard():
    t = lambda a: torch.tensor(a).double()  # noqa: E731
    found = Logistic().best_intercept(t([[0.0], [0.0]]), t([[-1.0], [1.0]]), t([1e4, 1.0]), t([800.0]))
    assert float(found) == pytest.approx(-math.log(1e4), rel=1e-9)
    rng = np.random.default_rng(0)
    X, y = rng.standard_normal((40, 3, 2)), np.sign(rng.standard_normal(40))
    w = np.where(y > 0, 1.0, 1e4)
    problem = cf.Problem("attention", X, y, beta_ratio=0.1, loss="logistic", intercept=True, sample_weight=w)
    start = Weights(problem.operator.zeros(), t([800.0]))
    solution = cf.solve(problem, tolerance=1e-6, warm_start=start, max_time=20)
    assert solution.status is cf.Status.CONVERGED
    assert float(solution.weights.intercept.abs()) < 100
    assert solution.certificate.kind == "exact"


@QUIET
def test_tokens_of_a_large_mean_in_float32_do_not_crash():
    rng = np.random.default_rng(0)
    X, y = 1.6e6 + rng.standard_normal((40, 4, 5)), rng.integers(0, 3, 40)
    problem = cf.Problem("self_attention", X, y, beta_ratio=0.1, intercept=True, dtype=torch.float32)
    solution = cf.solve(problem, tolerance=1e-3, solver="staircase", max_time=2)
    assert math.isfinite(solution.objective)


@QUIET
def test_a_sum_of_gated_heads_on_identical_samples_does_not_crash():
    rng = np.random.default_rng(0)
    X = np.repeat(rng.standard_normal((1, 4, 3)), 30, 0)
    head = cf.heads.Sum([cf.heads.MLP("gated_relu", gates=3), cf.heads.Attention("gated_relu", gates=3)])
    problem = cf.Problem(head, X, rng.integers(0, 3, 30), beta=1e-3, intercept=True)
    assert cf.solve(problem, tolerance=1e-6, max_time=10).certificate.meets(1e-6)


@pytest.mark.parametrize("loss", ["squared", "logistic", "cross_entropy"])
@pytest.mark.parametrize("head", ["attention", "mlp", "self_attention"])
def test_constant_features_with_an_intercept_say_nothing(head, loss):
    """beta_max used to be the rounding of a sum, 1e-19, and fits ended stalled."""
    rng = np.random.default_rng(0)
    X = np.repeat(rng.standard_normal((1, 4, 3)), 50, 0)
    y = rng.standard_normal(50)
    Y = {"squared": y, "logistic": np.sign(y), "cross_entropy": (y > 0).astype(int)}[loss]
    problem = cf.Problem(head, X, Y, beta_ratio=0.1, loss=loss, intercept=True)
    assert problem.beta_max == 0.0
    with pytest.warns(cf.ZeroSolutionWarning, match="uncorrelated with the targets"):
        solution = cf.solve(problem, tolerance=1e-8)
    assert solution.status is cf.Status.CONVERGED
    assert not bool(solution.dense().any())


# ---------------------------------------------------------------------- a loss of the user's own


class RowHuber(Loss):
    """``sqrt(1 + |f - y|^2) - 1`` of the whole row: neither separable nor a softmax.

    ``L*(u, y) = 1 - sqrt(1 - |u|^2) + <u, y>`` on ``|u| <= 1``.
    """

    name, curvature = "row_huber", 1.0

    def encode(self, Y):
        return Y.double().reshape(len(Y), -1)

    def value(self, F, Y):
        return (1 + (F - Y).square().sum(1)).sqrt() - 1

    def gradient(self, F, Y):
        return (F - Y) / (1 + (F - Y).square().sum(1, keepdim=True)).sqrt()

    def conjugate(self, U, Y):
        square = U.square().sum(1)
        inside = 1 - (1 - square.clamp_max(1)).sqrt() + (U * Y).sum(1)
        return torch.where(square <= 1 + 1e-12, inside, math.inf)


@pytest.mark.parametrize("solver", ["fista", "working_set", "staircase"])
@pytest.mark.parametrize("intercept", [False, True])
def test_a_loss_that_is_neither_separable_nor_softmax_solves(solver, intercept):
    rng = np.random.default_rng(0)
    X, Y = rng.standard_normal((50, 4, 3)), 2 * rng.standard_normal((50, 2)) + 1
    check_loss(RowHuber(), Y)
    head = cf.heads.Attention(decay="l1" if solver == "working_set" else "l2")
    problem = cf.Problem(head, X, Y, beta_ratio=0.1, loss=RowHuber(), intercept=intercept)
    assert isinstance(problem.penalty, Sliced)
    solution = cf.solve(problem, tolerance=1e-7, solver=solver)
    assert solution.status is cf.Status.CONVERGED
    reference = cf.solve(problem, tolerance=1e-7, solver="fista")
    assert solution.objective == pytest.approx(reference.objective, rel=2e-7)

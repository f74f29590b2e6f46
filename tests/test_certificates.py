"""Certificates: a gap that is never too small, at any point, for any head, in any precision."""

import math
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.exceptions import ConvergenceWarning

import convexformer as cf
from cases import EVEN_LOSSES, HEADS, LOSSES, MORE_HEADS, OPTIONS, random_data
from convexformer.certificates import certificate
from convexformer.gauges import Gauge, GroupNorm, Polar, PolarKind
from convexformer.heads.base import Head
from convexformer.networks import AttentionNetwork
from convexformer.testing import check_gauge, check_weak_duality
from convexformer.weights import Weights
from reference import blocks, program_of

# ---------------------------------------------------------------------- (a) 2,000 problems
# One test a head, so that workers share them. The optimum is bounded from above by a solved point, whose value is
# computed by reference.py; "rounding" is a relative 1e-9 of the values involved.

N_PROBLEMS = 2000
EACH = math.ceil(N_PROBLEMS / len(HEADS))

problems = {
    "loss": st.sampled_from(list(LOSSES)),
    "option": st.sampled_from(OPTIONS),
    "sizes": st.tuples(st.integers(3, 7), st.integers(1, 3), st.integers(1, 3)),
    "log_scales": st.tuples(st.floats(-3, 3), st.floats(-3, 3)),
    "log_beta": st.floats(-3, 0.3),
    "point": st.sampled_from(["random", "few iterations", "zero", "near the optimum"]),
    "seed": st.integers(0, 2**31),
}


def scaled(data, loss, log_scales):
    """Tokens and real targets over six orders of magnitude each; labels have no scale."""
    X = 10 ** log_scales[0] * data.X
    Y = 10 ** log_scales[1] * data.Y if loss.startswith(("squared,", "huber")) or loss == "squared" else data.Y
    return replace(data, X=X, Y=Y)


def some_point(kind, problem, solved, rng):
    """A point to certify; its intercept is not the best one."""
    Z = torch.from_numpy(rng.standard_normal(problem.operator.weight_shape))
    b = torch.from_numpy(rng.standard_normal(problem.layout.n_outputs)) if problem.intercept else None
    size = 10 ** rng.uniform(-3, 2) * float(solved.weights.Z.norm() / Z.norm() + 1e-3)
    if kind == "zero":
        return Weights(0 * Z, b)
    if kind == "random":
        return Weights(size * Z, b)
    if kind == "near the optimum":
        return Weights(solved.weights.Z * (1 + 1e-4 * Z), solved.weights.intercept)
    return quietly(problem, max_iter=int(rng.integers(1, 12))).weights


def quietly(problem, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        warnings.simplefilter("ignore", cf.ZeroSolutionWarning)
        return cf.solve(problem, **options)


@pytest.mark.parametrize("head", HEADS)
@settings(max_examples=EACH)
@given(**problems)
def test_no_certificate_is_below_the_true_gap(head, loss, option, sizes, log_scales, log_beta, point, seed):
    case, rng = HEADS[head], np.random.default_rng(seed)
    n, s, d = sizes
    s = max(s, 2) if case.per_token else s  # labels (N, 1) would be read as one label a sample
    data = scaled(random_data(case, LOSSES[loss], option, rng, n, s, d), loss, log_scales)
    problem = cf.Problem(case.build(data.gates), data.X, data.Y, beta_ratio=10**log_beta, **data.options)
    reference = program_of(case, data, problem.beta)
    solved = quietly(problem, tolerance=1e-7, max_iter=200)
    best = reference.objective(*blocks(solved.weights))

    weights = some_point(point, problem, solved, rng)
    proof = certificate(problem.objective, weights)
    own = reference.objective(*blocks(weights))

    assert proof.kind == "exact"
    assert proof.primal == pytest.approx(own, rel=1e-9, abs=1e-300)
    rounding = 1e-9 * (abs(own) + abs(best))
    assert proof.dual <= best + rounding
    assert proof.gap >= own - best - rounding
    assert solved.certificate.dual <= best * (1 + 1e-12)
    assert solved.certificate.dual <= own + rounding


# ---------------------------------------------------------------------- weak duality along a solve


@pytest.mark.parametrize("head", MORE_HEADS)
@pytest.mark.parametrize("loss", EVEN_LOSSES)
def test_weak_duality_holds_for_the_other_heads(head, loss):
    data = random_data(MORE_HEADS[head], EVEN_LOSSES[loss], "weights", np.random.default_rng(11), n=6, s=4, d=2)
    problem = cf.Problem(MORE_HEADS[head].build(data.gates), data.X, data.Y, beta_ratio=0.05, **data.options)
    assert check_weak_duality(problem).certificate.relative_gap <= 1e-6


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("loss", ["squared, 2 outputs", "huber", "logistic", "cross_entropy"])
@pytest.mark.parametrize("option", ["plain", "all"])
def test_weak_duality_holds_at_every_iterate(head, loss, option):
    data = random_data(HEADS[head], LOSSES[loss], option, np.random.default_rng(11))
    problem = cf.Problem(HEADS[head].build(data.gates), data.X, data.Y, beta_ratio=0.05, **data.options)
    assert check_weak_duality(problem).certificate.relative_gap <= 1e-6


# ---------------------------------------------------------------------- (b) bad networks


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("loss", ["squared, 2 outputs", "cross_entropy"])
def test_a_bad_network_has_a_large_gap_that_encloses_the_optimum(head, loss):
    case = HEADS[head]
    data = random_data(case, LOSSES[loss], "weights", np.random.default_rng(12))
    problem = cf.Problem(case.build(data.gates), data.X, data.Y, beta_ratio=0.1, **data.options)
    optimum = program_of(case, data, problem.beta).optimum()
    scaled_network = cf.solve(problem, tolerance=1e-6).network()
    with torch.no_grad():
        for name, value in scaled_network.named_parameters():
            if not (name == "w1" and case.model == "attention"):
                value.mul_(3.0)
    for network in (scaled_network, case.network(problem.head)(problem.layout, 0)):
        proof = cf.certify(network, problem)
        rows = network(data.X).detach()
        assert proof.dual <= optimum + 1e-7
        assert proof.primal >= optimum - 1e-7
        assert proof.gap >= proof.primal - optimum - 1e-7
        assert proof.relative_gap > 0.05
        assert proof.primal == pytest.approx(nonconvex_objective(problem, network, rows), rel=1e-10)


def nonconvex_objective(problem, network, outputs):
    loss = problem.loss.value(outputs.reshape(problem.objective.targets.shape), problem.objective.targets)
    return float(problem.objective.sample_weight @ loss) + problem.beta * network.decay().item()


# ---------------------------------------------------------------------- (c) float32


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("head", ["attention l1", "attention l2", "gated mlp", "linear"])
def test_float32_is_certified_in_float64(head, loss):
    case = HEADS[head]
    data = random_data(case, LOSSES[loss], "all", np.random.default_rng(13), n=12)
    data = replace(data, X=data.X.astype(np.float32))
    problem = cf.Problem(case.build(data.gates), data.X, data.Y, beta_ratio=0.2, dtype=torch.float32, **data.options)
    solution = cf.solve(problem, tolerance=1e-3)
    assert solution.status is cf.Status.CONVERGED
    assert solution.weights.Z.dtype == torch.float32

    exact = replace(data, X=data.X.astype(np.float64))
    reference = program_of(case, exact, problem.beta)
    optimum, proof = reference.optimum(), solution.certificate
    assert proof.kind == "exact"
    assert proof.relative_gap <= 1e-3
    assert proof.primal == pytest.approx(reference.objective(*blocks(solution.weights)), rel=1e-12)
    assert proof.dual <= optimum * (1 + 1e-7)
    assert proof.primal >= optimum * (1 - 1e-7)


# ---------------------------------------------------------------------- (d) beta_max and above


@pytest.mark.parametrize("head", [name for name, case in HEADS.items() if case.penalty != "ridge"])
@pytest.mark.parametrize("option", ["plain", "all"])
def test_zero_is_certified_above_beta_max_with_a_warning(head, option):
    case = HEADS[head]
    data = random_data(case, LOSSES["cross_entropy"], option, np.random.default_rng(14))
    build = {"head": case.build(data.gates), "X": data.X, "Y": data.Y, **data.options}
    with pytest.warns(cf.ZeroSolutionWarning, match="beta_max"):
        solution = cf.solve(cf.Problem(**build, beta_ratio=1.5))
    assert float(solution.weights.Z.abs().max()) == 0.0
    assert solution.n_iter == 0
    assert solution.status is cf.Status.CONVERGED
    assert solution.certificate.relative_gap <= 1e-12
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        at = cf.solve(cf.Problem(**build, beta_ratio=1.0))
        below = cf.solve(cf.Problem(**build, beta_ratio=0.9), tolerance=1e-6)
    assert float(at.weights.Z.abs().max()) == 0.0
    assert float(below.weights.Z.abs().max()) > 0.0


def test_the_ridge_never_warns_of_a_zero_solution():
    rng = np.random.default_rng(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        solution = cf.solve(cf.Problem("linear", rng.standard_normal((9, 2, 3)), rng.standard_normal(9), beta_ratio=10))
    assert float(solution.weights.Z.abs().max()) > 0.0


# ---------------------------------------------------------------------- (e) what does not certify


class LowerGauge(Gauge):
    """The group norm with a polar that is known from below only, as a local search would give it."""

    inner = GroupNorm()

    def value(self, Z):
        return self.inner.value(Z)

    def prox(self, Z, step):
        return self.inner.prox(Z, step)

    def polar(self, M):
        return Polar(0.5 * self.inner.polar(M).value, PolarKind.LOWER)

    def atom(self, M):
        return self.inner.atom(M)


def two_problems():
    """The same data, once with the true polar and once with a lower bound."""
    rng = np.random.default_rng(15)
    X, Y = rng.standard_normal((12, 3, 2)), rng.standard_normal(12)
    return cf.Problem("attention", X, Y, beta_ratio=0.1), cf.Problem(Blind(), X, Y, beta_ratio=0.1)


class Blind(Head):
    """Attention whose penalty knows no more than a lower bound on its polar; ``beta_max`` is that of attention."""

    name, per_token, positional = "blind", False, True
    inner = cf.heads.Attention()

    def operator(self, tokens, layout):
        return self.inner.operator(tokens, layout)

    def penalty(self, tokens, layout):
        return LowerGauge()

    def recover(self, weights, layout):
        return self.inner.recover(weights, layout)

    def lift(self, network, layout):
        return self.inner.lift(network, layout)

    def config(self):
        return {}


def test_a_lower_bound_on_the_polar_claims_nothing():
    exact, blind = two_problems()
    weights = cf.solve(exact).weights
    proof = certificate(blind.objective.at(exact.beta), weights)
    assert (proof.kind, proof.confidence, proof.dual, proof.gap) == ("none", 0.0, -math.inf, math.inf)
    assert proof.primal == certificate(exact.objective, weights).primal
    assert not proof.meets(1e9)
    assert "not certified" in str(proof)
    check_gauge(LowerGauge(), (3, 2, 2))


def test_a_solve_without_certificate_says_so_and_returns_its_best_point():
    exact, blind = two_problems()
    with pytest.warns(ConvergenceWarning):
        solution = cf.solve(blind.with_beta(exact.beta), max_iter=200)
    assert solution.status is not cf.Status.CONVERGED
    assert solution.certificate.kind == "none"
    assert solution.objective == pytest.approx(cf.solve(exact, tolerance=1e-7).objective, rel=1e-5)


def test_the_primal_of_an_unbalanced_network_is_its_own_objective():
    rng = np.random.default_rng(16)
    X, Y = rng.standard_normal((12, 3, 2)), rng.standard_normal((12, 2))
    problem = cf.Problem("attention", X, Y, beta_ratio=0.1)
    balanced = cf.solve(problem, tolerance=1e-6).network()
    unbalanced = AttentionNetwork(balanced.w1, 5 * balanced.w2, balanced.w3 / 5, decay="l1")
    assert torch.allclose(balanced(X), unbalanced(X))
    assert torch.allclose(balanced.lift().Z, unbalanced.lift().Z)
    one, two = cf.certify(balanced, problem), cf.certify(unbalanced, problem)
    difference = problem.beta * (unbalanced.decay() - balanced.decay()).item()
    assert two.primal - one.primal == pytest.approx(difference)
    assert difference > 0.1
    assert two.dual == pytest.approx(one.dual)


# ---------------------------------------------------------------------- (f) outside the simplex


@pytest.mark.parametrize(
    ("w1", "words"),
    [([[0.5, 0.6]], "sums to 1.1"), ([[1.5, -0.5]], "smallest entry is -0.5"), ([[0.2, 0.2]], "sums to 0.4")],
)
def test_attention_weights_outside_the_simplex_are_refused(w1, words):
    problem = cf.Problem("attention", np.ones((3, 2, 1)), np.arange(3.0), beta_ratio=0.1)
    network = AttentionNetwork(torch.tensor(w1).double(), torch.ones(1, 1).double(), torch.ones(1, 1).double())
    with pytest.raises(ValueError, match="simplex") as error:
        cf.certify(network, problem)
    assert words in str(error.value)


def test_rounding_in_the_simplex_is_not_taken_for_progress():
    """Rows that sum to 1 + 9e-7 pass; the outputs they gain are paid for, so that the gap is still a gap."""
    rng = np.random.default_rng(0)
    problem = cf.Problem("attention", rng.standard_normal((12, 3, 3)), rng.standard_normal(12), beta_ratio=0.1)
    solution = cf.solve(problem, tolerance=1e-11)
    network = solution.network()
    grown = AttentionNetwork(network.w1 * (1 + 9e-7), network.w2 * (1 - 4.5e-7), network.w3 * (1 - 4.5e-7))
    proof = cf.certify(grown, problem)
    assert proof.gap >= 0
    assert proof.primal >= solution.certificate.dual


# ---------------------------------------------------------------------- the rest


def test_the_kkt_residuals_vanish_at_the_optimum_and_not_elsewhere():
    rng = np.random.default_rng(17)
    problem = cf.Problem(
        "attention", rng.standard_normal((12, 3, 2)), rng.standard_normal(12), beta_ratio=0.1, intercept=True
    )
    at = cf.solve(problem, tolerance=1e-10).certificate.kkt
    away = certificate(problem.objective, Weights(torch.ones(3, 2, 1).double())).kkt
    for residual in ("feasibility", "alignment"):
        assert at[residual] < 1e-5 < 1e-2 < away[residual]
    assert at["intercept"] < 1e-12
    assert away["intercept"] < 1e-12


def test_an_intercept_that_was_not_found_makes_the_bound_looser_and_never_false():
    """With ``sum_i v_i != 0`` the dual point would not be feasible; it is balanced."""
    rng = np.random.default_rng(18)
    problem = cf.Problem(
        "attention", rng.standard_normal((12, 3, 2)), 5 + rng.standard_normal(12), beta_ratio=0.1, intercept=True
    )
    optimum = cf.solve(problem, tolerance=1e-9).objective
    zero = Weights(problem.operator.zeros())
    tight = certificate(problem.objective, zero).dual
    problem.loss.best_intercept = lambda F, Y, w, start, rows: start + 3
    assert certificate(problem.objective, zero).dual <= min(tight * (1 + 1e-9), optimum)


def test_weights_of_another_shape_are_refused():
    problem = cf.Problem("attention", np.ones((3, 2, 1)), np.arange(3.0), beta_ratio=0.1)
    with pytest.raises(ValueError, match=r"\(5, 1, 1\).*expects \(2, 1, 1\)"):
        certificate(problem.objective, Weights(torch.zeros(5, 1, 1).double()))


@pytest.mark.parametrize("thing", [3.0, "network", None, np.zeros(3)])
def test_only_solutions_weights_and_networks_are_certified(thing):
    problem = cf.Problem("attention", np.ones((3, 2, 1)), np.arange(3.0), beta_ratio=0.1)
    with pytest.raises(TypeError, match="cannot certify"):
        cf.certify(thing, problem)


def test_a_certificate_in_words_and_as_a_dictionary():
    proof = cf.Certificate(primal=2.0, dual=1.5, kind="exact", confidence=1.0)
    assert proof.gap == 0.5
    assert proof.relative_gap == 0.25
    assert proof.meets(0.25)
    assert not proof.meets(0.2)
    assert "at most 0.5 above the global optimum" in str(proof)
    assert proof.to_dict()["relative_gap"] == 0.25
    assert "probability 0.99" in str(cf.Certificate(2.0, 1.5, "probabilistic", 0.99))

"""Newton's candidates: their gaps are true bounds, smaller than without, and come from their weights alone."""

import numpy as np
import pytest
import torch

import convexformer as cf
from convexformer.certificates import dual_point
from convexformer.gauges import FrobeniusNorm, GroupNorm, L1Norm, NuclearNorm, Ridge
from convexformer.gauges.base import Penalty
from convexformer.gauges.combined import SumPenalty
from convexformer.solvers import SOLVERS
from convexformer.solvers.fista import Fista, FistaOptions, newton_polish
from convexformer.solvers.fista.group_metric import GroupMetric, forms_blocks
from convexformer.solvers.fista.newton_polish import NewtonPolish, PolishOptions

EXAMPLES = {
    "self-attention, squared": (cf.heads.SelfAttention(), "squared", {}),
    "self-attention, classes": (cf.heads.SelfAttention(), "cross_entropy", {}),
    "attention, l1, intercept": (cf.heads.Attention(decay="l1"), "cross_entropy", {"intercept": True}),
    "attention, l2": (cf.heads.Attention(decay="l2"), "cross_entropy", {}),
    "attention, gated": (cf.heads.Attention(activation="gated_relu", gates=3), "huber", {}),
}
GAUGES = {
    "nuclear, tall": (NuclearNorm(1.3), (7, 4)),
    "nuclear, wide slices": (NuclearNorm(), (3, 4, 6)),
    "group": (GroupNorm(), (3, 4, 2)),
    "l1": (L1Norm(), (12,)),
    "frobenius": (FrobeniusNorm(), (4, 3)),
    "ridge": (Ridge(), (4, 3)),
    "sum": (SumPenalty([NuclearNorm(), GroupNorm("token")], [(4, 3), (2, 3, 2)]), (24,)),
}


def example(name, ratio=0.02):
    head, loss, options = EXAMPLES[name]
    rng = np.random.default_rng(0)
    X = rng.standard_normal((200, 5, 6))
    scores = np.stack([(X[:, 0] * X[:, k % 5]).sum(1) for k in range(3)], 1) + 0.5 * rng.standard_normal((200, 3))
    Y = scores.argmax(1) if loss == "cross_entropy" else scores
    return cf.Problem(head, X, Y, beta_ratio=ratio, loss=loss, **options)


def without(monkeypatch):
    monkeypatch.setattr(NewtonPolish, "try_step", lambda self, *args: None)


@pytest.mark.parametrize("name", GAUGES)
def test_prox_derivatives_are_symmetric_contractions_and_agree_with_differences(name):
    gauge, shape = GAUGES[name]
    draw = torch.Generator().manual_seed(0)
    Z, D, E = (torch.randn(shape, generator=draw, dtype=torch.float64) for _ in range(3))
    J = gauge.prox_derivative(Z, 0.8)
    torch.testing.assert_close(J(D), Penalty.prox_derivative(gauge, Z, 0.8)(D), rtol=1e-6, atol=1e-8)
    assert float((E * J(D)).sum()) == pytest.approx(float((D * J(E)).sum()), abs=1e-7)
    assert -1e-8 <= float((D * J(D)).sum()) <= float((D * D).sum()) * (1 + 1e-8)


def first_iteration(monkeypatch, number):
    options = FistaOptions(polish=PolishOptions(first_iteration=number))
    monkeypatch.setitem(SOLVERS, "fista", Fista(options))


@pytest.fixture(autouse=True)
def from_the_start(monkeypatch):
    """Small examples are solved before a candidate would be tried."""
    first_iteration(monkeypatch, 0)


def test_short_solves_go_without(monkeypatch):
    first_iteration(monkeypatch, 50)
    tried = []
    monkeypatch.setattr(NewtonPolish, "_newton", lambda self, *args: tried.append(1))
    problem = example("self-attention, classes")
    cf.solve(problem, tolerance=1e-12, solver="fista", max_iter=49)
    assert not tried
    cf.solve(problem, tolerance=1e-12, solver="fista", max_iter=200)
    assert tried


def test_supports_count_ranks_and_numbers():
    Z = torch.zeros((2, 4, 3), dtype=torch.float64)
    assert NuclearNorm().support(Z) == GroupNorm().support(Z) == 0
    Z[0] = torch.outer(torch.arange(1.0, 5.0), torch.tensor([1.0, 0.0, 2.0]))
    assert NuclearNorm().support(Z) == 1
    assert GroupNorm().support(Z) == 8


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_gap_of_a_candidate_is_never_below_its_distance_to_the_optimum(name, monkeypatch):
    # betas at which several candidates are found: at .02 self-attention finds one or none, as rounding falls
    problem = example(name, 0.02 if name == "attention, l2" else 0.05)
    optimum = cf.solve(problem, tolerance=1e-9, solver="fista").certificate
    ours, found = NewtonPolish.try_step, []

    def keep(self, Z, F, fit, L, monitor):
        answer = ours(self, Z, F, fit, L, monitor)
        if answer is not None:
            found.append((self.objective, fit, Z, *answer))
        return answer

    monkeypatch.setattr(NewtonPolish, "try_step", keep)
    cf.solve(problem, tolerance=1e-7, solver="fista")
    assert found
    for inner, old_fit, old, Z, F, fit in found:
        torch.testing.assert_close(inner.apply(Z), F)
        primal, before = (
            float(f.value) + inner.beta * float(inner.penalty.value(z)) for f, z in ((fit, Z), (old_fit, old))
        )
        slack = 1e-12 * abs(primal)
        assert primal <= before + slack
        gap = primal - dual_point(inner, fit).value
        assert gap >= primal - optimum.primal - slack


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_certificate_is_that_of_the_weights(name):
    problem = example(name)
    solution = cf.solve(problem, tolerance=1e-7, solver="fista")
    again = cf.certify(solution.weights, problem)
    assert solution.certificate.meets(1e-7)
    assert (again.primal, again.dual) == (solution.certificate.primal, solution.certificate.dual)


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
@pytest.mark.parametrize("name", EXAMPLES)
def test_after_the_same_iterations_the_gap_is_no_larger_than_without(name, monkeypatch):
    problem = example(name)
    with_candidates = cf.solve(problem, tolerance=1e-7, solver="fista")
    without(monkeypatch)
    plain = cf.solve(problem, tolerance=1e-7, solver="fista", max_iter=with_candidates.n_iter)
    assert with_candidates.certificate.relative_gap <= max(plain.certificate.relative_gap, 1e-7)


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
@pytest.mark.parametrize("limit", [45, 60, 75])
def test_steps_of_conjugate_gradients_count_as_iterations(limit):
    solution = cf.solve(example("attention, l1, intercept"), tolerance=1e-9, solver="fista", max_iter=limit)
    assert solution.n_iter == limit
    assert solution.history[-1].iteration == limit


def test_nothing_is_tried_at_zero_or_while_the_support_changes(monkeypatch):
    tried = []
    monkeypatch.setattr(NewtonPolish, "_newton", lambda self, *args: tried.append(1))
    problem = example("attention, l2")
    candidates = NewtonPolish(problem.objective, PolishOptions())
    Z = problem.operator.zeros()

    class Watch:
        done = late = False
        iteration = 100

    L = torch.tensor(1.0)
    for _ in range(2):
        F = problem.operator.apply(Z)
        assert candidates.try_step(Z, F, problem.objective.evaluate(F), L, Watch()) is None
    Z = Z.clone()
    Z[0, 0, 0] = 1e-3
    F = problem.operator.apply(Z)
    candidates.try_step(Z, F, problem.objective.evaluate(F), L, Watch())
    assert not tried
    for _ in range(8):  # a failure makes it wait two checks, the next one four
        candidates.try_step(Z, F, problem.objective.evaluate(F), L, Watch())
    assert len(tried) == 3


def wide_groups(loss="cross_entropy"):
    """Few groups in use among many correlated ones."""
    rng = np.random.default_rng(1)
    X = rng.standard_normal((300, 1, 6)) + 0.7 * rng.standard_normal((300, 40, 6))
    scores = X[:, 3, :4] + 2 * X[:, 20, 1:5] + 0.2 * rng.standard_normal((300, 4))
    Y = scores.argmax(1) if loss == "cross_entropy" else (scores[:, 0] > 0) * 2.0 - 1
    ratio = 0.01 if loss == "cross_entropy" else 0.1
    return cf.Problem("attention", X, Y, beta_ratio=ratio, loss=loss, intercept=True)


@pytest.mark.parametrize("loss", ["cross_entropy", "logistic"])
def test_steps_on_groups_end_at_the_optimum_in_fewer_iterations(loss, monkeypatch):
    problem = wide_groups(loss)
    solution = cf.solve(problem, tolerance=1e-9, solver="fista")
    assert forms_blocks(problem.objective, solution.dense())
    other = cf.solve(problem, tolerance=1e-9, solver="working_set")
    assert solution.objective == pytest.approx(other.objective, rel=2e-9)
    monkeypatch.setattr(newton_polish, "forms_blocks", lambda *args: False)
    assert solution.n_iter < cf.solve(problem, tolerance=1e-9, solver="fista").n_iter


def test_the_metric_of_groups_is_the_hessian_of_each_output():
    problem = wide_groups()
    Z = cf.solve(problem, tolerance=1e-2, solver="fista").dense()
    norms = torch.linalg.vector_norm(Z, dim=-2, keepdim=True)
    Z = torch.where(norms > 0.1 * norms.max(), Z, 0.0)
    objective = problem.objective
    at = objective.evaluate(objective.apply(Z))
    h = objective.loss.hessian(at.outputs, objective.targets).diagonal()
    metric = GroupMetric(objective, Z, h)
    draw = torch.randn(Z.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    P = torch.where(metric.mask, draw, 0.0)
    HP = torch.where(metric.mask, metric.bent(P) + objective.adjoint(h * objective.apply(P)), 0.0)
    torch.testing.assert_close(metric.solve(HP), P, rtol=1e-3, atol=1e-4)
    step, norm = 1e-5 * P, lambda W: torch.linalg.vector_norm(W, dim=-2, keepdim=True).clamp_min(1e-300)
    change = objective.beta * ((Z + step) / norm(Z + step) - (Z - step) / norm(Z - step)) / 2e-5
    torch.testing.assert_close(change, metric.bent(P), rtol=1e-4, atol=1e-4)

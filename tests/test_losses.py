"""Losses: the contract, the conjugate table, and values at the ends of the range."""

import copy
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cases import LOSSES, labels, probabilities
from convexformer.losses import LOSSES as REGISTRY
from convexformer.losses import CrossEntropy, Huber, Logistic, Squared, SquaredHinge
from convexformer.testing import check_loss
from reference import sample_loss

CASES = pytest.mark.parametrize("case", LOSSES.values(), ids=LOSSES.keys())


def rows(*values):
    """One output a row."""
    return torch.tensor(values, dtype=torch.float64)[:, None]


def test_every_registered_loss_has_a_case():
    assert {case.loss.name for case in LOSSES.values()} == set(REGISTRY)


@CASES
@settings(max_examples=15)
@given(seed=st.integers(0, 10_000), n=st.integers(3, 20))
def test_losses_keep_the_contract(case, seed, n):
    check_loss(case.loss, case.targets(np.random.default_rng(seed), n), seed)


@CASES
def test_a_wrong_hessian_product_breaks_the_contract(case):
    wrong = copy.copy(case.loss)
    object.__setattr__(wrong, "hessian_product", lambda F, Y, D: 1.1 * case.loss.hessian_product(F, Y, D) + 0.01 * D)
    with pytest.raises(AssertionError, match="hessian_product"):
        check_loss(wrong, case.targets(np.random.default_rng(0), 12))


@CASES
@settings(max_examples=20)
@given(seed=st.integers(0, 10_000), scale=st.sampled_from([0.01, 1.0, 100.0]))
def test_value_is_the_formula_written_with_numpy(case, seed, scale):
    rng = np.random.default_rng(seed)
    Y = case.loss.encode(torch.from_numpy(case.targets(rng, 6)))
    F = scale * rng.standard_normal(tuple(Y.shape))
    delta = case.loss.config().get("delta", 1.0)
    expected = [sample_loss(case.loss.name, f, y, delta) for f, y in zip(F, Y.numpy(), strict=True)]
    assert case.loss.value(torch.from_numpy(F), Y).numpy() == pytest.approx(np.array(expected), rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("name", ["squared", "huber", "logistic", "squared_hinge"])
@settings(max_examples=20)
@given(seed=st.integers(0, 10_000))
def test_conjugate_is_the_supremum_over_a_grid(name, seed):
    case, rng = LOSSES[name], np.random.default_rng(seed)
    Y = case.loss.encode(torch.from_numpy(case.targets(rng, 4)))
    U = rng.uniform(0, 1) * case.loss.gradient(torch.from_numpy(rng.standard_normal((4, 1))), Y)
    grid = torch.linspace(-60, 60, 120_001, dtype=torch.float64)[:, None]
    for u, y, conjugate in zip(U, Y, case.loss.conjugate(U, Y), strict=True):
        supremum = (u * grid[:, 0] - case.loss.value(grid, y.expand_as(grid))).max()
        assert float(supremum) == pytest.approx(float(conjugate), abs=1e-6)


# ---------------------------------------------------------------------- the table


TABLE = {
    "squared": (Squared(), 2.0, lambda u: u**2 / 2 + 2 * u),
    "huber": (Huber(1.0), 2.0, lambda u: u**2 / 2 + 2 * u if abs(u) <= 1 else math.inf),
    "huber(0.4)": (Huber(0.4), -1.0, lambda u: u**2 / 2 - u if abs(u) <= 0.4 else math.inf),
    "squared_hinge, +1": (SquaredHinge(), 1.0, lambda u: u**2 / 2 + u if u <= 0 else math.inf),
    "squared_hinge, -1": (SquaredHinge(), -1.0, lambda u: u**2 / 2 - u if u >= 0 else math.inf),
    "logistic, +1": (Logistic(), 1.0, lambda u: entropy(-u)),
    "logistic, -1": (Logistic(), -1.0, lambda u: entropy(u)),
}


@pytest.mark.parametrize(("loss", "y", "expected"), TABLE.values(), ids=TABLE.keys())
@pytest.mark.parametrize("u", [-1.5, -1.0, -0.3, 0.0, 0.3, 1.0, 1.5])
def test_conjugates_are_those_of_the_table(loss, y, expected, u):
    assert float(loss.conjugate(rows(u), rows(y))) == pytest.approx(expected(u), abs=1e-14)


def entropy(p):
    if not 0 <= p <= 1:
        return math.inf
    return sum(q * math.log(q) for q in (p, 1 - p) if q > 0)


def test_conjugate_of_cross_entropy_is_the_negative_entropy_on_the_simplex():
    label = torch.tensor([[0.0, 1.0, 0.0]], dtype=torch.float64)
    q = torch.tensor([[0.5, 0.2, 0.3]], dtype=torch.float64)
    loss = CrossEntropy()
    assert float(loss.conjugate(q - label, label)) == pytest.approx(float((q * q.log()).sum()))
    assert float(loss.conjugate(0 * label, label)) == 0.0
    assert float(loss.conjugate(0.1 + q - label, label)) == math.inf
    assert float(loss.conjugate(torch.tensor([[0.6, -1.1, 0.5]]).double(), label)) == math.inf


@pytest.mark.parametrize(
    ("loss", "y", "gradient"),
    [
        (Squared(), 3.0, -3.0),
        (Huber(), 3.0, -1.0),
        (Huber(), -0.2, 0.2),
        (Logistic(), 1.0, -0.5),
        (SquaredHinge(), -1.0, 1.0),
    ],
    ids=str,
)
def test_gradient_at_zero_is_that_of_the_table(loss, y, gradient):
    assert float(loss.gradient(rows(0.0), rows(y))) == pytest.approx(gradient)


def test_gradient_of_cross_entropy_at_zero_is_uniform_minus_the_label():
    Y = CrossEntropy().encode(torch.tensor([0, 3, 1, 2]))
    assert torch.allclose(CrossEntropy().gradient(torch.zeros(4, 4).double(), Y), 0.25 - Y)


def test_the_best_dual_scale_of_the_squared_loss_is_a_projection():
    F, Y, w = rows(1.0, -2.0, 0.5), rows(2.0, 0.0, 1.0), torch.tensor([1.0, 2.0, 0.5]).double()
    U = Squared().gradient(F, Y)
    best = -float((w[:, None] * U * Y).sum() / (w[:, None] * U**2).sum())
    assert Squared().dual_scale(U, Y, w, math.inf) == pytest.approx(best)
    assert Squared().dual_scale(U, Y, w, best / 2) == pytest.approx(best / 2)


# ---------------------------------------------------------------------- far out


@pytest.mark.parametrize("loss", [Logistic(), CrossEntropy()], ids=str)
def test_huge_outputs_do_not_overflow(loss):
    Y = loss.encode(torch.tensor([1, 0, 1])) if loss.name == "cross_entropy" else rows(1.0, -1.0, 1.0)
    F = 1e5 * (1 - 2 * Y) / Y.shape[1]  # as wrong as can be
    assert torch.isfinite(loss.value(F, Y)).all()
    assert torch.isfinite(loss.conjugate(loss.gradient(F, Y), Y)).all()
    assert float(Logistic().value(rows(-1000.0), rows(1.0))) == 1000.0


@settings(max_examples=60)
@given(seed=st.integers(0, 10_000), exponent=st.floats(-2, 4), soft=st.booleans())
def test_the_intercept_of_cross_entropy_is_exact_where_softmax_saturates(seed, exponent, soft):
    rng = np.random.default_rng(seed)
    n, c, scale = int(rng.integers(4, 30)), int(rng.integers(2, 6)), 10**exponent
    Y = CrossEntropy().encode(torch.from_numpy((probabilities if soft else labels)(rng, n + c, c)))
    F = torch.from_numpy(scale * (rng.standard_normal(tuple(Y.shape)) + rng.standard_normal(c)))
    w = torch.from_numpy(rng.uniform(0.01, 1, len(Y)))
    b = CrossEntropy().best_intercept(F, Y, w, torch.zeros(c).double())
    left = (w[:, None] * CrossEntropy().gradient(F + b, Y)).sum(0)
    assert float(left.abs().max()) <= 1e-10 * float(w.sum())
    assert abs(float(b.sum())) <= 1e-9 * float(1 + b.abs().max())


@pytest.mark.parametrize("name", ["cross_entropy", "huber", "logistic", "squared", "squared_hinge"])
def test_float32_dual_points_stay_in_the_domain(name):
    case = LOSSES[name]
    rng = np.random.default_rng(0)
    Y = case.loss.encode(torch.from_numpy(case.targets(rng, 50))).float()
    F = torch.from_numpy(3 * rng.standard_normal(tuple(Y.shape))).float()
    U, w = case.loss.gradient(F, Y), torch.ones(50)
    for limit in (0.1, 0.7, 1.0, math.inf):
        assert torch.isfinite(case.loss.conjugate(case.loss.dual_scale(U, Y, w, limit) * U, Y)).all()

"""Losses: the contract, the conjugate table, and values at the ends of the range."""

import copy
import math
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cases import LOSSES, LossCase, labels, probabilities, real, signs
from convexformer import jit
from convexformer.losses import LOSSES as REGISTRY
from convexformer.losses import (
    CrossEntropy,
    DiagonalHessian,
    Huber,
    Logistic,
    Loss,
    SoftmaxHessian,
    Squared,
    SquaredHinge,
    cross_entropy,
    softmax_compiled,
    softmax_intercept,
)
from convexformer.rows import LOCAL, Rows
from convexformer.testing import check_loss
from reference import sample_loss

CASES = pytest.mark.parametrize("case", LOSSES.values(), ids=LOSSES.keys())
EPS = torch.finfo(torch.float64).eps


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
    Y = loss.encode(torch.tensor([1, 0, 1])) if loss.class_labels else rows(1.0, -1.0, 1.0)
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


# ---------------------------------------------------------------------- Hessians


def test_hessians_are_the_matrices_they_stand_for():
    generator = torch.Generator().manual_seed(0)
    q, D = (torch.randn(5, 3, generator=generator).double() for _ in range(2))
    softmax, diagonal = SoftmaxHessian(q.softmax(1)), DiagonalHessian(q.square())
    for row in range(5):
        p = q[row].softmax(0)
        H = torch.diag(p) - torch.outer(p, p)
        assert torch.allclose(softmax.product(D)[row], H @ D[row])
        assert torch.allclose(softmax.diagonal()[row], H.diagonal())
        assert torch.allclose(diagonal.product(D)[row], torch.diag(q[row] ** 2) @ D[row])
    assert torch.equal(diagonal.diagonal(), q.square())


def test_flags_say_what_solvers_ask():
    assert [loss.name for loss in (case.loss for case in LOSSES.values()) if loss.quadratic] == ["squared", "squared"]
    assert {case.loss.name for case in LOSSES.values() if case.loss.class_labels} == {"cross_entropy"}
    assert {case.loss.name for case in LOSSES.values() if not case.loss.separable} == {"cross_entropy"}


# ---------------------------------------------------------------------- a loss of the user's own


class RowDistance(Loss):
    """``L = sqrt(1 + |f - y|^2) - 1`` of the whole row: neither separable nor a softmax.

    ``L*(u, y) = 1 - sqrt(1 - |u|^2) + <u, y>`` on ``|u| <= 1``.
    """

    name, curvature = "row_distance", 1.0

    def encode(self, Y):
        return Y.double().reshape(len(Y), -1)

    def value(self, F, Y):
        square = (F - Y).square().sum(1)
        return square / (1 + (1 + square).sqrt())

    def gradient(self, F, Y):
        return (F - Y) / (1 + (F - Y).square().sum(1, keepdim=True)).sqrt()

    def conjugate(self, U, Y):
        square = U.square().sum(1)
        inside = 1 - (1 - square.clamp_max(1)).sqrt() + (U * Y).sum(1)
        return torch.where(square <= 1 + 1e-12, inside, math.inf)


@settings(max_examples=15)
@given(seed=st.integers(0, 10_000), c=st.integers(1, 4))
def test_a_loss_with_nothing_but_the_basics_keeps_the_contract(seed, c):
    check_loss(RowDistance(), np.random.default_rng(seed).standard_normal((9, c)), seed)


@given(seed=st.integers(0, 10_000), exponent=st.floats(-6, 4))
def test_hessian_products_by_differences(seed, exponent):
    rng = np.random.default_rng(seed)
    Y, F = torch.from_numpy(rng.standard_normal((6, 3))), torch.from_numpy(3 * rng.standard_normal((6, 3)))
    D = torch.from_numpy(10**exponent * rng.standard_normal((6, 3)))
    D[0] = 0
    r, root = F - Y, (1 + (F - Y).square().sum(1, keepdim=True)).sqrt()
    exact = D / root - r * (r * D).sum(1, keepdim=True) / root**3
    found = RowDistance().hessian_product(F, Y, D)
    assert torch.allclose(found, exact, rtol=1e-7, atol=1e-8 * 10**exponent)
    assert torch.equal(found[0], torch.zeros(3).double())


@pytest.mark.parametrize("c", [1, 3, 40])  # 40 outputs: by conjugate gradients
@settings(max_examples=20)
@given(seed=st.integers(0, 10_000))
def test_the_default_intercept_is_exact_from_far_away(c, seed):
    rng = np.random.default_rng(seed)
    F, Y = (torch.from_numpy(scale * rng.standard_normal((60, c))) for scale in (1.0, 10.0))
    w, start = torch.from_numpy(10 ** rng.uniform(-3, 3, 60)), torch.from_numpy(rng.uniform(-1e3, 1e3, c))
    loss = RowDistance()
    calls = count(loss)
    b = loss.best_intercept(F, Y, w, start)
    assert len(calls) <= 200 + 2 * 50 * 200
    V = w[:, None] * loss.gradient(F + b, Y)
    assert float(V.sum(0).abs().max()) <= 1e-11 * float(V.abs().sum())


@CASES
@settings(max_examples=15)
@given(seed=st.integers(0, 10_000), start=st.floats(-100, 100))
def test_the_default_intercept_is_that_of_the_loss(case, seed, start):
    rng = np.random.default_rng(seed)
    F, Y, w = problem(case, rng, 12, 3.0)
    first = torch.full(Y.shape[1:], start).double()
    own, default = case.loss.best_intercept(F, Y, w, first), Loss.best_intercept(case.loss, F, Y, w, first)
    values = [float((w * case.loss.value(F + b, Y)).sum()) for b in (own, default)]
    assert values[1] == pytest.approx(values[0], rel=1e-12, abs=1e-12)


def problem(case, rng, n, scale=1.0):
    """Outputs, encoded targets and weights."""
    Y = case.loss.encode(torch.from_numpy(case.targets(rng, n)))
    return torch.from_numpy(scale * rng.standard_normal(tuple(Y.shape))), Y, torch.from_numpy(rng.uniform(0.1, 2, n))


def count(loss):
    """Record every call of the gradient of this instance."""
    calls, gradient = [], loss.gradient

    def counted(F, Y):
        calls.append(F)
        return gradient(F, Y)

    loss.gradient = counted
    return calls


# ---------------------------------------------------------------------- intercepts at the ends of the range


def test_the_intercept_of_a_saturated_logistic_loss():
    F, Y, w = rows(0.0, 0.0), rows(-1.0, 1.0), torch.tensor([1e4, 1.0]).double()
    for start in (800.0, -800.0, 0.0, 1e300, -1e300, math.inf, math.nan):
        b = Logistic().best_intercept(F, Y, w, torch.tensor([start], dtype=torch.float64))
        assert float(b) == pytest.approx(-math.log(1e4), rel=1e-14)


@pytest.mark.parametrize(
    ("loss", "searches"), [(Logistic(), 400), (Huber(), 100), (Huber(1e-3), 100), (SquaredHinge(), 100)]
)
def test_intercepts_are_roots_whatever_the_weights_offsets_and_starts(loss, searches):
    calls = count(loss)
    for seed in range(searches):
        F, Y, w, start = far_out(seed)
        calls.clear()
        b = loss.best_intercept(F, Y, w, start)
        assert len(calls) <= 100
        assert is_root(loss, F, Y, w, b), f"seed {seed}"


def far_out(seed):
    """Weights from 1e-6 to 1e6, outputs and a start up to 1e3 away."""
    rng = np.random.default_rng(seed)
    n = int(rng.integers(2, 30))
    F = 10 ** rng.uniform(-2, 2) * rng.standard_normal(n) + rng.uniform(-1e3, 1e3)
    y = np.concatenate([[-1.0, 1.0], rng.choice([-1.0, 1.0], n - 2)])
    return (
        rows(*F),
        rows(*y),
        torch.from_numpy(10 ** rng.uniform(-6, 6, n)),
        torch.from_numpy(rng.uniform(-1e3, 1e3, 1)),
    )


def is_root(loss, F, Y, w, b):
    """The weighted sum of gradients vanishes up to rounding, or changes sign within the rounding of the outputs."""
    V = w[:, None] * loss.gradient(F + b, Y)
    reach = 4 * EPS * (1 + F.abs().max() + b.abs().max())
    below, above = ((w[:, None] * loss.gradient(F + b + d, Y)).sum(0) for d in (-reach, reach))
    return bool(((V.sum(0).abs() <= 16 * EPS * V.abs().sum(0)) | ((below <= 0) & (above >= 0))).all())


@pytest.mark.parametrize("seed", range(40))
def test_intercepts_of_cross_entropy_are_exact_whatever_the_weights_offsets_and_starts(seed, monkeypatch):
    calls, slope = [], softmax_intercept.SoftmaxIntercept._slope
    monkeypatch.setattr(softmax_intercept.SoftmaxIntercept, "_slope", lambda *args: calls.append(0) or slope(*args))
    rng = np.random.default_rng(seed)
    c, n = int(rng.integers(2, 7)), int(rng.integers(0, 30))
    Y = CrossEntropy().encode(torch.from_numpy(labels(rng, n + c, c)))
    F = torch.from_numpy(10 ** rng.uniform(-2, 2) * rng.standard_normal((n + c, c)) + rng.uniform(-1e3, 1e3, c))
    w, start = torch.from_numpy(10 ** rng.uniform(-6, 6, n + c)), torch.from_numpy(rng.uniform(-1e3, 1e3, c))
    b = CrossEntropy().best_intercept(F, Y, w, start)
    V = w[:, None] * CrossEntropy().gradient(F + b, Y)
    assert float(V.sum(0).abs().max()) <= 1e-9 * float(V.abs().sum())
    assert len(calls) <= 400


@pytest.mark.parametrize("classes", [3, 40])
@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_intercepts_of_many_classes_need_no_hessian(classes, scale, monkeypatch):
    monkeypatch.setattr(softmax_intercept, "MANY_CLASSES", {"cpu": 2})
    rng = np.random.default_rng(0)
    Y = CrossEntropy().encode(torch.from_numpy(labels(rng, 300, classes)))
    F, w = torch.from_numpy(scale * rng.standard_normal((300, classes))), torch.from_numpy(rng.uniform(0.1, 2, 300))
    b = CrossEntropy().best_intercept(F, Y, w, torch.zeros(classes).double())
    V = w[:, None] * CrossEntropy().gradient(F + b, Y)
    assert float(V.sum(0).abs().max()) <= 1e-11 * float(V.abs().sum())


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("loss", [*(case.loss for case in LOSSES.values()), RowDistance()], ids=str)
def test_outputs_that_are_not_finite_leave_the_intercept_at_its_start(loss, bad):
    rng = np.random.default_rng(0)
    case = next((case for case in LOSSES.values() if case.loss is loss), LOSSES["squared, 2 outputs"])
    F, Y, w = problem(case, rng, 9)
    F[4, 0] = bad
    start = torch.arange(1.0, 1 + F.shape[1]).double()
    assert torch.equal(loss.best_intercept(F, Y, w, start), start)
    assert torch.equal(loss.best_intercept(torch.full_like(F, bad), Y, w, start), start)


def test_inexact_intercepts_are_not_thrown_out_where_the_sigmoid_saturates():
    F, Y, w = rows(0.0, 0.0), rows(-1.0, 1.0), torch.tensor([1e4, 1.0]).double()
    b = Logistic().inexact_intercept(F, Y, w, torch.tensor([800.0]).double())
    assert 700 < float(b) <= 800


# ---------------------------------------------------------------------- balanced dual points

LOSSES_AND_MINE = [*LOSSES.values(), LossCase(RowDistance(), lambda rng, n: real(rng, n, 2))]


@pytest.mark.parametrize("case", LOSSES_AND_MINE, ids=lambda case: str(case.loss))
@settings(max_examples=40)
@given(seed=st.integers(0, 10_000), exponent=st.floats(-2, 2), spread=st.floats(0, 4), t=st.floats(0, 1))
def test_any_dual_point_can_be_balanced(case, seed, exponent, spread, t):
    """Gradients far from any intercept, and mixtures of them: the sum vanishes, and the domain is kept."""
    rng = np.random.default_rng(seed)
    F, Y, w = problem(case, rng, 12, 10**exponent)
    w = w * torch.from_numpy(10 ** rng.uniform(-spread, spread, 12))
    G = F + torch.from_numpy(10**exponent * rng.standard_normal(F.shape[1]))
    U = t * case.loss.gradient(G, Y) + (1 - t) * rng.uniform() * case.loss.gradient(F, Y)
    found = case.loss.balance(U, Y, w)
    assert torch.isfinite(case.loss.conjugate(found, Y)).all()
    size = float((w[:, None] * (U.abs() + found.abs())).sum())
    assert float((w[:, None] * found).sum(0).abs().max()) <= 128 * EPS * size


@pytest.mark.parametrize("case", LOSSES_AND_MINE, ids=lambda case: str(case.loss))
@settings(max_examples=20)
@given(seed=st.integers(0, 10_000), exponent=st.floats(-12, -3))
def test_a_point_that_is_nearly_balanced_hardly_moves(case, seed, exponent):
    rng = np.random.default_rng(seed)
    F, Y, w = problem(case, rng, 12, 2.0)
    b = case.loss.best_intercept(F, Y, w, torch.zeros_like(F[0]))
    exact = case.loss.gradient(F + b, Y)
    assert torch.allclose(case.loss.balance(exact, Y, w), exact, rtol=1e-12, atol=1e-12)
    b = b + 10**exponent * torch.from_numpy(rng.standard_normal(len(b)))
    U = case.loss.gradient(F + b, Y)
    left = float((w[:, None] * U).sum(0).abs().max())
    assert float((case.loss.balance(U, Y, w) - U).abs().max()) <= 1e3 * left / float(w.min())


@pytest.mark.parametrize("case", LOSSES.values(), ids=LOSSES.keys())
def test_a_balanced_point_is_left_alone(case):
    F, Y, w = problem(case, np.random.default_rng(0), 12)
    U = torch.zeros_like(F)
    assert case.loss.balance(U, Y, w) is U
    found = case.loss.balance(case.loss.gradient(F, Y), Y, w)
    assert torch.allclose(case.loss.balance(found, Y, w), found, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("loss", [Logistic(), CrossEntropy()], ids=str)
def test_tiny_gradients_keep_their_digits_when_balanced(loss):
    """Labels that are all but certain: gradients of 1e-13, whose sum is off by a millionth of that."""
    rng = np.random.default_rng(0)
    Y = loss.encode(torch.from_numpy(labels(rng, 20, 3) if loss.class_labels else signs(rng, 20)))
    F = 30 * Y + torch.from_numpy(0.1 * rng.standard_normal(tuple(Y.shape)))
    w = torch.ones(20).double()
    b = loss.best_intercept(F, Y, w, torch.zeros_like(F[0]))
    U = loss.gradient(F + b + 1e-6 * torch.arange(1.0, 1 + len(b)), Y)
    found = loss.balance(U, Y, w)
    assert float(U.abs().max()) < 1e-11
    assert float((w[:, None] * found).sum(0).abs().max()) <= 16 * EPS * float(U.abs().sum())
    assert torch.allclose(found, U, rtol=1e-3, atol=0)
    assert torch.isfinite(loss.conjugate(found, Y)).all()


def test_rare_classes_do_not_spoil_the_balance():
    """A class with a millionth of a millionth of the weight, and a sum that is all wrong."""
    for loss, Y in ((Logistic(), rows(1.0, -1.0, 1.0)), (CrossEntropy(), torch.eye(3).double())):
        w = torch.tensor([1.0, 1e-12, 2.0]).double()
        U = loss.gradient(torch.linspace(3, -2, Y.numel()).double().reshape(Y.shape), Y)
        found = loss.balance(U, Y, w)
        assert torch.isfinite(loss.conjugate(found, Y)).all()
        assert float((w[:, None] * found).sum(0).abs().max()) <= 16 * EPS * float((w[:, None] * found).abs().sum())


def test_a_squared_hinge_without_weight_on_one_class_is_balanced_by_zero():
    Y, w = rows(1.0, 1.0, -1.0), torch.tensor([0.0, 0.0, 1.0]).double()
    assert not SquaredHinge().balance(rows(-1.0, 0.0, 2.0), Y, w).any()


# ---------------------------------------------------------------------- rows in two parts


class Part(Rows):
    """One of two threads that hold half of the rows each; it knows how to add up, and nothing else."""

    def __init__(self, rank, barrier, board):
        self.rank, self.barrier, self.board = rank, barrier, board

    def sum(self, values):
        self.board[self.rank] = values.sum(0)
        self.barrier.wait()
        total = self.board[0] + self.board[1]
        self.barrier.wait()  # no part writes before both have read
        return total


def apart(function, *tensors):
    """Return what ``function(*halves, rows)`` finds in each of two threads."""
    barrier, board = threading.Barrier(2, timeout=60), [None, None]
    halves = [[tensor[part] for tensor in tensors] for part in (slice(None, 5), slice(5, None))]
    with ThreadPoolExecutor(2) as pool:
        found = [pool.submit(function, *half, Part(rank, barrier, board)) for rank, half in enumerate(halves)]
        return [future.result() for future in found]


@pytest.mark.parametrize("case", LOSSES_AND_MINE, ids=lambda case: str(case.loss))
@pytest.mark.parametrize("scale", [1.0, 200.0])
def test_two_parts_find_what_one_finds(case, scale):
    loss = case.loss
    F, Y, w = problem(case, np.random.default_rng(3), 14, scale)
    start = torch.ones_like(F[0])
    U = loss.gradient(F, Y)
    b = loss.best_intercept(F, Y, w, start)
    for found in apart(lambda F, Y, w, rows: loss.best_intercept(F, Y, w, start, rows), F, Y, w):
        V = w[:, None] * loss.gradient(F + found, Y)
        assert float(V.sum(0).abs().max()) <= 1e-12 * float(V.abs().sum())
        if scale == 1.0:  # else the minimum may be flat
            assert torch.allclose(found, b, rtol=1e-9, atol=1e-9)
    functions = {
        "inexact": lambda F, Y, w, U, rows: loss.inexact_intercept(F, Y, w, b + 0.1, rows),
        "step": lambda F, Y, w, U, rows: loss.intercept_step(F, Y, w, start, rows),
        "scale": lambda F, Y, w, U, rows: torch.tensor(loss.dual_scale(U, Y, w, 0.8, rows), dtype=torch.float64),
        "check": lambda F, Y, w, U, rows: loss.check_intercept(Y, w, rows) or torch.zeros(()),
    }
    for name, function in functions.items():
        expected = function(F, Y, w, U, LOCAL)
        for found in apart(function, F, Y, w, U):
            assert torch.allclose(found, expected, rtol=1e-9, atol=1e-12), name
    whole = loss.balance(U, Y, w)
    parts = apart(lambda U, Y, w, rows: loss.balance(U, Y, w, rows), U, Y, w)
    assert torch.allclose(torch.cat(parts), whole, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("loss", [Logistic(), CrossEntropy()], ids=str)
def test_a_class_that_only_one_part_holds_is_no_cause_to_complain(loss):
    Y = loss.encode(torch.tensor([0, 0, 0, 0, 0, 1, 1, 1]) if loss.class_labels else rows(*[-1.0] * 5, *[1.0] * 3))
    w = torch.ones(8).double()
    assert apart(loss.check_intercept, Y, w) == [None, None]
    with pytest.raises(ValueError, match="class"):
        loss.check_intercept(Y[:5], w[:5])


@pytest.fixture
def softmax_loops():
    """Compiled, as a solve has them."""
    if not jit.available:
        pytest.skip("numba is not installed")
    jit.compile_in_time(softmax_compiled.KERNELS)


@pytest.mark.usefixtures("softmax_loops")
@pytest.mark.parametrize("smooth", [False, True], ids=["labels", "probabilities"])
@pytest.mark.parametrize(("n", "c", "spread"), [(40, 3, 1.0), (200, 10, 5.0), (60, 24, 0.1)])
def test_the_compiled_intercept_is_that_of_torch(n, c, spread, smooth):
    generator = torch.Generator().manual_seed(n)
    F = spread * torch.randn(n, c, generator=generator, dtype=torch.float64)
    Y = torch.nn.functional.one_hot(torch.arange(n) % c, c).double()
    Y = 0.9 * Y + 0.1 / c if smooth else Y
    w = torch.rand(n, generator=generator, dtype=torch.float64) + 0.1
    start = torch.zeros(c, dtype=torch.float64)
    assert softmax_compiled.serves(F, LOCAL)
    found = softmax_compiled.best(F, Y, w, start)
    expected = softmax_intercept.SoftmaxIntercept(F, Y, w).best(start)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10 * max(1.0, spread))
    assert float((w @ ((F + found).softmax(1) - Y)).abs().max()) <= 1e-13 * float(w.sum())


@pytest.mark.usefixtures("softmax_loops")
def test_the_compiled_intercept_says_where_it_fails():
    F = torch.tensor([[1e3, 0.0], [0.0, 1e3]], dtype=torch.float64)
    Y = torch.tensor([[0.0, 1.0], [1.0, 0.0]], dtype=torch.float64)
    w = torch.tensor([1.0, 1e6], dtype=torch.float64)
    assert softmax_compiled.best(F, Y, w, torch.tensor([-600.0, 600.0], dtype=torch.float64)) is None


@pytest.mark.usefixtures("softmax_loops")
@pytest.mark.parametrize("smooth", [False, True], ids=["labels", "probabilities"])
@pytest.mark.parametrize(("n", "c", "spread"), [(40, 2, 1.0), (50, 3, 300.0), (30, 10, 5.0)])
def test_the_compiled_loss_and_gradient_are_those_of_torch(n, c, spread, smooth, monkeypatch):
    generator = torch.Generator().manual_seed(n)
    F = spread * torch.randn(n, c, generator=generator, dtype=torch.float64)
    Y = torch.nn.functional.one_hot(torch.arange(n) % c, c).double()
    Y = 0.9 * Y + 0.1 / c if smooth else Y
    found = softmax_compiled.value_and_gradient(F, Y)
    monkeypatch.setattr(softmax_compiled, "FEW_OUTPUTS", 0)
    assert softmax_compiled.value_and_gradient(F, Y) is None
    expected = CrossEntropy().value_and_gradient(F, Y)
    for ours, theirs in zip(found, expected, strict=True):  # to all digits: small losses and gradients count
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-300)


@pytest.mark.usefixtures("softmax_loops")
def test_an_inexact_intercept_of_few_classes_is_right_to_eight_digits():
    generator = torch.Generator().manual_seed(0)
    F = torch.randn(200, 5, generator=generator, dtype=torch.float64)
    Y, w, start = one_hot_rows(200, 5), torch.ones(200).double(), torch.zeros(5).double()
    b = CrossEntropy().inexact_intercept(F, Y, w, start)
    assert 1e-16 < float((w @ ((F + b).softmax(1) - Y)).abs().max()) <= 1e-7 * float(w.sum())


@pytest.mark.usefixtures("softmax_loops")
def test_an_inexact_intercept_of_many_classes_is_right_to_eight_digits():
    generator = torch.Generator().manual_seed(0)
    F = torch.randn(300, 50, generator=generator, dtype=torch.float64)
    Y, w, start = one_hot_rows(300, 50), torch.ones(300).double(), torch.zeros(50).double()
    b = CrossEntropy().inexact_intercept(F, Y, w, start)
    assert float((w @ ((F + b).softmax(1) - Y)).abs().max()) <= 1e-7 * float(w.sum())


@pytest.mark.usefixtures("softmax_loops")
@pytest.mark.parametrize("mean", [0.0, 3.0])
def test_one_compiled_evaluation_is_the_plain_one(mean, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    F = 3 * torch.randn(60, 4, generator=generator, dtype=torch.float64)
    Y, w = one_hot_rows(60, 4), torch.rand(60, generator=generator, dtype=torch.float64)
    start = torch.full((4,), mean, dtype=torch.float64)
    value, b, outputs, U, V = CrossEntropy().evaluate_nearly(F, Y, w, start)
    torch.testing.assert_close(b, CrossEntropy().inexact_intercept(F, Y, w, start), rtol=1e-12, atol=1e-12)
    values, gradients = CrossEntropy().value_and_gradient(F + b, Y)
    torch.testing.assert_close(outputs, F + b)
    torch.testing.assert_close(U, gradients, rtol=1e-12, atol=1e-300)
    torch.testing.assert_close(V, w[:, None] * gradients, rtol=1e-12, atol=1e-300)
    assert float(value) == pytest.approx(float(w @ values), rel=1e-13)
    monkeypatch.setattr(softmax_compiled, "FEW_OUTPUTS", 0)
    assert CrossEntropy().evaluate_nearly(F, Y, w, start) is None


def one_hot_rows(n, c):
    return torch.nn.functional.one_hot(torch.arange(n) % c, c).double()


@pytest.mark.parametrize("spread", [1.0, 40.0])
def test_losses_of_many_labels_are_those_of_probabilities(spread, monkeypatch):
    """Labels are looked up once and save passes; rows of probabilities that are no labels go the general way."""
    generator = torch.Generator().manual_seed(0)
    F = spread * torch.randn((500, 80), generator=generator, dtype=torch.float64)
    Y = torch.nn.functional.one_hot(torch.randint(80, (500,), generator=generator), 80).double()
    F[:100] += 60 * Y[:100]  # all but certain
    quick = CrossEntropy().value_and_gradient(F, Y)
    monkeypatch.setattr(cross_entropy, "MANY_OUTPUTS", math.inf)
    for found, expected in zip(quick, CrossEntropy().value_and_gradient(F, Y), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=0.0)
    monkeypatch.undo()
    soft = 0.9 * Y + 0.1 / 80
    assert cross_entropy._labels(soft) is None
    torch.testing.assert_close(CrossEntropy().value_and_gradient(F, soft)[0], CrossEntropy().value(F, soft))


def test_one_compiled_call_is_the_softmax_of_plain_code():
    """Value, intercept, outputs and balanced gradients, at labels and at rows of probabilities, some of weight zero."""
    generator = torch.Generator().manual_seed(0)
    F = 3 * torch.randn((40, 4), generator=generator, dtype=torch.float64)
    w = torch.rand(40, generator=generator, dtype=torch.float64)
    w[:3] = 0.0
    loss = REGISTRY["cross_entropy"]()
    for Y in (loss.encode(torch.arange(40) % 4), torch.softmax(F.flip(0), 1)):
        jit.compile_in_time(loss.kernels, lambda: False)
        value, b, outputs, U, V = loss.evaluate_exactly(F, Y, w, torch.ones(4, dtype=torch.float64))
        with jit.interpreted():
            assert loss.evaluate_exactly(F, Y, w, b) is None
            expected = loss.best_intercept(F, Y, w, torch.zeros(4, dtype=torch.float64))
            values, gradients = loss.value_and_gradient(F + expected, Y)
        torch.testing.assert_close(b, expected, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(outputs, F + b)
        torch.testing.assert_close(value, w @ values, rtol=1e-12, atol=0.0)
        torch.testing.assert_close(U, gradients, rtol=1e-8, atol=1e-10)
        torch.testing.assert_close(V, w[:, None] * U)
        assert (w @ U).abs().max() <= 1e-14 * (w @ U.abs()).sum()


def test_the_value_of_a_softmax_is_differentiable_where_it_is_compiled():
    loss = REGISTRY["cross_entropy"]()
    jit.compile_in_time(loss.kernels, lambda: False)
    F = torch.zeros((5, 3), dtype=torch.float64, requires_grad=True)
    Y = loss.encode(torch.tensor([0, 1, 2, 0, 1]))
    loss.value(F, Y).sum().backward()
    torch.testing.assert_close(F.grad, loss.gradient(F.detach(), Y))

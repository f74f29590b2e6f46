"""Data at the edge of what floats hold: a certificate may get vaguer there, never too good."""

import numpy as np
import pytest
import torch

import convexformer as cf
from convexformer.gauges import FrobeniusNorm, GroupNorm, NuclearNorm
from convexformer.gauges.krylov import Krylov, random_rows
from convexformer.losses import CrossEntropy, Logistic
from convexformer.operators.bilinear import frobenius_norm
from convexformer.weights import Weights

pytestmark = pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")


@pytest.mark.parametrize("loss", ["squared", "logistic", "huber", "cross_entropy"])
@pytest.mark.parametrize("offset", [1e6, 1e8])
def test_features_with_a_large_mean_are_not_certified_above_the_optimum(loss, offset):
    for seed in range(2):
        rng = np.random.default_rng(seed)
        x = np.round(rng.standard_normal(60) * 2**8) / 2**8  # x + offset is exact
        y = x + 0.3 * rng.standard_normal(60)
        y = {"logistic": np.sign(y), "cross_entropy": (y > 0).astype(int)}.get(loss, y)
        near = cf.Problem("attention", x[:, None, None], y, beta_ratio=0.5, loss=loss, intercept=True)
        best = cf.solve(near, tolerance=1e-10).objective
        far = cf.Problem("attention", (x + offset)[:, None, None], y, beta=near.beta, loss=loss, intercept=True)
        found = cf.solve(far, tolerance=1e-5, max_iter=100).certificate
        assert found.dual <= best * (1 + 1e-12)
        assert found.primal >= best * (1 - 1e-6)  # outputs are exact to eps times the offset


@pytest.mark.parametrize("scale", [1e-170, 1e-100, 1e100, 1e155])
@pytest.mark.parametrize("head", ["mlp", "attention", cf.heads.Attention(decay="l2")], ids=str)
def test_squares_that_vanish_or_overflow_certify_nothing_false(head, scale):
    rng = np.random.default_rng(0)
    X, Y = rng.standard_normal((10, 3, 2)), rng.standard_normal((10, 2))
    plain, scaled = (cf.Problem(head, X * s, Y, beta=1e-3 * s) for s in (1.0, scale))
    at_zero = [cf.certify(Weights(p.operator.zeros()), p) for p in (plain, scaled)]
    assert at_zero[1].dual == pytest.approx(at_zero[0].dual, rel=1e-9, abs=1e-12)
    assert scaled.beta_max == pytest.approx(scale * plain.beta_max, rel=1e-12)


@pytest.mark.parametrize("gauge", [GroupNorm(), GroupNorm("token"), FrobeniusNorm(), NuclearNorm()], ids=repr)
@pytest.mark.parametrize("scale", [1e-200, 1e200])
def test_gauges_and_polars_are_homogeneous_at_any_scale(gauge, scale):
    Z = torch.randn((3, 4, 2), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert float(gauge.value(scale * Z)) == pytest.approx(scale * float(gauge.value(Z)), rel=1e-12)
    assert gauge.polar(scale * Z).value == pytest.approx(scale * gauge.polar(Z).value, rel=1e-12)


def test_a_polar_that_is_no_number_certifies_nothing():
    limit, polar = NuclearNorm().max_dual_scale(torch.full((2, 2), torch.inf, dtype=torch.float64), 1.0)
    assert limit == 0.0
    assert not polar.kind.certifies


def test_tiny_losses_keep_their_digits():
    gap = torch.tensor([30.0, 50.0, 200.0, 700.0], dtype=torch.float64)
    exact = torch.exp(-gap)
    F = torch.stack([gap, torch.zeros_like(gap)], 1)
    Y = torch.tensor([[1.0, 0.0]], dtype=torch.float64).expand(4, 2)
    softmax, logistic = CrossEntropy(), Logistic()
    assert torch.allclose(softmax.value(F, Y), torch.log1p(exact), rtol=1e-13, atol=0)
    assert torch.allclose(softmax.gradient(F, Y)[:, 0], -exact, rtol=1e-12, atol=0)
    # Fenchel-Young with equality at the gradient, relative to numbers of the size of the loss
    U = softmax.gradient(F, Y)
    assert torch.allclose(softmax.conjugate(U, Y), -exact * (gap + 1), rtol=1e-12, atol=0)
    u = logistic.gradient(gap[:, None], torch.ones(4, 1, dtype=torch.float64))
    entropy = logistic.conjugate(u, torch.ones(4, 1, dtype=torch.float64))
    assert torch.allclose(entropy, -exact * (gap + 1), rtol=1e-12, atol=0)


@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.parametrize("loss", ["cross_entropy", "logistic"])
@pytest.mark.parametrize("beta", [1e-8, 1e-12])
def test_separable_data_is_certified_down_to_tiny_objectives(loss, beta, intercept):
    rng = np.random.default_rng(0)
    X = rng.standard_normal((100, 1, 3))
    X[:, 0, 0] += 0.5 * np.sign(X[:, 0, 0])
    y = (X[:, 0, 0] > 0).astype(int)
    y = y if loss == "cross_entropy" else 2.0 * y - 1
    solution = cf.solve(cf.Problem("attention", X, y, beta=beta, loss=loss, intercept=intercept), tolerance=1e-6)
    assert solution.status is cf.Status.CONVERGED
    assert 0 <= solution.certificate.relative_gap <= 1e-6


@pytest.mark.parametrize("rank", [1, 2, 5])
@pytest.mark.parametrize("scale", [1e-150, 1.0, 1e150])
def test_krylov_spaces_survive_that_directions_run_out(rank, scale):
    rng = np.random.default_rng(rank)
    M = torch.from_numpy(scale * rng.standard_normal((50, rank)) @ rng.standard_normal((rank, 40)))
    space = Krylov(lambda V: V @ M.T, lambda U: U @ M, random_rows(3, 40, M, seed=0))
    while not space.full:
        space.grow()
    found, M = space.top(), M.numpy()
    sigma, near, far = space.ritz(rank)
    np.testing.assert_allclose(sigma.numpy() / scale, np.linalg.svd(M / scale)[1][:rank], rtol=1e-9)
    np.testing.assert_allclose((far.T * sigma / scale) @ near, M / scale, atol=1e-9 * np.abs(M / scale).max())
    assert found == pytest.approx(np.linalg.norm(M / scale, 2) * scale, rel=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_weights_with_a_long_short_side_and_low_rank_data(dtype):
    rng = np.random.default_rng(0)
    X = rng.standard_normal((60, 4, 3)) @ rng.standard_normal((3, 33))
    Y = rng.standard_normal((60, 34))
    problem = cf.Problem("self_attention", X, Y, beta_ratio=0.1, dtype=dtype)
    fit = problem.objective.evaluate(problem.operator.like.new_zeros(problem.objective.targets.shape))
    exact = np.linalg.norm(problem.operator.adjoint(fit.V).double().numpy(), 2)
    assert problem.beta_max == pytest.approx(exact, rel=1e-5)
    assert cf.solve(problem, tolerance=1e-3).certificate.relative_gap <= 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("scale", [1e-8, 1e-6, 1e6, 1e8])
def test_the_staircase_is_blind_to_the_scale_of_the_tokens(scale, dtype):
    rng = np.random.default_rng(0)
    X, y = rng.standard_normal((50, 6, 10)), rng.integers(0, 3, 50)
    plain = cf.solve(cf.Problem("self_attention", X, y, beta_ratio=0.1), solver="staircase")
    scaled = cf.solve(cf.Problem("self_attention", scale * X, y, beta_ratio=0.1, dtype=dtype), solver="staircase")
    assert scaled.status is cf.Status.CONVERGED
    assert scaled.objective == pytest.approx(plain.objective, rel=2e-4)


def test_tokens_beyond_float32_are_refused_with_a_way_out():
    X = np.full((4, 3, 2), 1e30)
    with pytest.raises(ValueError, match=r"too large.*float64"):
        cf.Problem("self_attention", X, np.array([0, 1, 0, 1]), beta_ratio=0.1, dtype=torch.float32)


def test_a_solve_that_overflows_float32_goes_on_in_float64():
    rng = np.random.default_rng(0)
    X, y = 1e7 * rng.standard_normal((50, 6, 10)), rng.integers(0, 3, 50)
    solution = cf.solve(cf.Problem("self_attention", X, y, beta_ratio=0.1, dtype=torch.float32), solver="staircase")
    assert solution.certificate.relative_gap <= 1e-4


def test_many_classes_have_an_exact_intercept():
    rng = np.random.default_rng(0)
    y = np.concatenate([np.arange(90), rng.integers(0, 90, 210)])
    problem = cf.Problem("mlp", rng.standard_normal((300, 2, 5)), y, beta_ratio=0.1, intercept=True)
    F = torch.from_numpy(3 * rng.standard_normal((300, 90)))
    U = problem.objective.evaluate(F).U
    assert float(U.sum(0).abs().max()) <= 1e-11 * float(U.abs().sum())


def test_the_size_of_an_implicit_matrix_is_known_roughly():
    rng = np.random.default_rng(0)
    problem = cf.Problem(
        "self_attention", rng.standard_normal((20, 3, 6)), rng.standard_normal((20, 4)), beta_ratio=0.1
    )
    M = problem.operator.dual_matrix(torch.from_numpy(rng.standard_normal((20, 4))))
    assert 0.5 <= frobenius_norm(M) / float(M.dense().norm()) <= 2.0


class Matrix:
    """A dense matrix that is met through products."""

    def __init__(self, M):
        self.D = self.like = torch.from_numpy(M)
        self.shape = (1, *M.shape)

    def matvec(self, V, b):
        return V @ self.D.T

    def rmatvec(self, U, b):
        return U @ self.D

"""Fastfood: the fast transform, unbiased kernels, the 1/sqrt(D) law; as a module, a transformer and a pipeline step."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.pipeline import make_pipeline
from sklearn.utils.estimator_checks import check_estimator

import convexformer as cf
from convexformer.data import TokenDataset
from convexformer.features import Fastfood, fwht, hadamard, padded

MODULE_STATE = {"check_no_attributes_set_in_init": "a torch module keeps `training`"}


def tokens(*shape, seed=0, scale=0.4):
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def kernel(X, name, sigma):
    return ((X @ X.T) / sigma**2).exp() if name == "softmax" else (-torch.cdist(X, X).square() / (2 * sigma**2)).exp()


@given(power=st.integers(0, 11), seed=st.integers(0, 99))
def test_the_fast_transform_is_the_hadamard_product_and_its_own_inverse(power, seed):
    x = tokens(3, 2**power, seed=seed)
    assert torch.allclose(fwht(x), x @ hadamard(2**power, x), atol=1e-10)
    assert torch.allclose(fwht(fwht(x)) / 2**power, x, atol=1e-12)


def test_a_hadamard_matrix_has_a_power_of_two():
    with pytest.raises(ValueError, match="power of two"):
        hadamard(12)
    assert [padded(d) for d in (1, 2, 3, 8, 9)] == [1, 2, 4, 8, 16]


@given(d=st.integers(1, 20), features=st.integers(1, 40), kind=st.sampled_from(["positive", "chi"]))
def test_projections_are_those_of_the_matrix_whatever_the_sizes(d, features, kind):
    X = tokens(4, 3, d)
    food = Fastfood(kind, features, seed=d)
    out = food(X)
    assert out.shape == (4, 3, features)
    assert food.matrix().shape == (features, d)
    assert torch.allclose(food.project(X), X @ food.matrix().T, atol=1e-10)


@pytest.mark.parametrize("kind", ["gaussian", "positive", "chi"])
def test_none_takes_as_many_projections_as_the_padded_size(kind):
    assert Fastfood(kind)(tokens(2, 5)).shape[-1] == (16 if kind == "gaussian" else 8)


@pytest.mark.parametrize(
    ("kind", "name", "sigma"),
    [
        ("gaussian", "gaussian", 0.7),
        ("positive", "gaussian", 2.0),
        ("positive", "softmax", 2.0),
    ],
)
def test_kernel_estimates_are_unbiased_and_their_error_falls_as_one_over_the_root(kind, name, sigma):
    X = tokens(6, 10)
    exact = kernel(X, name, sigma)
    errors = {}
    for features in (64, 256, 1024):
        estimates = []
        for seed in range(40):
            phi = Fastfood(kind, features, sigma=sigma, seed=seed, kernel=name)(X)
            estimates.append(phi @ phi.T)
        stack = torch.stack(estimates)
        spread = stack.std(0) / 40**0.5
        assert bool(((stack.mean(0) - exact).abs() <= 5 * spread + 1e-12).all())  # five standard errors
        errors[features] = float((stack - exact).square().mean().sqrt())
    slope = np.polyfit(np.log(list(errors)), np.log(list(errors.values())), 1)[0]
    assert -0.65 < slope < -0.35


def test_rows_are_gaussian_with_the_right_scale():
    V = torch.cat([Fastfood("positive", 512, sigma=2.0, seed=seed).build(13).matrix() for seed in range(8)])
    assert torch.allclose(V.T @ V / len(V), torch.eye(13, dtype=torch.float64) / 4, atol=0.03)
    assert float((V * 2).pow(4).mean()) == pytest.approx(3.0, abs=0.15)


def test_the_printed_offset_is_wrong_unless_sigma_is_one():
    """The report subtracts |x|^2 whatever sigma; for sigma = 2 the estimate is then far too small."""
    X = tokens(2, 8, scale=0.7)
    food = Fastfood("positive", 1 << 15, sigma=2.0).build(8)
    printed = (food.project(X) - X.square().sum(-1, keepdim=True)).exp() / (1 << 15) ** 0.5
    exact = kernel(X, "gaussian", 2.0)
    assert float((printed @ printed.T)[0, 1]) < 0.3 * float(exact[0, 1])
    right = food(X)
    assert float((right @ right.T)[0, 1]) == pytest.approx(float(exact[0, 1]), rel=0.1)


def test_chi_is_a_linear_map_close_to_a_rotation_for_many_degrees():
    X = tokens(5, 64)
    food = Fastfood("chi", dof=64)
    assert torch.allclose(food(2 * X) - food(X), food(X))
    values = torch.linalg.svdvals(food.matrix())
    assert float(values[0] / values[-1]) < 3
    assert float(torch.linalg.cond(Fastfood("chi", dof=1).build(64).matrix())) > 10


@pytest.mark.parametrize("kind", ["gaussian", "positive", "chi"])
def test_scikit_learn_accepts_it(kind):
    check_estimator(Fastfood(kind, sigma=50.0), expected_failed_checks=MODULE_STATE)


def test_containers_come_back_as_they_went_in():
    X = tokens(4, 3, 5)
    food = Fastfood(n_features=8).fit(X)
    out = food.transform(X)
    assert isinstance(out, torch.Tensor)
    assert np.allclose(food.transform(X.numpy()), out.numpy())
    ragged = [X[0, :2].numpy(), X[1]]
    first, second = food.transform(ragged)
    assert isinstance(first, np.ndarray)
    assert np.allclose(first, out[0, :2])
    assert torch.allclose(second, out[1])
    mask = torch.ones(4, 3, dtype=torch.bool)
    mask[0, 2] = False
    masked = food.transform(TokenDataset.of(X, mask))
    assert float(masked.X[0, 2].abs().sum()) == 0
    assert torch.allclose(masked.X[1], out[1])
    assert clone(food).fit(X).transform(X).equal(out)
    assert food.get_feature_names_out()[0] == "fastfood0"


@pytest.mark.parametrize("head", ["attention", "self_attention", "mlp", "linear"])
def test_a_head_behind_it_is_certified_in_a_pipeline(head):
    X, y = cf.data.digits(patch=4)
    X, y = X[:150].numpy(), y[:150].numpy()
    model = make_pipeline(Fastfood(n_features=16, sigma=2.0), cf.TokenClassifier(head=head, beta_ratio=0.2)).fit(X, y)
    assert model[-1].certificate_.relative_gap <= 1e-3
    assert model.score(X, y) > 0.5


def test_as_a_module_it_passes_gradients_and_travels():
    X = tokens(3, 6).requires_grad_()
    food = Fastfood("gaussian", 8)
    food(X).sum().backward()
    assert float(X.grad.norm()) > 0
    twin = Fastfood("gaussian", 8, seed=5).build(6)
    twin.load_state_dict(food.state_dict())
    assert torch.equal(twin(X), food(X))
    assert food.float()(X.detach().float()).dtype == torch.float32


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "gausian"}, "Did you mean 'gaussian'"),
        ({"kernel": "rbf"}, "unknown kernel"),
        ({"n_features": 7}, "even number such as 8"),
        ({"n_features": 0, "kind": "chi"}, "n_features=0"),
        ({"sigma": -1.0}, "sigma=-1.0"),
        ({"dof": 0, "kind": "chi"}, "dof=0"),
    ],
)
def test_bad_options_say_what_was_expected(options, message):
    with pytest.raises(ValueError, match=message):
        Fastfood(**options).fit(tokens(3, 4))


def test_bad_tokens_say_what_was_expected():
    food = Fastfood("positive", sigma=1.0)
    with pytest.raises(NotFittedError):
        food.transform(tokens(3, 4))
    food.fit(tokens(3, 4))
    with pytest.raises(ValueError, match="X has 5 features, but Fastfood is expecting 4"):
        food.transform(tokens(2, 3, 5))
    with pytest.raises(ValueError, match="Standardise the tokens or raise sigma"):
        food.transform(1e3 * tokens(3, 4))
    with pytest.raises(ValueError, match="different widths"):
        food.fit([np.zeros((2, 3)), np.zeros((2, 4))])
    with pytest.raises(ValueError, match="expected tokens"):
        food.fit(torch.zeros(4))

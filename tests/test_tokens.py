"""AsyncScalars tokens: moments, masks, and the many shapes in which users have them."""

import numpy as np
import pytest
import torch

import convexformer as cf
from convexformer.data import TokenDataset
from convexformer.data.tokens import as_tensor


@pytest.fixture(scope="module")
def padded():
    rng = np.random.default_rng(0)
    X = rng.standard_normal((4000, 6, 3))
    lengths = rng.integers(2, 7, 4000)
    return X, np.arange(6) < lengths[:, None], rng.random(4000)


@pytest.mark.parametrize("value", [0.1, -1234.567, 1e-30, 0.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_a_constant_channel_is_constant_whatever_the_mask_and_the_weights(padded, value, dtype):
    X, mask, w = padded
    X = X.copy()
    X[..., 1] = value
    for hidden in (None, mask):
        for weight in (None, torch.from_numpy(w)):
            mean, scale = TokenDataset.of(X, hidden, dtype=dtype).moments(weight)
            assert float(scale[1]) == 1.0
            assert float(mean[1]) == float(torch.tensor(value, dtype=dtype))
            assert mean.dtype == scale.dtype == dtype


def test_moments_are_those_of_the_real_tokens_weighted(padded):
    X, mask, w = padded
    far = X + 1e6  # sums of squares would cancel here
    real, weight = far[mask], np.repeat(w, mask.sum(1))
    mean = np.average(real - 1e6, axis=0, weights=weight)
    deviation = np.sqrt(np.average((real - 1e6 - mean) ** 2, axis=0, weights=weight))
    got = TokenDataset.of(far, mask).moments(torch.from_numpy(w))
    np.testing.assert_allclose(got[0] - 1e6, mean, atol=1e-9)
    np.testing.assert_allclose(got[1], deviation, rtol=1e-9)


def test_samples_without_weight_do_not_make_a_channel_vary(padded):
    X, _, w = padded
    X, w = X.copy(), w.copy()
    X[1:, :, 2], w[0] = 7.0, 0.0
    assert float(TokenDataset.of(X).moments(torch.from_numpy(w))[1][2]) == 1.0


def test_a_channel_stored_in_float32_is_predicted_as_one_stored_in_float64(padded):
    X, mask, _ = padded
    X = X.copy()
    X[..., 1] = 0.1
    y = (X[:, 0, 0] > 0).astype(int)
    model = cf.TokenClassifier(beta_ratio=0.05).fit(X, y, mask=mask)
    again = X.copy()
    again[..., 1] = np.float32(0.1)
    np.testing.assert_allclose(
        model.decision_function(again, mask=mask), model.decision_function(X, mask=mask), atol=1e-6
    )


# ---------------------------------------------------------------------- masks that hide nothing


@pytest.mark.parametrize("head", ["mlp_mixer", "fno", "fnet"])
def test_equal_lengths_need_no_mask_however_they_come(padded, head):
    X, y = padded[0][:40], np.arange(40) % 3
    plain = cf.TokenClassifier(head=head, beta_ratio=0.3).fit(X, y)
    by_list = cf.TokenClassifier(head=head, beta_ratio=0.3).fit(list(X), y)
    by_mask = cf.TokenClassifier(head=head, beta_ratio=0.3).fit(X, y, mask=np.ones(X.shape[:2], int))
    for other in (by_list, by_mask):
        np.testing.assert_array_equal(other.decision_function(list(X)), plain.decision_function(X))


def test_equal_lengths_below_that_of_the_fit_are_still_padded(padded):
    X = padded[0][:40]
    model = cf.TokenClassifier().fit(X, np.arange(40) % 2)
    short = [x[:4] for x in X]
    zeros = np.where(np.arange(6)[:, None] < 4, X, 0.0)
    mask = np.tile(np.arange(6) < 4, (40, 1))
    np.testing.assert_allclose(model.decision_function(short), model.decision_function(zeros, mask=mask))


# ---------------------------------------------------------------------- shapes and dtypes


def test_nested_lists_object_arrays_and_ragged_lists_are_tokens(padded):
    X, mask, _ = padded
    X, mask, y = X[:30], mask[:30], np.arange(30) % 2
    plain = cf.TokenClassifier().fit(X, y)
    np.testing.assert_array_equal(cf.TokenClassifier().fit(X.tolist(), y).predict(X.tolist()), plain.predict(X))
    ragged = [x[m] for x, m in zip(X, mask, strict=True)]
    held = np.empty(30, dtype=object)
    held[:] = ragged
    by_list, by_object = cf.TokenClassifier().fit(ragged, y), cf.TokenClassifier().fit(held, y)
    np.testing.assert_array_equal(by_list.decision_function(ragged), by_object.decision_function(held))


def test_feature_maps_are_refused_with_the_way_to_flatten_them(padded):
    maps = padded[0][:8].reshape(8, 2, 3, 3)
    with pytest.raises(ValueError, match=r"4 axes.*X\.reshape\(len\(X\), -1, X\.shape\[-1\]\)"):
        cf.TokenClassifier().fit(maps, np.arange(8) % 2)


@pytest.mark.parametrize("dtype", [">f8", ">f4", ">i4", np.longdouble], ids=str)
def test_foreign_number_formats_are_read(dtype):
    values = np.arange(6).reshape(2, 3)
    assert as_tensor(values.astype(dtype), "X").double().tolist() == values.tolist()

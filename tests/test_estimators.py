"""The scikit-learn estimators: manners, determinism, certificates, every kind of input."""

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

import convexformer as cf

ESTIMATORS = [cf.TokenClassifier(), cf.TokenRegressor()]


@parametrize_with_checks(ESTIMATORS)
def test_scikit_learn_contract(estimator, check):
    check(estimator)


@pytest.fixture(scope="module")
def digits():
    X, y = cf.data.digits(patch=4)
    return X[:300].numpy(), y[:300].numpy()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"decay": "l2"},
        {"activation": "gated_relu", "gates": 3},
        {"head": "mlp", "activation": "gated_relu", "gates": 4},
        {"head": "linear"},
        {"head": cf.heads.Attention(decay="l2")},
    ],
    ids=str,
)
def test_fit_is_certified_deterministic_and_equal_to_its_network(digits, options):
    X, y = digits
    first, second = (cf.TokenClassifier(**options).fit(X, y) for _ in range(2))
    assert first.certificate_.kind == "exact"
    assert first.certificate_.relative_gap <= first.tolerance
    np.testing.assert_array_equal(first.decision_function(X), second.decision_function(X))
    with torch.no_grad():
        outputs = first.network_(torch.from_numpy(X)).numpy()
    np.testing.assert_allclose(outputs, first.decision_function(X), atol=1e-8)
    np.testing.assert_allclose(first.predict_proba(X).sum(1), 1.0)
    assert first.certify(X, y).primal == pytest.approx(first.certificate_.primal, rel=1e-12)


def test_two_classes_use_one_output_and_any_labels(digits):
    X, y = digits
    rows = y < 2
    names = np.array(["zero", "one"])[y[rows]]
    model = cf.TokenClassifier().fit(X[rows], names)
    assert list(model.classes_) == ["one", "zero"]
    assert model.decision_function(X[rows]).shape == (rows.sum(),)
    assert model.predict_proba(X[rows]).shape == (rows.sum(), 2)
    assert model.score(X[rows], names) > 0.9
    hinge = cf.TokenClassifier(loss="squared_hinge").fit(X[rows], names)
    assert not hasattr(hinge, "predict_proba")
    assert hinge.score(X[rows], names) > 0.9


def test_regressor_shapes_and_losses(digits):
    X, y = digits
    model = cf.TokenRegressor().fit(X, y.astype(float))
    assert model.predict(X).shape == (300,)
    both = cf.TokenRegressor(loss="huber").fit(X, np.stack([y, -y], 1).astype(float))
    assert both.predict(X).shape == (300, 2)
    per_token = cf.TokenRegressor(head="mlp").fit(X, X[:, :, :2])
    assert per_token.predict(X).shape == (300, 4, 2)


def test_pipeline_and_grid_search_on_tokens(digits):
    X, y = digits
    pipeline = make_pipeline(FunctionTransformer(lambda X: X * 2.0), cf.TokenClassifier())
    search = GridSearchCV(pipeline, {"tokenclassifier__beta_ratio": [0.5, 0.05]}, cv=2).fit(X, y)
    assert search.best_params_ == {"tokenclassifier__beta_ratio": 0.05}
    flat = make_pipeline(StandardScaler(), cf.TokenClassifier(token_shape=X.shape[1:]))
    assert cross_val_score(flat, X.reshape(300, -1), y, cv=2).mean() > 0.6


def test_ragged_lists_masks_and_torch_tensors_agree():
    rng = np.random.default_rng(0)
    X, y = rng.standard_normal((60, 5, 3)), rng.integers(0, 3, 60)
    lengths = rng.integers(1, 6, 60)
    lengths[0] = 5
    mask = np.arange(5) < lengths[:, None]
    ragged = [x[:n] for x, n in zip(X, lengths, strict=True)]
    by_list = cf.TokenClassifier(beta_ratio=0.3).fit(ragged, y)
    by_mask = cf.TokenClassifier(beta_ratio=0.3).fit(
        torch.from_numpy(np.where(mask[..., None], X, np.nan)), y, mask=mask
    )
    np.testing.assert_allclose(by_list.decision_function(ragged), by_mask.decision_function(X, mask=mask), atol=1e-10)
    # a batch of short sequences is padded to the length of the fit
    assert by_list.predict([x[:2] for x in ragged[:4]]).shape == (4,)


def test_fit_after_clone_and_warm_start(digits):
    X, y = digits
    model = cf.TokenClassifier(tolerance=1e-6, warm_start=True).fit(X, y)
    cold = model.n_iter_
    assert model.fit(X, y).n_iter_ < cold
    assert clone(model).get_params() == model.get_params()


def test_a_warm_start_after_other_options_begins_anew(digits):
    X, y = digits
    model = cf.TokenClassifier(activation="gated_relu", gates=2, warm_start=True).fit(X, y)
    again = model.set_params(random_state=1).fit(X, y)
    fresh = cf.TokenClassifier(activation="gated_relu", gates=2, random_state=1).fit(X, y)
    np.testing.assert_array_equal(again.decision_function(X), fresh.decision_function(X))
    model.set_params(random_state=2)
    with pytest.raises(ValueError, match="gates are others"):
        model.certify(X, y)


@pytest.mark.parametrize("standardize", [False, True])
def test_a_fitted_estimator_holds_no_training_data(digits, standardize):
    X, y = digits[0][:60].astype(np.float64), digits[1][:60].copy()
    kept, labels = X.copy(), y.copy()
    model = cf.TokenClassifier(standardize=standardize).fit(X, y)
    before, proof = model.decision_function(kept), model.certificate_
    X *= 2
    y[:] = 0
    np.testing.assert_array_equal(model.decision_function(kept), before)
    assert model.certificate_ == proof
    assert model.certify(kept, labels).primal == pytest.approx(proof.primal, rel=1e-12)


def test_absolute_beta_overrides_the_ratio(digits):
    X, y = digits
    model = cf.TokenClassifier(beta=3.5, beta_ratio=0.1).fit(X, y)
    assert model.beta_ == 3.5


def test_class_weight_is_a_sample_weight(digits):
    X, y = digits
    weight = np.where(y == 3, 5.0, 1.0)
    by_class = cf.TokenClassifier(class_weight={3: 5.0}).fit(X, y)
    by_sample = cf.TokenClassifier().fit(X, y, sample_weight=weight)
    np.testing.assert_allclose(by_class.decision_function(X), by_sample.decision_function(X), atol=1e-9)


def test_token_importance_is_there_only_where_positions_matter(digits):
    X, y = digits
    assert cf.TokenClassifier().fit(X, y).token_importance_.shape == (4,)
    assert not hasattr(cf.TokenClassifier(head="linear").fit(X, y), "token_importance_")


def test_cross_validation_chooses_a_ratio_without_leaking(digits):
    X, y = digits
    model = cf.TokenClassifierCV(n_betas=4, beta_min_ratio=0.02, cv=3).fit(X, y)
    assert model.cv_results_["mean_test_score"].shape == (4,)
    assert model.cv_results_["max_relative_gap"].max() <= model.tolerance
    assert model.beta_ == pytest.approx(model.beta_ratio_ * model.beta_max_)
    assert model.best_score_ == model.cv_results_["mean_test_score"].max()
    # fold k of the table is what a plain classifier gets on that split, standardised on its own training part
    from sklearn.model_selection import StratifiedKFold

    train, test = next(StratifiedKFold(3).split(X, y))
    plain = cf.TokenClassifier(beta_ratio=model.beta_ratio_).fit(X[train], y[train])
    table = model.cv_results_["split0_test_score"][model.best_index_]
    assert abs(plain.score(X[test], y[test]) - table) <= 2 / len(test)  # two certified solutions, two roundings


def test_cross_validation_in_parallel_equals_serial(digits):
    X, y = digits
    options = {"n_betas": 3, "beta_min_ratio": 0.1, "cv": 2, "scoring": "neg_log_loss"}
    serial = cf.TokenClassifierCV(**options).fit(X, y, sample_weight=np.ones(300))
    parallel = cf.TokenClassifierCV(n_jobs=2, **options).fit(X, y, sample_weight=np.ones(300))
    np.testing.assert_allclose(serial.cv_results_["mean_test_score"], parallel.cv_results_["mean_test_score"])
    assert serial.predict(X).tolist() == parallel.predict(X).tolist()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"head": "atention"}, "Did you mean 'attention'"),
        ({"activation": "relu"}, "gated_relu"),
        ({"decay": "l3"}, "decay"),
        ({"loss": "squared"}, "loss"),
        ({"loss": "logistic"}, "two classes"),
        ({"beta": -1.0}, "beta=-1.0"),
        ({"device": "tpu0"}, "device"),
    ],
    ids=str,
)
def test_estimator_options_are_checked(digits, options, message):
    with pytest.raises(ValueError, match=message):
        cf.TokenClassifier(**options).fit(*digits)


def test_estimator_data_is_checked(digits):
    X, y = digits
    model = cf.TokenClassifier().fit(X, y)
    with pytest.raises(ValueError, match="d=3"):
        model.predict(X[:, :, :3])
    with pytest.raises(ValueError, match="fitted with 4"):
        model.predict(X[:, :2])
    with pytest.raises(ValueError, match="300 samples and y has 299"):
        cf.TokenClassifier().fit(X, y[:-1])
    with pytest.raises(ValueError, match="one class"):
        cf.TokenClassifier().fit(X, np.zeros(300, dtype=int))
    with pytest.raises(ValueError, match="no sample of positive weight"):
        cf.TokenClassifier().fit(X, y, sample_weight=(y != 3).astype(float))
    with pytest.raises(ValueError, match="class_weight"):
        cf.TokenRegressor(class_weight="balanced").fit(X, y)

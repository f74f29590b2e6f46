"""The scikit-learn estimators: manners, determinism, certificates, every kind of input."""

import warnings

import numpy as np
import pytest
import torch
from sklearn import config_context
from sklearn.base import clone
from sklearn.exceptions import ConvergenceWarning
from sklearn.metrics import r2_score
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

import convexformer as cf
from convexformer.solvers.monitor import Monitor

ESTIMATORS = [
    cf.TokenClassifier(),
    cf.TokenRegressor(),
    cf.TokenClassifier(head="linear"),
    cf.TokenRegressor(head="linear"),
]


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
    with pytest.raises(ValueError, match="gates differ"):
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
    model = cf.TokenClassifierCV(n_betas=4, beta_min_ratio=0.02, cv=3, fold_tolerance=1e-3).fit(X, y)
    assert model.cv_results_["mean_test_score"].shape == (4,)
    assert model.cv_results_["max_relative_gap"].max() <= model.fold_tolerance
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
        ({"activation": "relue"}, "gated_relu"),
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


# ---------------------------------------------------------------------- heads that know no masks


@pytest.mark.parametrize("head", ["fno", "mlp_mixer", "fnet"])
def test_a_mask_that_fit_refuses_is_refused_by_predict(digits, head):
    X, y = digits
    model = cf.TokenClassifier(head=head).fit(X, y)
    ragged, mask = [x[: 1 + i % 4] for i, x in enumerate(X)], np.ones(X.shape[:2], bool)
    mask[0, -1] = False
    for inputs in ({"X": ragged}, {"X": X, "mask": mask}):
        with pytest.raises(ValueError, match=f"the {head} head mixes tokens by position"):
            model.predict(**inputs)
        with pytest.raises(ValueError, match="no meaning"):
            model.solution_.predict(**inputs)


def test_a_pool_of_windows_takes_any_number_of_tokens(digits):
    X, y = digits
    model = cf.TokenClassifier(head="poolformer").fit(X, y)
    with torch.no_grad():
        outputs = model.network_(torch.from_numpy(X[:, :3])).numpy()
    np.testing.assert_allclose(model.decision_function(X[:, :3]), outputs, atol=1e-8)
    grid = cf.TokenClassifier(head=cf.heads.PoolFormer(grid=(2, 2))).fit(X, y)
    with pytest.raises(ValueError, match="fitted with 4"):
        grid.predict(X[:, :3])


def test_token_importance_says_why_there_is_none(digits):
    X, y = digits
    with pytest.raises(AttributeError, match="no weights that belong to token positions"):
        cf.TokenClassifier(head="mlp_mixer").fit(X, y).token_importance_


def test_blocks_that_do_not_divide_are_refused_with_those_that_do(digits):
    X, y = digits
    with pytest.raises(ValueError, match=r"cf\.heads\.BlockFNO\(blocks=B\) with B one of 3"):
        cf.TokenClassifier(head="block_fno").fit(X[:, :, :3], y % 3)
    with pytest.raises(ValueError, match=r"head='fno'.*loss='cross_entropy'"):
        cf.TokenClassifier(head="block_fno").fit(X, y % 2)
    assert cf.TokenClassifier(head="block_fno", loss="cross_entropy").fit(X, y % 2).score(X, y % 2) > 0.5


# ---------------------------------------------------------------------- masks in scores


@pytest.fixture(scope="module")
def padded():
    rng = np.random.default_rng(2)
    X, y = rng.standard_normal((80, 6, 3)), np.arange(80) % 2
    lengths = rng.integers(2, 7, 80)
    mask = np.arange(6) < lengths[:, None]
    X = np.where(mask[..., None], X + 0.8 * y[:, None, None], 50 * (1 - 2 * y[:, None, None]))  # padding that misleads
    return X, y, mask


def test_scores_take_masks_and_weights(padded):
    X, y, mask = padded
    w = np.random.default_rng(0).random(80)
    model = cf.TokenClassifier(head="mlp").fit(X, y, mask=mask)
    hits = model.predict(X, mask=mask) == y
    assert model.score(X, y, mask=mask) == pytest.approx(hits.mean())
    assert model.score(X, y, w, mask) == pytest.approx(np.average(hits, weights=w))
    assert model.score([x[m] for x, m in zip(X, mask, strict=True)], y) == pytest.approx(hits.mean())
    regressor = cf.TokenRegressor(head="mlp").fit(X, y.astype(float), mask=mask)
    assert regressor.score(X, y, mask=mask) == pytest.approx(r2_score(y, regressor.predict(X, mask=mask)))
    search = cf.TokenClassifierCV(head="mlp", n_betas=2, beta_min_ratio=0.2, cv=2).fit(X, y, mask=mask)
    assert search.score(X, y, mask=mask) > 0.7


def test_masks_are_routed_to_fit_and_score_alike(padded):
    X, y, mask = padded
    ragged = [x[m] for x, m in zip(X, mask, strict=True)]
    expected = cross_val_score(cf.TokenClassifier(head="mlp"), ragged, y, cv=2)
    with config_context(enable_metadata_routing=True):
        routed = cf.TokenClassifier(head="mlp").set_fit_request(mask=True).set_score_request(mask=True)
        np.testing.assert_allclose(cross_val_score(routed, X, y, cv=2, params={"mask": mask}), expected)


def test_padding_without_a_mask_is_warned_of(padded, tmp_path):
    X, y, mask = padded
    model = cf.TokenClassifier(head="mlp").fit(X, y, mask=mask)
    for fitted in (model, cf.load(cf.save(model, tmp_path))):
        with pytest.warns(cf.MissingMaskWarning, match="fitted with a mask") as caught:
            fitted.predict(X)
        assert caught[0].filename == __file__
    with pytest.warns(cf.MissingMaskWarning):
        model.score(X, y)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.predict([x[m] for x, m in zip(X, mask, strict=True)])
        model.predict(X, mask=np.ones_like(mask))
        cf.TokenClassifier(head="mlp").fit(X, y).predict(X)


# ---------------------------------------------------------------------- Ctrl-C


def interrupted_after(checks, monkeypatch):
    """Let Ctrl-C come at the gap check of this number, counted over all solves."""
    seen = []
    check = Monitor.check

    def press(self, Z, fit):
        point = check(self, Z, fit)
        seen.append(self.iteration)
        if len(seen) == checks:
            raise KeyboardInterrupt
        return point

    monkeypatch.setattr(Monitor, "check", press)
    return seen


def test_ctrl_c_ends_fit_and_keeps_the_best_point(digits, monkeypatch):
    X, y = digits
    model = cf.TokenClassifier(beta_ratio=0.01, tolerance=1e-8, warm_start=True)
    interrupted_after(3, monkeypatch)
    with pytest.warns(ConvergenceWarning, match="interrupted"), pytest.raises(KeyboardInterrupt, match="solution_"):
        model.fit(X, y)
    assert model.solution_.status is cf.Status.INTERRUPTED
    assert 1e-8 < model.certificate_.relative_gap < 1
    assert model.predict(X).shape == (300,)
    assert model.fit(X, y).certificate_.relative_gap <= 1e-8  # goes on, and is whole


def test_ctrl_c_ends_a_search_around_fit(digits, monkeypatch):
    X, y = digits
    seen = interrupted_after(2, monkeypatch)
    with pytest.warns(ConvergenceWarning, match="interrupted"), pytest.raises(KeyboardInterrupt):
        cross_val_score(cf.TokenClassifier(tolerance=1e-8), X, y, cv=3)
    assert len(seen) == 2
    seen = interrupted_after(2, monkeypatch)
    with pytest.warns(ConvergenceWarning, match="interrupted"), pytest.raises(KeyboardInterrupt):
        GridSearchCV(cf.TokenClassifier(tolerance=1e-8), {"beta_ratio": [0.1, 0.2]}, cv=2).fit(X, y)
    assert len(seen) == 2


# ---------------------------------------------------------------------- options and small print


def test_random_states_of_every_kind_draw_gates(digits, tmp_path):
    X, y = digits
    options = {"activation": "gated_relu", "gates": 3}
    plain = cf.TokenClassifier(random_state=2, **options).fit(X, y)
    numpy = cf.TokenClassifier(random_state=np.int64(2), **options).fit(X, y)
    np.testing.assert_array_equal(plain.decision_function(X), numpy.decision_function(X))
    states = [np.random.RandomState(7), np.random.RandomState(7), None]
    first, second, free = (cf.TokenClassifier(random_state=state, **options).fit(X, y) for state in states)
    np.testing.assert_array_equal(first.decision_function(X), second.decision_function(X))
    for model in (first, free):  # the gates are kept with the fit
        assert model.certify(X, y).primal == pytest.approx(model.certificate_.primal, rel=1e-12)
        assert cf.load(cf.save(model, tmp_path)).certify(X, y).primal == model.certify(X, y).primal
    with pytest.raises(ValueError, match="'seven' cannot be used"):
        cf.TokenClassifier(random_state="seven", **options).fit(X, y)
    assert cf.heads.PoolFormer(window=np.int64(3)).window == 3
    assert cf.heads.BlockFNO(blocks=np.int64(3)).blocks == 3
    with pytest.raises(TypeError, match="seed is a NoneType"):
        cf.Problem(cf.heads.MLP("gated_relu", seed=None), X, y, beta=1.0)


def test_two_classes_by_cross_entropy_have_one_score(digits):
    X, y = digits
    model = cf.TokenClassifier(loss="cross_entropy").fit(X, y % 2)
    scores = model.decision_function(X)
    assert scores.shape == (300,)
    np.testing.assert_array_equal(model.predict(X), (scores > 0).astype(int))
    np.testing.assert_allclose(model.predict_proba(X)[:, 1], 1 / (1 + np.exp(-scores)))
    outputs = model.solution_.predict((torch.from_numpy(X) - model.mean_) / model.scale_)
    np.testing.assert_allclose(model.predict_proba(X), outputs.softmax(1), atol=1e-12)
    assert cross_val_score(model, X, y % 2, cv=2, scoring="roc_auc", error_score="raise").mean() > 0.5


def test_a_table_of_bfloat16_is_read():
    X = torch.randn(20, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    y = [0, 1] * 10
    rounded = cf.TokenClassifier().fit(X.double(), y)
    np.testing.assert_allclose(cf.TokenClassifier().fit(X, y).decision_function(X), rounded.decision_function(X))


def test_read_only_weights_are_taken_quietly(digits):
    X, y = digits
    w = np.ones(300)
    w.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cf.TokenClassifier().fit(X, y, sample_weight=w)


def test_messages_name_labels_as_the_user_wrote_them(digits):
    X, y = digits
    with pytest.raises(ValueError, match=r"one class only \(0\)"):
        cf.TokenClassifier().fit(X, np.zeros(300, dtype=int))
    with pytest.raises(ValueError, match="class 3 has no sample"):
        cf.TokenClassifier().fit(X, y, sample_weight=(y != 3).astype(float))


def test_warnings_of_a_fit_point_at_the_line_that_called_it(digits):
    X, y = digits
    with pytest.warns(ConvergenceWarning) as caught:
        cf.TokenClassifier(beta_ratio=1e-3, max_iter=2).fit(X, y)
    assert [warning.filename for warning in caught] == [__file__]

"""Model selection: rules, engines, weights, and no leakage."""

import warnings

import joblib
import numpy as np
import pytest
import torch
from sklearn.metrics import make_scorer, max_error
from sklearn.model_selection import GroupKFold, KFold
from sklearn.utils.estimator_checks import parametrize_with_checks

import convexformer as cf
from convexformer.estimators import search
from convexformer.registry import GridEndWarning

QUICK = {"n_betas": 2, "beta_min_ratio": 0.2, "cv": 2}


@parametrize_with_checks([cf.TokenRegressorCV(**QUICK), cf.TokenClassifierCV(**QUICK)])
def test_cross_validated_estimators_keep_scikit_learns_contract(estimator, check):
    check(estimator)


@pytest.fixture(scope="module")
def planted():
    rng = np.random.default_rng(5)
    X = rng.standard_normal((120, 6, 3))
    y = X[:, 1] @ rng.standard_normal(3) + X[:, 4] @ rng.standard_normal(3) + 1.5 * rng.standard_normal(120)
    return X, y


def test_the_one_standard_error_rule_takes_the_sparsest_head_that_is_as_good(planted):
    options = {"n_betas": 10, "beta_min_ratio": 0.01, "cv": 5, "patience": None}
    best = cf.TokenRegressorCV(**options).fit(*planted)
    sparse = cf.TokenRegressorCV(selection="1se", **options).fit(*planted)
    table = best.cv_results_
    top = int(np.argmax(table["mean_test_score"]))
    scores = np.array([table[f"split{k}_test_score"] for k in range(5)])
    np.testing.assert_allclose(table["standard_error"], scores.std(0, ddof=1) / np.sqrt(5))
    assert best.best_index_ == top
    bar = table["mean_test_score"][top] - table["standard_error"][top]
    assert sparse.best_index_ == np.flatnonzero(table["mean_test_score"] >= bar)[0] < top
    assert sparse.beta_ratio_ > best.beta_ratio_
    assert (sparse.token_importance_ > 0).sum() <= (best.token_importance_ > 0).sum()
    assert sparse.beta_ == pytest.approx(sparse.beta_ratio_ * sparse.beta_max_)
    assert sparse.certificate_.relative_gap <= sparse.tolerance
    with pytest.raises(ValueError, match="selection"):
        cf.TokenRegressorCV(selection="2se", **QUICK).fit(*planted)


@pytest.mark.parametrize("backend", ["threading", "loky"])
def test_folds_run_on_joblibs_current_backend(planted, backend):
    serial = cf.TokenRegressorCV(**QUICK).fit(*planted)
    threads = torch.get_num_threads()
    with joblib.parallel_backend(backend, n_jobs=2):
        parallel = cf.TokenRegressorCV(**QUICK).fit(*planted)
    assert torch.get_num_threads() == threads
    np.testing.assert_allclose(serial.cv_results_["mean_test_score"], parallel.cv_results_["mean_test_score"])


def test_folds_that_share_a_process_share_its_threads(planted, monkeypatch):
    seen = []
    learn = cf.TokenRegressor._learn_scale
    monkeypatch.setattr(
        cf.TokenRegressor,
        "_learn_scale",
        lambda self, *args: (seen.append(torch.get_num_threads()), learn(self, *args)),
    )
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        with joblib.parallel_backend("threading", n_jobs=2):
            cf.TokenRegressorCV(**QUICK).fit(*planted)
        assert max(seen[:2]) <= 2
        assert torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(before)


def test_each_fold_standardises_on_its_own_training_part(planted, monkeypatch):
    X, y = planted
    seen = []
    learn = cf.TokenRegressor._learn_scale

    def watch(self, tokens, w):
        learn(self, tokens, w)
        seen.append((tokens.n_samples, self.mean_.clone()))

    monkeypatch.setattr(cf.TokenRegressor, "_learn_scale", watch)
    splitter = KFold(3)
    cf.TokenRegressorCV(n_betas=2, beta_min_ratio=0.2, cv=splitter).fit(X, y)
    assert len(seen) == 3 + 1  # once a fold, once for the last fit
    for (size, mean), (train, _) in zip(seen[:3], splitter.split(X), strict=True):
        assert size == len(train)
        np.testing.assert_allclose(mean.numpy(), X[train].mean((0, 1)), atol=1e-12)
    np.testing.assert_allclose(seen[3][1].numpy(), X.mean((0, 1)), atol=1e-12)


def test_what_is_left_out_cannot_change_how_a_fold_is_fitted(planted):
    X, y = planted
    rows = [(np.arange(60), np.arange(60, 120))]
    wild = X.copy()
    wild[60:] = 1e3  # were these seen in training, scale and beta_max would change
    scores = []
    scorer = lambda model, tokens, targets: float(model.predict(X[:60]).sum())  # noqa: E731
    for data in (X, wild):
        scores.append(cf.TokenRegressorCV(**{**QUICK, "cv": rows}, scoring=scorer).fit(data, y).cv_results_)
    np.testing.assert_array_equal(scores[0]["mean_test_score"], scores[1]["mean_test_score"])


def test_sample_weights_count_in_the_score_where_a_scorer_takes_them(planted):
    X, y = planted
    w = np.ones(120)
    w[::3] = 0.0
    kept = w > 0
    folds = [(np.arange(60), np.arange(60, 120))]
    position = np.cumsum(kept) - 1
    inner = [(position[np.arange(60)[kept[:60]]], position[60 + np.flatnonzero(kept[60:])])]
    for scoring in (None, "neg_mean_squared_error"):
        weighted = cf.TokenRegressorCV(**{**QUICK, "cv": folds}, scoring=scoring, tolerance=1e-9).fit(
            X, y, sample_weight=w
        )
        dropped = cf.TokenRegressorCV(**{**QUICK, "cv": inner}, scoring=scoring, tolerance=1e-9).fit(X[kept], y[kept])
        np.testing.assert_allclose(
            weighted.cv_results_["mean_test_score"], dropped.cv_results_["mean_test_score"], atol=1e-3
        )
    plain = make_scorer(max_error, greater_is_better=False)  # has no weights
    assert cf.TokenRegressorCV(**QUICK, scoring=plain).fit(X, y, sample_weight=w).best_score_ < 0


def test_groups_reach_the_splitter_and_several_outputs_work(planted):
    X, y = planted
    groups = np.arange(120) % 4
    model = cf.TokenRegressorCV(n_betas=2, beta_min_ratio=0.2, cv=GroupKFold(4)).fit(
        X, np.stack([y, -y], 1), groups=groups
    )
    assert "split3_test_score" in model.cv_results_
    assert model.predict(X).shape == (120, 2)
    with pytest.raises(ValueError, match="per token"):
        cf.TokenRegressorCV(head="mlp", **QUICK).fit(X, X[:, :, :2])


def test_progress_of_folds_is_shown_and_the_model_can_be_saved(planted, tmp_path, capsys):
    model = cf.TokenRegressorCV(verbose=1, **QUICK).fit(*planted)
    capsys.readouterr()
    loaded = cf.load(cf.save(model, tmp_path / "model"))
    assert isinstance(loaded, cf.TokenRegressorCV)
    np.testing.assert_array_equal(loaded.predict(planted[0]), model.predict(planted[0]))


def test_ctrl_c_ends_the_search(planted, monkeypatch):
    from convexformer.estimators import folds

    def half(problem, ratios, **options):
        yield cf.solve(problem.with_beta(0.01 * problem.beta), callback=lambda record, weights: True, tolerance=1e-12)

    monkeypatch.setattr(folds, "walk", half)
    with pytest.raises(KeyboardInterrupt):
        cf.TokenRegressorCV(**QUICK).fit(*planted)


def test_a_saved_search_keeps_what_it_found(planted, tmp_path):
    model = cf.TokenRegressorCV(**QUICK).fit(*planted)
    back = cf.load(cf.save(model, tmp_path))
    assert back.cv_results_.keys() == model.cv_results_.keys()
    for name, column in model.cv_results_.items():
        np.testing.assert_array_equal(back.cv_results_[name], column)
        assert isinstance(back.cv_results_[name], np.ndarray)
    np.testing.assert_array_equal(back.beta_ratios_, model.beta_ratios_)
    for name in ("best_index_", "best_score_", "beta_ratio_", "n_iter_"):
        assert getattr(back, name) == getattr(model, name)


def test_folds_and_the_last_fit_have_the_same_gates(planted, monkeypatch):
    seen = []
    problem = cf.TokenRegressor._problem

    def watch(self, *args, **options):
        built = problem(self, *args, **options)
        seen.append(built.head.seed)
        return built

    monkeypatch.setattr(cf.TokenRegressor, "_problem", watch)
    cf.TokenRegressorCV(activation="gated_relu", gates=2, random_state=None, **QUICK).fit(*planted)
    assert len(seen) == 3
    assert len(set(seen)) == 1


def test_beta_is_chosen_by_one_score(planted):
    with pytest.raises(ValueError, match="names several scores"):
        cf.TokenRegressorCV(**QUICK, scoring=["r2", "neg_mean_squared_error"]).fit(*planted)
    with pytest.raises(ValueError, match=r"returned 2 scores \(a, b\)"):
        cf.TokenRegressorCV(**QUICK, scoring=lambda model, X, y: {"a": 1.0, "b": 2.0}).fit(*planted)


def test_a_search_has_no_option_that_does_nothing():
    assert "warm_start" not in cf.TokenClassifierCV().get_params()


def test_a_search_has_no_checkpoints(planted, tmp_path):
    with pytest.raises(TypeError, match="TokenRegressorCV has no checkpoints"):
        cf.TokenRegressorCV(**QUICK).fit_checkpointed(*planted, checkpoint=tmp_path / "run")


# ---------------------------------------------------------------------- what selection cannot see is not computed


def fake_fold(rows):
    """Folds whose paths score these rows, whatever the data are."""
    rows = iter(rows)

    def fold(*args):
        row = np.array(next(rows))
        return row, np.where(np.isnan(row), np.nan, 1e-3)

    return fold


def search_of(monkeypatch, rows, **options):
    monkeypatch.setattr(search, "score_path", fake_fold(rows))
    rng = np.random.default_rng(0)
    X = rng.standard_normal((20, 3, 2))
    grid = {"n_betas": len(rows[0]), "beta_min_ratio": 0.1, "cv": len(rows)}
    return cf.TokenRegressorCV(**grid, **options).fit(X, X[:, 0, 0])


def test_a_fold_that_has_ended_counts_with_its_last_score(monkeypatch):
    nan = np.nan
    model = search_of(monkeypatch, [[0.0, 0.5, 0.4, nan, nan], [0.0, 0.3, 0.6, 0.5, nan]])
    np.testing.assert_allclose(model.cv_results_["mean_test_score"], [0.0, 0.4, 0.5, 0.45, nan])
    np.testing.assert_array_equal(model.cv_results_["split0_test_score"], [0.0, 0.5, 0.4, nan, nan])
    np.testing.assert_allclose(model.cv_results_["max_relative_gap"], [1e-3] * 4 + [nan])
    assert (model.best_index_, model.best_score_) == (2, 0.5)


def test_a_selection_at_the_end_of_the_grid_warns(monkeypatch):
    with pytest.warns(GridEndWarning, match=r"beta_ratio=0\.1; a smaller one may be better"):
        search_of(monkeypatch, 2 * [[0.0, 0.5, 0.6]])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        search_of(monkeypatch, 2 * [[0.0, 0.6, 0.6]])  # a tie: the larger beta is taken
        search_of(monkeypatch, 2 * [[0.0, 0.6, np.nan]])


def test_a_path_ends_when_scores_get_no_better_and_not_before_they_rise(planted):
    X, y = planted
    options = {"n_betas": 8, "beta_min_ratio": 1e-3, "cv": 2, "fold_tolerance": 1e-1}
    for curve, length in (((0, 1, 3, 2, 2, 2, 4, 5), 5), ((0, 0, 0, 0, 0, 1, 2, 3), 8)):
        fed = [*curve[:length], *curve[:length]]
        model = cf.TokenRegressorCV(**options, patience=2, scoring=lambda *args, fed=fed: fed.pop(0)).fit(X, y)
        assert not fed
        assert int((~np.isnan(model.cv_results_["split0_test_score"])).sum()) == length
    with pytest.raises(ValueError, match="patience=0"):
        cf.TokenRegressorCV(**options, patience=0).fit(X, y)


def test_a_coarse_search_selects_what_a_fine_one_does_and_certifies_its_last_fit(planted):
    options = {"n_betas": 8, "beta_min_ratio": 1e-2, "cv": 3}
    coarse = cf.TokenRegressorCV(**options).fit(*planted)
    fine = cf.TokenRegressorCV(**options, fold_tolerance=1e-6, patience=None).fit(*planted)
    assert coarse.best_index_ == fine.best_index_
    assert coarse.best_score_ == pytest.approx(fine.best_score_, abs=5e-3)
    assert coarse.certificate_.meets(coarse.tolerance)
    assert np.nanmax(coarse.cv_results_["max_relative_gap"]) <= coarse.fold_tolerance

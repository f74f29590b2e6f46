"""Feature maps, feature and kernel heads, learned block weights, and the program that ``head="auto"`` solves."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace

import cvxpy as cp
import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.model_selection import GroupKFold

import convexformer as cf
from convexformer.data import TokenDataset
from convexformer.estimators import part, portfolio, race, search
from convexformer.estimators.held_out import HeldOut
from convexformer.estimators.portfolio import AutoGrid
from convexformer.features import base
from convexformer.features.random_features import n_random_features
from convexformer.gauges import FrobeniusNorm, Ridge, ScaledPenalty
from convexformer.solvers.block_newton import block_newton
from convexformer.solvers.block_newton.blocks import Blocks
from convexformer.solvers.run import Limits
from convexformer.testing import check_head, check_penalty
from convexformer.weights import Representer, Weights

F, H = cf.features, cf.heads

FEATURES = {
    "mean": F.MeanPooling(),
    "flat": F.Flatten(),
    "class": F.ClassToken(),
    "sqrt": F.CovariancePooling(),
    "sqrt, 3 channels": F.CovariancePooling(max_channels=3),
    "log": F.CovariancePooling("log"),
    "raw": F.CovariancePooling("raw"),
    "queries": F.SoftmaxQueries(4),
    "random": F.RandomFeatures(F.Flatten(), n_features=32),
}


@pytest.fixture(scope="module")
def data() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    y = np.arange(36) % 3
    X = rng.normal(size=(36, 4, 5))
    X[:, 0, :3] += np.eye(3)[y]
    mask = np.ones((36, 4), bool)
    mask[::3, 2:] = False
    return X, y, mask


# ---------------------------------------------------------------------- features


@pytest.mark.parametrize("name", FEATURES)
def test_features_ignore_masked_tokens_and_the_size_of_batches(name, data, monkeypatch):
    X, _, mask = data
    feature = clone(FEATURES[name]).fit(X, mask=mask)
    whole = feature.transform(X, mask=mask)
    assert whole.shape == (len(X), feature.n_outputs)
    noisy = np.where(mask[..., None], X, np.nan)
    np.testing.assert_array_equal(feature.transform(noisy, mask=mask), whole)
    monkeypatch.setattr(base, "BATCH", 1)
    np.testing.assert_allclose(feature.transform(X, mask=mask), whole, atol=1e-12)
    single = feature(torch.tensor(X, dtype=torch.float32), torch.tensor(mask))
    assert single.dtype == torch.float32
    np.testing.assert_allclose(single, whole, atol=2e-4)


@pytest.mark.parametrize("name", FEATURES)
def test_features_are_normalised_on_training_tokens_alone(name, data):
    X, _, mask = data
    train = TokenDataset.of(X[:24], mask[:24])
    feature = FEATURES[name].fitted(train)
    assert feature is FEATURES[name].fitted(train), "heads that share a map share its fit"
    assert not hasattr(FEATURES[name], "n_features_in_"), "the map given stays as it was"
    phi = feature.normalised(train)
    assert float(phi.mean(0).abs().max()) < 1e-12
    assert float(phi.square().sum(1).mean()) == pytest.approx(1.0)
    again = copy.deepcopy(FEATURES[name]).fit(train)
    rest = TokenDataset.of(X[24:], mask[24:])
    torch.testing.assert_close(again.normalised(rest), feature.normalised(rest))
    kept = pickle.loads(pickle.dumps(feature))
    torch.testing.assert_close(kept.normalised(rest), feature.normalised(rest))


def test_square_root_of_a_covariance(data):
    X, _, mask = data
    found = F.CovariancePooling(shrinkage=0.1).fit(X, mask=mask).transform(X, mask=mask)
    for x, m, row in zip(X, mask, found, strict=True):
        C = np.cov(x[m].T, bias=True)
        values, Q = np.linalg.eigh(C + 0.1 * np.trace(C) / 5 * np.eye(5))
        root = (Q * np.sqrt(values)) @ Q.T
        i, j = np.triu_indices(5)
        np.testing.assert_allclose(row, root[i, j] * np.where(i == j, 1, np.sqrt(2)), atol=1e-10)


def test_covariances_of_single_tokens_are_finite():
    X = np.random.default_rng(0).normal(size=(6, 1, 4))
    for kind in ("sqrt", "log", "raw"):
        assert np.isfinite(F.CovariancePooling(kind).fit(X).transform(X)).all()


def test_bad_features_are_refused(data):
    X = data[0]
    with pytest.raises(ValueError, match="shrinkage=-1"):
        F.CovariancePooling(shrinkage=-1).fit(X)
    with pytest.raises(ValueError, match="size d=3"):
        F.MeanPooling().fit(X).transform(X[..., :3])
    with pytest.raises(ValueError, match="tokens a sample"):
        F.Flatten().fit(X).transform(X[:, :2])
    with pytest.raises(TypeError, match=r"expected a map from convexformer\.features"):
        H.Feature("mean")
    with pytest.raises(ValueError, match="not fitted"):
        H.Feature(F.MeanPooling()).operator(TokenDataset.of(X), None)
    with pytest.raises(ValueError, match="expected 'equal', 'learned'"):
        H.Sum(["linear"], weights="best")


# ---------------------------------------------------------------------- heads

BLOCKS = [
    H.Feature(F.MeanPooling(), "frobenius"),
    H.Kernel(F.Flatten(), "gaussian", decay="frobenius"),
    H.Feature(F.CovariancePooling(), "frobenius"),
    H.Kernel(F.SoftmaxQueries(4), "gaussian", scale=0.5, decay="frobenius"),
]
HEADS = {
    "ridge": H.Feature(F.CovariancePooling()),
    "frobenius": H.Feature(F.SoftmaxQueries(4), "frobenius"),
    "nuclear": H.Feature(F.Flatten(), "nuclear"),
    "kernel ridge": H.Kernel(F.Flatten()),
    "gaussian ridge": H.Kernel(F.MeanPooling(), "gaussian"),
    "gaussian norm": H.Kernel(F.CovariancePooling(), "gaussian", decay="frobenius"),
    "own kernel": H.Kernel(F.MeanPooling(), lambda U, V: (1 + U @ V.T) ** 2),
    "norms": H.Sum(BLOCKS, weights="learned"),
    "norms and a ridge": H.Sum([*BLOCKS[:2], H.Feature(F.Flatten())]),
    "papers": H.Sum([H.Attention(), H.Feature(F.CovariancePooling(), "frobenius")], weights="learned"),
    "random features": H.Kernel(F.Flatten(), "gaussian", memory=100),
}


@pytest.mark.parametrize("name", HEADS)
def test_contract_of_heads(name, data):
    X, y, mask = data
    check_head(HEADS[name], X, y)
    check_head(HEADS[name], X, y, mask=mask, intercept=True, sample_weight=1.0 + np.arange(len(y)) % 2)


def test_contract_of_scaled_penalties():
    check_penalty(ScaledPenalty(Ridge(), 3.0), (4, 3))
    check_penalty(ScaledPenalty(FrobeniusNorm(), 0.2), (4, 3))


def reference(problem: cf.Problem) -> float:
    """The optimum by CVXPY, from Gram matrices alone."""
    objective, N = problem.objective, problem.tokens.n_samples
    c = objective.n_outputs
    b = cp.Variable((1, c)) if objective.intercept else np.zeros((1, c))
    outputs, penalty = np.ones((N, 1)) @ b, 0
    for block, kind in zip(objective.operator.blocks(), objective.penalty.hilbert_blocks(), strict=True):
        K = block.row_gram().numpy()
        values, Q = np.linalg.eigh(K)
        keep = values > 1e-10 * values[-1]
        Z = cp.Variable((int(keep.sum()), c))
        outputs = outputs + (Q[:, keep] * np.sqrt(values[keep])) @ Z
        penalty = penalty + kind.weight * (cp.sum_squares(Z) / 2 if kind.squared else cp.norm(Z, "fro"))
    Y = objective.targets.numpy()
    if objective.loss.quadratic:
        loss = cp.sum_squares(outputs - Y) / 2
    else:
        loss = cp.sum(cp.log_sum_exp(outputs, axis=1)) - cp.sum(cp.multiply(Y, outputs))
    return cp.Problem(cp.Minimize(loss + objective.beta * penalty)).solve(
        solver="CLARABEL", tol_gap_abs=1e-9, tol_gap_rel=1e-9, tol_feas=1e-9
    )


@pytest.mark.parametrize("name", ["kernel ridge", "gaussian ridge", "gaussian norm", "norms", "norms and a ridge"])
@pytest.mark.parametrize("intercept", [True, False])
def test_kernels_and_block_norms_equal_cvxpy(name, intercept, data):
    X, y, mask = data
    for targets, ratio in ((y, 0.2), (y - y.mean() + 0.5 * X[:, 0, 0], 0.05)):
        problem = cf.Problem(HEADS[name], X, targets, beta_ratio=ratio, mask=mask, intercept=intercept)
        solution = cf.solve(problem, tolerance=1e-7)
        assert solution.solver == "block_newton"
        assert solution.certificate.meets(1e-7)
        assert solution.objective == pytest.approx(reference(problem), rel=1e-6)


def test_blocks_that_do_not_help_are_zero(data):
    X, y, mask = data
    problem = cf.Problem(HEADS["norms"], X, y, beta_ratio=0.5, mask=mask, intercept=True)
    solution = cf.solve(problem, tolerance=1e-6)
    norms = solution.block_norms
    assert list(norms) == ["MeanPooling", "gaussian Flatten", "CovariancePooling", "gaussian SoftmaxQueries"]
    assert min(norms.values()) == 0.0
    assert sum(norms.values()) == pytest.approx(float(problem.penalty.value(solution.weights.Z)))
    assert len(solution.plot_blocks().patches) == 4
    with pytest.raises(AttributeError, match="no blocks"):
        cf.solve(cf.Problem("linear", X, y, beta_ratio=0.1)).block_norms


def test_scales_of_features_do_not_matter(data):
    X, y, _ = data
    flat = [H.Feature(F.Flatten(), "frobenius"), H.Kernel(F.MeanPooling(), "gaussian", decay="frobenius")]
    values = [
        cf.solve(cf.Problem(H.Sum(flat, "learned"), scale * X, y, beta_ratio=0.2, intercept=True), 1e-6).objective
        for scale in (1.0, 1000.0)
    ]
    assert values[0] == pytest.approx(values[1], rel=1e-5)
    fitted = H.Sum([H.Attention(), *flat], "learned").fitted(TokenDataset.of(X))
    assert fitted.weights[1:] == (1.0, 1.0)
    more = H.Sum([H.Attention(), *flat], "learned").fitted(TokenDataset.of(10 * X))
    assert more.weights[0] == pytest.approx(10 * fitted.weights[0])


def test_small_betas_from_zero(data):
    X, y, mask = data
    for ratio in (1e-2, 1e-4):
        problem = cf.Problem(HEADS["norms"], X, y, beta_ratio=ratio, mask=mask, intercept=True)
        assert cf.solve(problem, tolerance=1e-4).certificate.meets(1e-4)


def test_a_portfolio_in_float32_is_certified_in_float64(data):
    X, y, mask = data
    problem = cf.Problem(HEADS["norms"], X, y, beta_ratio=0.05, mask=mask, intercept=True, dtype=torch.float32)
    solution = cf.solve(problem, tolerance=1e-3)
    assert solution.weights.form.dtype == torch.float32
    exact = cf.Problem(problem.head, X, y, beta=problem.beta, mask=mask, intercept=True)
    optimum = cf.solve(exact, tolerance=1e-7)
    assert solution.certificate.meets(1e-3)
    assert solution.objective >= optimum.objective * (1 - 1e-5)
    assert solution.certificate.dual <= optimum.objective * (1 + 1e-5)


def test_large_kernels_become_random_features(data):
    X, y, _ = data
    problem = cf.Problem(HEADS["random features"], X, y, beta_ratio=0.1)
    assert isinstance(problem.head, H.Feature)
    assert isinstance(problem.head.feature, F.RandomFeatures)
    assert problem.head.label() == "RandomFeatures"
    assert n_random_features(100_000, 1 << 30, 4) % 2 == 0
    # a linear layer certifies anywhere; a kernel machine does not
    assert cf.solve(cf.Problem(problem.head, X[:20], y[:20], beta_ratio=0.1)).certificate.meets(1e-4)
    kernel = cf.Problem(HEADS["gaussian norm"], X, y, beta_ratio=0.1).head
    with pytest.raises(TypeError, match="certified on the samples"):
        cf.Problem(kernel, X[:20], y[:20], beta_ratio=0.1)


# ---------------------------------------------------------------------- files


@pytest.mark.parametrize("name", ["frobenius", "gaussian norm", "norms", "random features"])
def test_files(name, data, tmp_path):
    X, y, mask = data
    solution = cf.solve(cf.Problem(HEADS[name], X, y, beta_ratio=0.1, mask=mask, intercept=True))
    for thing, ask in ((solution, lambda s: s.predict(X, mask)), (solution.network(), lambda n: n(X, mask).detach())):
        back = cf.load(cf.save(thing, tmp_path / type(thing).__name__))
        torch.testing.assert_close(ask(back), ask(thing), rtol=1e-12, atol=1e-12)
    loaded = cf.load(tmp_path / "Solution")
    again = cf.certify(loaded, cf.Problem(loaded.head, X, y, beta=loaded.beta, mask=mask, intercept=True))
    assert again.primal == pytest.approx(solution.objective)


# ---------------------------------------------------------------------- head="auto"


def test_auto_fits_features_on_training_folds_alone(data, monkeypatch, tmp_path):
    X, y, mask = data
    seen = []
    fit = base.TokenFeature.fit

    def spy(self, tokens, *args, **kwargs):
        seen.append(tokens.n_samples)
        return fit(self, tokens, *args, **kwargs)

    monkeypatch.setattr(base.TokenFeature, "fit", spy)
    found = cf.TokenClassifierCV(head="auto", cv=3, validation="folds").fit(X, y, mask=mask)
    maps = 4
    assert seen == [24] * 3 * maps + [36] * maps
    assert found.certificate_.meets(1e-3)
    assert np.nanmax(found.cv_results_["max_relative_gap"]) <= 3e-2
    entry = found.leaderboard_[0]
    assert entry.name == "auto"
    assert entry.score == found.best_score_
    assert "CovariancePooling" in repr(found.leaderboard_)
    assert found.leaderboard_.frame.shape[0] == 1
    again = cf.TokenClassifierCV(head="auto", cv=3, validation="folds").fit(X, y, mask=mask)
    np.testing.assert_array_equal(again.predict_proba(X, mask), found.predict_proba(X, mask))
    back = cf.load(cf.save(found, tmp_path / "model"))
    np.testing.assert_allclose(back.predict_proba(X, mask), found.predict_proba(X, mask), atol=1e-10)
    assert back.leaderboard_[0].score == entry.score
    assert found.certify(X, y, mask=mask).primal == pytest.approx(found.certificate_.primal)


def test_shared_folds_refit_coefficients_without_the_samples_left_out(data):
    """The outputs of a fold are those of the ridge problem of its training rows, solved on its own by CVXPY."""
    X, y, mask = data
    problem = cf.Problem(HEADS["norms"], X, y, beta_ratio=0.05, mask=mask, intercept=True)
    solution = cf.solve(problem, tolerance=1e-8)
    objective, blocks = problem.objective, Blocks(problem.objective)
    eta = blocks.norms(solution.weights.Z) / problem.beta
    K = blocks.combined(eta, problem.beta, torch.float64).numpy()
    train, test = np.arange(24), np.arange(24, 36)
    values, Q = np.linalg.eigh(1.5 * K[np.ix_(train, train)])
    keep = values > 1e-10 * values[-1]
    phi = Q[:, keep] * np.sqrt(values[keep])
    W, b = cp.Variable((int(keep.sum()), 3)), cp.Variable((1, 3))
    outputs = phi @ W + np.ones((24, 1)) @ b
    loss = cp.sum(cp.log_sum_exp(outputs, axis=1)) - cp.sum(cp.multiply(objective.targets.numpy()[train], outputs))
    cp.Problem(cp.Minimize(loss + cp.sum_squares(W) / 2)).solve(solver="CLARABEL")
    cross = 1.5 * K[np.ix_(test, train)] @ (Q[:, keep] / np.sqrt(values[keep]))  # features of the samples left out
    expected = cross @ W.value + b.value
    (found,) = HeldOut([(train, test)], steps=200, tolerance=1e-14).outputs(objective, eta)
    centred = [part - part.mean(1, keepdims=True) for part in (found.numpy(), expected)]
    np.testing.assert_allclose(*centred, atol=1e-4)


def test_half_of_the_samples_have_the_block_weights_of_all(monkeypatch):
    """The part is the program of its rows, with every class in it; the search solves that of all samples at the end."""
    X, y = (np.asarray(part)[:400] for part in cf.data.digits(patch=2))
    problem = cf.Problem(H.portfolio(), X, y, beta_ratio=1.0, intercept=True, dtype=torch.float32)
    monkeypatch.setattr(part, "LEAST", 100)
    half = part.Part(problem.objective)
    assert 200 <= len(half.rows) <= 210
    assert len(np.unique(y[half.rows])) == 10
    alone = cf.Problem(problem.head, X, y, beta_ratio=1.0, intercept=True, dtype=torch.float32).objective
    rows = half.rows.numpy()
    Z, alpha = [], torch.randn(len(rows), 10, generator=torch.Generator().manual_seed(0))
    for block in alone.operator.blocks():  # the same function, by all samples and by those of the part
        every = torch.zeros(400, 10)
        every[half.rows] = alpha
        Z.append(block.represent(every).flatten())
    both = alone.apply(torch.cat(Z))[rows], half.objective.apply(alpha.repeat(7, 1).flatten())
    torch.testing.assert_close(*both, atol=1e-4, rtol=1e-4)
    assert float(half.objective.penalty.value(alpha.repeat(7, 1).flatten())) == pytest.approx(
        float(alone.penalty.value(torch.cat(Z))), rel=1e-4
    )
    found = half.solve(0.01, None, Limits(1e-2))
    whole = cf.solve(problem.with_beta(0.01 * problem.beta_max), tolerance=1e-2)
    blocks = Blocks(problem.objective)
    own = blocks.norms(whole.weights.Z) / whole.beta
    shares = [eta / eta.sum() for eta in (half.block_weights(found, 0.01), own)]
    assert float((shares[0] - shares[1]).abs().max()) < 0.25
    model = cf.TokenClassifierCV(head="auto", cv=3).fit(X, y)
    assert model.certificate_.meets(1e-3)
    assert model.certify(X, y).primal == pytest.approx(model.certificate_.primal)


def test_rare_classes_and_weightless_samples_are_in_every_part(monkeypatch):
    monkeypatch.setattr(part, "LEAST", 100)
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(420, 2, 3)), np.r_[np.zeros(400, int), [1] * 19, [2]]
    w = np.ones(420)
    w[400:409] = 0
    problem = cf.Problem(H.portfolio(), X, y, beta_ratio=1.0, intercept=True, sample_weight=w)
    rows = part.Part(problem.objective).rows.numpy()
    assert {0, 1, 2} == set(y[rows][w[rows] > 0])


def test_a_solution_is_a_start_that_needs_no_second_way_down(data):
    X, y, mask = data
    problem = cf.Problem(HEADS["norms"], X, y, beta_ratio=0.02, mask=mask, intercept=True)
    solution = cf.solve(problem, tolerance=1e-5)
    assert cf.solve(problem, tolerance=1e-4, warm_start=solution).n_iter <= 2 < solution.n_iter


def test_shared_folds_choose_as_folds_do_and_repeat_themselves(tmp_path):
    X, y = (np.asarray(part)[:300] for part in cf.data.digits(patch=2))
    shared = cf.TokenClassifierCV(head="auto", cv=3).fit(X, y)
    strict = cf.TokenClassifierCV(head="auto", cv=3, validation="folds").fit(X, y)
    assert shared.certificate_.meets(1e-3)
    assert np.nanmax(shared.cv_results_["max_relative_gap"]) <= 3e-2
    both = ~np.isnan(shared.cv_results_["mean_test_score"] + strict.cv_results_["mean_test_score"])
    assert both.sum() >= 2
    apart = shared.cv_results_["mean_test_score"][both] - strict.cv_results_["mean_test_score"][both]
    assert np.abs(apart).max() <= 0.02
    again = cf.TokenClassifierCV(head="auto", cv=3).fit(X, y)
    np.testing.assert_array_equal(again.predict_proba(X), shared.predict_proba(X))  # no spread over refits
    back = cf.load(cf.save(shared, tmp_path / "model"))
    np.testing.assert_allclose(back.predict_proba(X), shared.predict_proba(X), atol=1e-10)


def test_noise_wants_larger_betas_than_the_path_begins_with():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(90, 3, 4))
    y = (X[:, 0, 0] + 1.5 * rng.normal(size=90) > 0).astype(int)
    found = cf.TokenClassifierCV(head="auto", cv=3).fit(X, y, sample_weight=1.0 + rng.random(90))
    scored = ~np.isnan(found.cv_results_["mean_test_score"])
    assert scored[2]
    assert scored[1] == (np.nanargmax(found.cv_results_["mean_test_score"][2:]) == 0)


def test_who_shares_folds(data):
    X, y, mask = data
    groups = np.arange(36) // 2
    strict = cf.TokenClassifierCV(head="auto", cv=GroupKFold(3)).fit(X, y, mask=mask, groups=groups)
    assert not np.isnan(strict.cv_results_["mean_test_score"][0])  # folds of their own begin at the largest beta
    with pytest.raises(ValueError, match="validation='shared' needs the solver"):
        cf.TokenClassifierCV(head="auto", validation="shared", solver="fista").fit(X, y, mask=mask)
    with pytest.raises(ValueError, match="validation"):
        cf.TokenClassifierCV(head="auto", validation="loo").fit(X, y, mask=mask)


def test_auto_in_plain_estimators_and_regression(data):
    X, y, mask = data
    plain = cf.TokenClassifier(head="auto", beta_ratio=0.01).fit(X, y, mask=mask)
    assert plain.certificate_.meets(1e-3)
    np.testing.assert_allclose(plain.network_(torch.tensor(X), mask).detach(), plain.outputs(X, mask), atol=1e-8)
    target = X[:, 0] @ np.arange(5)
    assert cf.TokenRegressorCV(head="auto", cv=3).fit(X, target, mask=mask).score(X, target, mask=mask) > 0.5


def test_compare_puts_scikit_learn_in_the_same_table(data):
    X, y, mask = data
    table = cf.compare(X, y, heads=["auto", H.Feature(F.MeanPooling())], mask=mask, cv=3)
    assert len(table) == 4
    assert [entry.score for entry in table] == sorted((entry.score for entry in table), reverse=True)
    certified = {entry.name: entry.gap for entry in table}
    assert certified["auto"] is not None
    assert certified["scikit-learn LogisticRegression"] is None
    assert {entry.reads for entry in table if entry.gap is None} == {"mean token", "flattened tokens"}
    assert len(cf.compare(X, X[:, 0, 0], heads=["linear"], mask=mask, cv=3)) == 3


def test_paths_of_long_strides_from_beta_max(data):
    X, y, mask = data
    path = cf.path(HEADS["norms"], X, y, n_betas=4, mask=mask, intercept=True, tolerance=1e-3)  # ten times each
    assert [solution.certificate.meets(1e-3) for solution in path.solutions] == [True] * 4


def test_the_wide_portfolio_races_the_papers_heads(tmp_path, monkeypatch):
    X, y = (np.asarray(part)[:160] for part in cf.data.digits(patch=4))
    monkeypatch.setattr(race, "RACERS", {name: race.RACERS[name] for name in ("mixer", "attention, l2", "mlp, gated")})
    found = cf.TokenClassifierCV(head="auto", portfolio="wide", cv=2).fit(X, y)
    board = found.leaderboard_
    assert {entry.name for entry in board} == {"auto", "mixer", "attention, l2", "mlp, gated"}
    assert max(entry.gap for entry in board) <= 0.1  # every one certified
    assert [entry.samples is None for entry in board] == [True, True, False, False]
    assert board.frame.shape == (4, 8)
    back = cf.load(cf.save(found, tmp_path / "model"))
    assert repr(back.leaderboard_) == repr(board)
    with pytest.raises(ValueError, match="portfolio='wide' widens head='auto'"):
        cf.TokenClassifierCV(head="linear", portfolio="wide").fit(X, y)


def test_a_head_that_wins_the_race_is_kept(data, monkeypatch, tmp_path):
    X, y, _ = data
    monkeypatch.setattr(race, "RACERS", {"mixer": H.MLPMixer(), "linear": H.Linear()})
    monkeypatch.setattr(search, "RACERS", race.RACERS)
    monkeypatch.setattr(search.CrossValidated, "_record", _worse_for_auto(search.CrossValidated._record))
    found = cf.TokenClassifierCV(head="auto", portfolio="wide", cv=2).fit(X, y)
    assert found.winner_ in race.RACERS
    assert found.leaderboard_[0].name == found.winner_
    assert found.leaderboard_[1].name == "auto"
    assert found.solution_.head.name == race.RACERS[found.winner_].name
    assert found.certify(X, y).primal == pytest.approx(found.certificate_.primal)
    back = cf.load(cf.save(found, tmp_path / "model"))
    np.testing.assert_array_equal(back.predict(X), found.predict(X))


def _worse_for_auto(record):
    def recorded(self, ratios, scores, gaps):
        record(self, ratios, scores if self.head != "auto" else 0 * scores, gaps)

    return recorded


@pytest.mark.parametrize("name", ["kernel ridge", "gaussian norm"])
def test_weights_of_kernel_heads_are_coefficients_of_samples(name, data, tmp_path):
    """``Z = sum_i phi(x_i) alpha_i^T``: its norm is that of the kernel; explicit features have the outputs ``phi Z``."""
    X, y, mask = data
    problem = cf.Problem(HEADS[name], X, y, beta_ratio=0.1, mask=mask, intercept=True)
    solution = cf.solve(problem, tolerance=1e-6)
    form = solution.weights.form
    assert isinstance(form, Representer)
    assert form.shape == (36, 3)
    K = problem.operator.row_gram()
    norm = form.norm(K)
    expected = norm if name == "gaussian norm" else norm.square() / 2
    assert float(problem.penalty.value(solution.weights.Z)) == pytest.approx(float(expected))
    if name == "kernel ridge":  # linear: features are explicit, centred and of mean squared norm one
        phi = problem.head.feature.normalised(problem.tokens)
        torch.testing.assert_close(phi @ form.in_features(phi), K @ form.alpha, atol=1e-8, rtol=1e-8)
    network = solution.network()
    torch.testing.assert_close(network(X, mask).detach(), solution.predict(X, mask))
    assert isinstance(network.lift().form, Representer)
    back = cf.load(cf.save(solution, tmp_path / "solution"))
    assert isinstance(back.weights.form, Representer)
    torch.testing.assert_close(back.weights.form.alpha, form.alpha)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("validation", ["shared", "folds"])
@pytest.mark.parametrize("constant", ["targets", "tokens"])
def test_the_search_on_constant_data_is_a_constant(validation, constant, data):
    X, y, _ = data
    X, y = (X, np.ones(36)) if constant == "targets" else (np.ones_like(X), y.astype(float))
    model = cf.TokenRegressorCV("auto", cv=3, validation=validation).fit(X, y)
    np.testing.assert_allclose(model.predict(X), y.mean())
    assert model.certificate_.gap <= 1e-9


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("validation", ["shared", "folds"])
def test_weights_that_a_stalled_solve_leaves_in_float64_are_scored(validation, data, monkeypatch):
    X, y, _ = data
    walked, minimised, seen = portfolio.walk, part.minimise, []

    def double(found):
        seen.append(found)
        return replace(found, weights=found.weights.to(dtype=torch.float64))

    monkeypatch.setattr(portfolio, "walk", lambda *args, **options: map(double, walked(*args, **options)))
    monkeypatch.setattr(part, "minimise", lambda *args, **options: double(minimised(*args, **options)))
    model = cf.TokenClassifierCV("auto", cv=3, validation=validation).fit(X, y)
    assert seen
    assert model.certificate_.meets(1e-3)


def test_a_score_that_is_undefined_is_named(data):
    """R^2 of one sample; NaN means a beta that a fold has not come to, so it would be read as too little time."""
    X, y, _ = data
    for head in ("auto", "linear"):
        with pytest.raises(ValueError, match="neg_mean_squared_error"):
            cf.TokenRegressorCV(head, cv=8).fit(X[:8], y[:8].astype(float))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_kernel_that_is_none_is_refused(dtype, data):
    """Its program is not convex: a certificate would call zero optimal where other weights are far better."""
    X, y, _ = data
    for kernel, word in ((lambda U, V: torch.tanh(U @ V.T), "semidefinite"), (lambda U, V: U @ V.T.roll(1, 1), "not")):
        with pytest.raises(ValueError, match=word):
            cf.Problem(H.Kernel(F.MeanPooling(), kernel, decay="frobenius"), X, y, beta_ratio=0.1, dtype=dtype)
    distance = H.Kernel(F.MeanPooling(), lambda U, V: -torch.cdist(U, V), decay="frobenius")  # it is one when centred
    assert cf.solve(cf.Problem(distance, X, y, beta_ratio=0.1, dtype=dtype), tolerance=1e-3).certificate.meets(1e-3)


@pytest.mark.parametrize("decay", ["ridge", "frobenius"])
def test_rounding_of_a_singular_kernel_is_no_way_below_the_optimum(decay, data):
    """``alpha^T K alpha`` may be below zero there, at coefficients as large as one over rounding."""
    X, _, _ = data
    Y = np.random.default_rng(0).normal(size=(36, 1))
    problem = cf.Problem(H.Kernel(F.MeanPooling(), decay=decay), X, Y, beta_ratio=0.1)
    solution = cf.solve(problem, tolerance=1e-4)
    K = problem.operator.K
    values, vectors = torch.linalg.eigh(K)
    best = solution.weights.dense()
    for value, v in zip(values[:20], vectors.T[:20, :, None], strict=True):
        wanted = float((v * (torch.from_numpy(Y) - K @ best)).sum()) / float(value)
        assert cf.certify(Weights(best + wanted * v), problem).primal >= solution.certificate.dual


def test_a_start_with_a_block_whose_gradient_has_vanished(data, monkeypatch):
    """Its weight would be one over the smallest number, which float32 cannot hold."""
    X, y, _ = data
    problem = cf.Problem(HEADS["norms"], X, y, beta_ratio=0.1, intercept=True, dtype=torch.float32)
    first = cf.solve(problem, tolerance=1e-2, solver="block_newton")
    plain, calls = block_newton._Run._polars, []

    def vanished(self, V, *which):
        found = plain(self, V, *which)
        if not calls:
            found[1:] = 0.0
        calls.append(1)
        return found

    monkeypatch.setattr(block_newton._Run, "_polars", vanished)
    nearby = problem.with_beta(0.9 * problem.beta)
    assert cf.solve(nearby, tolerance=1e-3, solver="block_newton", warm_start=first).certificate.meets(1e-3)
    assert len(calls) > 0


def test_a_path_does_not_follow_noise_to_ever_smaller_betas():
    """From the end of the standard grid on a gain must stand out from its own standard error over the folds."""
    grid = AutoGrid(count=4)
    steady = np.array([[0.5, 0.6, 0.7, 0.71], [0.4, 0.5, 0.6, 0.62], [0.5, 0.6, 0.7, 0.71]])
    assert not grid.noise(steady)
    assert not grid.noise(steady[:, :3])  # within the grid
    assert not grid.noise(steady[:1])  # one fold has no error
    uneven = steady + np.array([0.0, -0.03, 0.0])[:, None] * np.array([0, 0, 0, 1.0])
    assert uneven[:, 3].mean() > uneven[:, 2].mean()
    assert grid.noise(uneven)
    skipped = np.where(np.arange(4) < 1, np.nan, uneven)
    assert grid.noise(skipped)

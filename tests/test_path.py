"""Regularisation paths."""

import json
import warnings

import numpy as np
import pytest
import torch

import convexformer as cf
from convexformer.path.storage import StoredSolutions
from convexformer.weights import GroupSparse


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(3)
    X = rng.standard_normal((80, 6, 4))
    y = X[:, 1] @ rng.standard_normal(4) + 0.1 * rng.standard_normal(80)
    return X, y


def test_a_path_starts_at_zero_and_every_point_is_the_certified_optimum(data):
    X, y = data
    path = cf.path("attention", X, y, n_betas=6, beta_min_ratio=1e-2, tolerance=1e-7, intercept=True)
    assert len(path) == 6
    assert path.betas[0] == pytest.approx(path.beta_max)
    assert float(path.token_norms[0].max()) == 0.0
    assert max(path.relative_gaps) <= 1e-7
    # tokens enter: the planted one is the first
    assert int(path.token_norms[1].argmax()) == 1
    alone = cf.solve(cf.Problem("attention", X, y, beta=path.betas[3], intercept=True), tolerance=1e-7)
    assert path.solutions[3].objective == pytest.approx(alone.objective, rel=1e-6)


def test_warm_starts_save_iterations(data):
    X, y = data
    path = cf.path("attention", X, y, n_betas=12, beta_min_ratio=1e-2, tolerance=1e-6)
    cold = sum(cf.solve(cf.Problem("attention", X, y, beta=beta), tolerance=1e-6).n_iter for beta in path.betas)
    assert sum(solution.n_iter for solution in path.solutions) < cold


def test_a_path_is_drawn_with_its_gaps(data, tmp_path):
    X, y = data
    path = cf.path("attention", X, y, n_betas=4, tolerance=1e-5)
    figure = path.plot(n_labels=2, token_names=list("abcdef"))
    assert len(figure.axes) == 2
    assert len(figure.axes[0].lines) == X.shape[1]
    texts = [text.get_text() for text in figure.axes[0].texts]
    assert texts[0] == "b"  # the planted token is the largest
    assert len(texts) == 2 + 4  # two labels, and the active tokens at each beta
    assert "1e-05" in figure.axes[1].texts[0].get_text()
    with pytest.raises(ValueError, match="token_names has 2 names"):
        path.plot(token_names=["a", "b"])
    figure.savefig(tmp_path / "path.png")
    pooled = cf.path("mlp", X, y, n_betas=3)
    assert len(pooled.plot().axes) == 1
    with pytest.raises(ValueError, match="no weights that belong to token positions"):
        pooled.token_norms


def test_path_options_are_sorted_and_checked(data):
    X, y = data
    path = cf.path(cf.heads.MLP(), X, y, n_betas=2, beta_min_ratio=0.5, loss="huber", dtype=torch.float64, max_iter=500)
    assert path.solutions[0].loss.name == "huber"
    with pytest.raises(TypeError, match="Did you mean 'tolerance'"):
        cf.path("attention", X, y, tolerence=1e-3)
    with pytest.raises(ValueError, match="beta_min_ratio"):
        cf.path("attention", X, y, beta_min_ratio=2.0)
    with pytest.raises(ValueError, match="n_betas"):
        cf.path("attention", X, y, n_betas=0)


def test_stored_solutions_are_smaller_and_bit_for_bit_the_same(data):
    X, y = data
    dense = []
    path = cf.path("attention", X, y, n_betas=6, beta_min_ratio=0.05, callback=lambda record, weights: None)
    problem = cf.Problem("attention", X, y, beta=path.betas[-1])
    last = None
    for beta in path.betas:
        last = cf.solve(problem.with_beta(beta), warm_start=last)
        dense.append(last)
    for kept, own in zip(path.solutions, dense, strict=True):
        assert torch.equal(kept.dense(), own.dense())
        assert kept.certificate == own.certificate
    assert path.solutions.nbytes < sum(own.dense().nbytes for own in dense)
    assert torch.equal(path.solutions[-1].dense(), path.solutions[2:][-1].dense())
    assert cf.certify(path.solutions[-1], problem).primal == pytest.approx(path.solutions[-1].objective, rel=1e-12)
    with pytest.raises(IndexError):
        path.solutions[6]


@pytest.mark.parametrize("shape", [(5, 4), (6, 3, 2), (2, 6, 3, 2)], ids=str)
def test_packing_any_shape_is_exact(shape):
    Z = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    Z[..., 0] = 0.0
    assert torch.equal(GroupSparse.of(Z).dense(), Z)
    assert torch.equal(GroupSparse.of(torch.zeros(shape)).dense(), torch.zeros(shape))


def test_low_rank_solutions_are_kept_as_they_are(data):
    X, y = data
    path = cf.path("mlp", X, np.stack([y, -y], 1), n_betas=3, beta_min_ratio=0.1)
    assert isinstance(path.solutions, StoredSolutions)
    assert [tuple(solution.dense().shape) for solution in path.solutions] == [(4, 2)] * 3


def test_an_interrupted_path_returns_what_it_has(data):
    X, y = data
    seen = []

    def stop(record, weights):
        seen.append(record)
        return len(seen) == 3

    path = cf.path("attention", X, y, n_betas=6, beta_min_ratio=1e-2, callback=stop)
    assert path.stopped == "interrupted"
    assert 1 <= len(path) < 6
    assert len(path.solutions) == len(path.betas) == len(path.losses)

    def interrupt(record, weights):
        seen.append(record)
        if len(seen) == 3:
            raise KeyboardInterrupt

    seen.clear()
    path = cf.path("attention", X, y, n_betas=6, beta_min_ratio=1e-2, callback=interrupt)
    assert path.stopped == "interrupted"
    assert len(path) < 6
    assert path.solutions[-1].status in (cf.Status.INTERRUPTED, cf.Status.CONVERGED)


def test_a_path_goes_on_from_its_checkpoints(data, tmp_path):
    X, y = data
    options = {"n_betas": 4, "beta_min_ratio": 1e-2, "tolerance": 1e-6, "checkpoint": tmp_path / "run"}
    first = cf.path("attention", X, y, **options)
    assert len(list((tmp_path / "run").iterdir())) == 4
    work = []
    again = cf.path(
        "attention", X, y, callback=lambda record, weights: work.append(record.iteration) and False, **options
    )
    assert max(work) <= 10  # one look at each beta is enough
    np.testing.assert_allclose(
        [s.objective for s in again.solutions], [s.objective for s in first.solutions], rtol=1e-9
    )
    with pytest.raises(ValueError, match="another problem"):
        cf.path("attention", X, y + 1.0, **options)


def test_early_stop_and_explained_loss():
    rng = np.random.default_rng(0)
    X = rng.standard_normal((40, 8, 3))
    y = X[:, 2] @ rng.standard_normal(3)  # no noise: all of it can be explained
    whole = cf.path("attention", X, y, n_betas=12, beta_min_ratio=1e-4)
    early = cf.path("attention", X, y, n_betas=12, beta_min_ratio=1e-4, stop_early=True)
    assert whole.stopped == ""
    assert early.stopped == "saturated"
    assert len(early) < len(whole) == 12
    assert whole.explained[0] == 0.0
    assert list(whole.explained) == sorted(whole.explained)
    assert early.explained[-1] > 0.999
    table = json.loads(json.dumps(early.summary()))
    assert table["active_tokens"][0] == 0
    assert len(table["betas"]) == len(early)


def test_progress_is_drawn_over_the_whole_path(data, capsys):
    X, y = data
    silent = cf.path("attention", X, y, n_betas=3)
    shown = cf.path("attention", X, y, n_betas=3, progress=True)
    capsys.readouterr()
    np.testing.assert_array_equal(silent.token_norms, shown.token_norms)


def test_a_path_interrupted_at_its_last_beta_says_so(data):
    X, y = data
    starts = []

    def stop(record, weights):
        starts.append(record.iteration == 0)
        return np.bool_(sum(starts) == 4)  # NumPy's True counts as well as Python's

    path = cf.path("attention", X, y, n_betas=4, beta_min_ratio=1e-3, tolerance=1e-9, callback=stop)
    assert [solution.status.name for solution in path.solutions][-1] == "INTERRUPTED"
    assert len(path) == 4
    assert path.stopped == "interrupted"


def test_explained_loss_counts_from_zero_weights_for_a_ridge_too(data):
    X, y = data
    path = cf.path("linear", X, y, n_betas=3, intercept=True)
    zero = 0.5 * float(((y - y.mean()) ** 2).sum())
    assert path.zero_loss == pytest.approx(zero)
    np.testing.assert_allclose(path.explained, [1 - loss / zero for loss in path.losses])
    assert path.explained[0] > 0


def test_a_path_of_nothing_to_learn_warns_once_and_says_so():
    X = np.ones((20, 3, 2))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        cf.path("attention", X, np.arange(20.0), n_betas=3, intercept=True)
    assert len(caught) == 1
    assert "beta_max is zero" in str(caught[0].message)
    assert caught[0].filename == __file__


def test_only_the_last_beta_need_be_certified_to_the_tolerance(data):
    X, y = data
    options = {"n_betas": 6, "beta_min_ratio": 1e-2, "tolerance": 1e-8}
    whole = cf.path("attention", X, y, **options)
    rough = cf.path("attention", X, y, early_tolerance=1e-1, **options)
    assert rough.relative_gaps[-1] <= 1e-8
    assert max(rough.relative_gaps) <= 1e-1
    assert sum(solution.n_iter for solution in rough.solutions) < sum(solution.n_iter for solution in whole.solutions)
    assert rough.solutions[-1].objective == pytest.approx(whole.solutions[-1].objective, rel=1e-7)

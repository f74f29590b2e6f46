"""Regularisation paths."""

import numpy as np
import pytest
import torch

import convexformer as cf


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
    figure = cf.path("attention", X, y, n_betas=4).plot()
    assert len(figure.axes) == 2
    assert len(figure.axes[0].lines) == X.shape[1]
    figure.savefig(tmp_path / "path.png")
    pooled = cf.path("mlp", X, y, n_betas=3)
    assert len(pooled.plot().axes) == 1
    with pytest.raises(ValueError, match="alike"):
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

"""Saving and loading: exact round trips, and clear errors for everything else."""

import json

import numpy as np
import pytest
import torch

import convexformer as cf
from convexformer.data.files import read_arrays

HEADS = [
    cf.heads.Attention(),
    cf.heads.Attention(decay="l2"),
    cf.heads.Attention(activation="gated_relu", gates=(np.ones((2, 4)), -np.ones((2, 3)))),
    cf.heads.MLP(activation="gated_relu", gates=3, seed=5),
    cf.heads.Linear(),
]


def make_problem(head, **options):
    rng = np.random.default_rng(0)
    X, y = rng.standard_normal((30, 4, 3)), rng.integers(0, 3, 30)
    return cf.Problem(head, X, y, beta_ratio=0.2, intercept=True, **options)


@pytest.mark.parametrize("head", HEADS, ids=str)
def test_solutions_and_networks_come_back_exactly(head, tmp_path):
    problem = make_problem(head)
    solution = cf.solve(problem, tolerance=1e-6)
    back = cf.load(cf.save(solution, tmp_path / "solution"))
    X = problem.tokens.X
    assert torch.equal(back.predict(X), solution.predict(X))
    assert back.certificate == solution.certificate
    assert back.history == solution.history
    assert back.status is solution.status
    assert cf.certify(back, problem).primal == solution.objective
    network = cf.load(cf.save(solution.network(), tmp_path / "network"))
    assert torch.equal(network(X), solution.network()(X))
    assert torch.equal(network.decay(), solution.network().decay())
    assert cf.certify(network, problem).relative_gap < 1e-5


@pytest.mark.parametrize("labels", [[0, 1, 2], ["a", "b", "c"], [True, False]], ids=str)
def test_estimators_come_back_exactly(labels, tmp_path):
    rng = np.random.default_rng(1)
    X, y = rng.standard_normal((40, 4, 3)), np.array(labels)[rng.integers(0, len(labels), 40)]
    model = cf.TokenClassifier(beta_ratio=0.3).fit(X, y)
    back = cf.load(cf.save(model, tmp_path))
    np.testing.assert_array_equal(back.predict(X), model.predict(X))
    assert back.classes_.dtype == model.classes_.dtype
    assert back.get_params() == model.get_params()
    assert back.certify(X, y).primal == model.certify(X, y).primal
    assert torch.equal(back.network_(torch.from_numpy(X)), model.network_(torch.from_numpy(X)))


def test_regressors_and_searches_come_back(tmp_path):
    rng = np.random.default_rng(1)
    X, y = rng.standard_normal((40, 4, 3)), rng.standard_normal(40)
    regressor = cf.TokenRegressor(standardize=False, head="linear").fit(X, y)
    np.testing.assert_array_equal(cf.load(cf.save(regressor, tmp_path / "r")).predict(X), regressor.predict(X))
    search = cf.TokenClassifierCV(n_betas=2, beta_min_ratio=0.5, cv=2).fit(X, (y > 0).astype(int))
    np.testing.assert_array_equal(cf.load(cf.save(search, tmp_path / "s")).predict(X), search.predict(X))


@pytest.fixture
def folder(tmp_path):
    return cf.save(cf.solve(make_problem("attention"), tolerance=1e-2), tmp_path / "model")


def test_truncated_and_corrupted_tensors_are_refused(folder):
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-7])
    with pytest.raises(cf.ModelFileError, match="truncated, damaged"):
        cf.load(folder)
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(cf.ModelFileError, match="checksum"):
        cf.load(folder)


def test_damaged_and_foreign_configs_are_refused(folder):
    file = folder / "config.json"
    config = json.loads(file.read_text())
    for text, message in [
        (file.read_text()[:-40], "not valid JSON"),
        (json.dumps({"model_type": "bert"}), "not written by convexformer"),
        (json.dumps({**config, "schema": 99}), "schema version 99"),
        (json.dumps({**config, "kind": "pickle"}), "pickle"),
        (json.dumps({**config, "body": {}}), "damaged"),
        (json.dumps({**config, "body": {**config["body"], "weights": {"Z": {"tensor": "nowhere"}}}}), "damaged"),
        (json.dumps({**config, "body": {**config["body"], "status": "__import__('os')"}}), "damaged"),
    ]:
        file.write_text(text)
        with pytest.raises(cf.ModelFileError, match=message):
            cf.load(folder)


def test_missing_folders_and_files_are_named(folder, tmp_path):
    with pytest.raises(cf.ModelFileError, match="not a folder"):
        cf.load(tmp_path / "nowhere")
    (folder / "model.safetensors").unlink()
    with pytest.raises(cf.ModelFileError, match=r"no model\.safetensors"):
        cf.load(folder)


def test_what_cannot_be_saved_is_said(tmp_path):
    with pytest.raises(TypeError, match="cannot save a dict"):
        cf.save({}, tmp_path)
    with pytest.raises(ValueError, match="not fitted"):
        cf.save(cf.TokenClassifier(), tmp_path)


def test_arrays_with_python_objects_are_refused(tmp_path):
    np.save(tmp_path / "objects.npy", np.array([{}, None], dtype=object), allow_pickle=True)
    with pytest.raises(ValueError, match="hold objects"):
        read_arrays(tmp_path / "objects.npy")
    (tmp_path / "half.npz").write_bytes(b"PK\x03\x04 nothing")
    with pytest.raises(ValueError, match="cannot be read"):
        read_arrays(tmp_path / "half.npz")
    foreign = (tmp_path / "objects.npy").rename(tmp_path / "objects.pkl")
    with pytest.raises(ValueError, match="suffix"):
        read_arrays(foreign)


def test_a_text_file_called_npz_is_refused_without_bad_advice(tmp_path):
    (tmp_path / "tokens.npz").write_text("0.1 0.2 0.3")
    with pytest.raises(ValueError, match="another format") as error:
        read_arrays(tmp_path / "tokens.npz")
    assert "unsafe" not in str(error.value)
    assert "pickle" not in str(error.value)

"""Saving and loading: exact round trips, and clear errors for everything else."""

import hashlib
import json
import math
import os
import stat
from dataclasses import replace

import numpy as np
import pytest
import torch

import convexformer as cf
from convexformer.data.files import atomic_write, read_arrays, strict_json, write_json
from convexformer.data.fingerprint import fingerprint
from convexformer.io import folder as model_folder

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
    (file,) = folder.glob("model-*.safetensors")
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
        (json.dumps({**config, "kind": []}), "expected one of"),
        (json.dumps({**config, "tensors": "../model-0123456789abcdef.safetensors"}), "names the tensor file"),
        (json.dumps({**config, "body": {"number": "many"}}), "damaged number"),
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
    next(folder.glob("model-*.safetensors")).unlink()
    with pytest.raises(cf.ModelFileError, match=r"no model-[0-9a-f]{16}\.safetensors"):
        cf.load(folder)
    (folder / "config.json").unlink()
    with pytest.raises(cf.ModelFileError, match=r"no config\.json"):
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


# ---------------------------------------------------------------------- one atomic step


def strict(text):
    """Parse JSON as strict parsers do: without Infinity and NaN."""

    def refuse(word):
        raise AssertionError(f"{word} is not JSON")

    return json.loads(text, parse_constant=refuse)


def names(folder):
    return sorted(file.name for file in folder.iterdir())


@pytest.fixture(scope="module")
def two_solutions():
    problem = make_problem("attention")
    return [cf.solve(problem.with_beta(ratio * problem.beta), tolerance=1e-2) for ratio in (1.0, 0.5)]


def test_a_crash_between_the_two_files_leaves_the_old_model(two_solutions, tmp_path, monkeypatch):
    old, new = two_solutions
    cf.save(old, tmp_path)
    before = names(tmp_path)
    write = model_folder.atomic_write

    def crash(path, fill):
        if path.name == "config.json":
            raise OSError("the power is gone")
        write(path, fill)

    monkeypatch.setattr(model_folder, "atomic_write", crash)
    with pytest.raises(OSError, match="the power is gone"):
        cf.save(new, tmp_path)
    assert len(names(tmp_path)) == len(before) + 1  # the new tensors, which nothing names
    assert torch.equal(cf.load(tmp_path).dense(), old.dense())
    monkeypatch.undo()
    cf.save(old, tmp_path)
    assert names(tmp_path) == before  # the next save removes them
    cf.save(new, tmp_path)
    assert len(names(tmp_path)) == 2
    assert torch.equal(cf.load(tmp_path).dense(), new.dense())


def test_leftovers_of_a_crash_are_removed_and_other_files_are_not(two_solutions, tmp_path):
    old, running = (tmp_path / f".config.json.{digit * 16}.part" for digit in "01")
    for file in (old, running):
        file.write_text("{")
    os.utime(old, (0, 0))
    strangers = ["model-00001-of-00002.safetensors", "model.safetensors", "notes.part"]
    for name in strangers:
        (tmp_path / name).write_text("not ours")
    cf.save(two_solutions[0], tmp_path)
    kept = names(tmp_path)
    assert old.name not in kept
    assert running.name in kept  # another process may be writing it
    assert set(strangers) <= set(kept)


def test_the_tensors_are_named_by_their_content(two_solutions, tmp_path):
    cf.save(two_solutions[0], tmp_path)
    config = strict((tmp_path / "config.json").read_text())
    digest = hashlib.sha256((tmp_path / config["tensors"]).read_bytes()).hexdigest()
    assert config["schema"] == 2
    assert config["sha256"] == digest
    assert config["tensors"] == f"model-{digest[:16]}.safetensors"


def as_schema_1(folder):
    """Rewrite a model folder as version 0.1 wrote it."""
    config = json.loads((folder / "config.json").read_text())
    (folder / config.pop("tensors")).rename(folder / "model.safetensors")
    config["schema"] = 1
    body = config["body"].get("solution", config["body"])
    body["layout"]["channel_blocks"] = {"tuple": []}
    body["certificate"]["dual"] = -math.inf
    (folder / "config.json").write_text(json.dumps(config))  # with -Infinity, as it was then
    return folder


def test_models_of_the_first_schema_are_read_and_replaced(two_solutions, tmp_path):
    old, new = two_solutions
    as_schema_1(cf.save(old, tmp_path))
    assert names(tmp_path) == ["config.json", "model.safetensors"]
    back = cf.load(tmp_path)
    assert torch.equal(back.dense(), old.dense())
    assert back.certificate.dual == -math.inf
    cf.save(new, tmp_path)
    assert "model.safetensors" not in names(tmp_path)
    assert torch.equal(cf.load(tmp_path).dense(), new.dense())


def test_channel_blocks_of_the_first_schema_are_refused(two_solutions, tmp_path):
    folder = as_schema_1(cf.save(two_solutions[0], tmp_path))
    config = json.loads((folder / "config.json").read_text())
    config["body"]["layout"]["channel_blocks"] = {"tuple": [{"tuple": [0, 1]}, {"tuple": [2]}]}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(cf.ModelFileError, match="channel blocks"):
        cf.load(folder)


def test_a_folder_that_is_replaced_while_it_is_read(two_solutions, tmp_path, monkeypatch):
    old, new = two_solutions
    cf.save(old, tmp_path)
    read = model_folder._read_tensors

    def late(folder, config):
        monkeypatch.undo()
        cf.save(new, tmp_path)
        return read(folder, config)

    monkeypatch.setattr(model_folder, "_read_tensors", late)
    assert torch.equal(cf.load(tmp_path).dense(), new.dense())


# ---------------------------------------------------------------------- strict JSON


def test_a_certificate_that_is_not_finite_comes_back_from_strict_json(two_solutions, tmp_path):
    solution = two_solutions[0]
    blank = replace(solution.certificate, dual=-math.inf, kkt={"feasibility": math.inf, "alignment": 0.5})
    record = solution.history[0]._replace(dual=-math.inf, relative_gap=math.inf)
    cf.save(replace(solution, certificate=blank, history=(record,)), tmp_path)
    config = strict((tmp_path / "config.json").read_text())
    assert config["body"]["certificate"]["dual"] == {"number": "-inf"}
    back = cf.load(tmp_path)
    assert back.certificate == blank
    assert back.history == (record,)


def test_strict_json_writes_what_float_reads(tmp_path):
    values = {"gaps": [math.inf, -math.inf, math.nan, 0.5, np.float64(2.0)], "n": np.int64(3), "pair": (True, None)}
    back = strict(strict_json(values))
    assert [float(x) for x in back["gaps"][:2]] == [math.inf, -math.inf]
    assert math.isnan(float(back["gaps"][2]))
    assert (back["gaps"][3:], back["n"], back["pair"]) == ([0.5, 2.0], 3, [True, None])
    write_json(tmp_path / "values.json", values)
    assert strict((tmp_path / "values.json").read_text()) == back


# ---------------------------------------------------------------------- durable writes


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path):
    file = tmp_path / "numbers.txt"
    atomic_write(file, lambda out: out.write(b"old"))
    assert stat.S_IMODE(file.stat().st_mode) == 0o666 & ~_umask()

    def fail(out):
        out.write(b"half")
        raise RuntimeError("no space")

    with pytest.raises(RuntimeError, match="no space"):
        atomic_write(file, fail)
    assert file.read_bytes() == b"old"
    assert names(tmp_path) == ["numbers.txt"]


def test_a_file_and_its_folder_are_synchronised_around_the_rename(tmp_path, monkeypatch):
    calls = []
    fsync, rename = os.fsync, os.replace
    kinds = {True: "folder", False: "file"}
    monkeypatch.setattr(os, "fsync", lambda fd: calls.append(kinds[stat.S_ISDIR(os.fstat(fd).st_mode)]) or fsync(fd))
    monkeypatch.setattr(os, "replace", lambda a, b: calls.append("rename") or rename(a, b))
    atomic_write(tmp_path / "x", lambda out: out.write(b"1"))
    assert calls == ["file", "rename", "folder"]


def _umask():
    mask = os.umask(0)
    os.umask(mask)
    return mask


# ---------------------------------------------------------------------- fingerprints


def facts(**changes):
    own = {
        "head": cf.heads.MLP("gated_relu", gates=3, seed=1),
        "loss": cf.losses.Huber(0.5),
        "beta": 0.1,
        "tokens": torch.arange(6.0).reshape(2, 3),
        "options": {"steps": (1, 2), "limit": math.inf},
    }
    return {**own, **changes}


def test_a_fingerprint_is_the_same_for_the_same_facts():
    expected = fingerprint(facts())
    assert expected == fingerprint(facts())
    assert len(expected) == 64
    assert expected == fingerprint(dict(reversed(facts().items())))
    assert expected == fingerprint(facts(beta=np.float64(0.1)))
    assert expected == fingerprint(facts(tokens=np.arange(6, dtype=np.float32).reshape(2, 3)))
    assert expected == fingerprint(facts(options={"limit": math.inf, "steps": [1, np.int64(2)]}))
    assert expected == fingerprint(facts(tokens=torch.arange(6.0).reshape(2, 3).T.contiguous().T))


@pytest.mark.parametrize(
    "changes",
    [
        {"head": cf.heads.MLP("gated_relu", gates=3, seed=2)},
        {"head": cf.heads.MLP("gated_relu", gates=torch.ones(3, 3), seed=1)},
        {"loss": cf.losses.Huber(0.25)},
        {"beta": math.nextafter(0.1, 1)},
        {"tokens": torch.arange(6.0).reshape(3, 2)},
        {"tokens": torch.arange(6.0, dtype=torch.float64).reshape(2, 3)},
        {"tokens": torch.arange(6.0).reshape(2, 3).bfloat16()},
        {"tokens": torch.arange(6.0).reshape(2, 3).flip(0)},
        {"options": {"steps": (1, 2), "limit": "inf"}},
        {"options": {"steps": (2, 1), "limit": math.inf}},
        {"more": None},
    ],
    ids=str,
)
def test_a_fingerprint_changes_with_every_fact(changes):
    assert fingerprint(facts(**changes)) != fingerprint(facts())


def test_a_fingerprint_of_something_unknown_is_an_error():
    with pytest.raises(TypeError, match="fingerprint of a object"):
        fingerprint({"thing": object()})

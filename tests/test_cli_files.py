"""The command line with files as users have them, new commands, and what it does when something is in the way."""

import csv
import inspect
import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import convexformer as cf
from convexformer.cli import app
from convexformer.cli.errors import explained, is_bad_input
from convexformer.cli.heads import HeadChoice, parse
from convexformer.data.files import read_arrays

RNG = np.random.default_rng(0)
X = RNG.standard_normal((40, 4, 3)).astype(np.float32)
Y = np.where(X[:, 0, 0] + 0.1 * RNG.standard_normal(40) > 0, "cat", "dog")


def call(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


def report(*words, code=0):
    done = call(*words, "--json")
    assert done.exit_code == code, done.output
    return json.loads(done.stdout)


@pytest.fixture
def data(tmp_path):
    np.savez(tmp_path / "d.npz", X=X, y=Y, group=np.arange(40) // 4)
    return tmp_path / "d.npz"


@pytest.fixture
def model(data, tmp_path):
    report("fit", data, "-o", tmp_path / "model")
    return tmp_path / "model"


# ---------------------------------------------------------------------- start


@pytest.mark.parametrize("words", [["--version"], ["--help"], ["fit", "--help"], ["export", "--help"]], ids=" ".join)
def test_help_does_not_wait_for_torch(words):
    code = (
        "import sys; sys.argv = ['convexformer', *sys.argv[1:]]\n"
        "from convexformer.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'numpy', 'sklearn', 'scipy', 'matplotlib', 'numba'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_the_function_path_hides_the_package_of_that_name():
    code = "import convexformer as cf\nfrom convexformer.path import walk\nassert cf.path.__name__ == 'path', cf.path"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
    assert set(cf.__all__) <= set(dir(cf))
    with pytest.raises(AttributeError, match="has no attribute 'slove'"):
        _ = cf.slove


# ---------------------------------------------------------------------- files


def test_tensors_of_torch_and_targets_in_a_table(tmp_path):
    torch.save({"X": torch.from_numpy(X), "w": torch.ones(40)}, tmp_path / "d.pt")
    rows = [["name", "y", "weight"], *([f"n{k}", label, 1 + k % 2] for k, label in enumerate(Y))]
    for suffix, delimiter in (("csv", ","), ("tsv", "\t")):
        with (tmp_path / f"t.{suffix}").open("w", newline="") as file:
            csv.writer(file, delimiter=delimiter).writerows(rows)
        words = ["fit", tmp_path / "d.pt", "--targets", tmp_path / f"t.{suffix}", "-o", tmp_path / suffix]
        assert report(*words, "--weight", "weight")["task"] == "classify"
        assert cf.load(tmp_path / suffix).classes_.tolist() == ["cat", "dog"]
    assert report(*words[:3], tmp_path / "t.csv", "--y", "weight", "-o", tmp_path / "m")["task"] == "classify"
    torch.save(torch.from_numpy(X).bfloat16(), tmp_path / "one.pt")
    assert read_arrays(tmp_path / "one.pt")["one"].dtype == np.float32


def test_tables_are_read_by_type_with_or_without_a_header(tmp_path):
    (tmp_path / "a.csv").write_text('whole,real,text\n1,1.5,a\n2,2,"b,c"\n', encoding="utf-8-sig")
    table = read_arrays(tmp_path / "a.csv")
    assert [values.dtype.kind for values in table.values()] == ["i", "f", "U"]
    assert table["text"].tolist() == ["a", "b,c"]
    (tmp_path / "b.csv").write_text("0\n1\n1\n")
    assert read_arrays(tmp_path / "b.csv")["0"].tolist() == [0, 1, 1]


def lying_npy(path, shape):
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": "<f8", "fortran_order": False, "shape": shape})
        file.write(bytes(64))


def lying_npz(path):
    lying_npy(path.with_suffix(".npy"), (10**9, 10**3))
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(path.with_suffix(".npy"), "X.npy")


class Unpickled:
    def __reduce__(self):
        return (os.mkdir, ("executed",))


BAD = {
    "latin.csv": (lambda p: p.write_bytes(b"y\ncat\ndog\nh\xe9\n"), ["line 4 is not UTF-8", "0xe9"]),
    "short.csv": (lambda p: p.write_text("a,y\n1,2\n3\n"), ["line 3 has 1 columns", "has 2"]),
    "empty.csv": (lambda p: p.write_text(""), ["is empty", "column names"]),
    "twice.tsv": (lambda p: p.write_text("y\ty\n1\t2\n"), ["names a column twice"]),
    "lies.npy": (
        lambda p: lying_npy(p, (10**12, 10)),
        ["its header says float64 (1000000000000, 10)", "and there are 64"],
    ),
    "lies.npz": (lying_npz, ["array 'X'", "its header says", "truncated"]),
    "objects.pt": (lambda p: torch.save({"X": Unpickled()}, p), ["holds objects", "can execute code"]),
    "list.pt": (lambda p: torch.save([1, 2], p), ["holds a list", "dictionary of tensors"]),
    "text.pt": (lambda p: p.write_text("hello"), ["cannot be read", "Only tensors"]),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_bad_input(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    make, words = BAD[name]
    make(tmp_path / name)
    done = call("fit", tmp_path / name, "-o", tmp_path / "m")
    assert done.exit_code == 2, done.output
    for word in words:
        assert word in done.stderr.replace("\n", " ")
    assert not (tmp_path / "executed").exists()


def test_too_little_memory_is_bad_input():
    for error in (MemoryError("Unable to allocate 8 TiB"), RuntimeError("DefaultCPUAllocator: can't allocate memory")):
        assert is_bad_input(error)
        assert "not enough memory" in explained(error)
    assert not is_bad_input(RuntimeError("some bug"))


def test_files_have_the_permissions_of_any_new_file(model, tmp_path):
    (tmp_path / "plain").write_text("")
    normal = (tmp_path / "plain").stat().st_mode
    assert {file.stat().st_mode for file in model.iterdir()} == {normal}


# ---------------------------------------------------------------------- commands


def test_predict_writes_labels_and_probabilities(model, data, tmp_path):
    for suffix in ("npz", "csv", "tsv", "npy"):
        assert call("predict", model, data, "-o", tmp_path / f"p.{suffix}").exit_code == 0
    probe = cf.load(model)
    with np.load(tmp_path / "p.npz") as found:
        assert np.allclose(found["probabilities"], probe.predict_proba(X))
        assert found["classes"].tolist() == ["cat", "dog"]
        assert found["predictions"].tolist() == probe.predict(X).tolist()
    table = read_arrays(tmp_path / "p.tsv")
    assert list(table) == ["prediction", "probability_cat", "probability_dog"]
    assert np.allclose(table["probability_dog"], probe.predict_proba(X)[:, 1])


def test_score_and_cv(model, data, tmp_path):
    scored = report("score", model, data)
    assert (scored["metric"], scored["samples"]) == ("accuracy", 40)
    assert scored["score"] == cf.load(model).score(X, Y)
    words = ["cv", data, "-o", tmp_path / "cv", "--folds", 3, "--n-betas", 4, "--beta-min-ratio", 0.05]
    found = report(*words, "--groups", "group", "--selection", "1se", "--scoring", "balanced_accuracy")
    assert found["certified"]
    assert 0 < found["score"] <= 1
    assert cf.load(tmp_path / "cv").beta_ratio_ == found["beta_ratio"]
    assert "is already" not in call(*words).stderr
    assert call(*words).exit_code == 2


def test_export_writes_and_checks_its_file(model, tmp_path):
    done = report("export", model, "--torch", tmp_path / "m.pt2")
    assert done["classes"] == "cat, dog"
    assert done["largest_difference"] < 1e-5
    assert "--force" in call("export", model, "--torch", tmp_path / "m.pt2").stderr
    assert call("export", model, "--torch", tmp_path / "m.pt2", "--force", "--dtype", "float64").exit_code == 0
    nothing = call("export", model)
    assert nothing.exit_code == 2
    assert "--onnx FILE" in nothing.stderr


def test_results_are_not_overwritten_without_force(model, data):
    before = (model / "config.json").read_bytes()
    done = call("fit", data, "-o", model, "--beta-ratio", 0.5)
    assert done.exit_code == 2
    assert "holds results already (config.json)" in done.stderr
    assert "--force" in done.stderr
    assert (model / "config.json").read_bytes() == before
    assert call("fit", data, "-o", model, "--beta-ratio", 0.5, "--force").exit_code == 0
    assert (model / "config.json").read_bytes() != before


def test_certify_tells_other_data_from_the_data_of_the_fit(model, data, tmp_path):
    assert report("certify", model, data)["data_of_the_fit"] is True
    torch.save({"X": torch.from_numpy(X)}, tmp_path / "same.pt")
    (tmp_path / "same.csv").write_text("\n".join(["y", *Y]))
    assert report("certify", model, tmp_path / "same.pt", "--targets", tmp_path / "same.csv")["data_of_the_fit"] is True
    other = X.copy()
    other[0, 0, 0] += 1
    np.savez(tmp_path / "other.npz", X=other, y=Y)
    done = call("certify", model, tmp_path / "other.npz", "--json")
    assert json.loads(done.stdout)["data_of_the_fit"] is False
    assert "not the data of the fit" in done.stderr


def test_tolerances_are_those_of_the_api():
    def default(function, name="tolerance"):
        return inspect.signature(function).parameters[name].default

    from convexformer.cli import path, search
    from convexformer.cli.commands import fit

    assert default(fit) == default(cf.TokenClassifier)
    assert default(search.cv) == default(cf.TokenClassifierCV)
    assert default(path.path) == default(cf.solve)


# ---------------------------------------------------------------------- heads


def test_every_argument_of_a_head_has_an_option(data, tmp_path):
    done = report("fit", data, "-o", tmp_path / "a", "--head", "poolformer", "--grid", "2x2", "--window", 5)
    assert done["certified"]
    head = cf.load(tmp_path / "a").solution_.head
    assert (head.grid, head.window) == ((2, 2), 5)

    def made(name, *more, activation="linear", gates=16):
        return HeadChoice(name, activation, "l1", gates, more=list(more)).parameters(3)

    assert made("mlp") == {"head": "mlp", "activation": "linear", "decay": "l1", "gates": 16, "random_state": 3}
    fno = made("block_fno", "blocks=3", "grid=2x2", activation="gated_relu", gates=5)["head"]
    assert fno.config() == {"activation": "gated_relu", "blocks": 3, "grid": (2, 2), "gates": 5, "seed": 3}
    assert [part.name for part in made("sum", "heads=mlp,fno", "weights=learned")["head"].heads] == ["mlp", "fno"]
    kernel = made("kernel", "feature=CovariancePooling", "feature.kind=log", "kernel=linear")["head"]
    assert (kernel.feature.kind, kernel.kernel) == ("log", "linear")
    assert made("block_self_attention", "blocks=[[0, 2], [1]]")["head"].blocks == ((0, 2), (1,))
    assert [parse(text) for text in ("8x8", "0.5", "None", "log")] == [(8, 8), 0.5, None, "log"]
    for more, message in (("windows=5", "has no option 'windows'; it has"), ("window", "expected NAME=VALUE")):
        refused = call("fit", data, "-o", tmp_path / "b", "--head", "poolformer", "-H", more)
        assert refused.exit_code == 2
        assert message in refused.stderr
    useless = call("fit", data, "-o", tmp_path / "b", "--head", "mlp", "--decay", "l2")
    assert useless.exit_code == 2
    assert "decay" in useless.stderr


# ---------------------------------------------------------------------- Ctrl-C

STUCK = """
import sys, time
from convexformer.cli.interrupt import answered
with answered():
    print("ready", flush=True)
    try:
        end = time.monotonic() + 60
        while time.monotonic() < end:
            {work}
    except KeyboardInterrupt:
        print("ended", flush=True)
        raise SystemExit(130)
"""


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
def test_ctrl_c_is_answered_while_a_library_does_not_listen():
    # a C function that takes long and holds no instruction of Python: the thread answers, a second press ends
    work = "import ctypes; ctypes.CDLL(None).usleep(20_000_000) or ctypes.CDLL(None).usleep(20_000_000)"
    code = "import signal; signal.signal(signal.SIGINT, lambda *_: None)\n" + STUCK.format(work=work)
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    assert process.stderr.readline() == "\n"
    assert process.stderr.readline().startswith("interrupted: ending")
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=10) == 130


def loaded(process, library):
    """Wait until a process has loaded a library: it is in the middle of its imports."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if library in Path(f"/proc/{process.pid}/maps").read_text():
            return
        time.sleep(0.02)
    raise AssertionError(f"{library} was not loaded")


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="looks into /proc")
@pytest.mark.parametrize(("library", "wait"), [("libtorch_cpu", 0.0), ("llvmlite", 1.0)], ids=["importing", "working"])
def test_ctrl_c_ends_a_command(tmp_path, library, wait):
    big = np.random.default_rng(0).standard_normal((2000, 64, 48)).astype(np.float32)
    np.savez(tmp_path / "big.npz", X=big, y=np.arange(2000) % 10)
    words = [
        "fit",
        tmp_path / "big.npz",
        "-o",
        tmp_path / "m",
        "--head",
        "self_attention",
        "--activation",
        "gated_relu",
    ]
    words += ["--beta-ratio", "0.001", "--tolerance", "1e-9"]
    command = [sys.executable, "-m", "convexformer", *map(str, words)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    loaded(process, library)
    time.sleep(wait)
    process.send_signal(signal.SIGINT)
    try:
        _, messages = process.communicate(timeout=60)
    finally:
        process.kill()
    assert "interrupted: ending" in messages
    assert "Traceback" not in messages
    assert process.returncode in (3, 130)

"""The command line: what it prints, what it writes, and its exit codes."""

import csv
import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from typer.testing import CliRunner

import convexformer as cf
from convexformer.cli import app, commands
from convexformer.cli.errors import is_bad_input
from convexformer.registry import one_of
from convexformer.solvers.monitor import Monitor


def call(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cli")
    X, y = cf.data.digits(patch=4)
    X, y = X[:200].numpy().astype(np.float32), y[:200].numpy()
    mask = np.ones(X.shape[:2], dtype=np.int8)
    mask[::3, -1] = 0
    np.savez(folder / "train.npz", X=X, y=y, m=mask, w=np.ones(200))
    np.save(folder / "tokens.npy", X)
    save_file({"target": y.astype(np.float32)}, folder / "targets.safetensors")
    return folder


def test_fit_predict_certify(files, tmp_path):
    done = call("fit", files / "train.npz", "-o", tmp_path / "model", "--json", "--mask", "m", "--weight", "w")
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert report["certified"]
    assert report["relative_gap"] <= 1e-3
    again = call("certify", tmp_path / "model", files / "train.npz", "--mask", "m", "--weight", "w", "--json")
    assert again.exit_code == 0, again.output
    assert json.loads(again.stdout)["objective"] == pytest.approx(report["objective"], rel=1e-12)
    predicted = call("predict", tmp_path / "model", files / "train.npz", "--mask", "m", "-o", tmp_path / "out.npz")
    assert predicted.exit_code == 0, predicted.output
    with np.load(tmp_path / "out.npz") as out, np.load(files / "train.npz") as train:
        assert out["outputs"].shape == (200, 10)
        assert (out["predictions"] == train["y"]).mean() == pytest.approx(report["train_score"])


def test_fit_regression_from_two_files_and_csv(files, tmp_path):
    words = [
        "fit",
        files / "tokens.npy",
        "--targets",
        files / "targets.safetensors",
        "-o",
        tmp_path / "m",
        "--head",
        "mlp",
    ]
    done = call(*words)
    assert done.exit_code == 0, done.output
    assert "relative gap" in done.stdout
    assert call("predict", tmp_path / "m", files / "tokens.npy", "-o", tmp_path / "p.csv").exit_code == 0
    lines = (tmp_path / "p.csv").read_text().splitlines()
    assert lines[0] == "prediction"
    assert len(lines) == 201


def test_exit_code_3_when_not_certified(files, tmp_path):
    words = ["fit", files / "train.npz", "-o", tmp_path / "model", "--max-iter", 3, "--beta-ratio", 0.001, "--json"]
    done = call(*words)
    assert done.exit_code == 3
    assert json.loads(done.stdout)["certified"] is False
    assert call("certify", tmp_path / "model", files / "train.npz").exit_code == 3
    assert call("certify", tmp_path / "model", files / "train.npz", "--tolerance", 0.999).exit_code == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["fit", "nowhere.npz", "-o", "m"], "does not exist"),
        (["fit", "{train}", "-o", "m", "--y", "labels"], "it holds"),
        (["fit", "{train}", "-o", "m", "--head", "atention"], "Did you mean 'attention'"),
        (["fit", "{train}", "-o", "m", "--task", "rank"], "unknown task"),
        (["fit", "{train}", "-o", "m", "--mask", "mask"], "no array 'mask'"),
        (["fit", "{train}", "-o", "m", "--tolerance", "-1"], "tolerance=-1.0"),
        (["predict", "nowhere", "{train}", "-o", "p.npy"], "not a folder"),
        (["certify", "nowhere", "{train}"], "not a folder"),
    ],
    ids=lambda value: " ".join(value[:1]) if isinstance(value, list) else value,
)
def test_exit_code_2_with_one_clear_line(files, words, message):
    done = call(*(word.format(train=files / "train.npz") for word in words))
    assert done.exit_code == 2
    assert message in done.stderr
    assert "Traceback" not in done.output


def test_predict_refuses_an_unknown_suffix_and_other_tokens(files, tmp_path):
    assert call("fit", files / "train.npz", "-o", tmp_path / "m", "--tolerance", 0.1).exit_code == 0
    refused = call("predict", tmp_path / "m", files / "train.npz", "-o", tmp_path / "p.xls")
    assert refused.exit_code == 2
    assert ".xls" in refused.stderr
    np.save(tmp_path / "other.npy", np.zeros((3, 4, 5)))
    assert call("predict", tmp_path / "m", tmp_path / "other.npy", "-o", tmp_path / "p.npy").exit_code == 2


def test_every_command_helps_with_an_example():
    for command in ("demo", "fit", "predict", "score", "cv", "certify", "path", "export", "bench"):
        done = call(command, "--help")
        assert done.exit_code == 0
        assert "Example" in done.stdout
    assert call("--version").stdout.strip() == cf.__version__


def test_path_writes_its_figure_and_numbers_and_resumes(files, tmp_path):
    words = ["path", files / "train.npz", "-o", tmp_path / "out", "--n-betas", 4, "--beta-min-ratio", 0.05, "--json"]
    words += ["--mask", "m", "--weight", "w", "--checkpoint", tmp_path / "resume"]
    done = call(*words)
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert report["certified"]
    assert report["betas"][0] == pytest.approx(report["beta_max"])
    assert report["active_tokens"][0] == 0
    saved = json.loads((tmp_path / "out" / "path.json").read_text())
    assert saved["relative_gaps"] == report["relative_gaps"]
    assert (tmp_path / "out" / "path.png").stat().st_size > 10_000
    again = json.loads(call(*words).stdout)
    assert again["objectives"] == pytest.approx(report["objectives"], rel=1e-6)
    # the last point is what fit finds at that beta
    fitted = call(
        "fit",
        *words[1:2],
        "-o",
        tmp_path / "m",
        "--beta",
        report["betas"][-1],
        *words[9:13],
        "--json",
        "--tolerance",
        1e-4,
    )
    assert json.loads(fitted.stdout)["objective"] == pytest.approx(report["objectives"][-1], rel=2e-4)
    assert call("path", files / "train.npz", "-o", tmp_path, "--n-betas", 0).exit_code == 2


def test_bench_compares_our_solvers_with_adam():
    sizes = ["--samples", 60, "--n-tokens", 6, "--width", 4, "--steps", 20]
    done = call("bench", *sizes, "--json")
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    assert [row["tool"].split()[0] for row in result["rows"]] == ["auto", "fista", "Adam,"]
    assert result["rows"][-1]["gap"] >= 0
    assert "gap at the end" in call("bench", *sizes).stdout
    assert call("bench", "--samples", 1).exit_code == 2


def test_quick_demo_is_certified_and_writes_its_figures(tmp_path):
    done = call("demo", "--quick", "--json", "-o", tmp_path)
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    assert result["worst_relative_gap"] <= 1e-4
    first, *others = result["leaderboard"]
    assert first["head"].startswith("auto")  # the best test accuracy of all
    assert first["relative_gap"] <= 1e-4
    assert {"logistic, mean token", "logistic, all tokens"} <= {row["head"] for row in others}
    optimum, *adam = result["adam"]
    assert all(run["objective"] >= optimum["objective"] * (1 - 1e-4) for run in adam)
    assert all(run["certified_gap"] >= run["above_optimum"] / (1 + run["above_optimum"]) - 1e-4 for run in adam)
    for name in ("blocks.png", "token_importance.png", "path.png", "convergence.png"):
        assert (tmp_path / name).stat().st_size > 10_000


def test_fit_with_targets_per_token(files, tmp_path):
    with np.load(files / "train.npz") as train:
        np.savez(tmp_path / "per_token.npz", X=train["X"], y=train["X"][:, :, :2].astype(float))
    done = call("fit", tmp_path / "per_token.npz", "--head", "mlp", "-o", tmp_path / "m", "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["train_score"] is None


def test_the_report_names_task_and_loss_and_weighs_its_score(files, tmp_path):
    with np.load(files / "train.npz") as train:
        X, y, w = train["X"], train["y"], np.linspace(0.1, 1, 200)
    np.savez(tmp_path / "d.npz", X=X, y=y.astype(float), labels=y, w=w)
    words = ["fit", tmp_path / "d.npz", "-o", tmp_path / "m", "--weight", "w"]
    report = json.loads(call(*words, "--json").stdout)
    assert (report["task"], report["loss"]) == ("regress", "squared")
    model = cf.load(tmp_path / "m")
    assert report["train_score"] == pytest.approx(model.score(X, y, sample_weight=w))
    assert "classify" in call(*words, "--y", "labels", "--force").stdout


@pytest.mark.parametrize("name", ["data[v2]x", "data[bold]"])
def test_names_with_brackets_are_kept(files, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    missing = call("fit", f"{name}.npz", "-o", "m")
    assert missing.exit_code == 2
    assert f"{name}.npz does not exist" in missing.stderr
    (tmp_path / f"{name}.npz").write_bytes((files / "train.npz").read_bytes())
    done = call("fit", f"{name}.npz", "-o", name, "--tolerance", 0.1)
    assert done.exit_code == 0, done.output
    assert name in done.stdout


def test_a_bracket_that_closes_nothing_is_no_markup():
    done = call("fit", "data[/v2].npz", "-o", "m")
    assert done.exit_code == 2
    assert "data[/v2].npz does not exist" in done.stderr


def test_labels_with_commas_and_quotes_come_back_from_csv(files, tmp_path):
    with np.load(files / "train.npz") as train:
        labels = np.array(["a,b", 'c"d', "e"])[train["y"] % 3]
        np.savez(tmp_path / "text.npz", X=train["X"], y=labels)
    assert call("fit", tmp_path / "text.npz", "-o", tmp_path / "m").exit_code == 0
    assert call("predict", tmp_path / "m", tmp_path / "text.npz", "-o", tmp_path / "p.csv").exit_code == 0
    with (tmp_path / "p.csv").open(newline="") as file:
        rows = list(csv.reader(file))
    with np.load(tmp_path / "text.npz") as text:
        expected = cf.load(tmp_path / "m").predict(text["X"])
    assert rows[0] == ["prediction", "probability_a,b", 'probability_c"d', "probability_e"]
    assert [row[0] for row in rows[1:]] == list(expected)
    assert all(sum(map(float, row[1:])) == pytest.approx(1) for row in rows[1:])


def test_ctrl_c_writes_the_best_model_and_the_same_command_goes_on(files, tmp_path, monkeypatch):
    check, seen = Monitor.check, []

    def press(self, Z, fit):
        point = check(self, Z, fit)
        seen.append(self.iteration)
        if len(seen) == 3:
            raise KeyboardInterrupt
        return point

    monkeypatch.setattr(Monitor, "check", press)
    words = ["fit", files / "train.npz", "-o", tmp_path / "m", "--beta-ratio", 0.01, "--tolerance", 1e-6, "--json"]
    words += ["--checkpoint", tmp_path / "run.safetensors"]
    done = call(*words)
    assert done.exit_code == 3, done.output
    report = json.loads(done.stdout)
    assert report["status"] == "interrupted; this is the best point so far, the same command resumes from it"
    assert cf.load(tmp_path / "m").certificate_.relative_gap == report["relative_gap"]
    again = json.loads(call(*words).stdout)
    assert again["certified"]
    assert again["iterations"] > report["iterations"]


def test_a_path_has_limits_for_each_beta(files, tmp_path):
    words = ["path", files / "train.npz", "-o", tmp_path, "--n-betas", 3, "--max-iter", 2, "--json"]
    done = call(*words)
    assert done.exit_code == 3
    assert max(json.loads(done.stdout)["iterations"]) <= 2
    assert call(*words, "--max-time", 100, "--force").exit_code == 3


def test_the_quick_demo_promises_no_seconds():
    assert "under a minute" in " ".join(call("demo", "--help").stdout.replace("│", " ").split())


def test_warnings_are_one_line_each(files, tmp_path):
    assert call("fit", files / "train.npz", "-o", tmp_path / "m", "--mask", "m", "--tolerance", 0.1).exit_code == 0
    done = call("predict", tmp_path / "m", files / "train.npz", "-o", tmp_path / "p.npy")
    assert done.exit_code == 0
    assert done.stderr.startswith("warning: this estimator was fitted with a mask")
    assert ".py" not in done.stderr


def strict(text):
    """Parse JSON as strict parsers do: without Infinity and NaN."""

    def refuse(word):
        raise AssertionError(f"{word} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_json_is_strict_where_numbers_are_not_finite(files, tmp_path, monkeypatch):
    fit = cf.TokenClassifier.fit_checkpointed

    def blind(self, *args, **options):
        fit(self, *args, **options)
        self.certificate_ = replace(self.certificate_, dual=-math.inf, kind="none")
        self.solution_ = replace(self.solution_, certificate=self.certificate_)

    monkeypatch.setattr(cf.TokenClassifier, "fit_checkpointed", blind)
    done = call("fit", files / "train.npz", "-o", tmp_path / "model", "--tolerance", 0.1, "--json")
    assert done.exit_code == 3, done.output
    report = strict(done.stdout)
    assert report["dual"] == "-inf"
    assert float(report["relative_gap"]) == math.inf
    strict((tmp_path / "model" / "config.json").read_text())
    assert cf.load(tmp_path / "model").certificate_.dual == -math.inf


def test_every_json_output_is_strict(files, tmp_path):
    words = ["path", files / "train.npz", "-o", tmp_path, "--n-betas", 2, "--beta-min-ratio", 0.5, "--json"]
    strict(call(*words).stdout)
    strict((tmp_path / "path.json").read_text())
    strict(call("experiment", "--json").stdout)


@pytest.mark.parametrize(
    "bug",
    [
        lambda *_: len(None),
        lambda *_: {}["beta"],
        lambda *_: np.zeros(3) + np.zeros(4),
        lambda *_: torch.zeros("three"),
        lambda *_: torch.nn.Linear(2, 2)(None),
    ],
    ids=["TypeError", "KeyError", "ValueError of NumPy", "TypeError of torch", "TypeError inside torch"],
)
def test_a_bug_is_not_reported_as_bad_input(files, tmp_path, monkeypatch, bug):
    monkeypatch.setattr(commands, "_train_score", bug)
    done = call("fit", files / "train.npz", "-o", tmp_path / "m", "--tolerance", 0.1)
    assert done.exit_code == 1
    assert isinstance(done.exception, (TypeError, KeyError, ValueError))
    assert "error:" not in done.stderr


def test_an_operation_that_fails_inside_the_package_is_a_bug():
    with pytest.raises(TypeError, match="not iterable") as bug:
        one_of("kind", "name", None)
    assert not is_bad_input(bug.value)


def test_errors_about_the_input_are_bad_input(tmp_path):
    def error_of(action):
        with pytest.raises((ValueError, TypeError, OSError)) as caught:
            action()
        return caught.value

    X, y = np.ones((6, 2, 3)), np.array([0, 1] * 3)
    for action in (
        lambda: cf.Problem("attention", X, y, beta="large"),  # our TypeError
        lambda: cf.Problem("attention", X, y, beta=-1.0),  # our ValueError
        lambda: cf.Problem("attention", np.array([["a"]]), y, beta=1.0),  # NumPy's, translated by our validation
        lambda: cf.Problem("attention", np.ones((6, 1), dtype="datetime64[D]"), y, beta=1.0),
        lambda: cf.TokenClassifier().fit(np.array([["a"]] * 6), y),  # scikit-learn's validation of tables
        lambda: cf.TokenClassifier().fit(X, np.linspace(0, 1, 6)),  # and of labels
        lambda: cf.load(tmp_path / "nowhere"),
        lambda: (tmp_path / "no folder" / "file").write_text(""),
    ):
        assert is_bad_input(error_of(action))


def test_text_in_a_table_is_bad_input_on_the_command_line(tmp_path):
    np.savez(tmp_path / "text.npz", X=np.array([["a", "b"]] * 6), y=np.array([0, 1] * 3))
    done = call("fit", tmp_path / "text.npz", "-o", tmp_path / "m")
    assert done.exit_code == 2
    assert "Traceback" not in done.output

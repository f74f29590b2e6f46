"""The experiments on trained stacks: every part runs, writes its folder, and says what it measured."""

import json

import numpy as np
import pytest
from rich.console import Console

import test_margin_experiment as margin
from convexformer import deep
from convexformer.data import modular_division
from convexformer.experiments import deep_study, grokking, mod15, periodicity, spectra
from convexformer.experiments.study import Verdict

NAMES = ("grokking", "mod15", "periodicity", "spectra")


@pytest.fixture
def tiny(monkeypatch):
    """The same programs on a smaller task, for few iterations."""
    train = deep_study.train
    shorter = {"iterations": 40, "evaluate_every": 10, "max_time": None}

    def few(model, task, training, device):
        every = None if training.spectra_every is None else 10
        return train(model, task, training.but(**shorter, spectra_every=every), device="cpu")

    monkeypatch.setattr(deep_study, "train", few)
    small = modular_division(11)
    for module in (grokking, mod15, spectra):
        monkeypatch.setattr(module, "modular_division", lambda p: small)
    for module in (periodicity, spectra):
        monkeypatch.setattr(module, "periodicity", lambda p: small)


@pytest.mark.parametrize(
    ("name", "preset"), [("grokking", "all"), ("mod15", "paper"), ("periodicity", "all"), ("spectra", "report")]
)
def test_a_run_writes_figures_summary_results_and_config(tiny, tmp_path, name, preset):
    done = margin.invoke("experiment", name, "--quick", "--preset", preset, "--json", "-o", tmp_path)
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert report["certified"]
    assert report["findings"]
    assert {each["verdict"] for each in report["findings"]} <= {verdict.value for verdict in Verdict}
    summary = (tmp_path / "summary.md").read_text()
    for file in report["figures"]:
        assert (tmp_path / file).stat().st_size > 10_000
        assert file.rsplit("/", 1)[-1] in summary
    assert "data:image/png;base64" in (tmp_path / "summary.html").read_text()
    with np.load(tmp_path / "histories.npz") as curves:
        assert all(curves[f"{key}/test_accuracy"].shape[1] == len(row["seeds"]) for key, row in report["rows"].items())
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["rows"].keys() == report["rows"].keys()
    first = next(iter(config["rows"].values()))
    assert deep.Training(**{**first["training"], "betas": tuple(first["training"]["betas"])}).iterations > 0


def test_a_quick_run_stopped_by_the_clock_refutes_nothing(tmp_path):
    stacks = deep_study.TrainedStacks.begin("grokking", "a title", tmp_path, True, "tuned", Console(quiet=True))
    task = modular_division(11)
    stacks.train("convex-1", deep.recipe("convex-1"), task, max_time=1e-9)
    stacks.study.find("a paper", "a claim", "nothing", Verdict.NO)
    assert stacks.finish()["findings"][0]["verdict"] == "not tested"
    assert "stopped by the clock" in (tmp_path / "summary.md").read_text()


def test_an_unknown_preset_and_a_preset_where_there_is_none_are_bad_input(tmp_path):
    for words, message in (
        (("experiment", "grokking", "--preset", "tunned"), "Did you mean 'tuned'"),
        (("experiment", "implicit-bias", "--preset", "tuned"), "has no presets"),
    ):
        done = margin.invoke(*words, "-o", tmp_path)
        assert done.exit_code == 2
        assert message in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_quick_experiments_end_certified(tmp_path, name):
    done = margin.invoke("experiment", name, "--quick", "--json", "-o", tmp_path)
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["certified"]

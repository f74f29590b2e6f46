"""The experiments on trained stacks: every part runs, writes its folder, and says what it measured."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

import test_margin_experiment as margin
from convexformer import deep
from convexformer.data import modular_division
from convexformer.data import periodicity as make_periodicity
from convexformer.experiments import deep_costs, deep_study, grokking, grokking_moduli, mod15, periodicity, spectra
from convexformer.experiments.study import Verdict

CLAIM_KEYS = {"source", "claim", "predicted", "measured", "verdict", "holds", "budget"}
NAMES = ("grokking", "mod15", "periodicity", "spectra")


@pytest.fixture
def tiny(monkeypatch):
    """The same programs on a smaller task, for few iterations."""
    train = deep_study.train

    def few(model, task, training, device, checkpoint=None):
        every = None if training.spectra_every is None else 10
        short = training.but(iterations=40, evaluate_every=10, spectra_every=every)
        return train(model, task, short, device="cpu", checkpoint=checkpoint)

    monkeypatch.setattr(deep_study, "train", few)
    monkeypatch.setattr(deep_costs, "STEPS", 2)
    small, other = modular_division(11), make_periodicity(11)
    for module in (grokking, grokking_moduli, mod15, spectra):
        monkeypatch.setattr(module, "modular_division", lambda p: small)
    for module in (periodicity, spectra):
        monkeypatch.setattr(module, "periodicity", lambda p: other)


@pytest.mark.parametrize(
    ("name", "preset"), [("grokking", "all"), ("mod15", "paper"), ("periodicity", "all"), ("spectra", "all")]
)
def test_a_run_writes_figures_summary_results_and_config(tiny, tmp_path, name, preset):
    done = margin.invoke("experiment", name, "--quick", "--preset", preset, "--json", "-o", tmp_path)
    report = json.loads(done.stdout)
    assert report["certified"]
    verdicts = [each["verdict"] for each in report["claims"]]
    assert report["untested"] == verdicts.count("not tested") > 0
    assert done.exit_code == 4, done.output
    assert set(verdicts) <= {verdict.value for verdict in Verdict}
    assert all(each.keys() == CLAIM_KEYS for each in report["claims"])
    assert len({(each["source"], each["claim"]) for each in report["claims"]}) == len(verdicts)
    assert report["config"] == json.loads((tmp_path / "config.json").read_text())
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


@pytest.fixture
def stacks(tmp_path):
    return deep_study.TrainedStacks.begin("grokking", "a title", tmp_path, True, "tuned", Console(quiet=True))


@pytest.mark.parametrize(
    ("limit", "settled", "verdict"),
    [(20, False, "not tested"), (20, True, "not reproduced"), (None, False, "not reproduced")],
)
def test_a_budget_below_the_full_one_refutes_only_what_is_settled(stacks, limit, settled, verdict):
    recipe = deep.recipe("convex-1").but(iterations=30)
    stacks.train("convex-1", recipe, modular_division(11), quick=limit)
    stacks.find("a paper", "a claim", ("convex-1",), lambda run: deep_study.Measured("never", Verdict.NO, settled))
    (claim,) = stacks.finish()["claims"]
    assert claim["verdict"] == verdict
    assert claim["budget"] == f"{limit or 30} iterations, 2 seeds"
    assert ("20 of 30 iterations" in claim["measured"]) == (verdict == "not tested")


@pytest.mark.parametrize(("indifferent", "verdict"), [((), "not tested"), ((0,), "not tested"), ((1,), "reproduced")])
def test_a_model_whose_further_iterations_do_not_matter_may_stop_early(stacks, indifferent, verdict):
    recipe = deep.recipe("convex-1").but(iterations=30)
    stacks.train("whole", recipe, modular_division(11))
    stacks.train("short", recipe, modular_division(11), quick=20)
    measured = deep_study.Measured("less", Verdict.YES, indifferent=indifferent)
    stacks.find("a paper", "a claim", ("whole", "short"), lambda *_: measured)
    assert stacks.finish()["claims"][0]["verdict"] == verdict


def test_a_claim_about_the_end_of_training_needs_the_whole_budget(stacks, monkeypatch):
    monkeypatch.setattr(deep.Run, "iterations_to", lambda *_, **__: np.array([10.0, 10.0]))
    stacks.train("convex-1", deep.recipe("convex-1").but(iterations=30), modular_division(11), quick=20)
    for whole in (False, True):
        stacks.find(
            "a paper",
            f"whole: {whole}",
            ("convex-1",),
            lambda run: deep_study.Measured("all", Verdict.YES),
            whole=whole,
        )
    assert [each["verdict"] for each in stacks.finish()["claims"]] == ["reproduced", "not tested"]


def test_a_model_left_out_of_a_quick_run_leaves_its_claims_open(stacks):
    stacks.train("softmax-4", deep.recipe("softmax-4"), modular_division(11), quick=0)
    stacks.find("a paper", "a claim", ("softmax-4",), lambda run: pytest.fail("there is no run to measure"))
    result = stacks.finish()
    assert result["untested"] == 1
    assert "left out of a quick run: softmax, tuned, L=4" in result["claims"][0]["measured"]


def test_seeds_and_budget_come_from_the_command_line(tiny, tmp_path, monkeypatch):
    short = deep_study.train
    wanted = []
    monkeypatch.setattr(
        deep_study, "train", lambda model, task, training, device, checkpoint: (
            wanted.append((len(model.seeds), training.iterations)) or short(model, task, training, device)
        ),
    )  # fmt: skip
    words = ("--preset", "report", "--quick", "--seeds", 3, "--budget", 500)
    done = margin.invoke("experiment", "periodicity", *words, "--json", "-o", tmp_path)
    assert done.exit_code == 4, done.output
    assert wanted == [(3, 500)] * 3
    assert json.loads(done.stdout)["config"]["full_budgets"]["report-convex"] == 300_000


def test_a_study_goes_on_from_the_trainings_that_are_there(tmp_path):
    """A run of 10 iterations, one of 30 that goes on from it, and one of 10 that finds more than it asks for."""
    curves, budgets = [], []
    for resume, folder, limit in ((True, "a", 10), (True, "a", 30), (True, "a", 10), (False, "b", 30)):
        stacks = deep_study.TrainedStacks.begin(
            "grokking", "a title", tmp_path / folder, False, "tuned", Console(quiet=True), seeds=1, resume=resume
        )
        recipe = deep.recipe("convex-1").but(iterations=limit, evaluate_every=5, target=None)
        stacks.train("convex-1 mod 11", recipe, modular_division(11))
        curves.append(stacks.runs["convex-1 mod 11"].history)
        budgets.append(stacks.recipes["convex-1 mod 11"].training.iterations)
    assert [each.iteration[-1] for each in curves] == [10, 30, 30, 30]
    assert budgets == [10, 30, 30, 30]
    np.testing.assert_array_equal(curves[1].train_loss, curves[3].train_loss)
    assert curves[2].seconds[-1] == curves[1].seconds[-1]  # not trained again
    assert [file.name for file in (tmp_path / "a/checkpoints").iterdir()] == ["convex-1-mod-11.safetensors"]
    assert not (tmp_path / "b/checkpoints").exists()


def test_options_that_an_experiment_does_not_have_are_bad_input(tmp_path):
    for words, message in (
        (("experiment", "grokking", "--preset", "tunned"), "Did you mean 'tuned'"),
        (("experiment", "implicit-bias", "--preset", "tuned"), "has no presets"),
        (("experiment", "implicit-bias", "--seeds", "2"), "Leave --seeds out"),
        (("experiment", "implicit-bias", "--resume"), "Leave --resume out"),
        (("experiment", "grokking", "--budget", "0"), "expected a positive whole number"),
        (("experiment", "spectra", "--preset", "moduli"), "unknown preset 'moduli'"),
    ):
        done = margin.invoke(*words, "-o", tmp_path)
        assert done.exit_code == 2
        assert message in done.stderr


RESULTS = Path(__file__).parent.parent / "docs" / "results"


@pytest.mark.skipif(not RESULTS.exists(), reason="the documentation is not part of this installation")
def test_stored_results_are_judged_by_the_rules_of_the_code(tmp_path):
    names = ("grokking", "periodicity", "mod15", "spectra", "spectra_cpu")
    for name in names:
        (tmp_path / f"{name}.json").write_text((RESULTS / f"{name}.json").read_text())
    spec = importlib.util.spec_from_file_location(
        "judge_stored", RESULTS.parent.parent / "benchmarks" / "judge_stored.py"
    )
    judge = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(judge)
    judge.main(tmp_path)
    for name in names:
        assert json.loads((tmp_path / f"{name}.json").read_text()) == json.loads((RESULTS / f"{name}.json").read_text())


@pytest.mark.skipif(not RESULTS.exists(), reason="the documentation is not part of this installation")
@pytest.mark.parametrize("file", sorted(RESULTS.glob("*_quick.json")), ids=lambda file: file.stem)
def test_stored_quick_runs_have_budgets_and_as_many_open_claims_as_they_say(file):
    results = json.loads(file.read_text())
    if "claims" not in results:
        pytest.skip("an experiment without budgets")
    assert all(each.keys() == CLAIM_KEYS and each["budget"] for each in results["claims"])
    assert results["untested"] == sum(each["verdict"] == "not tested" for each in results["claims"])
    assert all(row["training"]["max_time"] is None for row in results["config"]["rows"].values())


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_quick_experiments_end_certified(tmp_path, name):
    done = margin.invoke("experiment", name, "--quick", "--json", "-o", tmp_path)
    assert done.exit_code in (0, 4), done.output
    report = json.loads(done.stdout)
    assert report["certified"]
    assert (done.exit_code == 4) == (report["untested"] > 0)
    tested = [each for each in report["claims"] if each["verdict"] != "not tested"]
    assert len(tested) >= 3

"""The implicit-bias experiment through the command line, and the registry that finds it."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from convexformer.cli import app
from convexformer.experiments.registry import EXPERIMENTS, experiment_of


def invoke(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


def test_every_registered_experiment_can_be_loaded():
    for entry in EXPERIMENTS.values():
        assert callable(entry.load())
        assert entry.help


def test_an_unknown_experiment_suggests_the_nearest():
    with pytest.raises(ValueError, match="Did you mean 'implicit-bias'"):
        experiment_of("implicit-bais")
    result = invoke("experiment", "implicit-bais")
    assert result.exit_code == 2
    assert "Did you mean" in result.output + result.stderr


def test_without_a_name_the_experiments_are_listed():
    result = invoke("experiment", "--json")
    assert result.exit_code == 0
    assert "implicit-bias" in json.loads(result.stdout)


def test_an_experiment_that_does_not_certify_exits_with_three(monkeypatch, tmp_path):
    from convexformer.experiments import implicit_bias

    monkeypatch.setattr(implicit_bias, "run", lambda output, *, quick, console: {"certified": False})
    assert invoke("experiment", "implicit-bias", "--output", tmp_path).exit_code == 3


@pytest.mark.slow
def test_the_quick_experiment_confirms_every_claim(tmp_path):
    result = invoke("experiment", "implicit-bias", "--quick", "--output", tmp_path, "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["certified"]
    assert all(claim["holds"] for claim in report["claims"])
    assert report["seconds"] < 120
    assert all(Path(file).stat().st_size > 10_000 for file in report["figures"])
    assert json.loads((tmp_path / "results.json").read_text())["claims"] == report["claims"]
    assert json.loads((tmp_path / "config.json").read_text())["quick"] is True
    assert "cannot tell nuclear from Frobenius" in (tmp_path / "summary.md").read_text()

"""The benchmark of probes: every model on a small file, and attentive probes that learn what they can see."""

import json
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(scope="module")
def tokens():
    """Two classes by the direction of one token, wherever it stands."""
    rng = np.random.default_rng(0)
    y = np.arange(80) % 2
    X = rng.normal(size=(80, 3, 4)).astype(np.float32)
    X[np.arange(80), rng.integers(0, 3, 80)] += np.where(y[:, None] == 1, 4.0, -4.0) * np.array([1, -1, 1, -1])
    return X, y


def test_models_have_lines_and_splits_a_spread(tokens, tmp_path, monkeypatch, capsys):
    X, y = tokens
    mask = np.ones((80, 3), bool)
    np.savez(tmp_path / "small.npz", X_train=X[:50], y_train=y[:50], X_test=X[50:], y_test=y[50:],
             mask_train=mask[:50], mask_test=mask[50:])  # fmt: skip
    out = tmp_path / "out.json"
    models = ["auto", "logistic regression, flattened", "efficient probing"]
    options = ["--quick", "--folds", "2", "--seeds", "2", "--json", str(out), "--models", *models]
    monkeypatch.setattr(sys, "argv", ["probes.py", str(tmp_path / "small.npz"), *options])
    runpy.run_path(str(BENCHMARKS / "probes.py"), run_name="__main__")
    rows = json.loads(out.read_text())["tables"]["small"]
    assert [(row["model"], row["seed"]) for row in rows[:2]] == [("auto", 0), ("auto", 1)]
    assert len(rows) == 6
    assert all(
        np.isfinite([row["test"], row["error"], row["log_loss"], row["ece"], row["seconds"]]).all() for row in rows
    )
    assert all((row["gap"] is not None) == (row["model"] == "auto") for row in rows)
    assert min(row["fits"] for row in rows) == 3  # two learning rates, and once more on everything
    assert capsys.readouterr().out.count("\n| ") == 4  # the head of the table and three models


@pytest.mark.parametrize("kind", ["attentive probe", "efficient probing"])
def test_attentive_probes_learn(kind, tokens, monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from attentive import Sweep, TunedProbe

    X, y = tokens
    mask = np.ones((80, 3), bool)
    mask[:, 2] = False
    X = np.where(mask[..., None], X, 100.0).astype(np.float32)  # what a mask hides must not matter
    probe = TunedProbe(kind, Sweep(rates=(1e-2,), decays=(1e-2,), epochs=20, batch=16)).fit(X[:60], y[:60], mask[:60])
    other = np.where(mask[..., None], X, -7.0).astype(np.float32)
    p = probe.predict_proba(X[60:], mask[60:])
    np.testing.assert_allclose(probe.predict_proba(other[60:], mask[60:]), p)
    assert ((p.argmax(1) == y[60:])[np.abs(X[60:, :2]).mean((1, 2)) > 1.5]).mean() > 0.8
    assert probe.fits == 2

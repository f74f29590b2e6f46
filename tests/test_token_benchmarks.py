"""The benchmark of token-sparse problems: its ruler, its driver, and what it writes. Nothing here is timed."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import convexformer as cf

FOLDER = Path(__file__).parent.parent / "benchmarks" / "tokens"


@pytest.fixture(scope="module")
def problems():
    sys.path.insert(0, str(FOLDER))
    try:
        from datasets import SUITES
    finally:
        sys.path.remove(str(FOLDER))
    return [dataset.get_data() for dataset in SUITES["tiny"]]


@pytest.mark.parametrize("place", [0, 1, 2], ids=["squared", "softmax", "gated"])
def test_the_ruler_measures_our_own_objective(problems, place, tmp_path):
    objective = problems[place]
    head = cf.heads.Attention()
    if objective.gate_vectors is not None:
        head = cf.heads.Attention(activation="gated_relu", gates=objective.gate_vectors)
    problem = cf.Problem(head, objective.X, objective.y, beta=objective.beta)
    assert problem.beta_max == pytest.approx(objective.beta_max(), rel=1e-10)
    solution = cf.solve(problem, tolerance=1e-6)
    Z = solution.dense().numpy()
    assert objective.value(Z) == pytest.approx(solution.objective, rel=1e-10)
    flat = Z.reshape(objective.n_features, -1)
    outputs = objective.outputs(Z).reshape(len(objective.y), -1)
    np.testing.assert_allclose(outputs, objective.design @ flat, atol=1e-10)
    objective.save(tmp_path)
    again = type(objective).load(tmp_path, mapped=True)
    assert again.beta == objective.beta
    assert again.value(flat) == objective.value(flat)


@pytest.mark.slow
def test_a_tiny_run_writes_table_and_figure_and_names_what_is_missing(tmp_path):
    words = ["--suite", "tiny", "--problems", "0", "--solvers", "convexformer", "convexformer, fista", "celer", "Adam"]
    words += ["--output", str(tmp_path), "--no-costs", "--peers", sys.executable]
    done = subprocess.run([sys.executable, str(FOLDER / "run.py"), *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "| convexformer (" in done.stdout
    (result,) = json.loads((tmp_path / "tokens.json").read_text())["results"]
    assert result["below_lower_bound"] <= 1e-12
    rows = {row["solver"]: row for row in result["rows"]}
    assert rows["convexformer"]["ratio"] == 1.0
    assert None not in rows["convexformer"]["certified_seconds"]
    assert rows["celer"]["note"].startswith("not installed")
    assert "celer: not installed" in done.stdout
    assert (tmp_path / "tokens.png").stat().st_size > 10_000

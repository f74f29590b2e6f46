"""The scripts on stacked layers: the sweep in rungs, fresh seeds, and what half of division mod 15 determines."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch

import convexformer as cf
from convexformer import deep

FOLDER = Path(__file__).parents[1] / "benchmarks"


def load(name):
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


sweep, robust, half = (load(name) for name in ("gpu_grokking", "robust", "mod15_half"))


def test_dense_shapes_are_equation_12():
    for depth in (1, 2):
        for shape in sweep.shapes("dense", depth, separate=False):
            model = deep.ConvexTransformer(11, 11, depth=depth, **shape)
            assert (model.blocks, model.rank_one, model.normalize, model.residual) == (1, True, False, False)


def test_halving_gives_the_best_third_more_iterations(tmp_path):
    task = cf.data.modular_division(11)
    settings = [
        {
            "family": "convex",
            "depth": 1,
            "shape": {"width": 8, "blocks": 4},
            "training": {"learning_rate": rate, "weight_decay": 1.0, "batch_size": 16, "evaluate_every": 10},
        }
        for rate in (1e-5, 1e-2, 1e-4, 2e-2)
    ]
    rows = sweep.halving(task, settings, [20, 40], "cpu", tmp_path)
    assert [row["iterations"] for row in rows] == [40, 40, 20, 20]
    assert sorted(row["learning_rate"] for row in rows) == [1e-5, 1e-4, 1e-2, 2e-2]
    assert sweep.score(rows[0]) <= sweep.score(rows[1])
    best = next(each for each in settings if each["training"]["learning_rate"] == rows[0]["learning_rate"])
    whole = sweep.measure(task, **{**best, "training": {**best["training"], "iterations": 40}}, device="cpu")
    assert rows[0]["best_test_accuracy"] == whole["best_test_accuracy"]  # continued, not begun again
    again = sweep.halving(task, settings, [20, 40], "cpu", tmp_path)
    assert [row["seconds"] for row in again[:2]] == [row["seconds"] for row in rows[:2]]  # nothing is trained twice


def test_fresh_seeds_are_written_and_replaced(tmp_path, monkeypatch, capsys):
    file = tmp_path / "robust.json"
    words = "robust.py --recipes convex-1 --moduli 11 --seeds 3-9 --set iterations=10 --device cpu --json"
    for _ in range(2):
        monkeypatch.setattr("sys.argv", [*words.split(), str(file)])
        robust.main()
    (row,) = json.loads(file.read_text())["rows"]
    assert row["seeds"] == [3, 4, 5, 6, 7, 8, 9]
    assert len(row["iterations_test"]) == 7
    assert row["training"] == {"iterations": 10}
    assert "of 7 seeds at 99% within 10 iterations" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="expected name=value"):
        robust.changes(["iterations"])


def test_answers_that_the_pairs_determine_are_right():
    task = cf.data.modular_division(half.P)
    train, test = (half.triples(part) for part in task.split(0.7, seed=0))
    pairs = [(a, b) for a, b, _ in test]
    sizes = []
    for classes, elimination in half.READERS.values():
        found = half.determined(train, pairs, classes, elimination)
        assert all(c == a * pow(b, -1, half.P) % half.P for (a, b), c in found.items())
        sizes.append(len(found))
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[-1] <= len(test)


def test_nothing_is_determined_where_the_law_does_not_hold():
    """Two answers for one relation: random answers make every symbol of a class equal, and no answer follows."""
    task = cf.data.modular_division(half.P)
    order = torch.randperm(len(task), generator=torch.Generator().manual_seed(0))
    broken = cf.data.SymbolTask(task.X, task.y[order], task.n_symbols, task.n_classes, "noise")
    train, test = (half.triples(part) for part in broken.split(0.5, seed=0))
    assert half.determined(train, [(a, b) for a, b, _ in test], False, False) == {}


def test_hermite_decides_membership():
    basis = half.hermite([[2, 4, 0], [0, 6, 3]])
    assert half.inside([2, 10, 3], basis)
    assert not half.inside([1, 2, 0], basis)
    assert not half.inside([0, 0, 1], basis)
    assert half.inside([0, 0, 0], half.hermite([]))


def test_a_tied_stack_is_linear_in_its_last_layer():
    model = half.TiedStack([0, 1], depth=2, width=8, blocks=4, gates=3)
    task = cf.data.modular_division(half.P)
    H, Z = model.last_tokens(task.X), model.last_weights()
    assert torch.allclose(torch.einsum("sbtw,stwc->sbc", H, Z), model(task.X), atol=1e-5)
    before = model.stack.embedding.table.detach().clone()
    deep.train(model, task, deep.Training(iterations=5), device="cpu")
    assert not torch.equal(before, model.stack.embedding.table)

"""The student-teacher experiment and its data; counts of weights and operations."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from typer.testing import CliRunner

import convexformer as cf
from convexformer.cli import app
from convexformer.experiments import student_teacher
from convexformer.experiments.student_teacher import map_scores
from convexformer.experiments.student_teacher_data import _rest_of_layer, attention_layer, load, mean_map, synthetic
from convexformer.experiments.student_teacher_runs import Config

TINY = Config((0.3, 0.1), (0.01,), (0.01, 0.03), 5, 10, 2, 8, 1e-2, 50)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Config, "of", classmethod(lambda cls, quick: TINY))
    monkeypatch.setattr(student_teacher, "load", lambda file, quick: synthetic(60, 4, 6, 6))


def bert_layer(rng: np.random.Generator, d: int = 64) -> dict[str, torch.Tensor]:
    """The weights of a random BERT layer by their Hugging Face names."""
    sizes = {f"attention.self.{name}": (d, d) for name in ("query", "key", "value")}
    sizes |= {"attention.output.dense": (d, d), "intermediate.dense": (2 * d, d), "output.dense": (d, 2 * d)}
    weights = {f"{name}.weight": rng.standard_normal(size) / math.sqrt(size[1]) for name, size in sizes.items()}
    weights |= {f"{name}.bias": 0.1 * rng.standard_normal(size[0]) for name, size in sizes.items()}
    for name in ("attention.output.LayerNorm", "output.LayerNorm"):
        weights |= {f"{name}.weight": 1 + 0.1 * rng.standard_normal(d), f"{name}.bias": 0.1 * rng.standard_normal(d)}
    return {name: torch.from_numpy(values) for name, values in weights.items()}


def test_a_quick_run_writes_figures_and_numbers_and_is_not_done_twice(tiny: None, tmp_path: Path) -> None:
    result = student_teacher.run(tmp_path, quick=True)
    assert result["certified"]
    students = result["numbers"]["students"]
    assert set(students) == {
        "convex",
        "alternative",
        "standard",
        "standard, 2 heads, scaled",
        "standard, LayerNorm and skip",
    }
    convex, alternative = (students[name]["common beta"] for name in ("convex", "alternative"))
    assert convex["objective"]["mean"] <= alternative["objective"]["best"] * (1 + 1e-2)
    assert result["numbers"]["lower_bound"] <= convex["objective"]["mean"]
    assert alternative["relative_gap"]["mean"] > convex["relative_gap"]["mean"]
    assert {each["verdict"] for each in result["findings"]} <= {"reproduced", "partly", "not reproduced", "not tested"}
    for name in ("curves.png", "maps.png", "summary.md", "summary.html", "results.json", "config.json", "runs.json"):
        assert (tmp_path / name).stat().st_size > 0
    kept = (tmp_path / "runs.json").read_text()
    again = student_teacher.run(tmp_path, quick=True)
    assert (tmp_path / "runs.json").read_text() == kept
    assert again["numbers"]["students"] == students
    assert all(math.isfinite(run["objective"]) for run in json.loads(kept)["runs"].values())


def test_the_synthetic_layer_has_maps_and_centred_targets() -> None:
    lesson = synthetic()
    assert lesson.teacher_map.sum(1).tolist() == pytest.approx([1.0] * 8)
    assert lesson.train.Y[lesson.train.mask].mean(0).abs().max() < 1e-12
    assert float(lesson.train.Y.square().mean()) == pytest.approx(1)
    assert lesson.test.r_squared(lesson.test.Y) == 1
    assert lesson.test.r_squared(0 * lesson.test.Y) == 0


@pytest.mark.parametrize("named", [True, False])
def test_a_layer_file_has_the_attention_of_its_weights(named: bool, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    weights, X, mask = bert_layer(rng), rng.standard_normal((20, 5, 64)), np.ones((20, 5), np.uint8)
    mask[3, 4] = 0
    tokens, real = torch.from_numpy(X), torch.from_numpy(mask.astype(bool))
    attention, Y = attention_layer(tokens, real, weights, 2)
    assert float(attention[3, :, :, 4].abs().max()) == 0
    arrays = {"X_in_train": X[:16], "X_in_test": X[16:], "mask_train": mask[:16], "mask_test": mask[16:]}
    arrays |= {f"W__{name}": values.numpy() for name, values in weights.items()}
    if named:
        arrays["n_heads"] = np.array(2)
    else:  # the number of heads is that which reproduces the outputs of the layer
        arrays["X_out_train"] = _rest_of_layer(tokens, Y, weights)[:16].numpy()
    np.savez(tmp_path / "layer.npz", **arrays)
    lesson = load(tmp_path / "layer.npz")
    assert lesson.n_heads == 2
    assert lesson.sizes == {"N": 14, "s": 5, "d": 64, "c": 64}
    assert torch.allclose(lesson.teacher_map, mean_map(attention[16:], real[16:]))
    expected = Y[16:] - Y[:14][real[:14]].mean(0)
    ratio = lesson.test.Y / expected
    assert torch.allclose(ratio, ratio[0, 0, 0].expand_as(ratio))


def test_a_file_of_activations_is_read(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    attention = rng.dirichlet(np.ones(6), (40, 3, 6)).astype(np.float16)
    arrays = {
        "X_in": rng.standard_normal((40, 6, 20)),
        "X_out": rng.standard_normal((40, 6, 20)),
        "attention": attention,
    }
    save_file({**arrays, "mask": np.ones((40, 6), np.uint8)}, tmp_path / "activations.safetensors")
    lesson = load(tmp_path / "activations.safetensors")
    assert (len(lesson.train.X), len(lesson.validation.X), len(lesson.test.X)) == (28, 4, 8)
    quick = load(tmp_path / "activations.safetensors", quick=True)
    assert quick.sizes == {"N": 28, "s": 6, "d": 16, "c": 8}


def test_files_of_something_else_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "other.npz", X=np.ones(3))
    with pytest.raises(ValueError, match="expected X_in, X_out, attention and mask"):
        load(tmp_path / "other.npz")
    found = CliRunner().invoke(app, ["experiment", "implicit-bias", "--data", "x.npz"])
    assert found.exit_code == 2
    assert "Leave --data out" in found.output


def test_scores_of_maps() -> None:
    teacher = np.array([[0.9, 0.1], [0.2, 0.8]])
    same, uniform = map_scores(teacher, teacher), map_scores(np.full((2, 2), 0.5), teacher)
    assert same["kl"] == same["total_variation"] == 0
    assert same["correlation"] == pytest.approx(1)
    assert uniform["correlation"] == uniform["from_uniform"] == 0
    assert uniform["kl"] > 0.1
    assert uniform["total_variation"] == pytest.approx(0.35)


def test_costs_are_the_sizes_of_the_weights() -> None:
    table = cf.cost("attention", s=4, d=3, c=2, heads=5)
    assert table["convex"].parameters == 4 * 3 * 2
    assert table["alternative"].parameters == 5 * (4 + 3 + 2)  # table 2 of Ergen et al.
    assert table["standard"].parameters == 5 * (3 * 9 + 3 * 2)
    layout = cf.Problem("attention", np.ones((1, 4, 3)), np.ones((1, 2)), beta=1.0).layout
    network = cf.heads.Attention().random_network(layout, 5)
    assert sum(p.numel() for p in network.parameters()) == table["alternative"].parameters
    softmax = cf.networks.SoftmaxAttentionNetwork.random(3, 2, n_heads=5)
    assert sum(p.numel() for p in softmax.parameters()) == table["standard"].parameters
    assert cf.cost(cf.heads.Attention("gated_relu", gates=7), 4, 3, 2)["convex"].parameters == 7 * 4 * 3 * 2
    assert cf.cost("attention", 4, 3, 2, per_token=True)["convex"].parameters == 4 * 4 * 3 * 2
    assert "h is missing" in str(table)
    with pytest.raises(ValueError, match="d=0"):
        cf.cost("attention", 4, 0)


@pytest.mark.parametrize("name", ["self_attention", "mlp_mixer", "fno", "mlp"])
def test_costs_of_factors_are_those_of_the_networks(name: str) -> None:
    rng = np.random.default_rng(2)
    problem = cf.Problem(name, rng.standard_normal((3, 4, 6)), rng.standard_normal((3, 4, 2)), beta=1.0)
    network = problem.head.random_network(problem.layout, 5)  # type: ignore[attr-defined]
    found = cf.cost(name, 4, 6, 2, heads=5, per_token=True)
    assert found["factors"].parameters == sum(p.numel() for p in network.parameters())
    assert found["convex"].parameters == math.prod(problem.operator.weight_shape)

"""Trained stacks: models seed by seed, training that resumes exactly, spectra, and certified last layers."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import convexformer as cf
from convexformer import deep
from convexformer.deep.batches import Batches, Split
from convexformer.deep.stepper import Stepper

P = 11
TASK = cf.data.modular_division(P)
SHORT = deep.Training(iterations=30, batch_size=16, learning_rate=1e-2)
BUILDERS = {
    "convex": lambda **o: deep.ConvexTransformer(P, P, width=8, blocks=4, gates=3, **o),
    "convex, two layers": lambda **o: deep.ConvexTransformer(P, P, depth=2, width=8, blocks=4, gates=3, **o),
    "convex, four layers": lambda **o: deep.ConvexTransformer(
        P, P, depth=4, width=8, blocks=4, gates=3, residual=True, normalize=True, **o
    ),
    "as printed": lambda **o: deep.ConvexTransformer(P, P, width=8, blocks=1, gates=4, rank_one=True, **o),
    "fixed": lambda **o: deep.ConvexTransformer(P, P, width=8, blocks=4, gates=3, embedding="fixed", **o),
    "one-hot": lambda **o: deep.ConvexTransformer(P, P, blocks=1, gates=3, embedding="one_hot", **o),
    "separate": lambda **o: deep.ConvexTransformer(P, P, width=8, blocks=4, gates=3, separate=True, **o),
    "fastfood": lambda **o: deep.ConvexTransformer(P, P, depth=2, width=8, blocks=4, gates=3, fastfood="gaussian", **o),
    "softmax": lambda **o: deep.SoftmaxTransformer(P, P, depth=2, width=8, heads=2, **o),
    "softmax, pre": lambda **o: deep.SoftmaxTransformer(P, P, depth=1, width=8, heads=2, norm="pre", **o),
    "softmax, bare": lambda **o: deep.SoftmaxTransformer(P, P, depth=1, width=8, heads=2, norm="none", **o),
    "report": lambda **o: deep.ReportTransformer(P, P, width=8, **o),
    "report, kernel": lambda **o: deep.ReportTransformer(P, P, width=8, kernel="chi", **o),
}
every_model = pytest.mark.parametrize("build", BUILDERS.values(), ids=BUILDERS)


@every_model
def test_logits_are_linear_in_the_last_layer_given_the_rest(build):
    model = build(seeds=2)
    logits = model(TASK.X)
    assert logits.shape == (2, len(TASK), P)
    H, Z = model.last_tokens(TASK.X), model.last_weights()
    assert torch.allclose(torch.einsum("sbtw,stwc->sbc", H, Z), logits, atol=1e-5)


@every_model
def test_a_seed_trains_alike_alone_and_in_company(build):
    alone, together = (deep.train(build(seeds=seeds), TASK, SHORT) for seeds in ([2], [0, 2]))
    assert np.allclose(alone.history.test_loss[:, 0], together.history.test_loss[:, 1], rtol=2e-2)
    assert np.isfinite(together.history.train_loss).all()
    assert together.history.train_loss[-1].mean() < together.history.train_loss[0].mean()


@every_model
def test_config_builds_the_same_model_again(build):
    model = build(seeds=[3])
    twin = type(model)(**model.config(), seeds=[3])
    assert torch.equal(model(TASK.X), twin(TASK.X))
    assert model.n_parameters == twin.n_parameters


def test_the_layer_is_equation_12():
    """Written out sum by sum: one block, gates u1 u2^T, one layer."""
    model = deep.ConvexTransformer(P, P, width=6, blocks=1, gates=4, rank_one=True)
    X = model.embedding(TASK.X[None])[0]  # (N, n, d)
    U = model.U0[0, 0].T.view(4, 2, 6)
    Z = model.last_weights()[0].view(4, 2, 6, P)
    expected = torch.zeros(len(X), P)
    for j in range(4):
        opened = (X * U[j]).sum((1, 2)) >= 0
        expected += opened[:, None] * torch.einsum("nkd,kdc->nc", X, Z[j])
    assert torch.allclose(model(TASK.X)[0], expected, atol=1e-5)
    assert torch.linalg.matrix_rank(U[0]) == 1
    groups = Z.norm(dim=2).sum()
    assert float(model.group_norm().detach()) == pytest.approx(float(groups.detach()), rel=1e-4)


def test_only_a_fixed_embedding_and_one_layer_make_training_convex():
    convex = [name for name, build in BUILDERS.items() if build(seeds=1).convex_last_layer]
    assert convex == ["fixed", "one-hot"]


def test_parameter_counts_of_the_papers_models():
    assert deep.recipe("paper-dense-1").model(cf.data.modular_division(97)).n_parameters == 409_728
    assert deep.recipe("report-convex").model(cf.data.modular_division(97)).n_parameters == 189_184
    assert deep.recipe("paper-softmax-2").model(cf.data.modular_division(97)).n_parameters == 420_608


@pytest.mark.parametrize("name", deep.RECIPES)
def test_every_recipe_builds_and_takes_a_step(name):
    chosen = deep.recipe(name).but(
        shape={"width": 16, **({"blocks": 4} if "blocks" in deep.recipe(name).shape else {})}
    )
    run = deep.train(
        chosen.model(TASK), TASK, chosen.training.but(iterations=10, evaluate_every=10, batch_size=8), device="cpu"
    )
    assert np.isfinite(run.history.train_loss).all()


def test_an_unknown_recipe_suggests_the_nearest():
    with pytest.raises(ValueError, match="Did you mean 'convex-1'"):
        deep.recipe("convex1")


# ---------------------------------------------------------------------- training


def test_the_tuned_recipe_groks_division():
    """Mod 31, for speed: the recipe of mod 97 on one seed."""
    task = cf.data.modular_division(31)
    run = deep.train(deep.recipe("convex-2").model(task), task, deep.recipe("convex-2").training, device="cpu")
    assert run.outcome is deep.Outcome.TARGET
    assert run.iterations_to()[0] <= 600
    assert run.grokking_gap()[0] >= 0
    assert run.summary()["reached"] == 1


def test_resuming_is_exact(tmp_path):
    build = BUILDERS["convex, two layers"]
    options = SHORT.but(spectra_every=10, half_life=15)
    whole = deep.train(build(seeds=2), TASK, options)
    deep.train(build(seeds=2), TASK, options, iterations=10, checkpoint=tmp_path / "run.safetensors")
    resumed = deep.train(build(seeds=2), TASK, options, checkpoint=tmp_path / "run.safetensors")
    for name in ("iteration", "train_loss", "test_accuracy", "test_loss", "spectra_iteration"):
        assert np.array_equal(getattr(whole.history, name), getattr(resumed.history, name)), name
    assert np.array_equal(whole.history.spectra["Z1"], resumed.history.spectra["Z1"])
    assert torch.equal(whole.model(TASK.X), resumed.model(TASK.X))


@pytest.mark.parametrize(("iterations", "every"), [(25, 10), (5, 10), (7, 3), (1, 1)])
def test_training_takes_as_many_iterations_as_asked_for(iterations, every, tmp_path):
    options = SHORT.but(evaluate_every=every, target=None)
    run = deep.train(
        BUILDERS["convex"](), TASK, options, iterations=iterations, checkpoint=tmp_path / "run.safetensors"
    )
    assert run.history.iteration.tolist() == [*range(0, iterations, every), iterations]
    further = deep.train(BUILDERS["convex"](), TASK, options, checkpoint=tmp_path / "run.safetensors")
    whole = deep.train(BUILDERS["convex"](), TASK, options)
    assert further.history.iteration.tolist() == sorted({*range(0, 31, every), iterations, 30})
    assert torch.equal(further.model(TASK.X), whole.model(TASK.X))


def test_the_learning_rate_rises_and_halves():
    model = BUILDERS["convex"]()
    split = Split.of(TASK, 0.5, model)
    rates = []
    for options in (SHORT, SHORT.but(half_life=10)):
        stepper = Stepper(model, split, options.but(warmup=5), 10)
        for first, count in ((0, 1), (1, 9), (10, 10)):
            assert stepper.take(first, count) == count
            rates.append(float(stepper.learning_rate) / options.learning_rate)
    assert rates == pytest.approx([0.2, 1.0, 1.0, 0.2 * 2**-0.1, 0.5, 0.25])


def test_a_checkpoint_of_another_run_is_refused(tmp_path):
    file = tmp_path / "run.safetensors"
    deep.train(BUILDERS["convex"](), TASK, SHORT, iterations=10, checkpoint=file)
    with pytest.raises(ValueError, match="belongs to another run"):
        deep.train(BUILDERS["convex"](), TASK, SHORT, learning_rate=1e-3, checkpoint=file)
    file.write_bytes(b"nonsense")
    with pytest.raises(ValueError, match="cannot be read"):
        deep.train(BUILDERS["convex"](), TASK, SHORT, checkpoint=file)


@given(size=st.integers(1, 40), count=st.integers(1, 7), first=st.integers(0, 9))
def test_batches_are_epochs_cut_to_size_and_a_function_of_the_iteration(size, count, first):
    batches = Batches((0, 5), 30, size)
    rows = batches.rows(first, count)
    assert rows.shape == (count, 2, batches.size)
    assert torch.equal(rows[-1], Batches((0, 5), 30, size).rows(first + count - 1, 1)[0])
    stream = Batches((0,), 30, size).rows(0, 30)[:, 0].flatten()
    assert all(sorted(epoch.tolist()) == list(range(30)) for epoch in stream[: len(stream) // 30 * 30].view(-1, 30))


def test_how_training_ends(capsys):
    model = BUILDERS["convex"]
    assert deep.train(model(), TASK, SHORT).outcome is deep.Outcome.ITERATIONS
    assert deep.train(model(), TASK, SHORT, target=0.001).outcome is deep.Outcome.TARGET
    assert deep.train(model(), TASK, SHORT, max_time=1e-9).outcome is deep.Outcome.MAX_TIME
    stopped = deep.train(model(), TASK, SHORT, callback=lambda run: run.history.iteration[-1] >= 20, progress=True)
    assert stopped.outcome is deep.Outcome.INTERRUPTED
    assert stopped.history.iteration[-1] == 20
    with np.errstate(all="ignore"):
        lost = deep.train(BUILDERS["convex, two layers"](), TASK, SHORT, learning_rate=1e30, iterations=200)
    assert lost.outcome is deep.Outcome.DIVERGED
    assert "learning rate" in str(lost.outcome)


def test_ctrl_c_returns_what_there_is():
    def interrupt(run):
        if run.history.iteration[-1] == 10:
            raise KeyboardInterrupt

    run = deep.train(BUILDERS["convex"](), TASK, SHORT, callback=interrupt)
    assert run.outcome is deep.Outcome.INTERRUPTED
    assert run.history.iteration[-1] == 10


def test_a_given_split_serves_all_seeds():
    train, test = TASK.split(0.7, seed=3)
    run = deep.train(BUILDERS["convex"](seeds=2), (train, test), SHORT)
    assert run.history.test_accuracy.shape == (4, 2)
    with pytest.raises(TypeError, match="expected a SymbolTask"):
        deep.train(BUILDERS["convex"](), TASK.X)


def test_penalties_shrink_what_they_name():
    model = BUILDERS["convex"]
    long = SHORT.but(iterations=150, weight_decay=0.0)
    plain, group = (deep.train(model(), TASK, long, **o) for o in ({}, {"penalty": "group", "beta": 1e-3}))
    assert bool(group.model.group_norm() < plain.model.group_norm())
    ridge = deep.train(model(), TASK, long, penalty="ridge", beta=0.1)
    assert bool(ridge.model.ridge() < plain.model.ridge())


def test_adam_puts_the_decay_into_the_gradient():
    def weights(**options):
        return deep.train(BUILDERS["convex"](), TASK, SHORT, iterations=20, **options).model.Z[0].detach()

    without = [weights(optimizer=name, weight_decay=0.0) for name in ("adam", "adamw")]
    torch.testing.assert_close(*without)
    # the l2 term is rescaled with the gradient: at decay 10 it is all that Adam sees, a step of the learning rate each time
    start, steps = BUILDERS["convex"]().Z[0].detach(), 20 - (SHORT.warmup - 1) / 2
    adam, adamw = (weights(optimizer=name, weight_decay=10.0) for name in ("adam", "adamw"))
    large = start.abs() > 3 * SHORT.learning_rate * steps
    assert bool(large.any())
    moved = (start - adam)[large] * start[large].sign()
    torch.testing.assert_close(moved, torch.full_like(moved, SHORT.learning_rate * steps), rtol=0.05, atol=0.0)
    assert bool((adam - adamw).abs().max() > SHORT.learning_rate)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"learning_rte": 1.0}, "Did you mean 'learning_rate'"),
        ({"learning_rate": 0.0}, "learning_rate=0.0"),
        ({"iterations": 0}, "iterations=0"),
        ({"batch_size": 1.5}, "batch_size=1.5"),
        ({"weight_decay": -1.0}, "weight_decay=-1.0"),
        ({"target": 2.0}, "target=2.0"),
        ({"penalty": "grup"}, "Did you mean 'group'"),
        ({"optimizer": "adamx"}, "Did you mean 'adam'"),
        ({"beta": 1.0}, "without a penalty"),
        ({"half_life": 0}, "half_life=0"),
        ({"spectra_every": 15}, "no multiple"),
        ({"train_fraction": 1.0}, "train=1.0"),
    ],
)
def test_bad_options_of_training_are_named(changes, message):
    with pytest.raises((ValueError, TypeError), match=message):
        deep.train(BUILDERS["convex"](), TASK, SHORT, **changes)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: deep.ConvexTransformer(P, P, blocks=5), "do not divide"),
        (lambda: deep.ConvexTransformer(P, P, depth=0), "depth=0"),
        (lambda: deep.ConvexTransformer(P, P, embedding="learnt"), "Did you mean 'learned'"),
        (lambda: deep.ConvexTransformer(P, P, seeds=[1, 1]), "repeats a seed"),
        (lambda: deep.ConvexTransformer(P, P, seeds=[]), "expected how many"),
        (lambda: deep.SoftmaxTransformer(P, P, width=10, heads=4), "do not divide"),
        (lambda: deep.SoftmaxTransformer(P, P, norm="before"), "unknown norm"),
        (lambda: deep.ConvexTransformer(P, P)(torch.zeros(3, 4, dtype=torch.long)), "symbols have shape"),
        (lambda: deep.train(deep.ConvexTransformer(7, 7), TASK), "Build it as ConvexTransformer"),
        (lambda: deep.train(BUILDERS["softmax"](), TASK, SHORT, penalty="group", beta=1.0), "belongs to a Convex"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_models_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


# ---------------------------------------------------------------------- spectra


def test_singular_values_and_ranks():
    model = BUILDERS["report"](seeds=2)
    for name, values in deep.singular_values(model).items():
        exact = torch.linalg.svdvals(model.matrices()[name].double()).detach().numpy()
        assert np.allclose(values, exact, atol=1e-6)
    assert deep.effective_rank([1.0, 1.0, 1.0, 0.0]) == pytest.approx(3.0)
    assert deep.effective_rank([5.0, 0.0]) == pytest.approx(1.0)
    assert deep.stable_rank([2.0, 2.0, 0.0]) == pytest.approx(2.0)


def test_spectra_are_recorded_when_asked():
    history = deep.train(BUILDERS["convex"](seeds=2), TASK, SHORT, spectra_every=20).history
    assert history.spectra_iteration.tolist() == [0, 20]
    assert history.spectra["Z1"].shape[:2] == (2, 2)
    assert history.effective_rank("Z1").shape == (2, 2)
    assert np.array_equal(history.spectral_norm("Z1"), history.spectra["Z1"][..., 0])
    with pytest.raises(ValueError, match="unknown layer"):
        history.effective_rank("Z9")


# ---------------------------------------------------------------------- certified last layers


@pytest.mark.parametrize("penalty", ["ridge", "group"])
@pytest.mark.parametrize("name", ["convex", "convex, two layers", "softmax", "report, kernel"])
def test_last_layers_are_certified_and_no_worse_than_trained_ones(name, penalty):
    run = deep.train(BUILDERS[name](seeds=2), TASK, SHORT, iterations=100)
    ratio = 1e-2 if penalty == "ridge" else 0.2
    for layer in deep.certify_last_layer(run.model, TASK, penalty=penalty, beta_ratio=ratio):
        assert layer.certificate.kind == "exact"
        assert layer.certificate.relative_gap <= 1e-4
        assert layer.certificate.primal <= layer.trained.primal * (1 + 1e-9)
        assert cf.certify(layer.solution, layer.problem).primal == pytest.approx(layer.certificate.primal)
        accuracy = run.history.test_accuracy[-1][run.model.seeds.index(layer.seed)]
        assert layer.trained_test_accuracy == pytest.approx(float(accuracy), abs=1e-6)
        assert layer.summary()["relative_gap"] <= 1e-4


def test_the_group_problem_is_equation_12_with_its_penalty():
    model = BUILDERS["convex"]()
    (layer,) = deep.certify_last_layer(model, TASK, penalty="group", beta=0.5)
    train, _ = TASK.split(0.5, seed=0)
    logits = model(train.X)[0].double()
    objective = torch.nn.functional.cross_entropy(logits, train.y, reduction="sum") + 0.5 * model.group_norm().double()
    assert layer.trained.primal == pytest.approx(objective.item(), rel=1e-4)


def test_bad_wishes_for_a_last_layer():
    model = BUILDERS["convex"]()
    with pytest.raises(ValueError, match="seed 4 was asked for"):
        deep.certify_last_layer(model, TASK, seeds=[4])
    with pytest.raises(ValueError, match="unknown penalty"):
        deep.certify_last_layer(model, TASK, penalty="lasso")
    with pytest.raises(ValueError, match="raise train_fraction"):
        deep.certify_last_layer(model, TASK, train_fraction=0.03)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "limit"), [("convex-1", 300), ("convex-2", 300), ("convex-4", 400)])
def test_division_mod_97_on_five_seeds(name, limit):
    task = cf.data.modular_division(97)
    run = deep.train(deep.recipe(name).model(task, seeds=5), task, deep.recipe(name).training, device="cpu")
    assert (run.iterations_to() <= limit).all()


@pytest.mark.gpu
@every_model
def test_a_gpu_trains_as_a_cpu_does(build):
    cpu = deep.train(build(seeds=2), TASK, SHORT, device="cpu")
    graph, eager = (deep.train(build(seeds=2), TASK, SHORT, device="cuda", graph=graph) for graph in (True, False))
    for run in (graph, eager):
        assert np.allclose(run.history.train_loss[:2], cpu.history.train_loss[:2], rtol=2e-2)
    assert np.allclose(graph.history.train_loss, eager.history.train_loss, rtol=5e-2)


@pytest.mark.parametrize("norm", ["post", "pre", "none"])
@pytest.mark.parametrize("depth", [1, 2])
def test_softmax_transformer_is_the_textbook_one_at_the_equals_sign(depth, norm):
    """Every sample and position on its own: embeddings, causal attention, an MLP; the library takes short cuts."""
    model = deep.SoftmaxTransformer(P, P, depth=depth, width=8, heads=2, norm=norm, seeds=(4,)).double()
    named = {name: value[0] for name, value in model.named_parameters()}
    table = next(value for name, value in named.items() if name.startswith("embedding")).reshape(P + 2, 8)
    X = TASK.X[:20]

    def scaled(x, gain):
        return torch.nn.functional.layer_norm(x, (8,)) * named[gain]

    rows = []
    for a, b in X.tolist():
        x = table[[a, P, b, P + 1]] + named["position"]
        for l in range(depth):
            y = scaled(x, f"gain_attention{l}") if norm == "pre" else x
            q, k, v = ((y @ part).view(4, 2, 4).transpose(0, 1) for part in named[f"qkv{l}"].chunk(3, -1))
            mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + mixed.transpose(0, 1).reshape(4, 8) @ named[f"out{l}"]
            x = scaled(x, f"gain_attention{l}") if norm == "post" else x
            y = scaled(x, f"gain_mlp{l}") if norm == "pre" else x
            x = x + (y @ named[f"up{l}"] + named[f"bias_up{l}"]).relu() @ named[f"down{l}"] + named[f"bias_down{l}"]
            x = scaled(x, f"gain_mlp{l}") if norm == "post" else x
        x = scaled(x, "gain_last") if norm == "pre" else x
        rows.append(x[-1] @ named["unembedding"])
    torch.testing.assert_close(model(X)[0], torch.stack(rows), rtol=0, atol=1e-12)

"""Tokens that stay on disk: every head has the operator, the optimum and the certificate that it has in memory."""

import numpy as np
import pytest
import torch

import convexformer as cf
from cases import ALL_HEADS, EVEN_LOSSES, random_data
from convexformer.data.stores import StoreWriter, TokenStream
from convexformer.data.tokens import TokenDataset
from convexformer.operators import StreamedBilinear, StreamedOperator, memory_budget
from convexformer.testing import check_operator

STREAMED = (StreamedOperator, StreamedBilinear)
FEATURES = {
    "mean": cf.features.MeanPooling(),
    "flatten": cf.features.Flatten(),
    "covariance": cf.features.CovariancePooling(),
    "projected covariance": cf.features.CovariancePooling(max_channels=1),
    "queries": cf.features.SoftmaxQueries(3),
}
STATISTICS = ["linear", "mlp", "gated mlp", "self_attention", "fno", "poolformer", "fnet", "block self-attention"]


@pytest.fixture(autouse=True)
def small_batches(monkeypatch):
    monkeypatch.setattr("convexformer.data.stores.stream.BATCH", 4 * 2 * 9)  # nine samples


def store_of(folder, X, mask=None, *, memory=0):
    """Tokens in shards of five samples, float64; nothing of it may be held in memory."""
    with StoreWriter(folder, dtype="float64", shard_samples=5) as writer:
        writer.add(X, mask)
        writer.finish()
    return cf.data.open(folder, memory=memory)


def problems(case, tmp_path, option="all", loss="squared, 2 outputs", **extra):
    """The same problem in memory and on disk."""
    data = random_data(case, EVEN_LOSSES[loss], option if case.masks else "weights", np.random.default_rng(3), 13, 4, 2)
    options = {**data.options, "beta_ratio": 0.1, **extra}
    mask = options.pop("mask", None)
    disk = cf.Problem(case.build(data.gates), store_of(tmp_path / "store", data.X, mask), data.Y, **options)
    options["beta"], options["beta_ratio"] = disk.beta, None
    return cf.Problem(case.build(data.gates), data.X, data.Y, mask=mask, **options), disk


STORED = pytest.mark.parametrize("stored", [0, 1 << 30], ids=["a pass a product", "gathered"])
FEW = ["attention l1", "gated mlp", "self_attention", "self_attention per token", "mlp_mixer", "linear"]


@STORED
@pytest.mark.parametrize("name", ALL_HEADS)
def test_every_head_has_the_operator_of_memory(name, stored, tmp_path):
    with memory_budget(stored=stored):
        memory, disk = problems(ALL_HEADS[name], tmp_path)
        assert isinstance(disk.tokens, TokenStream)
        Z = torch.randn(disk.operator.weight_shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        V = torch.randn(disk.operator.output_shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        torch.testing.assert_close(disk.objective.apply(Z), memory.objective.apply(Z), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(disk.objective.adjoint(V), memory.objective.adjoint(V), rtol=1e-12, atol=1e-12)
        if name != "linear":  # a ridge's is a norm of the operator, by fewer iterations on disk
            assert disk.beta_max == pytest.approx(memory.beta_max, rel=1e-10)
        assert disk.beta_max == pytest.approx(memory.beta_max, rel=1e-3)


@STORED
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FEW else pytest.mark.slow) for name in ALL_HEADS]
)
def test_every_head_has_the_optimum_of_memory(name, stored, tmp_path):
    with memory_budget(stored=stored):
        memory, disk = problems(ALL_HEADS[name], tmp_path)
        check_operator(disk.operator)
        solution = cf.solve(disk, tolerance=1e-10)
        assert solution.certificate.meets(1e-10)
        again = cf.certify(solution, memory)  # so both have the same optimum, to 1e-10
        assert again.meets(1.01e-10)
        assert again.primal == pytest.approx(solution.objective, rel=1e-12)
        torch.testing.assert_close(
            solution.predict(disk.tokens), solution.predict(memory.tokens), rtol=1e-10, atol=1e-10
        )


@pytest.mark.parametrize("name", ALL_HEADS)
def test_what_is_gathered_and_what_is_streamed(name, tmp_path):
    with memory_budget(stored=1 << 30):
        _, disk = problems(ALL_HEADS[name], tmp_path)
        parts = disk.operator.blocks()
        small = name in STATISTICS or name.startswith("attention") or (name == "mlp_mixer")
        if small:
            assert not any(isinstance(part, STREAMED) for part in parts)
    with memory_budget(stored=0):
        _, disk = problems(ALL_HEADS[name], tmp_path / "again")
        assert all(isinstance(part, STREAMED) for part in disk.operator.blocks())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["attention l1", "attention l2", "gated mlp", "self_attention", "mlp_mixer"])
@pytest.mark.parametrize("option", ["plain", "intercept"])
def test_cross_entropy_on_disk(name, option, tmp_path):
    with memory_budget(stored=0):
        memory, disk = problems(ALL_HEADS[name], tmp_path, option, "cross_entropy, 2 classes")
        solution = cf.solve(disk, tolerance=1e-10)
        assert solution.certificate.meets(1e-10)
        assert cf.certify(solution, memory).meets(1.01e-10)


@pytest.mark.parametrize("kind", ["feature", "gaussian kernel"])
@pytest.mark.parametrize("feature", FEATURES)
def test_features_and_kernels_on_disk(feature, kind, tmp_path):
    rng = np.random.default_rng(0)
    X, y = rng.standard_normal((17, 4, 2)), rng.integers(0, 3, 17)
    mask = np.arange(4) < rng.integers(2, 5, 17)[:, None]
    X[~mask] = np.nan
    store = store_of(tmp_path / "s", X, mask)
    head = cf.heads.Feature(FEATURES[feature], "frobenius")
    if kind != "feature":
        head = cf.heads.Kernel(FEATURES[feature], kind.split()[0], decay="frobenius")
    memory = cf.Problem(head, X, y, beta_ratio=0.1, mask=mask, intercept=True)
    disk = cf.Problem(head, store, y, beta_ratio=0.1, intercept=True)
    assert disk.beta_max == pytest.approx(memory.beta_max, rel=1e-9)
    one, other = cf.solve(memory, tolerance=1e-9), cf.solve(disk, tolerance=1e-9)
    assert other.objective == pytest.approx(one.objective, rel=1e-8)
    torch.testing.assert_close(other.predict(store), one.predict(X, mask), rtol=1e-3, atol=1e-3)


def test_a_kernel_whose_features_are_too_large_becomes_random_features(tmp_path):
    X = np.random.default_rng(0).standard_normal((5, 4, 2))
    store, y = store_of(tmp_path / "s", X), X[:, 0, 0]
    kernel = cf.heads.Kernel(
        cf.features.Flatten(), "gaussian", memory=5 * 8 * 8 - 1
    )  # the kernel itself takes 5 * 5 * 8
    assert isinstance(kernel.fitted(TokenDataset.of(X)), cf.heads.Kernel)
    found = cf.Problem(kernel, store, y, beta=1.0).head
    assert isinstance(found, cf.heads.Feature)
    assert isinstance(found.feature, cf.features.RandomFeatures)
    assert isinstance(cf.Problem(cf.heads.Kernel(cf.features.Flatten()), store, y, beta=1.0).head, cf.heads.Kernel)


def test_the_squared_loss_is_compressed_in_one_pass(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    X = rng.standard_normal((90, 4, 2))
    Y, w = X[:, 0] + rng.standard_normal((90, 2)), rng.uniform(0.5, 2, 90)
    store = store_of(tmp_path / "s", X)
    with memory_budget(stored=90 * 8 * 8 - 1):
        disk = cf.Problem("attention", store, Y, beta_ratio=0.1, sample_weight=w)
        assert isinstance(disk.operator, StreamedOperator)
        small = disk.objective.compressed()
        assert small.operator.output_shape[0] <= 16
        memory = cf.Problem("attention", X, Y, beta=disk.beta, sample_weight=w)
        solution = cf.solve(disk, tolerance=1e-10)
    assert cf.certify(solution, memory).meets(1e-9)


def test_float32_is_certified_in_float64(tmp_path):
    rng = np.random.default_rng(0)
    X, y = rng.standard_normal((40, 4, 2)), rng.integers(0, 2, 40)
    store = store_of(tmp_path / "s", X)
    for name in ("attention", "self_attention"):
        for stored in (0, 1 << 30):
            with memory_budget(stored=stored):
                disk = cf.Problem(name, store, y, beta_ratio=0.1, dtype=torch.float32)
                solution = cf.solve(disk, tolerance=1e-4)
            memory = cf.Problem(name, X, y, beta=disk.beta)
            assert cf.certify(solution, memory).relative_gap == pytest.approx(
                solution.certificate.relative_gap, abs=1e-9
            )


# ---------------------------------------------------------------------- estimators


@pytest.fixture(scope="module")
def blobs():
    rng = np.random.default_rng(0)
    y = np.repeat(["cat", "dog", "owl"], 14)
    centers = rng.standard_normal((3, 4, 2))
    return centers[np.repeat(np.arange(3), 14)] + 0.5 * rng.standard_normal((42, 4, 2)), y


@pytest.mark.parametrize("memory", [0, 1 << 30], ids=["disk", "memory"])
@pytest.mark.parametrize("head", ["attention", "mlp"])
def test_estimators_take_stores(blobs, tmp_path, memory, head):
    X, y = blobs
    with StoreWriter(tmp_path / "s", dtype="float64", shard_samples=4) as writer:
        writer.add(X, labels=y)
        writer.finish()
    store = cf.data.open(tmp_path / "s", memory=memory)
    one = cf.TokenClassifier(head=head, tolerance=1e-8).fit(X, y)
    other = cf.TokenClassifier(head=head, tolerance=1e-8).fit(store, store.labels)
    assert other.certificate_.primal == pytest.approx(one.certificate_.primal, rel=1e-7)
    assert other.predict(store).tolist() == one.predict(X).tolist()
    assert other.score(store, store.labels) == one.score(X, y)
    assert other.certify(store, store.labels).meets(1.01e-8)
    assert other.predict(store[:5]).tolist() == one.predict(X[:5]).tolist()


def test_searches_take_stores(blobs, tmp_path):
    from sklearn.model_selection import cross_val_score

    X, y = blobs
    store = store_of(tmp_path / "s", X)
    options = {"head": "mlp", "n_betas": 4, "beta_min_ratio": 0.01, "cv": 3}
    one, other = cf.TokenClassifierCV(**options).fit(X, y), cf.TokenClassifierCV(**options).fit(store, y)
    assert other.best_score_ == pytest.approx(one.best_score_)
    assert other.beta_ == pytest.approx(one.beta_, rel=1e-9)
    scores = cross_val_score(cf.TokenClassifier(head="mlp"), store, y, cv=3)
    assert scores == pytest.approx(cross_val_score(cf.TokenClassifier(head="mlp"), X, y, cv=3))


def test_the_portfolio_takes_stores(blobs, tmp_path):
    X, y = blobs
    store = store_of(tmp_path / "s", X)
    found = cf.TokenClassifierCV(head="auto", cv=2, tolerance=1e-2).fit(store, y)
    assert found.certificate_.meets(1e-2)
    assert found.score(store, y) > 0.8


def test_a_head_that_looks_at_all_tokens_says_so(tmp_path):
    class Odd(cf.heads.Linear.__mro__[1]):
        name, per_token, positional = "odd", False, False
        program = recover = lift = lambda *_: None

        def config(self):
            return {}

    store = store_of(tmp_path / "s", np.ones((5, 4, 2)))
    with pytest.raises(ValueError, match="the odd head needs all tokens in memory"):
        cf.Problem(Odd(), store, np.zeros(5), beta=1.0)


def test_checkpoints_of_streams_resume(blobs, tmp_path):
    X, y = blobs
    store = store_of(tmp_path / "s", X)
    codes = np.unique(y, return_inverse=True)[1]
    problem = cf.Problem("attention", store, codes, beta_ratio=0.05)
    with pytest.warns(UserWarning, match="max_iter"):
        cf.solve(problem, solver="fista", max_iter=3, tolerance=1e-9, checkpoint=tmp_path / "c")
    again = cf.Problem("attention", cf.data.open(store.folder, memory=0), codes, beta_ratio=0.05)
    assert again.fingerprint() == problem.fingerprint()
    assert cf.solve(again, tolerance=1e-6, checkpoint=tmp_path / "c").certificate.meets(1e-6)
    other = cf.Problem("attention", store[:30], codes[:30], beta_ratio=0.05)
    assert other.fingerprint() != problem.fingerprint()

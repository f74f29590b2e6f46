"""The race on real tokens: its data, its peers, its driver, and the cost model it fits. Nothing here is timed."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import convexformer as cf
from convexformer.solvers.cost import anisotropy, depth, predicted_seconds

FOLDER = Path(__file__).parent.parent / "benchmarks" / "real"
MODULES = ("data", "cases", "peers", "report", "race", "fit", "run")


@pytest.fixture(scope="module")
def real():
    """The modules of the benchmark by name; their plain names are taken back afterwards."""
    before = {name: sys.modules.pop(name) for name in MODULES if name in sys.modules}
    sys.path.insert(0, str(FOLDER))
    try:
        modules = {name: __import__(name) for name in MODULES}
    finally:
        sys.path.remove(str(FOLDER))
        for name in MODULES:
            sys.modules.pop(name, None)
        sys.modules.update(before)
    return modules


@pytest.fixture
def file(tmp_path):
    """Twelve tokens of half precision with a mask and a test part."""
    rng = np.random.default_rng(0)
    arrays = {}
    for part, n in (("train", 60), ("test", 20)):
        X = rng.standard_normal((n, 5, 4))
        arrays |= {f"X_{part}": X.astype(np.float16), f"y_{part}": (X[:, 0, 0] > 0).astype(np.int64)}
        arrays[f"mask_{part}"] = (np.arange(5) < rng.integers(2, 6, n)[:, None]).astype(np.uint8)
    np.savez(tmp_path / "mine_tokens.npz", **arrays)
    return tmp_path / "mine_tokens.npz"


def test_a_file_is_read_standardised_and_can_be_given_more_classes(real, file, tmp_path):
    tokens = real["data"].load(str(file), samples=50)
    assert tokens.X.shape == (50, 5, 4)
    assert tokens.test.X.shape == (20, 5, 4)
    assert not tokens.X[~tokens.mask].any()
    np.testing.assert_allclose(tokens.X[tokens.mask].std(0), 1, rtol=1e-6)
    many = real["data"].load(f"{file}@7")
    assert many.n_classes == 7
    assert len(many.y) + len(many.test.y) == 60  # pseudo-labels are split, for the file's own test labels are others
    np.savez(tmp_path / "plain.npz", X=tokens.X, y=tokens.y)
    assert real["data"].load(str(tmp_path / "plain.npz")).mask is None
    np.savez(tmp_path / "wrong.npz", A=tokens.X)
    with pytest.raises(ValueError, match="expected X and y"):
        real["data"].load(str(tmp_path / "wrong.npz"))


@pytest.mark.parametrize("name", ["ill_conditioned", "imbalanced", "one_token", "heavy_tails"])
def test_made_up_problems_have_the_shape_they_are_named_for(real, name):
    tokens = real["data"].load(f"made:{name}")
    counts = np.bincount(tokens.y)
    spread = np.linalg.svd(tokens.X[:, 0], compute_uv=False)
    assert {
        "ill_conditioned": spread[0] > 50 * spread[-1],
        "imbalanced": counts.max() > 10 * counts.min(),
        "one_token": tokens.X.shape[1] == 1,
        "heavy_tails": np.abs(tokens.X).max() > 15,
    }[name]


@pytest.mark.parametrize("head", ["mlp", "attention_l2", "self_attention"])
def test_lbfgs_on_factors_is_certified_by_the_library(real, head):
    case = real["cases"].Case("made:tiny", head, samples=60)
    tokens = case.tokens()
    problem = real["cases"].build(case, tokens, beta_ratio=0.1)
    found = real["peers"].factored_lbfgs(problem, limit=20.0)
    assert found["gap"] < 1e-3
    assert found["seconds"]["0.001"] is not None
    times = [seconds for seconds in found["seconds"].values() if seconds is not None]
    assert times == sorted(times)


def test_every_head_of_the_race_builds(real):
    tokens = real["data"].load("made:tiny", samples=30)
    for head in real["cases"].HEADS:
        for loss in ("cross_entropy", "squared"):
            case = real["cases"].Case("made:tiny", head, loss)
            if case.skip(tokens) is not None:
                assert head.startswith("block_fno")  # three classes
                continue
            assert real["cases"].build(case, tokens.narrowed(4), beta=1.0).objective.n_outputs == tokens.n_classes


def test_the_verdict_compares_auto_with_the_best_solver(real):
    def row(tool, seconds, **more):
        words = {"tool": tool, "ratio": 0.1, "threads": 1, "status": "CONVERGED" if seconds else "MAX_TIME"}
        return words | {"seconds": {"0.001": seconds}, "iterations": {"0.001": 1}, "gap": 1e-4} | more

    entry = {
        "cold": [row("auto", 3.0, took="fista"), row("fista", 2.4), row("working_set", 1.0), row("staircase", None)]
    }
    rows = real["report"].pooled(entry, 0.1)
    assert rows["auto"]["seconds"]["0.001"] == 2.4  # the same computation: the lesser time counts
    found = real["report"].verdict(rows)
    assert (found["best"], found["auto_over_best"]) == ("working_set", 2.4)
    assert found["bad"] == ["staircase MAX_TIME"]


def test_fitted_prices_choose_the_cheaper_solver(real):
    Counts, Prices = real["fit"].Counts, real["fit"].Prices
    rng = np.random.default_rng(0)
    truth = {"fista": Prices(0.1, 50.0, power=0.5, deepening=0.2), "working_set": Prices(0.5, 5.0)}
    rows = []
    for products, unequal, deep in 10.0 ** rng.uniform((-4, 0, 1), (0, 1, 3), (60, 3)):
        counts = Counts(products=products, anisotropy=unequal, depth=deep)
        seconds = {name: prices.seconds(counts) * rng.uniform(0.9, 1.1) for name, prices in truth.items()}
        rows.append({"name": "made up", "kind": "nuclear", "counts": counts, "seconds": seconds})
    prices = real["fit"].fit(rows)["nuclear"]
    for name, true in truth.items():
        assert (prices[name].power, prices[name].deepening) == (true.power, true.deepening)
        assert prices[name].overhead == pytest.approx(true.overhead, rel=0.1)
        assert prices[name].products == pytest.approx(true.products, rel=0.1)
    assert real["fit"].judge(rows, {"nuclear": prices})[0][0] < 1.3


@pytest.mark.slow
def test_a_smoke_run_writes_table_numbers_and_figure(tmp_path, file):
    words = [str(file), "--suite", "smoke", "--output", str(tmp_path), "--only", "attention,auto,fista"]
    run = lambda words: subprocess.run(  # noqa: E731
        [sys.executable, str(FOLDER / "run.py"), *words], capture_output=True, text=True, check=False
    )
    done = run(words)
    assert done.returncode == 0, done.stderr
    assert "auto / best solver at 1e-3" in done.stdout
    out = json.loads((tmp_path / "real.json").read_text())
    assert [entry["name"] for entry in out["entries"]] == ["tiny, attention", "mine, attention"]
    for entry in out["entries"]:
        assert {row["tool"] for row in entry["cold"]} == {"auto", "fista"}
        assert all(row["gap"] <= 1e-3 for row in entry["cold"] if row["status"] == "CONVERGED")
        assert len(entry["paths"][0]["steps"]) == 5
    assert (tmp_path / "real.png").stat().st_size > 10_000
    again = run(["--fit-auto", str(tmp_path / "real.json")])
    assert again.returncode == 0, again.stderr
    assert '"fista": Prices(' in again.stdout


def test_only_restricts_what_it_names(real):
    cases = real["cases"].smoke([]).cases
    chosen, solvers, peers = real["run"].select(cases, ["mlp", "fista", "auto"])
    assert [case.head for case in chosen] == ["mlp"]
    assert solvers == ["fista", "auto"]
    assert not peers
    with pytest.raises(ValueError, match="nothing: not known"):
        real["run"].select(cases, ["nothing"])


def test_auto_explains_its_prediction():
    rng = np.random.default_rng(0)
    head = cf.heads.Attention(decay="l2")
    problem = cf.Problem(head, rng.standard_normal((300, 8, 10)), np.arange(300) % 3, beta_ratio=0.1)
    text = cf.solvers.explain(problem)
    assert "predicted" in text
    assert "anisotropy" in text
    predicted = predicted_seconds(problem.objective)
    assert cf.solvers.select(problem.objective) == min(predicted, key=predicted.get)
    assert set(predicted) == {"fista", "working_set"}
    assert "promises no end" in text
    assert "hands over to 'staircase'" in text
    groups = cf.Problem("attention", rng.standard_normal((300, 8, 10)), np.arange(300) % 3, beta_ratio=0.1)
    assert cf.solvers.select(groups.objective) == "working_set"


def test_depth_is_how_far_beta_is_below_its_largest():
    rng = np.random.default_rng(0)
    problem = cf.Problem(
        "attention", rng.standard_normal((60, 4, 3)), np.arange(60) % 3, beta_ratio=0.01, intercept=True
    )
    assert depth(problem.objective) == pytest.approx(100.0, rel=1e-6)
    assert depth(problem.objective.at(0.1 * problem.beta)) == pytest.approx(1000.0, rel=1e-6)
    assert depth(problem.objective.at(1000 * problem.beta)) == 1.0


@pytest.mark.parametrize("spread", [0.0, 2.0])
def test_anisotropy_is_one_for_equal_singular_values_and_large_for_unequal_ones(spread):
    rng = np.random.default_rng(0)
    Q = np.linalg.qr(rng.standard_normal((400, 60)))[0] * np.arange(1, 61) ** -spread
    objective = cf.Problem("attention", Q.reshape(400, 6, 10), rng.standard_normal((400, 8)), beta=1.0).objective
    squares = np.arange(1.0, 61) ** (-2 * spread)
    exact = 60 * np.square(squares).sum() / squares.sum() ** 2
    assert anisotropy(objective) == pytest.approx(exact, rel=0.35)
    assert anisotropy(objective.at(2.0)) == anisotropy(objective)

"""Scores, assumptions, and data for each theorem."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from convexformer.margin import Sequences, check_assumptions, sample_data

KINDS = ("diagonal", "general", "aligned")


@settings(max_examples=30)
@given(seed=st.integers(0, 10_000), n=st.integers(1, 4), L=st.integers(2, 5), d=st.integers(1, 5))
def test_scores_and_optimal_tokens_are_those_of_definition_3_1(seed, n, L, d):
    rng = np.random.default_rng(seed)
    X, z, y, v = (
        rng.standard_normal((n, L, d)),
        rng.standard_normal((n, d)),
        rng.choice([-1, 1], n),
        rng.standard_normal(d),
    )
    data = Sequences.of(X, z, y, v)
    scores = y[:, None] * (X @ v)
    best = scores.argmax(1)
    assert data.scores.numpy() == pytest.approx(scores)
    assert (data.optimal.numpy() == best).all()
    for i in range(n):
        rest = [l for l in range(L) if l != best[i]]
        assert data.others[i].tolist() == rest
        assert data.differences[i].numpy() == pytest.approx(X[i, best[i]] - X[i, rest])
    assert data.infimum == pytest.approx(np.exp(-scores.max(1)).mean())
    W = rng.standard_normal((d, d))
    margins = np.einsum("ild,de,ie->il", data.differences.numpy(), W, z)
    assert data.operator().apply(torch.from_numpy(W)).numpy() == pytest.approx(margins)
    b = rng.standard_normal((d, 1))
    diagonal = data.diagonal_operator().apply(torch.from_numpy(b)).numpy().reshape(n, L - 1)
    assert diagonal == pytest.approx(np.einsum("ild,d,id->il", data.differences.numpy(), b[:, 0], z))


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=6)
@given(seed=st.integers(0, 10_000))
def test_samples_satisfy_the_assumptions_of_their_theorem(kind, seed):
    report = check_assumptions(*sample_data(kind, seed=seed))
    assert report[1].holds
    assert report[2].holds
    assert report[3].holds
    assert report[4].holds == (kind == "aligned")
    if kind == "diagonal":
        assert report.theorem_4_1
    assert report.theorem_5_1 == (kind == "aligned")


def test_the_counterexample_fails_assumption_3_alone():
    report = check_assumptions(*sample_data("violates_a3"))
    assert report[1].holds
    assert report[1].numbers["diagonal_margin"] > 0
    assert report[2].holds
    assert not report[3].holds
    assert report[3].numbers["initial_loss"] == pytest.approx(0.5 + np.exp(-1.95) / 2)
    assert report[3].numbers["threshold"] == pytest.approx((np.exp(-2) + np.exp(-1.9)) / 2)
    assert not report.theorem_4_1
    assert "FAILS" in str(report)
    assert report.to_dict()["assumptions"]["3"]["holds"] is False


def test_assumption_1_fails_on_contradictions_and_ties():
    X, z, y, v = sample_data("general")
    X, z = X.copy(), z.copy()
    X[1], z[1], y[1] = X[0], -z[0], y[0]
    report = check_assumptions(X, z, y, v)
    assert not report[1].holds
    assert report[1].numbers["margin"] == 0
    X, z, y, v = sample_data("general")
    X = X.copy()
    X[0, 1] = X[0, 0]
    X[0, 2] = X[0, 0]
    assert check_assumptions(X, z, y, v)[1].numbers["ties"] == 1


def test_assumption_2_names_gap_and_spread():
    X, z, y, v = sample_data("general")
    data = Sequences.of(X, z, y, v)
    X = X.copy()
    other = int(data.others[0, 0])
    X[0, other] += 0.25 * y[0] * v / (v @ v)
    report = check_assumptions(X, z, y, v)
    assert not report[2].holds
    assert report[2].numbers["largest_spread"] == pytest.approx(0.25)
    assert check_assumptions(X, z, y, v, tolerance=0.5)[2].holds


def test_assumption_3_depends_on_the_start():
    X, z, y, v = sample_data("general")
    data = Sequences.of(X, z, y, v)
    away = -10 * data.operator().adjoint(torch.ones_like(data.operator().apply(torch.zeros(4, 4).double()))).numpy()
    assert check_assumptions(X, z, y, v)[3].holds
    assert not check_assumptions(X, z, y, v, W=away)[3].holds


@pytest.mark.parametrize("part", ["overlap", "one_minus_cosine", "pair_residual"])
def test_assumption_4_finds_what_is_broken(part):
    X, z, y, v = (np.array(a) for a in sample_data("aligned"))
    best = int(Sequences.of(X, z, y, v).optimal[0])
    if part == "one_minus_cosine":
        z[0] += 0.1 * np.linalg.norm(z[0]) * np.linalg.qr(np.stack([*z, v]).T)[0][:, -1]
    elif part == "overlap":
        z[0] += 0.1 * z[1]
    else:
        X[0, (best + 1) % X.shape[1]] += 0.1
    report = check_assumptions(X, z, y, v)
    assert not report[4].holds
    assert report[4].numbers[part] > 1e-4


@pytest.mark.parametrize("kind", KINDS)
def test_samples_are_reproducible_and_have_the_shape_asked_for(kind):
    shape = {"diagonal": (2, 3, 8), "general": (4, 5, 6), "aligned": (2, 3, 5)}[kind]
    one, two, other = (sample_data(kind, *shape, seed=seed) for seed in (1, 1, 2))
    assert one.X.shape == shape
    assert one.z.shape == (shape[0], shape[2])
    assert set(np.unique(one.y)) <= {-1.0, 1.0}
    assert one.v.shape == (shape[2],)
    assert all(np.array_equal(a, b) for a, b in zip(one, two, strict=True))
    assert not np.array_equal(one.X, other.X)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "diagnal"}, "Did you mean 'diagonal'"),
        ({"kind": "general", "L": 1}, "L >= 2"),
        ({"kind": "aligned", "L": 4}, "L odd"),
        ({"kind": "aligned", "n": 5, "d": 6}, "d >= n \\+ 2"),
        ({"kind": "violates_a3", "n": 3}, "fixed problem"),
        ({"kind": "diagonal", "n": 12, "L": 6, "d": 2}, "no separable data"),
    ],
)
def test_impossible_samples_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        sample_data(**options)


def test_bad_arguments_of_the_checker_are_named():
    data = sample_data("general")
    with pytest.raises(ValueError, match="tolerance"):
        check_assumptions(*data, tolerance=0)
    with pytest.raises(ValueError, match="W has shape"):
        check_assumptions(*data, W=np.zeros(3))
    with pytest.raises(KeyError, match="not 7"):
        check_assumptions(*data)[7]

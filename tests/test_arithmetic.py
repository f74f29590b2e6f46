"""Modular arithmetic: the tables say what they claim, and their splits are clean."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import convexformer as cf

moduli = st.integers(3, 40)


@given(p=moduli)
def test_division_undoes_multiplication_and_has_units_only(p):
    X, y = cf.data.modular_division(p)
    assert torch.equal(X[:, 1] * y % p, X[:, 0])
    assert all(math.gcd(int(b), p) == 1 for b in X[:, 1].unique())
    assert len(X) == len(X.unique(dim=0)) == p * sum(math.gcd(b, p) == 1 for b in range(1, p))


@given(p=moduli)
def test_the_other_operations(p):
    for task, rule in (
        (cf.data.modular_addition(p), lambda a, b: a + b),
        (cf.data.modular_subtraction(p), lambda a, b: a - b),
        (cf.data.modular_multiplication(p), lambda a, b: a * b),
    ):
        assert len(task) == p * p
        assert torch.equal(task.y, rule(*task.X.T) % p)
        assert (task.n_symbols, task.n_classes, task.n_tokens) == (p, p, 2)


def test_known_sizes():
    assert len(cf.data.modular_division(97)) == 97 * 96
    assert len(cf.data.modular_division(15)) == 120
    assert len(cf.data.periodicity()) == 96 * 97


def test_periodicity_as_printed():
    X, y = cf.data.periodicity(97)
    x, z = X.T
    inverse = torch.tensor([pow(int(value), -1, 97) for value in x])
    assert torch.equal((inverse + z**2) * ((2 * x) % 6) % 97, y)
    assert bool((y[x % 3 == 0] == 0).all())


@given(p=moduli, share=st.floats(0.2, 0.8), seed=st.integers(0, 9))
def test_splits_are_disjoint_complete_and_depend_on_the_seed_alone(p, share, seed):
    task = cf.data.modular_addition(p)
    train, test = task.splits(share, [seed, seed + 1])
    assert sorted([*train[0].tolist(), *test[0].tolist()]) == list(range(len(task)))
    assert torch.equal(train[0], task.splits(share, [seed])[0][0])
    assert not torch.equal(train[0], train[1])
    part, rest = task.split(share, seed)
    assert torch.equal(part.X, task.X[train[0]])
    assert len(part) + len(rest) == len(task)


def test_one_hot_tokens_for_the_heads():
    X, y = cf.data.modular_division(5).one_hot()
    assert X.shape == (20, 2, 5)
    assert float(X.sum()) == 40
    problem = cf.Problem("attention", X, y, beta_ratio=0.5)
    assert cf.solve(problem).certificate.relative_gap <= 1e-4


@pytest.mark.parametrize("p", [2, 2.5, True, "97"])
def test_a_bad_modulus_is_named(p):
    with pytest.raises(ValueError, match="expected a whole number of at least 3"):
        cf.data.modular_division(p)


@pytest.mark.parametrize("share", [0, 1, 1.5, 1e-9])
def test_a_bad_fraction_is_named(share):
    with pytest.raises(ValueError, match=f"train={share}"):
        cf.data.modular_division(5).split(share)

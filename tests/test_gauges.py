"""Gauges: the contract over shapes, closed forms, and a broken gauge that the checks must catch."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cases import GAUGES
from convexformer.gauges import (
    ConeNuclearNorm,
    FrobeniusNorm,
    Gauge,
    GroupNorm,
    Norm,
    NuclearNorm,
    Penalty,
    Polar,
    PolarKind,
    ReLUNorm,
    RepresenterNorm,
    RepresenterRidge,
    Ridge,
    ScaledPenalty,
    StochasticNorm,
    SumPenalty,
)
from convexformer.testing import check_gauge, check_penalty

shapes = st.tuples(st.lists(st.integers(1, 3), max_size=2), st.integers(1, 5), st.integers(1, 4)).map(
    lambda parts: (*parts[0], parts[1], parts[2])
)


def normal(seed, shape):
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape))


@pytest.mark.parametrize("gauge", GAUGES.values(), ids=GAUGES.keys())
@settings(max_examples=40)
@given(shape=shapes, seed=st.integers(0, 10_000))
def test_gauges_keep_the_contract(gauge, shape, seed):
    check_gauge(gauge, shape, seed)


@settings(max_examples=20)
@given(shape=shapes, seed=st.integers(0, 10_000))
def test_the_ridge_keeps_the_contract_of_a_penalty(shape, seed):
    check_penalty(Ridge(), shape, seed)


@settings(max_examples=20)
@given(first=shapes, second=shapes, seed=st.integers(0, 10_000), parts=st.permutations([*GAUGES.values(), Ridge()]))
def test_sums_of_penalties_keep_the_contract_of_a_penalty(first, second, seed, parts):
    total = math.prod(first) + math.prod(second)
    check_penalty(SumPenalty(parts[:2], [first, second]), (total,), seed)


def test_every_penalty_of_the_package_has_a_case():
    concrete = {kind for kind in _below(Penalty) if kind.__module__.startswith("convexformer.gauges")} - {Gauge, Norm}
    elsewhere = {  # test_portfolio.py, test_token_attention.py, test_relu.py
        ConeNuclearNorm,
        ReLUNorm,
        RepresenterNorm,
        RepresenterRidge,
        ScaledPenalty,
        StochasticNorm,
    }
    assert {type(gauge) for gauge in GAUGES.values()} | {Ridge, SumPenalty} | elsewhere == concrete


def _below(kind):
    return {child for direct in kind.__subclasses__() for child in {direct, *_below(direct)}}


# ---------------------------------------------------------------------- closed forms


def test_group_norm_sums_the_norms_of_tokens_and_classes():
    Z = torch.zeros(2, 2, 3).double()
    Z[0, :, 0], Z[1, :, 2] = torch.tensor([3.0, 4.0]), torch.tensor([0.0, -2.0])
    assert float(GroupNorm().value(Z)) == 7.0
    assert GroupNorm().polar(Z) == Polar(5.0, PolarKind.EXACT, 1.0)
    assert torch.equal(GroupNorm().prox(Z, 2.0)[0, :, 0], 0.6 * Z[0, :, 0])
    assert torch.equal(GroupNorm().prox(Z, 2.0)[1], torch.zeros(2, 3).double())


def test_group_norm_per_token_joins_the_classes():
    Z = torch.tensor([[[3.0, 0.0], [0.0, 4.0]], [[0.0, 1.0], [0.0, 0.0]]]).double()
    assert float(GroupNorm("token").value(Z)) == 6.0
    assert GroupNorm("token").polar(Z).value == 5.0


@settings(max_examples=25)
@given(shape=shapes, seed=st.integers(0, 10_000))
def test_nuclear_norm_and_its_polar_are_sums_and_maxima_of_singular_values(shape, seed):
    Z = normal(seed, shape)
    slices = Z.numpy().reshape(-1, *shape[-2:])
    assert float(NuclearNorm().value(Z)) == pytest.approx(sum(np.linalg.norm(z, "nuc") for z in slices))
    assert NuclearNorm().polar(Z).value == pytest.approx(max(np.linalg.norm(z, 2) for z in slices))


@settings(max_examples=25)
@given(shape=shapes, seed=st.integers(0, 10_000), step=st.floats(0.01, 3))
def test_the_prox_of_the_nuclear_norm_thresholds_singular_values(shape, seed, step):
    Z = normal(seed, shape)
    U, sigma, Vh = np.linalg.svd(Z.numpy(), full_matrices=False)
    expected = (U * np.maximum(sigma - step, 0)[..., None, :]) @ Vh
    assert NuclearNorm().prox(Z, step).numpy() == pytest.approx(expected, abs=1e-10)


@settings(max_examples=25)
@given(shape=shapes, seed=st.integers(0, 10_000))
def test_nuclear_is_below_the_group_norm_and_equal_for_one_class(shape, seed):
    Z = normal(seed, shape)
    assert float(NuclearNorm().value(Z)) <= float(GroupNorm().value(Z)) * (1 + 1e-12)
    one = Z[..., :1]
    assert float(NuclearNorm().value(one)) == pytest.approx(float(GroupNorm().value(one)))


@pytest.mark.parametrize("gauge", [*GAUGES.values(), Ridge()], ids=str)
def test_the_prox_of_zero_is_zero(gauge):
    zero = torch.zeros(3, 4, 2).double()
    assert torch.equal(gauge.prox(zero, 0.7), zero)
    assert float(gauge.value(zero)) == 0.0


@pytest.mark.parametrize("gauge", GAUGES.values(), ids=GAUGES.keys())
def test_a_zero_gradient_has_polar_zero_and_needs_no_scaling(gauge):
    zero = torch.zeros(3, 4, 2).double()
    assert gauge.polar(zero).value == 0.0
    assert gauge.max_dual_scale(zero, 0.5)[0] == float("inf")
    assert float(gauge.value(gauge.atom(zero))) <= 1 + 1e-12


def test_only_a_lower_bound_does_not_certify():
    assert {kind for kind in PolarKind if not kind.certifies} == {PolarKind.LOWER}


# ---------------------------------------------------------------------- the checks can fail


class Broken(Gauge):
    """A group norm with one of its parts replaced."""

    def __init__(self, **parts):
        self.parts = {name: getattr(GroupNorm(), name) for name in ("value", "prox", "polar", "atom")} | parts

    def value(self, Z):
        return self.parts["value"](Z)

    def prox(self, Z, step):
        return self.parts["prox"](Z, step)

    def polar(self, M):
        return self.parts["polar"](M)

    def atom(self, M):
        return self.parts["atom"](M)


BROKEN = {
    "prox of another gauge": (Broken(prox=NuclearNorm().prox), "<Z - P, P>|max_dual_scale"),
    "prox with half the step": (Broken(prox=lambda Z, step: GroupNorm().prox(Z, step / 2)), "Z - P"),
    "polar too small": (Broken(polar=lambda M: Polar(0.9 * GroupNorm().polar(M).value)), "<M, |max_dual_scale"),
    "polar too large": (Broken(polar=lambda M: Polar(1.1 * GroupNorm().polar(M).value)), "polar"),
    "atom too long": (Broken(atom=lambda M: 2 * GroupNorm().atom(M)), r"g\(atom\)"),
    "value not homogeneous": (Broken(value=lambda Z: GroupNorm().value(Z) ** 2), "Z - P|g|objective"),
    "atom of another shape": (Broken(atom=lambda M: GroupNorm().atom(M)[0]), "shape"),
}


@pytest.mark.parametrize(("gauge", "message"), BROKEN.values(), ids=BROKEN.keys())
def test_check_gauge_catches_a_broken_gauge(gauge, message):
    check_gauge(Broken(), (3, 4, 2))
    with pytest.raises(AssertionError, match=message):
        check_gauge(gauge, (3, 4, 2))


@pytest.mark.parametrize("gauge", [GroupNorm(), GroupNorm("token"), FrobeniusNorm()], ids=repr)
def test_the_prox_ends_at_zero_exactly(gauge):
    g = torch.Generator().manual_seed(0)
    for step in torch.rand(200, generator=g, dtype=torch.float64).tolist():
        Z = torch.randn((3, 4, 2), generator=g, dtype=torch.float64)
        Z = 0.999 * step * Z / gauge.polar(Z).value
        assert not bool(gauge.prox(Z, step).any())

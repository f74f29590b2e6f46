"""Gated heads too large to form: bounds from few products, and the solver that works on row spaces."""

import numpy as np
import pytest
import torch
from tests.cases import tensor

import convexformer as cf
from convexformer.gauges import PolarKind, deflation, spectral
from convexformer.gauges.krylov import random_rows
from convexformer.solvers import SOLVERS, select

FAILURE = 1e-6


class Stack:
    """Dense matrices behind the interface of a linear map."""

    def __init__(self, M):
        self.M, self.shape, self.like, self.products = M, tuple(M.shape), M, 0

    def matvec(self, V, b):
        self.products += len(V)
        return V @ self.M[b].T

    def rmatvec(self, U, b):
        self.products += len(U)
        return U @ self.M[b]


def with_spectrum(g, B, p, q, values):
    U, _ = torch.linalg.qr(torch.randn(B, p, min(p, q), generator=g, dtype=torch.float64))
    V, _ = torch.linalg.qr(torch.randn(B, q, min(p, q), generator=g, dtype=torch.float64))
    return (U * values[:, None, :]) @ V.mT


SPECTRA = {
    "fast": lambda n: 0.7 ** torch.arange(n, dtype=torch.float64),
    "steps": lambda n: torch.where(torch.arange(n) < 10, 1.0, 0.05).double(),  # ties at the top
    "one": lambda n: (torch.arange(n) < 1).double(),
    "zero": lambda n: torch.zeros(n, dtype=torch.float64),
    "slow": lambda n: 1 / (1 + torch.arange(n, dtype=torch.float64)) ** 0.5,
    "flat": lambda n: torch.ones(n, dtype=torch.float64),
}


@pytest.mark.parametrize("start", ["near", "random"])
@pytest.mark.parametrize("spectrum", SPECTRA)
@pytest.mark.parametrize(("B", "p", "q"), [(1, 60, 40), (4, 30, 90), (3, 12, 12), (2, 1, 50), (2, 200, 1)])
def test_bounds_from_few_products_are_never_too_small(B, p, q, spectrum, start):
    for seed in range(4):
        g = torch.Generator().manual_seed(seed)
        sizes = torch.rand(B, generator=g, dtype=torch.float64) + 0.5
        if seed == 3:
            sizes *= 10.0 ** float(100 * torch.randn(1, generator=g))
        n = min(p, q)
        M = with_spectrum(g, B, p, q, sizes[:, None] * SPECTRA[spectrum](n))
        top = float(M.abs().max()) or 1.0
        true = top * float(torch.linalg.matrix_norm(M / top, 2).max())
        _, _, Vh = torch.linalg.svd(M / top if q <= p else M.mT / top, full_matrices=False)
        rough = Vh[:, : deflation.RANK].float().double()
        starts = {b: rough[b] if start == "near" else random_rows(8, n, M, seed=b) for b in range(B)}
        found = deflation.deflated(Stack(M), starts, FAILURE)
        if found is None:
            assert spectrum in ("slow", "flat", "steps", "fast")
            assert start == "random" or spectrum in ("slow", "flat")
        else:
            assert true * (1 - 1e-12) <= found <= true * (1 + deflation.LOOSE)


def test_a_start_that_misses_the_top_does_not_hide_it():
    g = torch.Generator().manual_seed(0)
    values = torch.cat([torch.tensor([1.0, 0.999]), torch.full((38,), 1e-3)]).double()
    M = with_spectrum(g, 1, 60, 40, values[None])
    _, _, Vh = torch.linalg.svd(M[0], full_matrices=False)
    found = deflation.deflated(Stack(M), {0: Vh[2:12]}, FAILURE)
    assert found is None or found >= float(torch.linalg.matrix_norm(M[0], 2))
    found = deflation.deflated(Stack(M), {0: Vh[1:12]}, FAILURE)  # the second is there, the first is not
    assert found is None or found >= float(torch.linalg.matrix_norm(M[0], 2))


def test_blocks_below_the_largest_cost_no_more_than_a_loose_bound():
    g = torch.Generator().manual_seed(0)
    sizes = torch.tensor([1.0, 0.3, 0.2, 0.1], dtype=torch.float64)
    M = with_spectrum(g, 4, 80, 60, sizes[:, None] * SPECTRA["fast"](60))
    starts = {b: torch.linalg.svd(M[b], full_matrices=False)[2][: deflation.RANK] for b in range(4)}
    L = Stack(M)
    assert deflation.deflated(L, starts, FAILURE) == pytest.approx(1.0, rel=1e-6)
    assert L.products <= 4 * (2 * deflation.RANK + 2 * deflation.PROBES)


def gated(head=cf.heads.SelfAttention, N=60, s=7, d=8, c=3, gates=4, seed=0, **options):
    rng = np.random.default_rng(seed)
    X, y = rng.standard_normal((N, s, d)) / np.sqrt(s), rng.permutation(np.arange(N) % c)
    X[np.arange(N), 0, y % d] += 1.0
    return cf.Problem(head("gated_relu", gates=gates), X, y, beta=1.0, **options)


@pytest.mark.parametrize("sizes", [{}, {"s": 1}, {"N": 12, "gates": 1}, {"d": 3, "c": 5, "gates": 9}])
def test_the_polar_is_bounded_as_by_the_dense_matrix(sizes, monkeypatch):
    monkeypatch.setattr(spectral, "MUCH_WORK", 0.0)
    monkeypatch.setattr(spectral, "VERIFYING_COST", 0.0)
    monkeypatch.setattr(spectral, "SMALL_SIDE", 2)
    monkeypatch.setattr(spectral, "verified", lambda M, failure: None)
    A = gated(**sizes).operator
    for seed in range(3):
        V = tensor(np.random.default_rng(seed), *A.output_shape)
        exact = float(torch.linalg.svdvals(A.adjoint(V)).amax())
        polar = spectral.bound(A.dual_matrix(V))
        assert exact * (1 - 1e-12) <= polar.value <= exact * (1 + deflation.LOOSE)
        assert polar.kind in (PolarKind.PROBABILISTIC, PolarKind.UPPER)
        assert exact * (1 - 1e-2) <= spectral.estimate(A.dual_matrix(V)).value <= exact * (1 + 1e-9)


def test_a_sketch_is_products_with_vectors_that_factor():
    A = gated().operator
    V = tensor(np.random.default_rng(0), *A.output_shape)
    left, right = (tensor(np.random.default_rng(seed), 5, 8) for seed in (1, 2))
    U = (left[:, :, None] * right[:, None, :]).flatten(1)
    for b in range(4):
        torch.testing.assert_close(A.sketch(V, b, left, right), A.rmatvec(V, U, b))


@pytest.mark.parametrize("head", [cf.heads.SelfAttention, cf.heads.MLPMixer])
def test_the_small_program_is_the_whole_one_on_fixed_rows(head):
    A = gated(head).operator
    p, q = A.weight_shape[-2:]
    P, Y = tensor(np.random.default_rng(0), 4, 3, p), tensor(np.random.default_rng(1), 4, 3, q)
    small = A.on_row_features(torch.stack([A.row_features(rows, b) for b, rows in enumerate(P)], 1))
    torch.testing.assert_close(small.apply(Y), A.apply(P.mT @ Y))
    V = tensor(np.random.default_rng(2), *A.output_shape)
    torch.testing.assert_close(small.adjoint(V), P @ A.adjoint(V))


@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.parametrize("head", [cf.heads.SelfAttention, cf.heads.MLPMixer])
@pytest.mark.parametrize("sizes", [{}, {"s": 1}, {"N": 10, "gates": 9}])
def test_row_spaces_reach_the_same_optimum(head, sizes, intercept):
    problem = gated(head, intercept=intercept, **sizes)
    for ratio in (0.3, 0.02):
        at = problem.with_beta(ratio * problem.beta_max)
        found = cf.solve(at, tolerance=1e-5, solver="row_space")
        other = cf.solve(at, tolerance=1e-6, solver="staircase")
        assert found.certificate.meets(1e-5)
        assert found.objective == pytest.approx(other.objective, rel=2e-5)


def test_row_spaces_with_masks_weights_and_a_warm_start():
    rng = np.random.default_rng(3)
    X, y = rng.standard_normal((30, 6, 5)), rng.integers(0, 3, 30)
    mask = np.arange(6) < rng.integers(1, 7, 30)[:, None]
    problem = cf.Problem(
        cf.heads.SelfAttention("gated_relu", gates=3),
        X,
        y,
        beta_ratio=0.1,
        mask=mask,
        sample_weight=rng.random(30) + 0.1,
    )
    first = cf.solve(problem, tolerance=1e-3, solver="row_space")
    again = cf.solve(problem.with_beta(0.7 * problem.beta), tolerance=1e-4, solver="row_space", warm_start=first)
    cold = cf.solve(problem.with_beta(0.7 * problem.beta), tolerance=1e-5, solver="staircase")
    assert again.certificate.meets(1e-4)
    assert again.objective == pytest.approx(cold.objective, rel=2e-4)


def test_auto_takes_row_spaces_where_weights_are_too_large_to_form():
    small, large = gated().objective, gated(s=2, d=48, c=4, N=6, gates=40).objective
    assert select(small) == "staircase"
    assert select(large) == "row_space"
    assert SOLVERS["row_space"].requires(small) is None
    assert "pooled" in SOLVERS["row_space"].requires(
        cf.Problem("self_attention", np.ones((4, 2, 3)), [0, 1, 0, 1], beta=1.0).objective
    )

"""What large gated heads rest on: matrices formed in float32 and verified, filters on factors, Krylov spaces of a GPU."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from tests.cases import tensor

import convexformer as cf
from convexformer.gauges import PolarKind, krylov, proof, spectral
from convexformer.operators import BilinearOperator, FactoredView, LowRank
from convexformer.operators.base import sum_of_slabs
from convexformer.operators.fourier_factors import FourierFactors
from convexformer.operators.last_products import LastProducts
from convexformer.threads import nearest_tf32
from convexformer.weights import Weights

MATRIX_HEADS = [cf.heads.SelfAttention, cf.heads.MLPMixer]


@pytest.fixture
def all_work_is_much(monkeypatch):
    for name in ("MUCH_WORK", "VERIFYING_COST"):
        monkeypatch.setattr(spectral, name, 0.0)
    monkeypatch.setattr(spectral, "SMALL_SIDE", 2)
    monkeypatch.setattr(spectral, "_deflated", lambda M: None)  # see test_row_space.py


def gated(head, seed=0, scale=1.0, gates=4):
    rng = np.random.default_rng(seed)
    X, Y = scale * rng.standard_normal((40, 17, 6)), rng.standard_normal((40, 4))
    return cf.Problem(head("gated_relu", gates=gates), X, Y, beta=1.0)


@pytest.mark.parametrize("head", MATRIX_HEADS)
def test_a_matrix_formed_in_float32_is_verified(head, all_work_is_much):
    A = gated(head).operator
    for seed in range(3):
        V = tensor(np.random.default_rng(seed), *A.output_shape)
        exact = float(torch.linalg.svdvals(A.adjoint(V)).amax())
        polar = spectral.bound(A.dual_matrix(V))
        assert polar.kind is PolarKind.PROBABILISTIC
        assert polar.confidence == 1 - spectral.FAILURE
        assert exact <= polar.value <= exact * (1 + 1e-4)
        found = spectral.estimate(A.dual_matrix(V))
        assert found.kind is PolarKind.LOWER
        assert 0.99 * exact <= found.value <= exact * (1 + 1e-12)


@pytest.mark.parametrize("head", MATRIX_HEADS)
def test_blocks_that_are_not_the_largest_are_verified_by_few_products(head, all_work_is_much, monkeypatch):
    A, seen = gated(head, gates=6).operator, []
    V = tensor(np.random.default_rng(0), *A.output_shape)
    matvec = type(A).matvec
    monkeypatch.setattr(type(A), "matvec", lambda A, D, W, b: seen.append((b, len(W))) or matvec(A, D, W, b))
    bound, sizes = spectral.bound(A.dual_matrix(V)).value, torch.linalg.svdvals(A.adjoint(V)).amax(-1)
    assert float(sizes.max()) <= bound <= float(sizes.max()) * (1 + 1e-4)
    largest_so_far = sizes.cummax(0).values
    for b, size in enumerate(sizes.tolist()):
        products = sum(count for block, count in seen if block == b)
        if size < 0.99 * float(largest_so_far[b]):
            assert products == proof.FITTED + proof.FEW_PROBES
        elif size == float(largest_so_far[b]):
            assert products == proof.FITTED + proof.PROBES
    assert len(seen) < 2 * len(sizes)


@pytest.mark.parametrize("head", MATRIX_HEADS)
@pytest.mark.parametrize("wrong", ["other tokens", "shrunk", "one entry", "another matrix", "zero"])
def test_whatever_was_formed_the_bound_holds(head, wrong, all_work_is_much, monkeypatch):
    problem, other = gated(head), gated(head, seed=5)
    A = problem.operator
    rough = A.rough
    if wrong == "other tokens":
        monkeypatch.setattr(rough, "X", rough.X + 0.05 * torch.randn_like(rough.X))
    elif wrong == "another matrix":
        A._rough = other.operator.rough
    else:
        blocks = rough.adjoint_blocks

        def spoiled(V):
            for block in blocks(V):
                if wrong == "one entry":
                    block = block.clone()
                    block[3, 2] += 0.5 * block.abs().max()
                yield {"shrunk": 0.9, "zero": 0.0}.get(wrong, 1.0) * block

        monkeypatch.setattr(rough, "adjoint_blocks", spoiled)
    for seed in range(8):
        V = tensor(np.random.default_rng(seed), *A.output_shape)
        assert spectral.bound(A.dual_matrix(V)).value >= float(torch.linalg.svdvals(A.adjoint(V)).amax())


@pytest.mark.parametrize("head", MATRIX_HEADS)
@pytest.mark.parametrize("scale", [1e15, 1e-15])
def test_numbers_beyond_float32_are_formed_in_float64(head, scale, all_work_is_much):
    A = gated(head, scale=scale).operator  # products of tokens overflow, or vanish
    V = tensor(np.random.default_rng(0), *A.output_shape)
    exact = float(torch.linalg.svdvals(A.adjoint(V)).amax())
    assert spectral.bound(A.dual_matrix(V)).value >= exact
    assert 0.99 * exact <= spectral.estimate(A.dual_matrix(V)).value <= exact * (1 + 1e-12)


@pytest.mark.parametrize("head", MATRIX_HEADS)
def test_certificates_agree_whichever_way_the_matrix_was_formed(head, monkeypatch):
    problem = gated(head).with_beta(0.3 * gated(head).beta_max)
    A = problem.operator
    Z = LowRank.of(0.01 * tensor(np.random.default_rng(2), *A.weight_shape))
    Z = Z.select(torch.arange(Z.n_terms) % 7 == 0)
    exact = cf.certify(Weights(Z), problem)
    for name in ("MUCH_WORK", "VERIFYING_COST"):
        monkeypatch.setattr(spectral, name, 0.0)
    monkeypatch.setattr(spectral, "SMALL_SIDE", 2)
    rough = cf.certify(Weights(Z), problem)
    assert (exact.kind, rough.kind) == ("exact", "probabilistic")
    assert rough.primal == exact.primal
    assert exact.dual - 1e-3 * abs(exact.dual) <= rough.dual <= exact.dual


@pytest.mark.parametrize("blocks", [1, 2])
def test_filters_on_factors_are_the_dense_operator(blocks):
    rng = np.random.default_rng(0)
    head = cf.heads.BlockFNO("gated_relu", blocks=blocks, gates=5, grid=(2, 3))
    problem = cf.Problem(head, rng.standard_normal((12, 6, 4)), rng.standard_normal((12, 4)), beta=1.0)
    A, F = problem.operator, problem.objective.factored().operator
    assert isinstance(F, FourierFactors)
    Z = LowRank.of(tensor(rng, *A.weight_shape))
    Z = Z.select(torch.from_numpy(rng.random(Z.n_terms)) < 0.2)  # gates without terms, and few terms in all
    assert not F.dense_pays(Z.n_terms)
    D, few = tensor(rng, *A.output_shape), {"rtol": 1e-12, "atol": 1e-12}
    assert torch.allclose(F.apply(Z), A.apply(Z.dense()), **few)
    expected = FactoredView(A).factor_gradients(D, Z)
    for _ in range(2):  # with and without what apply left behind
        for own, other in zip(F.factor_gradients(D, Z), expected, strict=True):
            assert torch.allclose(own, other, **few)
        F._known = LastProducts()


def test_gated_fourier_heads_are_fitted_on_filters():
    rng = np.random.default_rng(0)
    X, y = rng.standard_normal((80, 6, 4)), rng.integers(0, 3, 80)
    problem = cf.Problem(cf.heads.FNO("gated_relu", gates=6), X, y, beta_ratio=0.2, intercept=True)
    fits = [cf.solve(problem, tolerance=1e-5, solver=solver) for solver in ("staircase", "fista")]
    assert all(fit.certificate.meets(1e-5) for fit in fits)
    assert fits[0].objective == pytest.approx(fits[1].objective, rel=2e-5)


@pytest.mark.parametrize("rank", [2, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_krylov_spaces_by_gram_matrices_are_those_by_qr(rank, dtype, monkeypatch):
    rng = np.random.default_rng(0)
    M = (tensor(rng, 60, rank) * 0.7 ** torch.arange(rank) @ tensor(rng, rank, 50)).to(dtype)
    tops = []
    for by_gram in (False, True):
        if by_gram:  # what a GPU does
            monkeypatch.setattr(krylov, "_orthonormal", krylov.gram_orthonormal)
            monkeypatch.setattr(krylov, "_shortest", partial(lambda own, kind, _: own(kind, True), krylov._shortest))
        space = krylov.Krylov(lambda Q: Q @ M.T, lambda U: U @ M, krylov.random_rows(4, 50, M, 0))
        while not space.full and len(space.basis) < 30:
            space.grow()
        one = torch.eye(len(space.basis), dtype=dtype)
        eps = torch.finfo(dtype).eps
        assert torch.allclose(space.basis @ space.basis.T, one, atol=100 * eps)
        tops.append(space.top())
    assert tops[0] == pytest.approx(tops[1], rel=1e-5)
    assert tops[1] <= float(torch.linalg.matrix_norm(M.double(), 2)) * (1 + 1e-6)


def test_rounding_to_tf32_is_to_the_nearest():
    x = torch.randn(10_000, generator=torch.Generator().manual_seed(0))
    y = nearest_tf32(x.clone())
    assert bool(((y.view(torch.int32) & 0x1FFF) == 0).all())
    error = ((y - x) / x).double()
    assert float(error.abs().max()) <= 2.0**-11
    assert abs(float(error.mean())) <= 0.1 * 2.0**-11


def test_products_in_slabs_are_products():
    rng = np.random.default_rng(0)
    A, B = tensor(rng, 103, 5), tensor(rng, 103, 3)
    assert torch.allclose(sum_of_slabs(A, B, 8), A.T @ B, rtol=1e-12, atol=1e-12)


def test_groups_of_gates_do_not_change_the_adjoint():
    A = gated(cf.heads.MLPMixer, gates=5).operator
    V = tensor(np.random.default_rng(0), *A.output_shape)
    whole = A.adjoint(V)
    size = 2 * 8 * math.prod(A.weight_shape[-2:])
    for gates in (1, 2):
        with cf.operators.memory_budget(stored=gates * size):
            assert torch.allclose(torch.stack(list(A.adjoint_blocks(V))), whole, rtol=1e-12, atol=1e-12)
    by_terms = torch.stack([BilinearOperator.adjoint_block(A, V, b) for b in range(A.n_blocks)])
    assert torch.allclose(by_terms, whole, rtol=1e-11, atol=1e-11)

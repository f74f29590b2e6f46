"""Operators: adjoints, linearity, shapes, norms; and wrong ones that the check must catch."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import architectures as arch
import convexformer as cf
from cases import ALL_HEADS, HEADS, LOSSES, OPERATORS, random_data, random_mask, tensor
from convexformer.gauges import Factored, PolarKind, spectral
from convexformer.operators import (
    BilinearOperator,
    DenseOperator,
    GatedOperator,
    LowRank,
    Operator,
    bilinear,
    fourier,
    memory_budget,
)
from convexformer.operators.fourier import fourier_gates
from convexformer.operators.gates import (
    AttentionRule,
    MixerRule,
    PackedGates,
    RecomputedGates,
    StoredGates,
    hold_gates,
)
from convexformer.operators.positions import PositionOperator
from convexformer.operators.relu import CellOperator, ReLUOperator
from convexformer.operators.streamed import StreamedBilinear, StreamedOperator
from convexformer.testing import check_operator

sizes = st.integers(1, 5)


@pytest.mark.parametrize("make", OPERATORS.values(), ids=OPERATORS.keys())
@settings(max_examples=25)
@given(R=sizes, s=sizes, d=sizes, c=sizes, seed=st.integers(0, 10_000))
def test_operators_keep_the_contract(make, R, s, d, c, seed):
    check_operator(make(np.random.default_rng(seed), R, s, d, c), seed)


@pytest.mark.parametrize("case", HEADS.values(), ids=HEADS.keys())
@settings(max_examples=15)
@given(n=st.integers(3, 6), s=sizes, d=sizes, seed=st.integers(0, 10_000), masked=st.sampled_from(["plain", "mask"]))
def test_the_operators_of_heads_keep_the_contract(case, n, s, d, seed, masked):
    data = random_data(case, LOSSES["squared, 2 outputs"], masked, np.random.default_rng(seed), n, s, d)
    problem = cf.Problem(case.build(data.gates), data.X, data.Y, beta=1.0, **data.options)
    check_operator(problem.operator, seed)


def forms(case, seed, n=12):
    """The operator of a head as it is, compressed for the squared loss, and on factors of the weights."""
    data = random_data(case, LOSSES["squared, 2 outputs"], "weights", np.random.default_rng(seed), n, 4, 2)
    problem = cf.Problem(case.build(data.gates), data.X, data.Y, beta=1.0, **data.options)
    objective = problem.objective
    factored = [objective.factored()] if isinstance(problem.penalty, Factored) else []
    return [objective, objective.compressed(), *factored]


@pytest.mark.parametrize("case", ALL_HEADS.values(), ids=ALL_HEADS.keys())
@settings(max_examples=5)
@given(seed=st.integers(0, 10_000))
def test_compressed_and_factored_operators_keep_the_contract(case, seed):
    for problem in forms(case, seed):
        check_operator(problem.operator, seed)


@pytest.mark.parametrize("case", ALL_HEADS.values(), ids=ALL_HEADS.keys())
def test_a_compressed_problem_has_the_same_objective_and_gradient(case):
    problem, small, *_ = forms(case, 3)
    Z = torch.from_numpy(np.random.default_rng(4).standard_normal(problem.operator.weight_shape))
    one, two = (p.evaluate(p.apply(Z)) for p in (problem, small))
    assert float(one.value) == pytest.approx(float(two.value), rel=1e-10)
    gradients = [p.operator.adjoint(fit.V) for p, fit in ((problem, one), (small, two))]
    assert torch.allclose(*gradients, rtol=1e-9, atol=1e-9 * float(gradients[0].abs().max()))


KINDS = ["pooled", "pooled, one output", "tokens", "pooled, masked", "tokens, masked"]
GATED = [(cf.heads.MLPMixer, kind) for kind in KINDS[:3]] + [(cf.heads.SelfAttention, kind) for kind in KINDS]


@pytest.mark.parametrize(("head", "targets"), GATED)
@pytest.mark.parametrize("s", [3, 17])
@pytest.mark.parametrize("budget", [(1, 0), (40_000, 2_000), (1 << 28, 1 << 31)])
def test_gated_matrix_operators_take_dense_weights_by_direct_products(head, targets, s, budget, monkeypatch):
    with memory_budget(temporaries=budget[0], buffers=budget[0], stored=budget[1]):
        dense_weights_by_direct_products(head, targets, s, monkeypatch)


def dense_weights_by_direct_products(head, targets, s, monkeypatch):
    rng, n, d, c = np.random.default_rng(0), 7, 3, 1 if "one" in targets else 2
    Y = rng.standard_normal((n, s, c) if "tokens" in targets else (n, c))
    mask = random_mask(rng, n, s) if "masked" in targets else None
    A = cf.Problem(head("gated_relu", gates=2), rng.standard_normal((n, s, d)), Y, beta=1.0, mask=mask).operator
    Z, V = tensor(rng, *A.weight_shape), tensor(rng, *A.output_shape)
    by_terms = BilinearOperator.apply_dense(A, Z), adjoint_by_terms(A, V)
    # one term for each row of a matrix: minutes where the direct products take seconds
    for slow in ("apply_factors", "matvec", "rmatvec"):
        monkeypatch.setattr(A, slow, None)
    assert torch.allclose(A.apply(Z), by_terms[0], rtol=1e-12, atol=1e-12 * float(by_terms[0].abs().max()))
    assert torch.allclose(A.adjoint(V), by_terms[1], rtol=1e-12, atol=1e-12 * float(by_terms[1].abs().max()))


def adjoint_by_terms(A, V):
    blocks = [BilinearOperator.adjoint_block(A, V, b) for b in range(A.n_blocks)]
    return torch.stack(blocks).reshape(A.weight_shape)


@pytest.mark.parametrize("head", [cf.heads.MLPMixer, cf.heads.SelfAttention], ids=["mixer", "attention"])
@pytest.mark.parametrize("gathered", [0, 1 << 20])
def test_many_terms_of_gated_matrices_go_through_one_dual_matrix(head, gathered, monkeypatch):
    monkeypatch.setattr(bilinear, "GATHERED", gathered)
    rng = np.random.default_rng(0)
    A = cf.Problem(head("gated_relu", gates=3), tensor(rng, 6, 4, 3), tensor(rng, 6, 4, 2), beta=1.0).operator
    assert A.dense_pays(40)
    assert not A.dense_pays(1)
    V, Z = tensor(rng, *A.output_shape), LowRank.of(tensor(rng, *A.weight_shape))
    Z = Z.select(Z.block != 1)  # a gate without terms
    M = A.adjoint(V)[Z.block]
    monkeypatch.setattr(A, "matvec", None)
    monkeypatch.setattr(A, "rmatvec", None)
    left, right = A.factor_gradients(V, Z)
    assert torch.allclose(left, (M @ Z.V[:, :, None])[:, :, 0], rtol=1e-12, atol=1e-12)
    assert torch.allclose(right, (Z.U[:, None] @ M)[:, 0], rtol=1e-12, atol=1e-12)


def test_every_operator_of_the_package_has_a_case():
    rng = np.random.default_rng(0)
    met = {type(make(rng, 2, 2, 2, 2)) for make in OPERATORS.values()}
    met |= {type(form.operator) for case in ALL_HEADS.values() for form in forms(case, 0)}
    package = {kind for kind in below(Operator) if kind.__module__.startswith("convexformer.operators")}
    elsewhere = {  # test_relu.py, test_streams.py, test_token_attention.py
        CellOperator,
        PositionOperator,
        ReLUOperator,
        StreamedBilinear,
        StreamedOperator,
    }
    assert met | elsewhere == {kind for kind in package if not kind.__abstractmethods__}


def below(kind):
    return {child for direct in kind.__subclasses__() for child in {direct, *below(direct)}}


def test_float32_operators_agree_with_float64():
    operator = OPERATORS["gated, two axes"](np.random.default_rng(0), 5, 2, 3, 2)
    Z = torch.from_numpy(np.random.default_rng(1).standard_normal(operator.weight_shape))
    single = operator.to(dtype=torch.float32)
    check_operator(single)
    assert single.apply(Z.float()).dtype == torch.float32
    assert torch.allclose(single.apply(Z.float()).double(), operator.apply(Z), atol=1e-5)


def test_gated_operator_is_the_sum_over_open_gates():
    rng = np.random.default_rng(3)
    phi, gates, Z = rng.standard_normal((4, 3)), rng.random((4, 2)) > 0.5, rng.standard_normal((2, 3, 2))
    operator = GatedOperator(torch.from_numpy(phi), torch.from_numpy(gates), (3,), 2)
    expected = [sum(gates[i, g] * phi[i] @ Z[g] for g in range(2)) for i in range(4)]
    assert operator.apply(torch.from_numpy(Z)).numpy() == pytest.approx(np.array(expected))


@pytest.mark.parametrize(
    "make",
    [
        lambda: DenseOperator(torch.zeros(4, 5), (2, 3), 1),
        lambda: GatedOperator(torch.zeros(4, 5), torch.ones(4, 2), (2, 3), 1),
        lambda: GatedOperator(torch.zeros(4, 6), torch.ones(3, 2), (2, 3), 1),
    ],
)
def test_operators_refuse_features_that_do_not_match(make):
    with pytest.raises(ValueError, match="do not match"):
        make()


# ---------------------------------------------------------------------- the check can fail


class Wrong(Operator):
    """A dense operator with a fault."""

    def __init__(self, fault):
        self.inner = OPERATORS["dense, two axes"](np.random.default_rng(0), 4, 2, 3, 2)
        self.weight_shape, self.output_shape, self.fault = self.inner.weight_shape, self.inner.output_shape, fault

    like = property(lambda self: self.inner.like)

    def to(self, **where):
        return self

    def apply(self, Z):
        out = self.inner.apply(Z)
        return out + 1 if self.fault == "affine" else out[:-1] if self.fault == "shape" else out

    def adjoint(self, V):
        if self.fault == "layout" and not V.is_contiguous():
            V = -V
        return 1.01 * self.inner.adjoint(V) if self.fault == "adjoint" else self.inner.adjoint(V)

    def norm_squared(self, iterations=30):
        factor = {"norm too large": 1.2, "norm useless": 0.1}.get(self.fault, 1.0)
        return factor * super().norm_squared(iterations)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("affine", "differ"),
        ("shape", "shape"),
        ("adjoint", r"<V, A Z>"),
        ("layout", "layout"),
        ("norm too large", "norm_squared"),
        ("norm useless", "norm_squared"),
    ],
)
def test_check_operator_catches_a_wrong_operator(fault, message):
    check_operator(Wrong(None))
    with pytest.raises(AssertionError, match=message):
        check_operator(Wrong(fault))


@pytest.mark.parametrize(("grid", "B"), [((7,), 1), ((3, 4), 2), ((5, 2), 2)])
@pytest.mark.parametrize("unit", [1.0, 0.1])
def test_fourier_gates_of_discrete_tokens_are_decided_by_direct_sums(grid, B, unit):
    """Ties included; where the sums are not exact, one sample and a batch still agree."""
    rng, s, d, N = np.random.default_rng(1), math.prod(grid), 2 * B, 60
    X = unit * rng.integers(-1, 2, (N, s, d))
    X[0] = 0
    h = unit * rng.integers(-1, 2, (B, 3, s, d // B))
    h[:, 0, 2:] = 0  # a gate that looks at two shifts
    found = fourier_gates(torch.tensor(X), torch.tensor(h), grid)
    single = [fourier_gates(torch.tensor(x[None]), torch.tensor(h), grid) for x in X]
    assert torch.equal(found, torch.cat(single))
    turned = torch.tensor(X).transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(found, fourier_gates(turned, torch.tensor(h), grid))
    wide = np.stack([arch.circulant(x, grid) for x in X]).reshape(N, s, s, B, d // B)
    sums = np.einsum("noubk,bguk->nbgo", wide, h)
    assert (abs(sums) < 1e-12).mean() > 0.05
    sure = np.ones_like(sums, dtype=bool) if unit == 1 else abs(sums) > 1e-12
    np.testing.assert_array_equal(found.numpy()[sure], (sums >= 0)[sure])


def test_a_gated_fno_with_ties_predicts_the_same_for_one_sample_as_for_a_batch():
    rng = np.random.default_rng(2)
    X, y = rng.integers(-1, 2, (60, 7, 1)).astype(float), rng.standard_normal((60, 7, 1))
    gate = np.zeros((1, 7, 1))
    gate[0, :2] = 1
    solution = cf.solve(cf.Problem(cf.heads.FNO("gated_relu", gates=gate), X, y, beta_ratio=0.01), tolerance=1e-6)
    batch, network = solution.predict(X), solution.network()
    single = torch.cat([solution.predict(x[None]) for x in X])
    assert torch.allclose(batch, single, atol=1e-12)
    printed = network.w1.detach().numpy(), network.w2.detach().numpy()
    wide = np.stack([arch.circulant(x, (7,)) for x in X])
    open_gates = wide @ gate.reshape(7, 1) >= 0
    by_hand = sum(open_gates * (wide @ w1.reshape(7, 1)) * w2 for w1, w2 in zip(*printed, strict=True))
    np.testing.assert_allclose(batch.numpy(), by_hand, atol=1e-9)
    np.testing.assert_allclose(network(torch.tensor(X)).detach().numpy(), by_hand, atol=1e-9)


# ---------------------------------------------------------------------- memory budgets

TIGHT = {
    "one sample at a time, nothing kept": {"temporaries": 1, "buffers": 1, "stored": 0},
    "gates as bits": {"temporaries": 4_000, "buffers": 4_000, "stored": 300},
    "gates decided anew": {"temporaries": 20_000, "buffers": 20_000, "stored": 40},
}
GATED_HEADS = [
    cf.heads.SelfAttention("gated_relu", gates=3),
    cf.heads.MLPMixer("gated_relu", gates=3),
    cf.heads.FNO("gated_relu", gates=3),
    cf.heads.BlockFNO("gated_relu", blocks=2, gates=2),
    cf.heads.FNO("gated_relu", gates=2, grid=(2, 3)),
    cf.heads.SelfAttention(),
    cf.heads.MLP("gated_relu", gates=3),
]


@pytest.mark.parametrize("budget", TIGHT.values(), ids=TIGHT.keys())
@pytest.mark.parametrize("targets", ["pooled", "tokens"])
@pytest.mark.parametrize("head", GATED_HEADS, ids=str)
def test_no_budget_changes_an_operator(head, targets, budget):
    rng, N, s, d, c = np.random.default_rng(0), 13, 6, 4, 2
    X, Y = rng.standard_normal((N, s, d)), rng.standard_normal((N, s, c) if targets == "tokens" else (N, c))
    A = cf.Problem(head, X, Y, beta=1.0).operator
    Z, V = tensor(rng, *A.weight_shape), tensor(rng, *A.output_shape)
    with memory_budget(**budget):
        small = cf.Problem(head, X, Y, beta=1.0).operator
        check_operator(small)
        for mine, theirs in ((small.apply(Z), A.apply(Z)), (small.adjoint(V), A.adjoint(V))):
            assert torch.allclose(mine, theirs, rtol=1e-11, atol=1e-11 * float(theirs.abs().max()))


def test_gates_are_kept_as_the_budget_allows():
    X = tensor(np.random.default_rng(0), 70, 5, 3)
    for rule in (AttentionRule(tensor(np.random.default_rng(1), 2, 3, 3)), MixerRule(torch.randn(2, 5, 5).double())):
        kinds, found = [], []
        for stored in (1 << 20, 2_000, 100):
            with memory_budget(stored=stored):
                gates = hold_gates(X, rule)
            kinds.append(type(gates))
            found.append(torch.stack([gates.take(slice(7, 69), b) for b in range(2)]))
        assert kinds == [StoredGates, PackedGates, RecomputedGates]
        assert torch.equal(found[0], found[1])
        assert torch.equal(found[0], found[2])


def test_recomputed_gates_do_not_depend_on_the_chunk():
    """Sums that rounding decides: the same whatever samples are asked for."""
    X = 0.1 * torch.tensor(np.random.default_rng(0).integers(-1, 2, (90, 6, 3)))
    gates = RecomputedGates(X, AttentionRule(0.1 * torch.tensor(np.random.default_rng(1).integers(-1, 2, (1, 3, 3)))))
    whole = gates.take(slice(0, 90), 0)
    assert torch.equal(whole, torch.cat([gates.take(slice(k, k + 1), 0) for k in range(90)]))
    assert torch.equal(whole[40:], gates.take(slice(40, None), 0))


@pytest.mark.parametrize("targets", ["pooled", "tokens"])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("head", GATED_HEADS, ids=str)
def test_exact_operators_are_those_of_float64_tokens_and_copy_none(head, masked, targets):
    if masked and not head.masks:
        return
    rng, N, s, d, c = np.random.default_rng(0), 9, 6, 4, 2
    X, Y = (
        rng.standard_normal((N, s, d)).astype(np.float32),
        rng.standard_normal((N, s, c) if targets == "tokens" else (N, c)),
    )
    mask = random_mask(rng, N, s) if masked else None
    single = cf.Problem(head, X, Y, beta=1.0, mask=mask, dtype=torch.float32)
    exact = single.objective.reference().operator
    double = cf.Problem(head, X.astype(np.float64), Y, beta=1.0, mask=mask).operator
    check_operator(exact)
    Z, V = tensor(rng, *double.weight_shape), tensor(rng, *double.output_shape)
    assert exact.like.dtype == torch.float64
    assert torch.allclose(exact.apply(Z), double.apply(Z), rtol=1e-13, atol=1e-13 * float(double.apply(Z).abs().max()))
    assert torch.allclose(exact.adjoint(V), double.adjoint(V), rtol=1e-13, atol=1e-12)
    if (made := single.operator.exact()) is not None:
        held = [part for part in vars(made).values() if isinstance(part, torch.Tensor)]
        assert not any(part.dtype == torch.float64 and part.numel() >= X.size for part in held)


@pytest.mark.parametrize("head", [cf.heads.SelfAttention, cf.heads.MLPMixer])
def test_estimates_of_many_blocks_are_close_and_never_above(head, monkeypatch):
    monkeypatch.setattr(spectral, "SMALL_SIDE", 2)
    rng = np.random.default_rng(0)
    X, Y = rng.standard_normal((60, 6, 7)), rng.standard_normal((60, 5))
    A = cf.Problem(head("gated_relu", gates=5), X, Y, beta=1.0).operator
    for turn in range(3):  # later ones start where the last ended
        V = tensor(rng, *A.output_shape)
        exact = torch.linalg.svdvals(A.adjoint(V)).amax()
        M = A.dual_matrix(V)
        found = spectral.estimate(M)
        assert found.kind is PolarKind.LOWER
        assert 0.99 * exact <= found.value <= exact * (1 + 1e-12), turn
        sigma, U, right, block = spectral.top_pairs(M, 3)
        aligned = torch.einsum("kp,kpq,kq->k", U, -A.adjoint(V)[block], right)
        assert torch.allclose(aligned, sigma, rtol=1e-9)
        proof = spectral.bound(M)
        assert proof.kind is PolarKind.UPPER
        assert exact <= proof.value <= exact * (1 + 1e-4)


@pytest.mark.parametrize("blocks", [1, 2])
def test_all_orders_of_a_pooled_gated_fourier_operator_agree(blocks, monkeypatch):
    rng, N, s, d = np.random.default_rng(0), 7, 5, 16
    head = cf.heads.BlockFNO("gated_relu", blocks=blocks, gates=3)
    A = cf.Problem(head, rng.standard_normal((N, s, d)), rng.standard_normal((N, 2)), beta=1.0).operator
    Z, V = tensor(rng, *A.weight_shape), tensor(rng, *A.output_shape)
    pooled = []
    for wide in (0, 100):  # outputs first, products of spectra first
        monkeypatch.setattr(fourier, "WIDE", wide)
        pooled.append((A.apply(Z), A.adjoint(V)))
    A.pooled, A.output_shape = False, (N * s, 2)
    by_token = A.apply(Z).view(N, s, 2).mean(1), A.adjoint((V / s)[:, None].expand(-1, s, -1).flatten(0, 1))
    for order in pooled:
        for mine, theirs in zip(order, by_token, strict=True):
            assert torch.allclose(mine, theirs, rtol=1e-11, atol=1e-12)

"""The staircase: escapes, growth, pruning, and the bounds behind its certificates."""

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch

import convexformer as cf
from convexformer.certificates import certificate
from convexformer.gauges import NuclearNorm, PolarKind, spectral
from convexformer.heads.base import Head
from convexformer.operators import BilinearOperator, ImplicitMatrix, LowRank, SelfAttentionOperator
from convexformer.solvers import SOLVERS
from convexformer.solvers.staircase import Staircase, StaircaseOptions
from convexformer.solvers.staircase.lbfgs import Pairs
from convexformer.threads import tensor_cores
from convexformer.weights import Weights


class Entries(BilinearOperator):
    """Every entry of ``Z``, times its weight: a weighted matrix completion."""

    def __init__(self, root):
        self.root = root  # (p, q)
        self.weight_shape, self.output_shape = tuple(root.shape), (root.numel(), 1)

    like = property(lambda self: self.root)

    def apply_factors(self, Z):
        return (self.root * (Z.U.T @ Z.V)).reshape(-1, 1)

    def matvec(self, D, V, b):
        return V @ (self.root * D.view_as(self.root)).T

    def rmatvec(self, D, U, b):
        return U @ (self.root * D.view_as(self.root))

    def to(self, *, device=None, dtype=None):
        return Entries(self.root.to(device=device, dtype=dtype))


@dataclass(frozen=True, eq=False)
class Completion(Head):
    root: torch.Tensor

    name, per_token, positional = "completion", False, False

    def operator(self, tokens, layout):
        return Entries(self.root)

    def penalty(self, tokens, layout):
        return NuclearNorm()

    def config(self):
        return {}

    def recover(self, weights, layout):
        raise AssertionError("not needed here")

    lift = recover


# 4x4 weighted least squares with a rank-one optimum .0245107 and a spurious local minimum .504230 at rank two
WEIGHT = [
    [12.8578784, 11.4837368, 0.70750606, 27.002737],
    [3.75283571, 0.955696722, 0.34869031, 152.397884],
    [9.9040849, 76.3943347, 253.279648, 0.539116605],
    [0.438064429, 0.000636330349, 38.897763, 58.2368465],
]
TARGET = [
    [0.17566805, -0.86580658, 0.62269352, -0.35660637],
    [-0.04666549, 0.22999795, -0.16541597, 0.09473101],
    [0.04276254, -0.21076164, 0.1515811, -0.08680801],
    [-0.09899216, 0.48789785, -0.35089919, 0.20095421],
]
SPURIOUS_U = [[-0.73416618, 0.19395838, 0.37165528, -0.86280547], [0.09919157, -0.0202742, 0.42706162, 1.37485821]]
SPURIOUS_V = [
    [-0.171996741, 0.990464987, 0.399574084, 0.537510511],
    [0.131730938, -1.35390718, 0.000586753112, 0.482129325],
]


@pytest.fixture
def trap():
    root = torch.tensor(WEIGHT, dtype=torch.float64).sqrt()
    Y = (root * torch.tensor(TARGET, dtype=torch.float64)).reshape(-1)
    return cf.Problem(Completion(root), torch.zeros((16, 1, 1)), Y, beta=0.01791287)


def test_the_certificate_sees_through_a_spurious_minimum_and_the_staircase_escapes_it(trap):
    U, V = (torch.tensor(rows, dtype=torch.float64) for rows in (SPURIOUS_U, SPURIOUS_V))
    stuck = Weights(LowRank(U, V, torch.zeros(2, dtype=torch.int64), (4, 4)))
    assert trap.value(stuck) == pytest.approx(0.504230, abs=1e-4)
    assert cf.certify(stuck, trap).gap > 0.4
    escaped = cf.solve(trap, tolerance=1e-7, solver="staircase", warm_start=stuck)
    assert escaped.objective == pytest.approx(0.0245107, abs=1e-7)
    assert escaped.certificate.relative_gap <= 1e-7
    assert cf.solve(trap, tolerance=1e-7, solver="staircase").objective == pytest.approx(0.0245107, abs=1e-7)


@pytest.fixture(scope="module")
def attention():
    rng = np.random.default_rng(0)
    X = rng.standard_normal((60, 6, 5))
    W1, W2 = rng.standard_normal((2, 5, 5)), rng.standard_normal((2, 5, 3))
    Y = sum(X @ a @ X.transpose(0, 2, 1) @ X @ b for a, b in zip(W1, W2, strict=True))
    return X, Y / Y.std() + 0.1 * rng.standard_normal((60, 6, 3))


def test_the_staircase_ends_with_as_many_terms_as_the_optimum_has_rank(attention):
    X, Y = attention
    problem = cf.Problem("self_attention", X, Y, beta_ratio=0.1)
    solution = cf.solve(problem, tolerance=1e-8, solver="staircase")
    dense = cf.solve(problem, tolerance=1e-8, solver="fista").dense()
    rank = int((torch.linalg.svdvals(dense) > 1e-6).sum())
    assert 0 < rank < 8  # fewer than the terms it grows by
    assert solution.weights.Z.n_terms == rank
    assert len(solution.network().w1) == rank


def test_warm_starts_along_beta_save_iterations(attention):
    X, Y = attention
    problem = cf.Problem("self_attention", X, Y, beta_ratio=0.05)
    cold = cf.solve(problem, tolerance=1e-6, solver="staircase")
    near = cf.solve(problem.with_beta(1.1 * problem.beta), tolerance=1e-6, solver="staircase")
    warm = cf.solve(problem, tolerance=1e-6, solver="staircase", warm_start=near)
    assert warm.n_iter < cold.n_iter
    assert warm.objective == pytest.approx(cold.objective, rel=2e-6)


def test_weights_pass_between_solvers_and_through_checkpoints(attention, tmp_path):
    X, Y = attention
    problem = cf.Problem("self_attention", X, Y, beta_ratio=0.1)
    file = tmp_path / "run.safetensors"
    with pytest.warns(UserWarning, match="max_iter"):
        cf.solve(problem, tolerance=1e-10, solver="staircase", max_iter=12, checkpoint=file)
    resumed = cf.solve(problem, tolerance=1e-6, solver="staircase", checkpoint=file)
    assert resumed.certificate.relative_gap <= 1e-6
    dense = cf.solve(problem, tolerance=1e-6, solver="fista", warm_start=resumed)
    assert dense.n_iter <= 10
    assert cf.solve(problem, tolerance=1e-6, solver="staircase", warm_start=dense).objective == pytest.approx(
        dense.objective, rel=1e-6
    )


def test_high_ranks_are_handed_over_to_dense_weights(attention, monkeypatch):
    problem = cf.Problem("self_attention", *attention, beta_ratio=0.01)
    alone = cf.solve(problem, tolerance=1e-7, solver="staircase")
    assert isinstance(alone.weights.Z, LowRank)  # a matrix too small for it to pay
    monkeypatch.setitem(SOLVERS, "staircase", Staircase(StaircaseOptions(dense_side=1)))
    handed = cf.solve(problem, tolerance=1e-7, solver="staircase")
    assert isinstance(handed.weights.Z, torch.Tensor)
    assert handed.status is cf.Status.CONVERGED
    assert handed.objective == pytest.approx(alone.objective, rel=2e-7)


def test_the_rough_start_leaves_no_trace(attention, monkeypatch):
    problem = cf.Problem("self_attention", *attention, beta_ratio=0.05)
    rough = cf.solve(problem, tolerance=1e-9, solver="staircase")
    monkeypatch.setitem(SOLVERS, "staircase", Staircase(StaircaseOptions(float32_range=1)))  # in float64 all the way
    exact = cf.solve(problem, tolerance=1e-9, solver="staircase")
    assert rough.weights.Z.dtype == torch.float64
    assert rough.objective == pytest.approx(exact.objective, rel=2e-9)


def test_tensor_cores_are_allowed_for_a_while_only():
    before = torch.backends.cuda.matmul.allow_tf32
    with tensor_cores():
        assert torch.backends.cuda.matmul.allow_tf32
    assert torch.backends.cuda.matmul.allow_tf32 == before


def test_the_staircase_says_which_penalties_it_serves():
    problem = cf.Problem("attention", np.eye(4)[:, None], np.array([0, 1, 0, 1]), beta_ratio=0.5)
    with pytest.raises(ValueError, match="nuclear norm"):
        cf.solve(problem, solver="staircase")


def test_uncorrelated_channels_separate_with_the_same_optimum():
    """Sahiner et al. 2022, corollary 3.2."""
    rng = np.random.default_rng(5)
    X = np.zeros((8, 6, 4))
    for x in X:  # channels 0, 2 live on tokens 0..2, channels 1, 3 on the others: no sample correlates them
        x[:3, ::2], x[3:, 1::2] = rng.standard_normal((3, 2)), rng.standard_normal((3, 2))
    Y = rng.standard_normal((8, 6, 2))
    found = cf.heads.channel_blocks(X)
    assert found == ((0, 2), (1, 3))
    apart = cf.Problem(cf.heads.BlockSelfAttention(found), X, Y, beta_ratio=0.1)
    blocks = cf.solve(apart, tolerance=1e-9)
    tokens = torch.from_numpy(X)
    whole = cf.Problem("self_attention", X, Y, beta=apart.beta)
    assert blocks.objective == pytest.approx(cf.solve(whole, tolerance=1e-9).objective, rel=1e-8)
    assert apart.beta_max == pytest.approx(whole.beta_max, rel=1e-12)
    network = blocks.network()
    assert torch.allclose(network(tokens), blocks.predict(tokens), atol=1e-9)
    assert cf.certify(network, apart).primal == pytest.approx(blocks.objective, rel=1e-10)
    # new tokens may correlate the channels; the blocks and the network still agree
    fresh = torch.from_numpy(rng.standard_normal((3, 6, 4)))
    assert torch.allclose(network(fresh), blocks.predict(fresh), atol=1e-9)


def hidden_label(e):
    """Orthogonal channels but for one pair of tokens: ``G[0, 1] = 2 e^2 y``, and a network that reads the label off it."""
    y = np.random.default_rng(0).choice([-1.0, 1.0], 40)
    X = np.zeros((40, 7, 2))
    X[:, :4, 0], X[:, :4, 1] = [1, 1, -1, -1], [1, -1, 1, -1]
    X[:, 4] = np.c_[0 * y + e, y * e]
    X[:, 5] = -X[:, 4]
    X[:, 6, 0] = 7  # the mean token is (1, 0)
    w1, w2 = torch.zeros(1, 2, 2).double(), torch.zeros(1, 2, 1).double()
    w1[0, 0, 0] = w2[0, 1, 0] = (2 * e * e) ** -0.5
    return X, y, cf.networks.SelfAttentionNetwork(w1, w2, squeeze=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("e", [2.0**-10, 2.0**-25, 2.0**-40])
def test_channels_with_tiny_correlations_stay_together(e, dtype):
    """They may be all that there is to learn; at 2^-40 the inner product even rounds to zero in float64."""
    X, y, network = hidden_label(e)
    problem = cf.Problem("self_attention", X, y, beta=1e-3 * e**2, dtype=dtype)
    assert len(cf.heads.channel_blocks(torch.tensor(X, dtype=dtype))) == 1
    if e > 2.0**-40:
        own = 0.5 * (network(torch.tensor(X)) - torch.tensor(y)).square().sum() + problem.beta * network.decay()
        proof = cf.certify(network, problem)
        assert proof.primal == pytest.approx(float(own.detach()), rel=1e-9)
        assert certificate(problem.objective, Weights(problem.operator.zeros())).dual <= proof.primal


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1.0, 2.0**-30, 3.0])
def test_exactly_orthogonal_channels_separate_in_every_precision(scale, dtype):
    """Integers, or their multiples by anything that float32 holds: sums of products are exact."""
    signs = np.array([[1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]]).T  # Hadamard: channels are columns
    X = scale * signs * np.random.default_rng(1).integers(1, 9, (10, 1, 4))
    X = np.concatenate([X, np.zeros((10, 4, 1))], 2)  # and one channel that is nothing at all
    assert cf.heads.channel_blocks(torch.tensor(X, dtype=dtype)) == ((0,), (1,), (2,), (3,), (4,))


def test_correlations_that_cannot_be_excluded_keep_channels_together():
    rng = np.random.default_rng(0)
    X = np.linalg.qr(rng.standard_normal((5, 6, 3)))[
        0
    ]  # orthogonal up to rounding, like most that is called orthogonal
    assert len(cf.heads.channel_blocks(X)) == 1
    tiny = np.zeros((2, 2, 2))
    tiny[:, 0] = 1e-170  # the product underflows
    assert len(cf.heads.channel_blocks(tiny)) == 1


def test_pooled_linear_fno_is_a_linear_head_on_the_mean_token():
    rng = np.random.default_rng(2)
    X, y = rng.standard_normal((30, 9, 3)), rng.integers(0, 3, 30)
    fno = cf.Problem(cf.heads.FNO(grid=(3, 3)), X, y, beta_ratio=0.2)
    linear = cf.Problem(cf.heads.MLP(), X, y, beta=fno.beta / math.sqrt(9))
    values = [cf.solve(problem, tolerance=1e-10).objective for problem in (fno, linear)]
    assert values[0] == pytest.approx(values[1], rel=1e-9)


# ---------------------------------------------------------------------- bounds on the largest singular value


@pytest.fixture(scope="module")
def implicit():
    rng = np.random.default_rng(1)
    X = torch.from_numpy(rng.standard_normal((20, 5, 6)))
    operator = SelfAttentionOperator(X, X.mT @ X, 4)
    V = torch.from_numpy(rng.standard_normal(operator.output_shape))
    return operator, V, float(torch.linalg.matrix_norm(operator.adjoint(V), 2))


def test_a_cholesky_factorisation_proves_a_tight_upper_bound(implicit, monkeypatch):
    operator, V, true = implicit
    monkeypatch.setattr(spectral, "SMALL_SIDE", 2)
    found = spectral.bound(ImplicitMatrix(operator, V))
    assert found.kind is PolarKind.UPPER
    assert found.kind.certifies
    assert true <= found.value <= true * (1 + 1e-4)


def test_lanczos_bounds_with_the_stated_probability(implicit, monkeypatch):
    operator, V, true = implicit
    monkeypatch.setattr(spectral, "SMALL_SIDE", 2)
    monkeypatch.setattr(spectral, "CHOLESKY_SIDE", 2)
    monkeypatch.setattr(spectral, "PROOF_WIDTH", 2)
    monkeypatch.setattr(spectral, "PROOF_STEPS", 8)
    found = spectral.bound(ImplicitMatrix(operator, V))
    assert found.kind is PolarKind.PROBABILISTIC
    assert found.confidence == 1 - spectral.FAILURE
    assert found.value >= true
    quick = spectral.estimate(ImplicitMatrix(operator, V))
    assert quick.kind is PolarKind.LOWER
    assert quick.value <= true * (1 + 1e-12)


def test_a_probabilistic_certificate_says_so(attention, monkeypatch):
    X, Y = attention
    monkeypatch.setattr(spectral, "SMALL_SIDE", 2)
    monkeypatch.setattr(spectral, "CHOLESKY_SIDE", 2)
    solution = cf.solve(cf.Problem("self_attention", X, Y, beta_ratio=0.2), tolerance=1e-6, solver="staircase")
    assert solution.certificate.kind == "probabilistic"
    assert solution.certificate.confidence == 1 - spectral.FAILURE
    assert "probability" in str(solution.certificate)


def test_subspace_iteration_finds_the_top_pairs(implicit, monkeypatch):
    operator, V, _ = implicit
    exact = torch.linalg.svdvals(operator.adjoint(V))[:3]
    monkeypatch.setattr(spectral, "SMALL_SIDE", 2)
    sigma, U, right, block = spectral.top_pairs(ImplicitMatrix(operator, V), 3, sweeps=30)
    assert torch.allclose(sigma, exact, rtol=1e-6)
    aligned = torch.einsum("kp,pq,kq->k", U, operator.adjoint(V), right)
    assert torch.allclose(aligned, sigma, rtol=1e-6)
    assert block.tolist() == [0, 0, 0]


@pytest.mark.parametrize("shape", [(6, 4), (3, 4, 6)], ids=str)
def test_low_rank_weights_are_what_they_stand_for(shape):
    rng = np.random.default_rng(0)
    blocks = math.prod(shape[:-2])
    U, V = (torch.from_numpy(rng.standard_normal((9, n))) for n in shape[-2:])
    Z = LowRank(U, V, torch.from_numpy(rng.integers(0, blocks, 9)), shape)
    dense = Z.dense()
    assert dense.shape == shape
    nuclear = float(torch.linalg.svdvals(dense).sum())
    assert float(Z.singular_values().sum()) == pytest.approx(nuclear)
    balanced = Z.balanced()
    assert torch.allclose(balanced.dense(), dense)
    assert 0.5 * float(balanced.U.square().sum() + balanced.V.square().sum()) == pytest.approx(nuclear)
    assert torch.allclose(LowRank.of(dense).dense(), dense)
    huge = LowRank(torch.zeros((1, 10**5)), torch.zeros((1, 10**5)), torch.zeros(1, dtype=torch.int64), (10**5, 10**5))
    with pytest.raises(ValueError, match="too many to form"):
        huge.dense()


def test_two_loops_over_pairs_are_the_compact_form_and_successors_do_not_disturb_each_other():
    g = torch.Generator().manual_seed(0)
    root = torch.randn((30, 30), generator=g, dtype=torch.float64)
    H, pairs, steps = root @ root.T + torch.eye(30), Pairs.none(root[0]), []
    for _ in range(25):
        s = torch.randn(30, generator=g, dtype=torch.float64)
        pairs.updated(-s, -2 * H @ s, 7)  # a successor that is dropped, as that of a refused step
        pairs = pairs.updated(s, H @ s, 7)
        steps = [*steps, s][-7:]
        assert torch.equal(pairs.S, torch.stack(steps))
        assert torch.allclose(pairs.Y, torch.stack(steps) @ H)
    gradient = torch.randn(30, generator=g, dtype=torch.float64)
    assert torch.allclose(pairs.direction(gradient), pairs.direction(gradient, sync_free=True), rtol=1e-10)


def test_estimates_by_krylov_spaces_of_formed_matrices_are_those_by_eigenvectors(monkeypatch):
    rng = np.random.default_rng(0)
    X, y = rng.standard_normal((60, 5, 4)), rng.integers(0, 3, 60)
    objective = cf.Problem("self_attention", X, y, beta_ratio=0.1).objective
    V = objective.zero_evaluation().V
    exact = spectral.top_pairs(objective.dual_matrix(V), 3)[0]
    monkeypatch.setattr(spectral, "EIGEN_SIDE", {"cpu": 2, "cuda": 2})
    monkeypatch.setattr(spectral, "WIDTHS", {"one": 4, "formed": 2, "gated": 2})
    M = objective.dual_matrix(V)
    found = spectral.estimate(M)
    assert found.kind is PolarKind.LOWER
    assert found.value == pytest.approx(float(exact[0]), rel=1e-8)
    for sigma, U, V, _ in (spectral.top_pairs(M, 3), spectral.pairs_of(M.dense(), 3)):
        assert torch.allclose(sigma, exact, rtol=1e-3)
        assert torch.allclose(((U @ M.dense()[0]) * V).sum(1), sigma, rtol=1e-3)
    solution = cf.solve(cf.Problem("self_attention", X, y, beta_ratio=0.1), tolerance=1e-7, solver="staircase")
    assert solution.certificate.meets(1e-7)
    assert solution.certificate.kind == "exact"

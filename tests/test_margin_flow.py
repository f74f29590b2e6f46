"""Gradient flow: the gradient itself, the clock, and where each parametrization ends up."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.exceptions import ConvergenceWarning

import convexformer as cf
from convexformer.margin import Sequences, TieWarning, aligned_init, gradient_flow, sample_data
from convexformer.margin.initial import start
from convexformer.margin.pull import Pull, log_excess

PARAMETRIZATIONS = ("separate", "combined", "diagonal", "reparametrized")
seeds = st.integers(0, 10_000)


def loss_of(data, W):
    """The loss as the paper writes it: ``1/n sum_i exp(-y_i v^T X_i^T softmax(X_i W z_i))``."""
    X, z, y, v = data
    attention = torch.softmax((X @ (z @ W.mT)[..., None])[..., 0], 1)
    return torch.exp(-y * ((X @ v) * attention).sum(1)).mean()


def random_data(seed, equal_scores):
    """Four sequences; scores equal but for the optimal token (assumption 2), or as they come."""
    if equal_scores:
        return tuple(torch.from_numpy(part) for part in sample_data("general", 4, 3, 5, seed=seed, clear=False))
    rng = np.random.default_rng(seed)
    parts = (
        rng.standard_normal((4, 3, 5)),
        rng.standard_normal((4, 5)),
        rng.choice([-1.0, 1.0], 4),
        rng.standard_normal(5),
    )
    return tuple(torch.from_numpy(part) for part in parts)


@pytest.mark.parametrize("equal_scores", [True, False], ids=["assumption 2", "any scores"])
@pytest.mark.parametrize("parametrization", PARAMETRIZATIONS)
@settings(max_examples=10)
@given(seed=seeds)
def test_one_step_follows_the_gradient_of_the_loss(parametrization, equal_scores, seed):
    data = random_data(seed, equal_scores)
    sequences = Sequences.of(*data)
    weights = start(sequences, parametrization, 0.7, 1, None, seed)
    before = {name: part.clone() for name, part in weights.factors().items()}
    pulls, log_total = Pull(sequences)(weights.logits())
    assert float(pulls.abs().sum()) == pytest.approx(1)
    tau = weights.advance(pulls, 1e-6)  # a tiny step of tau lasts tau / sum(c) in physical time
    seconds = float(tau * torch.exp(-log_total))

    leaves = {name: part.clone().requires_grad_() for name, part in before.items()}
    W = {
        "separate": lambda K, Q: K @ Q.mT,
        "combined": lambda W: W,
        "diagonal": lambda k, q: torch.diag_embed(k * q),
        "reparametrized": lambda plus, minus: torch.diag_embed((plus.square() - minus.square()) / 2),
    }[parametrization](**leaves)[0]
    loss_of(data, W).backward()
    after, steepest = weights.factors(), max(float(leaf.grad.abs().max()) for leaf in leaves.values())
    for name, leaf in leaves.items():
        moved = (after[name] - before[name]) / seconds
        assert torch.allclose(moved, -leaf.grad, rtol=1e-4, atol=1e-5 * steepest)


@settings(max_examples=20)
@given(seed=seeds, power=st.integers(0, 15), equal_scores=st.booleans())
def test_pulls_stay_finite_at_any_margin(seed, power, equal_scores):
    data = Sequences.of(*random_data(seed, equal_scores))
    W = torch.from_numpy(np.random.default_rng(seed).standard_normal((1, 5, 5))) * 10.0**power
    margins = data.operator().apply(W)
    logits = torch.cat([torch.zeros_like(margins[..., :1]), -margins], -1)
    pulls, log_total = Pull(data)(logits)
    assert torch.isfinite(pulls).all()
    assert torch.isfinite(log_total).all()
    assert float(pulls.abs().sum()) == pytest.approx(1)
    assert not torch.isnan(log_excess(data, margins)).any()


@settings(max_examples=20)
@given(seed=seeds, equal_scores=st.booleans())
def test_the_log_of_the_excess_loss_is_that_of_the_loss(seed, equal_scores):
    data = random_data(seed, equal_scores)
    sequences = Sequences.of(*data)
    W = torch.from_numpy(np.random.default_rng(seed).standard_normal((5, 5)))
    excess = float(loss_of(data, W)) - sequences.infimum
    assert math.exp(float(log_excess(sequences, sequences.operator().apply(W)))) == pytest.approx(excess, rel=1e-8)


def test_the_flow_is_gradient_descent_with_small_steps():
    data = sample_data("general")
    K0, Q0 = (0.3 * torch.from_numpy(np.random.default_rng(seed).standard_normal((4, 4))) for seed in (1, 2))
    flow = gradient_flow(*data, init=(K0, Q0), log_time=0.0, step=1e-3, records=2)
    steps, tensors = 4000, tuple(torch.from_numpy(part) for part in data)
    K, Q = K0.clone().requires_grad_(), Q0.clone().requires_grad_()
    for _ in range(steps):
        loss = loss_of(tensors, K @ Q.mT)
        slopes = torch.autograd.grad(loss, (K, Q))
        with torch.no_grad():
            for weights, slope in zip((K, Q), slopes, strict=True):
                weights -= math.exp(flow.log_time[-1]) / steps * slope
    end = (K @ Q.mT).detach().numpy()
    assert np.linalg.norm(flow.W[-1] - end) <= 2e-3 * np.linalg.norm(end)
    assert flow.loss[-1] == pytest.approx(float(loss.detach()), rel=2e-3)


# ---------------------------------------------------------------------- where it ends up


@pytest.fixture(scope="module")
def diagonal():
    data = sample_data("diagonal")
    svm = cf.margin.AttentionSVM("diagonal").fit(*data)
    return svm, gradient_flow(*data, parametrization="diagonal")


@pytest.fixture(scope="module")
def general():
    data = sample_data("general")
    svms = {norm: cf.margin.AttentionSVM(norm).fit(*data) for norm in ("nuclear", "frobenius")}
    return data, svms


def test_theorem_4_1_diagonal_flow_ends_at_the_l1_svm(diagonal):
    svm, flow = diagonal
    assert flow.distance_to(svm) <= 0.01
    assert flow.suboptimality(svm) <= 0.002
    assert flow.rate() == pytest.approx(flow.expected_rate(svm), rel=0.005)
    assert flow.expected_rate(svm) == pytest.approx(2 / np.abs(np.diag(svm.W_)).sum())
    assert flow.margin[-1] >= 1e6
    # the support of the l1 solution is the support of the direction
    b, target = np.abs(np.diag(flow.direction[-1])), np.abs(np.diag(svm.W_))
    assert (b[target < 1e-9] < 0.01 * b.max()).all()


def test_physical_time_is_hopeless(diagonal):
    svm, flow = diagonal
    along = flow.distance_to(svm, along=True)
    assert along[np.searchsorted(flow.log_time, math.log(1e4))] > 0.1


def test_records_of_a_flow_are_in_order(diagonal):
    _, flow = diagonal
    assert len(flow.times) == len(flow.loss) == len(flow.margin) == len(flow.W)
    assert flow.times[0] == 0
    assert flow.log_time[0] == -math.inf
    assert (np.diff(flow.times) > 0).all()
    assert (np.diff(flow.log_time[1:]) > 0).all()
    assert (np.diff(flow.log_excess_loss) < 1e-9).all()
    assert flow.loss[-1] == pytest.approx(flow.data.infimum)
    assert flow.margins.min((1, 2)) == pytest.approx(flow.margin)
    separating = flow.margin > 0
    assert flow.margin[separating][:, None, None] * flow.direction[separating] == pytest.approx(flow.W[separating])
    assert np.isnan(flow.direction[~separating]).all()
    assert flow.nuclear_norm == pytest.approx(np.abs(np.diagonal(flow.W, axis1=1, axis2=2)).sum(1))
    assert (flow.frobenius_norm <= flow.nuclear_norm * (1 + 1e-12)).all()


def test_approximate_kkt_residuals_vanish(diagonal):
    _, flow = diagonal
    for kkt in (flow.kkt, flow.recent_kkt):
        assert kkt.feasibility[-1] <= 1e-9
        assert kkt.complementarity[-1] <= 0.02
    # the paper's multipliers converge like 1/ln(mu); recent ones forget the start
    assert flow.recent_kkt.stationarity[-1] <= 0.01
    assert flow.kkt.stationarity[-1] <= 0.2
    assert (flow.multipliers[-1] >= 0).all()


def test_a_flow_certifies_itself_against_its_svm(diagonal):
    svm, flow = diagonal
    proof = flow.certificate()
    assert proof.kind == "exact"
    assert proof.dual <= svm.certificate_.primal <= proof.primal * (1 + 1e-9)
    assert proof.relative_gap <= 0.01
    assert flow.certificate(5).relative_gap > proof.relative_gap


def test_separate_keys_and_queries_end_at_the_nuclear_svm(general):
    data, svms = general
    flow = gradient_flow(*data, n_init=4, log_time=1e6, records=20)
    excess = flow.suboptimality(svms["nuclear"])
    assert excess.shape == (4,)
    assert (excess <= 0.01).all()
    price = np.linalg.svd(svms["frobenius"].W_, compute_uv=False).sum() / svms["nuclear"].objective_ - 1
    assert price > 0.05
    assert (flow.distance_to(svms["frobenius"]) > 0.05).all()
    assert flow.rate() == pytest.approx(np.full(4, flow.expected_rate(svms["nuclear"])), rel=0.005)
    assert (flow.margin[-1] >= 1e6).all()
    assert flow.W.shape == (len(flow.times), 4, 4, 4)
    values = flow.singular_values[-1]
    assert (values[:, svms["nuclear"].rank_] < 1e-3 * values[:, 0]).all()


def test_what_the_flow_of_keys_and_queries_conserves(general):
    data, _ = general
    flow = gradient_flow(*data, init=0.3, log_time=100.0, records=10)
    K, Q = flow.factors["K"], flow.factors["Q"]
    balance = K.transpose(0, 2, 1) @ K - Q.transpose(0, 2, 1) @ Q
    size = np.linalg.norm(K[-1]) ** 2
    assert np.abs(balance[-1] - balance[0]).max() <= 1e-4 * size


def test_the_combined_matrix_ends_at_the_frobenius_svm(general):
    data, svms = general
    flow = gradient_flow(*data, parametrization="combined", log_time=3e4, records=20)
    assert flow.distance_to(svms["frobenius"]) <= 0.005
    assert flow.rate() == pytest.approx(flow.expected_rate(svms["frobenius"]), rel=0.005)
    assert flow.distance_to(svms["nuclear"]) > 0.05
    assert flow.kkt.stationarity[-1] <= 1e-9  # W is the sum of its own pulls
    assert flow.certificate().relative_gap <= 1e-3


def test_theorem_5_1_aligned_flow_ends_where_both_svms_agree():
    data = sample_data("aligned")
    nuclear, frobenius = (cf.margin.AttentionSVM(norm).fit(*data) for norm in ("nuclear", "frobenius"))
    flow = gradient_flow(*data, init=aligned_init(*data), log_time=1e4, records=20)
    assert flow.distance_to(nuclear) <= 0.01
    # the theorem's data cannot tell the two norms apart
    assert np.linalg.norm(nuclear.W_ - frobenius.W_) <= 1e-4 * np.linalg.norm(frobenius.W_)


def test_lemma_5_1_the_flow_preserves_alignment():
    data = sample_data("aligned", seed=1)
    flow = gradient_flow(*data, init=aligned_init(*data, seed=1), log_time=100.0, records=10)
    assert flow.misalignment.max() <= 1e-9
    unaligned = gradient_flow(*data, init=0.1, log_time=100.0, records=10)
    assert unaligned.misalignment.min() > 0.1


@pytest.mark.parametrize("side", ["keys", "queries", "mixed"])
def test_lemma_4_1_both_parametrizations_move_alike(side):
    data = sample_data("diagonal", seed=1)
    rng = np.random.default_rng(3)
    w0, sign = np.exp(0.3 * rng.standard_normal(10)), rng.choice([-1.0, 1.0], 10)
    on_k = {"keys": np.ones(10, bool), "queries": np.zeros(10, bool), "mixed": rng.random(10) < 0.5}[side]
    k, q = (np.where(on, math.sqrt(2) * w0 * sign, 0.0) for on in (on_k, ~on_k))
    one = gradient_flow(*data, parametrization="diagonal", init=(k, q), log_time=100.0, records=10)
    two = gradient_flow(*data, parametrization="reparametrized", init=(w0, w0), log_time=100.0, records=10)
    other = gradient_flow(
        *data, parametrization="reparametrized", init=(0.5 * w0, 0.5 * w0), log_time=100.0, records=10
    )
    assert np.abs(one.W - two.W).max() <= 1e-9 * np.abs(one.W).max()
    assert one.log_time[1:] == pytest.approx(two.log_time[1:], rel=1e-9)
    assert np.linalg.norm(one.direction[-1] - other.direction[-1]) > 0.01 * np.linalg.norm(one.direction[-1])


def test_without_assumption_3_the_flow_ends_at_the_wrong_token():
    data = sample_data("violates_a3")
    scales = np.array([0.05, 0.5, 2.0])
    init = (math.sqrt(2) * scales[:, None] * np.ones((1, 3)), np.zeros((3, 3)))
    flow = gradient_flow(*data, parametrization="diagonal", init=init, log_time=1e6, records=8)
    assert flow.optimal_tokens.tolist() == [0, 0]
    assert flow.selected_tokens.tolist() == [[0, 1]] * 3
    assert (flow.margins[-1, :, 0, 0] > 1e5).all()
    assert (flow.margins[-1, :, 1, 0] < -1e5).all()
    assert (flow.loss[-1] > 1.02 * flow.data.infimum).all()
    assert np.isnan(flow.distance_to(cf.margin.AttentionSVM("diagonal").fit(*data))).all()


def test_scores_that_differ_among_the_others_are_followed_too():
    X, z, y, v = (part.numpy() for part in random_data(3, equal_scores=False))
    flow = gradient_flow(X, z, y, v, init=0.1, log_time=1e3, records=15)
    assert np.isfinite(flow.loss).all()
    assert (np.diff(flow.loss) <= 1e-9).all()
    assert np.isfinite(flow.margins).all()


def test_enormous_weights_stop_before_they_overflow():
    data = sample_data("general")
    flow = gradient_flow(*data, init=1.0, log_time=1e240, step=0.05, records=5)
    assert np.isfinite(flow.W).all()
    assert np.isfinite(flow.direction[-1]).all()
    assert flow.margin[-1] > 1e200


# ---------------------------------------------------------------------- starts and bad input


def test_starts_of_every_kind():
    data = sample_data("diagonal")
    options = {"log_time": 0.0, "records": 2}
    assert gradient_flow(*data, width=3, **options).factors["K"].shape[-2:] == (10, 3)
    assert gradient_flow(*data, parametrization="combined", init=0.1, n_init=3, **options).W.shape[1:] == (3, 10, 10)
    batch = gradient_flow(*data, parametrization="diagonal", n_init=3, **options)
    assert batch.factors["k"].shape[1:] == (3, 10)
    assert len(np.unique(batch.factors["k"][0])) > 3
    W = np.random.default_rng(0).standard_normal((2, 10, 10))
    given_start = gradient_flow(*data, parametrization="combined", init=W, **options)
    assert np.array_equal(given_start.W[0], W)
    one, two = (gradient_flow(*data, seed=5, **options).W for _ in range(2))
    assert np.array_equal(one, two)


def test_a_batch_is_what_its_members_are_alone():
    data = sample_data("general")
    K, Q = (0.3 * np.random.default_rng(seed).standard_normal((3, 4, 4)) for seed in (1, 2))
    together = gradient_flow(*data, init=(K, Q), log_time=5.0, records=2)
    alone = [gradient_flow(*data, init=(K[r], Q[r]), log_time=5.0, records=2) for r in range(3)]
    slowest = int(together.log_time[-1].argmin())
    mine, theirs = together.W[-1, slowest], alone[slowest].W[-1]
    assert np.linalg.norm(mine - theirs) <= 1e-9 * np.linalg.norm(theirs)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"parametrization": "seperate"}, "Did you mean 'separate'"),
        ({"init": 0.0}, "stays at zero"),
        ({"init": (np.zeros((10, 10)), np.zeros((10, 10)))}, "stationary"),
        ({"init": np.ones((10, 10))}, "pair \\(K, Q\\)"),
        ({"init": (np.ones((9, 10)), np.ones((9, 10)))}, "shape"),
        ({"init": (np.ones((10, 4)), np.ones((10, 5)))}, "differ in shape"),
        ({"init": (np.ones((10, 4)), np.ones((10, 4))), "n_init": 3}, "leading axis"),
        ({"n_init": 0}, "n_init"),
        ({"log_time": True}, "logarithm"),
        ({"log_time": math.inf}, "logarithm"),
        ({"step": 0.5}, "step"),
        ({"records": 1}, "records"),
        ({"max_steps": 0}, "max_steps"),
        ({"parametrization": "combined", "init": np.ones((10, 9))}, "shape"),
    ],
)
def test_bad_flow_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        gradient_flow(*sample_data("diagonal"), **options)


def test_a_flow_without_keys_has_no_alignment_and_a_batch_no_single_certificate():
    data = sample_data("diagonal")
    with pytest.raises(AttributeError, match="separate"):
        _ = gradient_flow(*data, parametrization="combined", log_time=0.0, records=2).misalignment
    with pytest.raises(ValueError, match="batch"):
        gradient_flow(*data, n_init=2, log_time=0.0, records=2).certificate()
    with pytest.raises(ValueError, match="orthogonal"):
        aligned_init(*data)
    X, z, y, v = data
    with pytest.warns(TieWarning), pytest.raises(ValueError, match="same score"):
        gradient_flow(X - (X @ v)[..., None] * v / (v @ v), z, y, v)


def test_running_out_of_steps_warns():
    with pytest.warns(ConvergenceWarning, match="max_steps"):
        flow = gradient_flow(*sample_data("general"), max_steps=50)
    assert flow.n_steps < 500

"""Statements of the theory, each as a test: equivalences, invariances, and numbers from an independent audit."""

import math

import numpy as np
import pytest
import torch

import convexformer as cf
from cases import HEADS, LOSSES, random_data
from convexformer.certificates import certificate
from convexformer.weights import Weights

RNG = np.random.default_rng(40)
N, S, D, C = 12, 4, 3, 3
X = RNG.standard_normal((N, S, D))
Y = RNG.standard_normal((N, C))
LABELS = np.arange(N) % C
SHIFT = np.array([10.0, -3.0, 0.0])
SPARSE = [name for name, case in HEADS.items() if case.penalty != "ridge"]


def optimum(*arguments, tolerance=1e-9, **options):
    return cf.solve(cf.Problem(*arguments, **options), tolerance=tolerance).objective


def same(value):
    return pytest.approx(value, rel=1e-7)


# ---------------------------------------------------------------------- numbers of the audit
# Optima that CVXPY, the dual and the recovered nonconvex weights agreed on to eight digits.


def audit(rng, y_drawn=1, N=6, n=3, d=3, c=3):
    X = rng.standard_normal((N, n, d))
    for _ in range(y_drawn):
        y = rng.standard_normal(N)
    return X, y, rng.standard_normal((N, c)), rng.integers(0, c, N)


AX, Ay, AY, A_LABELS = audit(np.random.default_rng(1))
ONE = np.random.default_rng(1)
GX, _, GY, G_LABELS = audit(ONE, y_drawn=2)
GATES = ONE.standard_normal((3, 3)), ONE.standard_normal((3, 3))
THREE = np.random.default_rng(3)
BX, BY = THREE.standard_normal((6, 3, 4)), THREE.standard_normal((6, 3))
LINEAR, ORDINARY = cf.heads.Attention(), cf.heads.Attention(decay="l2")
GATED = cf.heads.Attention("gated_relu", gates=GATES)

NUMBERS = {
    "theorem 1": (LINEAR, AX, Ay, 0.3, 0.64496671),
    "theorem 2, cross-entropy": (LINEAR, AX, A_LABELS, 0.25, 2.65155510),
    "theorem 3": (GATED, GX, GY, 0.6, 4.11453509),
    "theorem 3, cross-entropy": (GATED, GX, G_LABELS, 0.3, 3.70176211),
    "ordinary decay": (ORDINARY, AX, AY, 0.3, 1.88051268),
    "ordinary decay, cross-entropy": (ORDINARY, AX, A_LABELS, 0.25, 2.30322316),
    "full matrices": (ORDINARY, BX, BY, 0.4, 1.45340680),
}


@pytest.mark.parametrize(("head", "tokens", "targets", "beta", "value"), NUMBERS.values(), ids=NUMBERS.keys())
def test_optima_are_those_of_the_audit(head, tokens, targets, beta, value):
    assert optimum(head, tokens, targets, beta=beta) == pytest.approx(value, abs=1e-8)


def test_theorem_2_with_the_squared_loss():
    assert optimum(LINEAR, AX, AY, beta=0.3) == pytest.approx(2.32301, abs=5e-6)


def test_the_pooled_linear_mlp_of_the_audit():
    rng = np.random.default_rng(21)
    tokens, _, labels = rng.standard_normal((4, 3, 2)), rng.standard_normal((4, 3, 2)), rng.integers(0, 2, 4)
    assert optimum("mlp", tokens, labels, beta_ratio=0.15) == pytest.approx(2.3852578, abs=1e-6)


# ---------------------------------------------------------------------- beta_max


def test_beta_max_is_the_polar_of_the_gradient_at_zero():
    M = np.einsum("ic,ikd->kdc", Y, X)
    assert cf.Problem("attention", X, Y, beta=1.0).beta_max == same(np.linalg.norm(M, axis=1).max())
    assert cf.Problem(ORDINARY, X, Y, beta=1.0).beta_max == same(max(np.linalg.norm(m, 2) for m in M))
    assert cf.Problem("mlp", X, Y, beta=1.0).beta_max == same(np.linalg.norm(X.mean(1).T @ Y, 2))


@pytest.mark.parametrize(
    ("loss", "targets", "gradient"),
    [
        ("squared", 3 * Y[:, 0], -3 * Y[:, 0]),
        ("huber", 3 * Y[:, 0], np.clip(-3 * Y[:, 0], -1, 1)),
        ("logistic", np.sign(Y[:, 0]), -np.sign(Y[:, 0]) / 2),
        ("squared_hinge", np.sign(Y[:, 0]), -np.sign(Y[:, 0])),
    ],
)
def test_beta_max_follows_the_column_of_gradients_at_zero(loss, targets, gradient):
    expected = np.linalg.norm(np.einsum("i,ikd->kd", gradient, X), axis=1).max()
    assert cf.Problem("attention", X, targets, beta=1.0, loss=loss).beta_max == same(expected)


def test_with_an_intercept_beta_max_is_taken_at_the_best_constant():
    w = RNG.uniform(0.5, 2, N)
    centred = w[:, None] * (Y - np.average(Y, 0, w))
    problem = cf.Problem("attention", X, Y, beta=1.0, intercept=True, sample_weight=w)
    assert problem.beta_max == same(np.linalg.norm(np.einsum("ic,ikd->kdc", centred, X), axis=1).max())
    shares = np.array([w[l == LABELS].sum() for l in range(C)]) / w.sum()
    residual = w[:, None] * (np.eye(C)[LABELS] - shares)
    problem = cf.Problem("attention", X, LABELS, beta=1.0, intercept=True, sample_weight=w)
    assert problem.beta_max == same(np.linalg.norm(np.einsum("ic,ikd->kdc", residual, X), axis=1).max())


def test_the_beta_max_of_the_ridge_is_the_curvature():
    top = np.linalg.norm(X.mean(1), 2) ** 2
    assert cf.Problem("linear", X, Y, beta=1.0).beta_max == pytest.approx(top, rel=1e-3)
    assert cf.Problem("linear", X, LABELS, beta=1.0).beta_max == pytest.approx(0.5 * top, rel=1e-3)


def test_the_linear_head_with_the_squared_loss_is_ridge_regression():
    beta, M = 0.7, X.mean(1)
    Z = np.linalg.solve(M.T @ M + beta * np.eye(D), M.T @ Y)
    solution = cf.solve(cf.Problem("linear", X, Y, beta=beta), tolerance=1e-13)
    assert solution.dense().numpy() == pytest.approx(Z, abs=1e-6)
    assert solution.certificate.relative_gap <= 1e-12


# ---------------------------------------------------------------------- optimality


def test_nonzero_groups_align_with_the_gradient_and_zero_groups_stay_inside_the_ball():
    problem = cf.Problem("attention", X, LABELS, beta_ratio=0.3)
    Z = cf.solve(problem, tolerance=1e-12).dense()
    M = -problem.operator.adjoint(problem.objective.evaluate(problem.operator.apply(Z)).V)
    groups = [(Z[k, :, l], M[k, :, l]) for k in range(S) for l in range(C)]
    active = [(z, m) for z, m in groups if float(z.norm()) > 0]
    assert 0 < len(active) < len(groups)
    for z, m in active:
        assert m.numpy() == pytest.approx((problem.beta * z / z.norm()).numpy(), abs=1e-4 * problem.beta)
    for z, m in groups:
        assert float(m.norm()) <= problem.beta * (1 + 1e-5), z


def test_the_sum_of_the_dual_variables_vanishes_with_an_intercept():
    for loss, targets in (("squared", Y), ("huber", Y), ("cross_entropy", LABELS)):
        problem = cf.Problem("attention", X, targets, beta_ratio=0.2, loss=loss, intercept=True)
        weights = Weights(torch.from_numpy(RNG.standard_normal((S, D, C))))
        fit = problem.objective.evaluate(problem.objective.outputs(weights))
        assert float(fit.V.sum(0).abs().max()) <= 1e-12 * float(fit.V.abs().sum())


# ---------------------------------------------------------------------- relations between heads


@pytest.mark.parametrize("targets", [Y, LABELS])
def test_ordinary_decay_never_costs_more_than_l1_decay(targets):
    for activation in ("linear", "gated_relu"):
        l1, l2 = (
            optimum(cf.heads.Attention(activation, decay, gates=4), X, targets, beta=0.5) for decay in ("l1", "l2")
        )
        assert l2 < l1


def test_with_one_output_the_two_decays_agree():
    assert optimum(LINEAR, X, Y[:, 0], beta=0.5) == same(optimum(ORDINARY, X, Y[:, 0], beta=0.5))


@pytest.mark.parametrize("targets", [Y, LABELS])
def test_the_pooled_linear_mlp_sees_only_the_mean_token(targets):
    pooled = optimum("mlp", X, targets, beta=0.2)
    assert pooled == same(optimum("mlp", X.mean(1, keepdims=True), targets, beta=0.2))
    assert pooled == same(optimum(ORDINARY, X.mean(1, keepdims=True), targets, beta=0.2))
    shuffled = np.stack([x[RNG.permutation(S)] for x in X])
    assert pooled == same(optimum("mlp", shuffled, targets, beta=0.2))


@pytest.mark.parametrize("activation", ["linear", "gated_relu"])
def test_per_token_and_pooled_mlps_agree_on_single_tokens(activation):
    head = cf.heads.MLP(activation, gates=4)
    one = X[:, :1]
    assert optimum(head, one, Y[:, None, :], beta=0.2) == same(optimum(head, one, Y, beta=0.2))


@pytest.mark.parametrize("activation", ["linear", "gated_relu"])
def test_the_per_token_mlp_is_the_mlp_on_all_tokens_as_samples(activation):
    head = cf.heads.MLP(activation, gates=4)
    targets = RNG.standard_normal((N, S, 2))
    apart = optimum(head, X.reshape(N * S, 1, D), targets.reshape(N * S, 2), beta=0.5)
    assert optimum(head, X, targets, beta=0.5) == same(apart)
    labels = RNG.integers(0, 3, (N, S))
    assert optimum(head, X, labels, beta=0.5) == same(optimum(head, X.reshape(N * S, 1, D), labels.ravel(), beta=0.5))


@pytest.mark.parametrize("targets", [Y, LABELS])
def test_open_gates_give_the_linear_head(targets):
    opened = (np.zeros((3, S)), np.zeros((3, D)))
    for decay in ("l1", "l2"):
        gated = cf.heads.Attention("gated_relu", decay, gates=opened)
        linear = cf.heads.Attention("linear", decay)
        assert optimum(gated, X, targets, beta=0.5) == same(optimum(linear, X, targets, beta=0.5))
    gated = cf.heads.MLP("gated_relu", gates=np.zeros((3, D)))
    assert optimum(gated, X, targets, beta=0.2) == same(optimum("mlp", X, targets, beta=0.2))


def test_closed_gates_leave_nothing_to_learn():
    closed = (-np.ones((2, S)), np.ones((2, D)))
    problem = cf.Problem(cf.heads.Attention("gated_relu", gates=closed), np.abs(X) + 0.1, Y, beta=0.1)
    assert problem.beta_max == 0.0
    with pytest.warns(cf.ZeroSolutionWarning):
        solution = cf.solve(problem)
    assert solution.objective == same(0.5 * float((Y**2).sum()))


@pytest.mark.parametrize("make", [cf.heads.Attention, cf.heads.MLP])
def test_more_gates_never_cost_more_and_copies_change_nothing(make):
    sizes = (S, D) if make is cf.heads.Attention else (D,)
    few = [RNG.standard_normal((2, size)) for size in sizes]
    more = [np.concatenate([gate, RNG.standard_normal((3, gate.shape[1]))]) for gate in few]
    twice = [np.concatenate([gate, gate]) for gate in few]
    few, more, twice = (
        optimum(make("gated_relu", gates=tuple(g) if len(g) == 2 else g[0]), X, Y, beta=0.3) for g in (few, more, twice)
    )
    assert more < few
    assert twice == same(few)


# ---------------------------------------------------------------------- invariances


@pytest.mark.parametrize("name", SPARSE)
def test_scaling_the_tokens_is_scaling_beta(name):
    data = random_data(HEADS[name], LOSSES["squared, 2 outputs"], "all", np.random.default_rng(1))
    head = HEADS[name].build(data.gates)
    one = cf.Problem(head, data.X, data.Y, beta_ratio=0.2, **data.options)
    two = cf.Problem(head, 7 * data.X, data.Y, beta=7 * one.beta, **data.options)
    assert cf.solve(two, tolerance=1e-9).objective == same(cf.solve(one, tolerance=1e-9).objective)
    assert two.beta_max == same(7 * one.beta_max)


@pytest.mark.parametrize("head", [LINEAR, ORDINARY, "mlp", "linear"])
def test_rotating_the_tokens_changes_nothing(head):
    Q = np.linalg.qr(RNG.standard_normal((D, D)))[0]
    assert optimum(head, X @ Q, LABELS, beta=0.4) == same(optimum(head, X, LABELS, beta=0.4))


@pytest.mark.parametrize("head", [LINEAR, ORDINARY, "mlp", "linear"])
def test_the_order_of_samples_tokens_and_classes_changes_nothing(head):
    samples, tokens, classes = RNG.permutation(N), RNG.permutation(S), RNG.permutation(C)
    expected = same(optimum(head, X, LABELS, beta=0.4))
    assert optimum(head, X[samples], LABELS[samples], beta=0.4) == expected
    assert optimum(head, X[:, tokens], LABELS, beta=0.4) == expected
    assert optimum(head, X, classes[LABELS], beta=0.4) == expected


def test_one_hot_rows_are_labels():
    assert optimum("attention", X, np.eye(C)[LABELS], beta=0.4, loss="cross_entropy") == optimum(
        "attention", X, LABELS, beta=0.4
    )


def test_a_shift_of_the_targets_is_taken_by_the_intercept():
    one, two = (cf.solve(cf.Problem("attention", X, y, beta=0.4, intercept=True)) for y in (Y, Y + SHIFT))
    assert two.objective == same(one.objective)
    assert (two.weights.intercept - one.weights.intercept).numpy() == pytest.approx(SHIFT, abs=1e-5)


# ---------------------------------------------------------------------- weights and masks


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("intercept", [False, True])
def test_weight_two_is_the_sample_twice_and_weight_zero_is_no_sample(name, intercept):
    data = random_data(HEADS[name], LOSSES["squared, 2 outputs"], "plain", np.random.default_rng(2))
    head, n = HEADS[name].build(data.gates), len(data.X)
    options = {"beta": 0.3, "intercept": intercept}
    twice = np.where(np.arange(n) < 4, 2.0, 1.0)
    copies = np.concatenate([np.arange(n), np.arange(4)])
    assert optimum(head, data.X, data.Y, sample_weight=twice, **options) == same(
        optimum(head, data.X[copies], data.Y[copies], **options)
    )
    without = np.where(np.arange(n) < 4, 0.0, 1.0)
    assert optimum(head, data.X, data.Y, sample_weight=without, **options) == same(
        optimum(head, data.X[4:], data.Y[4:], **options)
    )


@pytest.mark.parametrize("name", [name for name, case in HEADS.items() if not case.per_token])
def test_masked_padded_and_ragged_tokens_are_one_and_the_same(name):
    case, rng = HEADS[name], np.random.default_rng(3)
    lengths = np.array([1, 3, 2, 3, 1, 2, 3, 3, 2])
    mask = np.arange(3) < lengths[:, None]
    data = random_data(case, LOSSES["cross_entropy"], "plain", rng)
    head = case.build(data.gates)
    ragged = [x[:length] for x, length in zip(data.X, lengths, strict=True)]
    masked = np.where(mask[..., None], data.X, np.nan)
    one = cf.Problem(head, ragged, data.Y, beta_ratio=0.2)
    two = cf.Problem(head, masked, data.Y, beta_ratio=0.2, mask=mask)
    assert one.beta == two.beta
    first, second = cf.solve(one, tolerance=1e-6), cf.solve(two, tolerance=1e-6)
    assert torch.equal(first.weights.Z, second.weights.Z)
    assert torch.equal(first.predict(ragged), second.predict(masked, mask))
    assert torch.allclose(first.predict(ragged), first.network()(ragged))


@pytest.mark.parametrize("head", ["attention", "mlp", "linear"])
def test_padding_that_nobody_uses_changes_nothing(head):
    longer = np.concatenate([X, RNG.standard_normal((N, 2, D))], axis=1)
    mask = np.arange(S + 2) < np.full((N, 1), S)
    padded = cf.Problem(head, longer, LABELS, beta=0.4, mask=mask)
    solution = cf.solve(padded, tolerance=1e-9)
    assert solution.objective == same(optimum(head, X, LABELS, beta=0.4))
    if head == "attention":
        assert float(solution.dense()[S:].abs().max()) == 0.0


def test_pooled_means_divide_by_the_true_length():
    mask = np.array([[True, False, False, False]] * N)
    short = optimum("linear", X[:, :1], Y, beta=0.4)
    assert optimum("linear", X, Y, beta=0.4, mask=mask) == same(short)


# ---------------------------------------------------------------------- networks


def test_recovery_needs_no_more_heads_than_nonzero_groups_or_ranks():
    for head in (LINEAR, ORDINARY):
        solution = cf.solve(cf.Problem(head, X, LABELS, beta_ratio=0.2), tolerance=1e-9)
        Z, heads = solution.dense(), solution.network().w1.shape[0]
        groups = int((Z.norm(dim=1) > 0).sum())
        ranks = sum(int(np.linalg.matrix_rank(z, tol=1e-12)) for z in Z.numpy())
        assert heads == (groups if head is LINEAR else ranks)
        assert heads <= S * C


def test_a_head_with_mixed_attention_weights_lifts_to_all_its_tokens():
    """``w1`` inside the simplex spreads ``w2 w3^T`` over tokens: same outputs, gauge no larger than the decay."""
    problem = cf.Problem("attention", X, Y, beta=1.0)
    network = problem.head.random_network(problem.layout, n_heads=1)
    Z = network.lift().Z
    w1, w2, w3 = (p.detach().numpy()[0] for p in (network.w1, network.w2, network.w3))
    assert Z.numpy() == pytest.approx(np.einsum("k,d,c->kdc", w1, w2, w3))
    assert float(problem.penalty.value(Z)) == same(np.linalg.norm(w2) * np.abs(w3).sum())
    assert float(problem.penalty.value(Z)) <= network.decay().item()


def test_the_optimum_is_below_every_network_and_falls_with_the_number_of_heads_needed():
    problem = cf.Problem("attention", X, Y, beta_ratio=0.1)
    best = cf.solve(problem, tolerance=1e-8)
    for heads in (1, 3, 20):
        network = problem.head.random_network(problem.layout, heads, seed=heads)
        proof = cf.certify(network, problem)
        assert proof.primal > best.objective
        assert proof.dual <= best.objective


@pytest.mark.parametrize("activation", ["linear", "gated_relu"])
def test_token_norms_are_the_frobenius_norms_of_the_slices(activation):
    solution = cf.solve(cf.Problem(cf.heads.Attention(activation, gates=2), X, LABELS, beta_ratio=0.3))
    Z = solution.dense().reshape(-1, S, D, C).numpy()
    expected = [np.sqrt((Z[:, k] ** 2).sum()) for k in range(S)]
    assert solution.token_norms().numpy() == pytest.approx(np.array(expected))
    for head in ("mlp", "linear"):
        assert cf.solve(cf.Problem(head, X, LABELS, beta_ratio=0.3)).token_norms() is None


def test_the_value_at_zero_is_the_loss_of_a_constant():
    zero = Weights(torch.zeros(S, D, C).double())
    assert certificate(cf.Problem("attention", X, LABELS, beta=1.0), zero).primal == same(N * math.log(C))
    assert certificate(cf.Problem("attention", X, Y, beta=1.0), zero).primal == same(0.5 * float((Y**2).sum()))

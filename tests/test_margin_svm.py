"""Attention SVMs: optima against CVXPY, certificates, proofs of inseparability, and what an estimator owes its user."""

import math
import warnings

import cvxpy as cp
import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from sklearn.base import clone
from sklearn.exceptions import ConvergenceWarning, NotFittedError

import convexformer as cf
from convexformer.gauges import FrobeniusNorm, L1Norm, NuclearNorm
from convexformer.margin import MarginOperator, NotSeparableError, Sequences, TieWarning, margin_certificate
from convexformer.margin.admm import solve_admm
from convexformer.margin.frobenius import positive_solve, solve_frobenius
from convexformer.margin.low_rank import low_rank_point, refine
from convexformer.margin.nuclear import _normalised, solve_factorised
from convexformer.margin.progress import Limits, Progress
from convexformer.solvers.status import Status
from convexformer.testing import check_operator
from convexformer.threads import few_threads

NORMS = ("nuclear", "frobenius", "diagonal")
GAUGES = {"nuclear": NuclearNorm(), "frobenius": FrobeniusNorm(), "diagonal": L1Norm()}


def gaussian(n, L, d, seed=0):
    rng = np.random.default_rng(seed)
    return rng.standard_normal((n, L, d)), rng.standard_normal((n, d)), rng.choice([-1, 1], n), rng.standard_normal(d)


def constraints(X, z, y, v):
    """The rows ``vec((x_opt - x_l) z^T)``, written down sequence by sequence."""
    rows = []
    for tokens, query, label in zip(X, z, y, strict=True):
        best = int(np.argmax(label * (tokens @ v)))
        rows += [np.outer(tokens[best] - tokens[l], query) for l in range(len(tokens)) if l != best]
    return np.stack(rows)


def reference(data, norm):
    """The optimum of the program as the paper writes it, by CVXPY."""
    rows = constraints(*data)
    d = rows.shape[1]
    W = cp.diag(cp.Variable(d)) if norm == "diagonal" else cp.Variable((d, d))
    value = cp.norm(W, "fro") if norm == "frobenius" else cp.normNuc(W)
    margins = [cp.sum(cp.multiply(row, W)) >= 1 for row in rows]
    return cp.Problem(cp.Minimize(value), margins).solve(solver="CLARABEL")


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("kind", ["gaussian", "general", "diagonal"])
def test_svm_optimum_is_that_of_cvxpy(norm, kind):
    data = (
        gaussian(6, 4, 10) if kind == "gaussian" else cf.margin.sample_data(kind, 6, 4, 10 if kind == "general" else 20)
    )
    svm = cf.margin.AttentionSVM(norm).fit(*data)
    optimum, proof = reference(data, norm), svm.certificate_
    assert svm.objective_ == pytest.approx(optimum, rel=1e-4)
    assert svm.objective_ == pytest.approx(optimum, rel=1e-5)  # the issue asks for 1e-4; CLARABEL is better than that
    assert proof.kind == "exact"
    assert proof.relative_gap <= 1e-6
    assert proof.dual <= optimum * (1 + 1e-6)
    assert proof.primal >= optimum * (1 - 1e-6)


@pytest.mark.parametrize("norm", NORMS)
def test_svm_attributes_say_what_they_mean(norm):
    data = gaussian(6, 4, 12, seed=1)
    X, _, y, v = data
    svm = cf.margin.AttentionSVM(norm).fit(*data)
    rows = constraints(*data)
    margins = (rows * svm.W_).sum((1, 2))
    assert margins.min() == pytest.approx(1, abs=1e-9)
    assert np.sort(svm.margins_[svm.dual_coef_ != 0]) == pytest.approx(np.ones((svm.dual_coef_ != 0).sum()), abs=1e-3)
    assert (svm.optimal_tokens_ == (y[:, None] * (X @ v)).argmax(1)).all()
    assert svm.margin_ == pytest.approx(1 / svm.objective_)
    assert svm.rank_ == np.linalg.matrix_rank(svm.W_, tol=1e-8)
    assert svm.dual_coef_.sum() == pytest.approx(svm.certificate_.dual, rel=1e-9)
    assert (svm.dual_coef_[np.arange(6), svm.optimal_tokens_] == 0).all()
    assert {tuple(pair) for pair in svm.support_} <= {(i, l) for i in range(6) for l in range(4)}
    assert svm.ties_ == {}
    assert svm.certificate_.kkt["complementarity"] <= 1e-5
    assert svm.certificate_.kkt["alignment"] <= 1e-5
    if norm == "diagonal":
        assert np.count_nonzero(svm.W_ - np.diag(np.diag(svm.W_))) == 0


def test_attention_and_decisions_follow_the_model():
    X, z, y, v = gaussian(5, 4, 10, seed=2)
    svm = cf.margin.AttentionSVM().fit(X, z, y, v)
    logits = np.einsum("ild,de,ie->il", X, svm.W_, z)
    expected = np.exp(3 * logits) / np.exp(3 * logits).sum(1, keepdims=True)
    assert svm.attention(X, z, sharpness=3.0) == pytest.approx(expected)
    outputs = ((X @ v) * expected).sum(1)
    assert svm.decision_function(X, z, sharpness=3.0) == pytest.approx(outputs)
    hard = svm.attention(X, z, sharpness=math.inf)
    assert (hard.argmax(1) == svm.optimal_tokens_).all()
    assert hard.max() == 1
    assert (svm.selected_tokens(X, z) == svm.optimal_tokens_).all()
    assert (svm.predict(X, z) == np.sign((X @ v)[np.arange(5), svm.optimal_tokens_])).all()


def test_an_svm_is_an_estimator_and_deterministic():
    data = gaussian(5, 4, 8, seed=3)
    svm = cf.margin.AttentionSVM("frobenius", tolerance=1e-7)
    again = clone(svm)
    assert again.get_params() == svm.get_params()
    assert np.array_equal(svm.fit(*data).W_, again.fit(*(torch.from_numpy(np.asarray(part)) for part in data)).W_)
    with pytest.raises(NotFittedError):
        cf.margin.AttentionSVM().attention(data[0], data[1])


@settings(max_examples=25)
@given(seed=st.integers(0, 10_000), norm=st.sampled_from(NORMS), scale=st.sampled_from([1e-6, 1.0, 1e6]))
def test_weak_duality_holds_at_any_point(seed, norm, scale):
    X, z, y, v = gaussian(4, 3, 9, seed)
    data = Sequences.of(scale * X, z, y, v)
    operator = data.diagonal_operator() if norm == "diagonal" else data.operator()
    rng = np.random.default_rng(seed + 1)
    W = operator.adjoint(torch.from_numpy(rng.random(tuple(operator.output_shape))))
    lam = torch.from_numpy(rng.standard_normal(tuple(operator.output_shape)))
    loose = margin_certificate(operator, GAUGES[norm], W, lam)
    assert loose.dual <= loose.primal
    try:
        svm = cf.margin.AttentionSVM(norm).fit(scale * X, z, y, v)
    except NotSeparableError:
        assume(False)
    tight = svm.certificate_
    assert loose.dual <= tight.primal * (1 + 1e-12)
    assert tight.dual <= loose.primal * (1 + 1e-12)
    assert tight.meets(1e-6)


@settings(max_examples=15)
@given(seed=st.integers(0, 10_000), left=st.floats(1e-3, 1e3), right=st.floats(1e-3, 1e3))
def test_the_optimum_scales_with_the_data(seed, left, right):
    X, z, y, v = gaussian(4, 3, 6, seed)
    one = cf.margin.AttentionSVM(tolerance=1e-7).fit(X, z, y, v)
    two = cf.margin.AttentionSVM(tolerance=1e-7).fit(left * X, right * z, y, 5 * v)
    assert two.objective_ * left * right == pytest.approx(one.objective_, rel=1e-6)


@pytest.fixture
def one_thread():
    with few_threads(torch.zeros(1)):
        yield


def test_three_solvers_agree_on_the_nuclear_norm(one_thread):
    operator = Sequences.of(*gaussian(8, 5, 12, seed=4)).operator()
    unit = MarginOperator(operator.differences / operator.row_norms().mean(), operator.queries)
    values = [
        solve_admm(unit, NuclearNorm(), Limits(1e-7, 3000)).history[-1].primal,
        solve_factorised(unit, Limits(1e-7, 5000)).history[-1].primal,
    ]
    assert values[0] == pytest.approx(values[1], rel=1e-6)
    frobenius = [
        solve_admm(unit, FrobeniusNorm(), Limits(1e-7, 3000)).history[-1].primal,
        solve_frobenius(unit, Limits(1e-7, 3000)).history[-1].primal,
    ]
    assert frobenius[0] == pytest.approx(frobenius[1], rel=1e-6)


def test_factors_of_too_small_a_rank_grow_until_they_certify(one_thread, monkeypatch):
    from convexformer.margin import nuclear

    operator = Sequences.of(*gaussian(20, 6, 12, seed=5)).operator()
    full = solve_factorised(nuclear._normalised(operator), Limits(1e-6, 5000))
    begin = nuclear._start
    monkeypatch.setattr(nuclear, "_start", lambda op, rank: begin(op, 1))
    grown = solve_factorised(nuclear._normalised(operator), Limits(1e-6, 5000))
    assert grown.history[-1].relative_gap <= 1e-6
    assert grown.history[-1].primal == pytest.approx(full.history[-1].primal, rel=2e-6)
    assert np.linalg.matrix_rank(grown.W.numpy(), tol=1e-6) > 1


@settings(max_examples=20)
@given(seed=st.integers(0, 10_000), n=st.integers(1, 4), rest=st.integers(1, 4), d=st.integers(1, 4))
def test_the_margin_operator_keeps_the_contract(seed, n, rest, d):
    rng = np.random.default_rng(seed)
    operator = MarginOperator(*(torch.from_numpy(rng.standard_normal(s)) for s in ((n, rest, d), (n, d))))
    check_operator(operator, seed)
    rows = torch.arange(n * rest)
    dense = operator.dense_rows(rows)
    assert torch.allclose(operator.gram(rows), dense @ dense.T)
    assert torch.allclose(operator.row_norms().flatten(), dense.norm(dim=1))
    W = torch.from_numpy(rng.standard_normal((3, d, d)))
    assert torch.allclose(operator.apply(W)[1], operator.apply(W[1]))


# ---------------------------------------------------------------------- data that nothing separates


@pytest.mark.parametrize("norm", NORMS)
@settings(max_examples=8)
@given(seed=st.integers(0, 10_000))
def test_inseparable_data_comes_with_a_proof(norm, seed):
    X, z, y, v = gaussian(25, 5, 3, seed)
    with pytest.raises(NotSeparableError) as caught:
        cf.margin.AttentionSVM(norm).fit(X, z, y, v)
    proof = caught.value
    best = (y[:, None] * (X @ v)).argmax(1)
    differences = X[np.arange(25), best][:, None] - X
    total = np.einsum("il,ild,ie->de", proof.farkas, differences, z)
    assert proof.farkas.min() >= 0
    assert proof.farkas.sum() == pytest.approx(1)
    assert (proof.farkas[np.arange(25), best] == 0).all()
    left = np.abs(np.diag(total)) if norm == "diagonal" else np.linalg.svd(total, compute_uv=False)
    assert left.max() <= 1e-8 * np.abs(X).max() * np.abs(z).max()
    assert set(np.flatnonzero(proof.farkas.sum(1) > 1e-8)) <= set(proof.sequences)
    assert str(proof.sequences[0]) in str(proof)


def test_the_proof_names_no_more_sequences_than_contradict():
    X, z, y, v = gaussian(6, 3, 5, seed=7)
    X[4], z[4], y[4] = X[1], -z[1], y[1]  # the same tokens, the opposite query: no W serves both
    with pytest.raises(NotSeparableError, match="sequences 1, 4 contradict") as caught:
        cf.margin.AttentionSVM("frobenius").fit(X, z, y, v)
    assert caught.value.sequences == (1, 4)
    rest = [0, 1, 2, 3, 5]
    assert cf.margin.AttentionSVM("frobenius").fit(X[rest], z[rest], y[rest], v).certificate_.meets(1e-6)


def test_data_that_barely_separates_is_solved_or_said_not_to_be():
    X, z, y, v = cf.margin.sample_data("general")
    X, z, y = X.copy(), z.copy(), y.copy()
    X[1], y[1], z[1] = X[0], y[0], -z[0] + 1e-3 * np.random.default_rng(1).standard_normal(4)
    for norm in ("nuclear", "frobenius"):
        svm = cf.margin.AttentionSVM(norm).fit(X, z, y, v)
        assert svm.certificate_.meets(1e-6)
        assert svm.objective_ > 100


def test_ties_are_reported_and_the_first_token_is_taken():
    X, z, y, v = gaussian(4, 3, 8, seed=9)
    best = int((y[2] * (X[2] @ v)).argmax())
    other = (best + 1) % 3
    X[2, other] += v * (X[2, best] @ v - X[2, other] @ v) / (v @ v)
    with pytest.warns(TieWarning, match="sequence 2"):
        svm = cf.margin.AttentionSVM().fit(X, z, y, v)
    assert svm.ties_ == {2: sorted([best, other])}
    assert svm.optimal_tokens_[2] == min(best, other)
    X[2, other] = X[2, best]  # two identical optimal tokens cannot be told apart
    with pytest.warns(TieWarning), pytest.raises(NotSeparableError, match="tied"):
        cf.margin.AttentionSVM().fit(X, z, y, v)


# ---------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda X, z, y, v: (X[0], z, y, v), "expected tokens"),
        (lambda X, z, y, v: (X[:, :1], z, y, v), "at least 2"),
        (lambda X, z, y, v: (X, z[:2], y, v), "z has shape"),
        (lambda X, z, y, v: (X, z, y[:2], v), "y has shape"),
        (lambda X, z, y, v: (X, z, (y + 1) // 2, v), "pass 2 \\* y - 1"),
        (lambda X, z, y, v: (X, z, y, 0 * v), "v is zero"),
        (lambda X, z, y, v: (X, z, y, v[:2]), "v has shape"),
        (lambda X, z, y, v: (np.where(X > 1, np.nan, X), z, y, v), "NaN"),
        (lambda X, z, y, v: (X * 1j, z, y, v), "complex"),
    ],
)
def test_bad_svm_data_is_named(change, message):
    with pytest.raises(ValueError, match=message):
        cf.margin.AttentionSVM().fit(*change(*gaussian(4, 3, 6)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"norm": "nuclaer"}, "Did you mean 'nuclear'"),
        ({"tolerance": 0.0}, "tolerance"),
        ({"max_iter": 0}, "max_iter"),
        ({"max_time": -1.0}, "max_time"),
        ({"device": "toaster"}, "device"),
    ],
)
def test_bad_svm_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        cf.margin.AttentionSVM(**options).fit(*gaussian(4, 3, 6))


def test_bad_svm_queries_are_named():
    X, z, y, v = gaussian(4, 3, 6)
    svm = cf.margin.AttentionSVM("frobenius").fit(X, z, y, v)
    with pytest.raises(ValueError, match="fitted with d=6"):
        svm.attention(X[:, :, :5], z[:, :5])
    with pytest.raises(ValueError, match="sharpness"):
        svm.attention(X, z, sharpness=-1)


def test_threads_are_as_they_were_after_a_fit():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        cf.margin.AttentionSVM("frobenius").fit(*gaussian(4, 3, 6))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_an_unfinished_solve_warns_and_its_certificate_stays_true():
    data = gaussian(30, 8, 20, seed=6)
    with pytest.warns(ConvergenceWarning, match="relative gap"):
        rough = cf.margin.AttentionSVM(tolerance=1e-9, max_iter=25).fit(*data)
    fine = cf.margin.AttentionSVM().fit(*data)
    assert rough.certificate_.dual <= fine.objective_ <= rough.certificate_.primal


@pytest.mark.parametrize(("shape", "rank"), [((60, 40, 40), 1), ((300, 10, 60), 27)])
def test_ill_conditioned_tokens_take_few_iterations(shape, rank):
    """One direction of these tokens is up to a hundred times longer than the others; ranks low and high."""
    data = cf.margin.sample_data("general", *shape)
    svm = cf.margin.AttentionSVM("nuclear", max_iter=3000).fit(*data)
    assert svm.certificate_.meets(1e-6)
    assert abs(svm.rank_ - rank) <= 2


def test_newton_steps_on_few_factors_find_a_missing_pair():
    data = Sequences.of(*cf.margin.sample_data("general", 60, 40, 40))
    operator = _normalised(data.operator())
    full = solve_factorised(operator, Limits(1e-6, 5000))
    lam = torch.zeros(operator.output_shape, dtype=torch.float64)
    wrong = torch.linalg.svd(full.W)
    start = low_rank_point(torch.outer(wrong.U[:, 3], wrong.Vh[5]), lam)  # a pair that the solution does not have
    progress = Progress(operator, NuclearNorm(), Limits(1e-6, 5000))
    refine(operator, start, 9.0, progress, 0)
    assert progress.status is Status.CONVERGED


@pytest.mark.slow
def test_the_large_nuclear_svm_is_certified():
    with warnings.catch_warnings():
        warnings.simplefilter("error", ConvergenceWarning)
        svm = cf.margin.AttentionSVM(tolerance=1e-4).fit(*gaussian(200, 20, 100))
    assert svm.certificate_.kind == "exact"
    assert svm.certificate_.relative_gap <= 1e-4
    assert svm.seconds_ < 20


@pytest.mark.parametrize("norm", ["nuclear", "frobenius"])
def test_singular_newton_systems_end_in_an_answer(norm):
    """Integer sequences that contradict each other: the binding constraints are dependent, the penalty grows."""
    X = [
        [[-1, -2], [-3, -3], [1, 2]],
        [[1, 1], [1, 0], [2, -2]],
        [[2, 0], [0, -2], [0, 5]],
        [[0, -1], [1, 2], [2, -1]],
        [[-2, -2], [0, -4], [3, -1]],
    ]
    z = [[0, 3], [-2, 0], [-1, 1], [-1, 1], [-2, 2]]
    data = np.array(X, float), np.array(z, float), np.array([1, 1, -1, 1, -1]), np.array([1.0, -4.0])
    with pytest.raises(NotSeparableError, match="contradict"):
        cf.margin.AttentionSVM(norm).fit(*data)


def test_a_system_that_no_ridge_helps_has_no_solution():
    H = torch.diag(torch.tensor([1.0, -1.0]).double())
    assert positive_solve(H, torch.ones(2).double()) is None
    almost = torch.ones(3, 3).double()  # rank one
    solved = positive_solve(almost, torch.ones(3).double())
    assert torch.allclose(torch.ones(3, 3).double() @ solved, torch.ones(3).double(), atol=1e-6)

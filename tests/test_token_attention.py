"""Attention with targets per token: the programs, their gauges, solvers and networks (Ergen et al. 2022, appendix A.7)."""

from typing import Any

import cvxpy as cp
import numpy as np
import pytest
import torch

import convexformer as cf
from convexformer.gauges import StochasticNorm
from convexformer.networks import PositionAttentionNetwork, SoftmaxAttentionNetwork, StochasticAttentionNetwork
from convexformer.operators import PositionOperator
from convexformer.testing import check_gauge, check_head, check_operator
from convexformer.weights import Weights

CASES = [("row", "l1"), ("sub", "l1"), ("independent", "l1"), ("independent", "l2")]
KINDS = pytest.mark.parametrize(("stochastic", "decay"), CASES)


def head_of(stochastic: str, decay: str = "l1") -> cf.heads.Attention:
    return cf.heads.Attention(decay=decay, stochastic=stochastic)


def small_data(seed: int, N: int = 4, s: int = 3, d: int = 2, c: int = 2) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.standard_normal((N, s, d)), rng.standard_normal((N, s, c))


def gauge_by_cvxpy(Z: list[list[Any]], stochastic: str, decay: str, d: int, c: int) -> tuple[Any, list[Any]]:
    """The gauge of variables ``Z[r][k]: (d, c)`` in the words of the papers, and its constraints."""
    s = len(Z)
    if stochastic == "independent":
        if decay == "l2":
            return sum(cp.normNuc(Z[r][k]) for r in range(s) for k in range(s)), []
        return sum(cp.norm(Z[r][k][:, l]) for r in range(s) for k in range(s) for l in range(c)), []
    total, constraints = 0, []
    for a in range(d):
        for l in range(c):  # Z = Z1 - Z2, both nonnegative, with equal row sums or with row sums below a bound
            Z1, Z2, t = cp.Variable((s, s), nonneg=True), cp.Variable((s, s), nonneg=True), cp.Variable(2)
            constraints += [Z1[r, k] - Z2[r, k] == Z[r][k][a, l] for r in range(s) for k in range(s)]
            for part, size in ((Z1, t[0]), (Z2, t[1])):
                sums = cp.sum(part, axis=1)
                constraints.append(sums == size if stochastic == "row" else sums <= size)
            total += t[0] + t[1]
    return total, constraints


def optimum_by_cvxpy(
    X: np.ndarray,
    Y: np.ndarray,
    beta: float,
    stochastic: str,
    decay: str,
    w: np.ndarray | None = None,
    mask: Any = None,
) -> float:
    N, s, d = X.shape
    c = Y.shape[2]
    mask = np.ones((N, s), bool) if mask is None else mask
    X, w = X * mask[..., None], np.ones(N) if w is None else w
    Z = [[cp.Variable((d, c)) for _ in range(s)] for _ in range(s)]
    loss = 0
    for r in range(s):
        outputs = sum(X[:, k] @ Z[r][k] for k in range(s))
        loss += 0.5 * cp.sum(cp.multiply((w * mask[:, r])[:, None], cp.square(outputs - Y[:, r])))
    gauge, constraints = gauge_by_cvxpy(Z, stochastic, decay, d, c)
    problem = cp.Problem(cp.Minimize(loss + beta * gauge), constraints)
    problem.solve(solver=cp.CLARABEL)
    return float(problem.value)


# ---------------------------------------------------------------------- the programs


@pytest.mark.parametrize(("stochastic", "optimum"), [("row", 0.274375), ("sub", 0.048750)])
@pytest.mark.parametrize("solver", ["auto", "fista", "frank_wolfe"])
def test_theorem_a1_as_printed_is_a_relaxation(stochastic: str, optimum: float, solver: str) -> None:
    """Both tokens equal: row-stochastic heads give every token the same output, substochastic ones need not."""
    X, Y = np.ones((1, 2, 1)), np.array([[[1.0], [0.0]]])
    solution = cf.solve(cf.Problem(head_of(stochastic), X, Y, beta=0.05), tolerance=1e-9, solver=solver)
    assert solution.objective == pytest.approx(optimum, abs=1e-7)
    assert solution.certificate.meets(1e-9)
    assert (float(solution.predict(X).diff(dim=1)) == pytest.approx(0, abs=1e-9)) == (stochastic == "row")


@KINDS
@pytest.mark.parametrize("seed", [0, 1])
def test_random_problems_have_the_optimum_of_cvxpy(stochastic: str, decay: str, seed: int) -> None:
    X, Y = small_data(seed)
    problem = cf.Problem(head_of(stochastic, decay), X, Y, beta_ratio=[0.2, 0.05][seed])
    expected = optimum_by_cvxpy(X, Y, problem.beta, stochastic, decay)
    # atoms of groups and of nuclear norms are a continuum, on which Frank-Wolfe takes many rounds
    for solver in ("auto",) if stochastic == "independent" else ("auto", "frank_wolfe"):
        solution = cf.solve(problem, tolerance=1e-6, solver=solver)
        assert solution.objective == pytest.approx(expected, rel=1e-5), solver
        assert solution.certificate.meets(1e-6)
        assert solution.certificate.dual <= expected * (1 + 1e-6)


@KINDS
def test_masks_and_sample_weights(stochastic: str, decay: str) -> None:
    X, Y = small_data(2)
    mask, w = np.ones((4, 3), bool), np.array([1.0, 0.5, 0.0, 2.0])
    mask[0, 2] = mask[1, 1:] = False
    problem = cf.Problem(head_of(stochastic, decay), X, Y, beta=0.2, mask=mask, sample_weight=w)
    expected = optimum_by_cvxpy(X, Y, 0.2, stochastic, decay, w, mask)
    solution = cf.solve(problem, tolerance=1e-7)
    assert solution.objective == pytest.approx(expected, rel=1e-5)
    assert not solution.predict(X, mask)[~torch.from_numpy(mask)].any()


def test_independent_heads_are_theorem_2_with_all_tokens_as_outputs() -> None:
    X, Y = small_data(3, N=8)
    tokenwise = cf.Problem(head_of("independent"), X, Y, beta=0.3)
    pooled = cf.Problem("attention", X, Y.reshape(8, -1), beta=0.3)
    assert tokenwise.beta_max == pytest.approx(pooled.beta_max, rel=1e-12)
    one, other = cf.solve(tokenwise, tolerance=1e-8), cf.solve(pooled, tolerance=1e-8)
    assert one.objective == pytest.approx(other.objective, rel=1e-8)
    Z = one.dense()  # (s, s, d, c)
    assert torch.allclose(Z, other.dense().reshape(3, 2, 3, 2).permute(2, 0, 1, 3), atol=1e-3)


def test_the_printed_program_is_below_the_exact_one() -> None:
    X, Y = small_data(4)
    values = {
        kind: cf.solve(cf.Problem(head_of(kind), X, Y, beta=0.1), tolerance=1e-5).objective for kind in ("row", "sub")
    }
    assert values["sub"] < values["row"] * (1 - 1e-3)


# ---------------------------------------------------------------------- the terms


@pytest.mark.parametrize("rows", ["row", "sub"])
@pytest.mark.parametrize("seed", range(3))
def test_the_gauge_passes_its_contract(rows: str, seed: int) -> None:
    check_gauge(StochasticNorm(rows), (4, 4, 2, 3), seed)
    check_gauge(StochasticNorm(rows), (1, 1, 2, 1), seed)


def test_unequal_row_sums_have_no_finite_gauge() -> None:
    Z = torch.zeros(2, 2, 1, 1, dtype=torch.float64)
    Z[0, 0] = 1.0
    assert float(StochasticNorm("row").value(Z)) == torch.inf
    assert float(StochasticNorm("sub").value(Z)) == 1.0
    Z[1, 1] = 1.0
    assert float(StochasticNorm("row").value(Z)) == 1.0


@pytest.mark.parametrize("rows", ["row", "sub"])
def test_the_prox_is_that_of_cvxpy(rows: str) -> None:
    """Rows far apart from each other and rows of little spread: there positive and negative budgets depend on each other."""
    rng = np.random.default_rng(5)
    for offset, step in ((0.0, 0.3), (4.0, 0.5), (4.0, 0.01), (1.0, 5.0)):
        Z = rng.standard_normal((4, 4)) * rng.choice([0.1, 2.0], (4, 1)) + offset * rng.standard_normal((4, 1))
        W = cp.Variable((4, 4))
        gauge, constraints = gauge_by_cvxpy(
            [[cp.reshape(W[r, k], (1, 1), "C") for k in range(4)] for r in range(4)], rows, "l1", 1, 1
        )
        problem = cp.Problem(cp.Minimize(0.5 * cp.sum_squares(W - Z) + step * gauge), constraints)
        problem.solve(solver=cp.CLARABEL)
        found = StochasticNorm(rows).prox(torch.from_numpy(Z)[:, :, None, None], step)[:, :, 0, 0]
        assert np.abs(found.numpy() - W.value).max() < 1e-4


@pytest.mark.parametrize("masked", [False, True])
def test_the_operator_passes_its_contract(masked: bool) -> None:
    rng = np.random.default_rng(6)
    X, mask = torch.from_numpy(rng.standard_normal((5, 3, 2))), torch.ones(5, 3, dtype=torch.bool)
    if masked:
        mask[1, 2] = mask[4, 1] = False
    operator = PositionOperator(X * mask[..., None], mask if masked else None, 2)
    check_operator(operator)
    Z = torch.from_numpy(rng.standard_normal(operator.weight_shape))
    outputs = operator.apply(Z)
    for r, (part, rows) in enumerate(operator.positions()):
        assert torch.allclose(part.apply(Z[r]), outputs[rows], atol=1e-12)


def test_the_squared_loss_needs_no_more_samples_than_features() -> None:
    X, Y = small_data(7, N=40)
    w = np.random.default_rng(7).uniform(0.5, 2, 40)
    problem = cf.Problem(head_of("independent"), X, Y, beta=1.0, sample_weight=w)
    small = problem.objective.compressed()
    assert len(small.targets) == 3 * 2 * 3
    weights = cf.solve(problem, tolerance=1e-3).weights
    assert small.value(weights) == pytest.approx(problem.value(weights), rel=1e-12)


# ---------------------------------------------------------------------- heads and networks


@KINDS
@pytest.mark.parametrize("loss", ["squared", "cross_entropy"])
def test_the_head_passes_its_contract(stochastic: str, decay: str, loss: str) -> None:
    X, Y = small_data(8, N=5)
    targets = Y if loss == "squared" else np.random.default_rng(8).dirichlet(np.ones(2), (5, 3))
    mask = np.ones((5, 3), bool)
    mask[2, 2] = False
    head = head_of(stochastic, decay)
    check_head(
        head,
        X,
        targets,
        loss=loss,
        mask=mask,
        sample_weight=[1.0, 2.0, 0.5, 1.0, 1.0],
        intercept=loss == "cross_entropy",
        make_network=lambda layout, seed: head.random_network(layout, 5, seed, bias=loss == "cross_entropy"),
    )


def test_recovered_heads_are_row_stochastic() -> None:
    X, Y = small_data(9, N=6, s=4)
    solution = cf.solve(cf.Problem(head_of("row"), X, Y, beta=0.2), tolerance=1e-6)
    network = solution.network()
    assert isinstance(network, StochasticAttentionNetwork)
    assert float(network.w1.detach().min()) >= 0
    assert torch.allclose(network.w1.sum(-1), torch.ones(()).double(), atol=1e-12)
    outputs = network(torch.from_numpy(X)).detach()
    objective = 0.5 * float((outputs - torch.from_numpy(Y)).square().sum()) + 0.2 * float(network.decay().detach())
    assert objective == pytest.approx(solution.objective, rel=1e-10)


@KINDS
def test_attention_maps_have_rows_in_the_simplex_and_find_the_tokens_in_use(stochastic: str, decay: str) -> None:
    """Each token copies the one before it; the map says so."""
    rng = np.random.default_rng(10)
    X = rng.standard_normal((60, 4, 2))
    Y = np.roll(X, 1, axis=1) @ rng.standard_normal((2, 2))
    solution = cf.solve(cf.Problem(head_of(stochastic, decay), X, Y, beta_ratio=0.05), tolerance=1e-4)
    found = solution.attention_map()
    assert torch.allclose(found.sum(1), torch.ones(4).double())
    assert found.argmax(1).tolist() == [3, 0, 1, 2]
    assert float(found.max(1).values.min()) > 0.9
    # evenly spread padding of rows below the largest is no use of tokens, so heads of a network may be flatter
    assert solution.network().attention_map().argmax(1).tolist() == [3, 0, 1, 2]


def test_a_pooled_head_has_no_attention_map() -> None:
    solution = cf.solve(cf.Problem("attention", np.ones((3, 2, 1)), np.ones(3), beta=0.1))
    with pytest.raises(ValueError, match="token_norms"):
        solution.attention_map()


def test_a_trained_alternative_is_certified_by_its_distance_to_the_optimum() -> None:
    from convexformer.experiments.adam import train_adam

    X, Y = small_data(11, N=10)
    for kind in ("row", "independent"):
        problem = cf.Problem(head_of(kind), X, Y, beta=0.5)
        network, curve = train_adam(problem, problem.head.random_network(problem.layout, 12, seed=0), steps=100)
        proof, optimum = cf.certify(network, problem), cf.solve(problem, tolerance=1e-6).objective
        assert proof.primal <= curve[0]
        assert proof.dual <= optimum * (1 + 1e-9) <= proof.primal * (1 + 1e-8)
        assert proof.gap >= (proof.primal - optimum) * (1 - 1e-6)


def test_softmax_attention_is_the_formula_and_has_no_lift() -> None:
    torch.manual_seed(0)
    network = SoftmaxAttentionNetwork.random(3, 2, n_heads=2, seed=1)
    X = torch.randn(4, 5, 3, dtype=torch.float64)
    expected = sum(
        (X @ q @ (X @ k).mT).softmax(-1) @ X @ v @ o
        for q, k, v, o in zip(network.query, network.key, network.value, network.out, strict=True)
    )
    assert torch.allclose(network(X), expected)
    assert float(network.decay()) == pytest.approx(0.5 * sum(float(p.square().sum()) for p in network.parameters()))
    mask = torch.ones(4, 5, dtype=torch.bool)
    mask[:, 3:] = False
    short = network(X[:, :3])
    assert torch.allclose(network(X, mask)[:, :3], short)
    assert not network(X, mask)[:, 3:].any()
    with pytest.raises(TypeError, match="no convex program"):
        cf.lift(network)


@pytest.mark.parametrize("options", [{}, {"norm": True}, {"skip": True}, {"scaled": True, "norm": True, "skip": True}])
def test_softmax_attention_trains(options: dict[str, bool]) -> None:
    torch.manual_seed(0)
    X = torch.randn(20, 4, 3, dtype=torch.float64)
    network, Y = SoftmaxAttentionNetwork.random(3, 3, seed=2, **options), X.roll(1, 1)
    optimiser = torch.optim.AdamW(network.parameters(), lr=0.02)
    first = last = float((network(X) - Y).square().sum())
    for _ in range(40):
        optimiser.zero_grad()
        loss = (network(X) - Y).square().sum()
        loss.backward()
        optimiser.step()
        last = float(loss.detach())
    assert last < 0.9 * first


# ---------------------------------------------------------------------- files and errors


@KINDS
def test_solutions_and_networks_survive_files(stochastic: str, decay: str, tmp_path: Any) -> None:
    X, Y = small_data(12)
    solution = cf.solve(cf.Problem(head_of(stochastic, decay), X, Y, beta_ratio=0.2))
    for name, model in (("solution", solution), ("network", solution.network())):
        cf.save(model, tmp_path / name)
        back = cf.load(tmp_path / name)
        predict = (lambda m: m.predict(X)) if name == "solution" else (lambda m: m(torch.from_numpy(X)))
        assert torch.equal(predict(back), predict(model))
    cf.save(SoftmaxAttentionNetwork.random(2, 2, skip=True), tmp_path / "softmax")
    assert cf.load(tmp_path / "softmax").skip


def test_errors_say_what_to_do() -> None:
    X, Y = small_data(13)
    with pytest.raises(ValueError, match="activation='linear'"):
        cf.Problem(cf.heads.Attention("gated_relu"), X, Y, beta=1.0)
    with pytest.raises(ValueError, match="NP-hard"):
        cf.Problem(head_of("row", "l2"), X, Y, beta=1.0)
    with pytest.raises(ValueError, match="float64"):
        cf.Problem(head_of("row"), X, Y, beta=1.0, dtype=torch.float32)
    with pytest.raises(ValueError, match="unknown stochastic 'column'"):
        head_of("column")
    problem = cf.Problem(head_of("row"), X, Y, beta=1.0)
    wrong = PositionAttentionNetwork(torch.ones(1, 3) / 3, torch.ones(1, 2), torch.ones(1, 3, 2))
    with pytest.raises(ValueError, match="not a StochasticAttentionNetwork"):
        cf.certify(wrong, problem)
    loose = StochasticAttentionNetwork(torch.ones(1, 3, 3), torch.ones(1, 2), torch.ones(1, 2))
    with pytest.raises(ValueError, match="a row sums to 3"):
        cf.certify(loose, problem)
    with pytest.raises(ValueError, match="skip=True"):
        SoftmaxAttentionNetwork.random(3, 2, skip=True)


def test_float32_independent_heads_are_certified_in_float64() -> None:
    X, Y = small_data(14, N=20)
    solution = cf.solve(cf.Problem(head_of("independent"), X, Y, beta_ratio=0.1, dtype=torch.float32), tolerance=1e-4)
    assert solution.certificate.meets(1e-4)


def test_unequal_row_sums_of_a_small_pair_are_no_rounding():
    """Weights of a channel of large tokens are small; the heads of a network cannot have unequal rows there either."""
    X, Y = small_data(0, c=1)
    X[..., 1] *= 1e10
    Z = torch.zeros((3, 3, 2, 1), dtype=torch.float64)
    Z[:, 0, 0, 0] = 1.0
    problem = cf.Problem(head_of("row"), X, Y, beta=1.0)
    assert cf.certify(Weights(Z), problem).kind == "exact"
    Z[0, 1, 1, 0] = 1e-10
    assert cf.certify(Weights(Z), problem).kind == "none"

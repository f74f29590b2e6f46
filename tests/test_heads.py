"""Heads: operator, beta_max, recovery and lift over the table, and what networks promise."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import convexformer as cf
from cases import ALL_HEADS, EVEN_LOSSES, HEADS, LOSSES, MORE_HEADS, OPTIONS, random_data
from convexformer.gauges import GroupNorm
from convexformer.heads.base import HEADS as REGISTRY
from convexformer.heads.base import Head
from convexformer.networks import AttentionNetwork, LinearNetwork, train_in_simplex
from convexformer.testing import check_head
from convexformer.weights import Weights
from reference import blocks, program_of

CASES = pytest.mark.parametrize("case", HEADS.values(), ids=HEADS.keys())


def test_every_registered_head_has_a_case():
    met = {case.build(case.gates(np.random.default_rng(0), 4, 2)).name for case in ALL_HEADS.values()}
    assert met | {"auto", "feature", "kernel"} == set(REGISTRY)  # those three: test_portfolio.py


@CASES
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("option", OPTIONS)
def test_heads_keep_the_contract(case, loss, option):
    rng = np.random.default_rng(len(loss) + 7 * len(option))
    data = random_data(case, LOSSES[loss], option, rng)
    head = case.build(data.gates)
    check_head(head, data.X, data.Y, make_network=case.network(head), **data.options)


@pytest.mark.parametrize("case", MORE_HEADS.values(), ids=MORE_HEADS.keys())
@pytest.mark.parametrize("loss", EVEN_LOSSES)
@pytest.mark.parametrize("option", ["weights", "all"])
def test_the_other_heads_keep_the_contract(case, loss, option):
    option = option if case.masks or option == "weights" else "intercept"
    data = random_data(case, EVEN_LOSSES[loss], option, np.random.default_rng(8), n=6, s=4, d=2)
    head = case.build(data.gates)
    check_head(head, data.X, data.Y, make_network=case.network(head), **data.options)


@CASES
@settings(max_examples=25)
@given(
    n=st.integers(3, 8),
    s=st.integers(1, 4),
    d=st.integers(1, 4),
    scale=st.sampled_from([1e-3, 1.0, 1e3]),
    seed=st.integers(0, 10_000),
)
def test_operator_and_penalty_are_those_of_the_definition(case, n, s, d, scale, seed):
    rng = np.random.default_rng(seed)
    data = random_data(case, LOSSES["squared, 2 outputs"], "all", rng, n, s, d)
    X = scale * data.X
    problem = cf.Problem(case.build(data.gates), X, data.Y, beta=0.7, **data.options)
    weights = Weights(torch.from_numpy(rng.standard_normal(problem.operator.weight_shape)), torch.zeros(2).double())
    reference = program_of(case, type(data)(X, data.Y, data.options, data.gates), 0.7)
    assert problem.value(weights) == pytest.approx(reference.objective(*blocks(weights)), rel=1e-10)


@pytest.mark.parametrize("make", [cf.heads.Attention, cf.heads.MLP])
def test_gates_by_number_are_drawn_from_the_seed(make):
    X = np.random.default_rng(1).standard_normal((20, 3, 4))

    def features(seed):
        head = make("gated_relu", gates=np.int64(5), seed=seed)
        operator = cf.Problem(head, X, np.arange(20.0), beta=1.0).operator
        assert operator.weight_shape[0] == 5
        return operator.adjoint(torch.ones(20, 1).double())

    assert torch.equal(features(4), features(4))
    assert not torch.equal(features(4), features(5))


@pytest.mark.parametrize("case", ALL_HEADS.values(), ids=ALL_HEADS.keys())
def test_config_builds_the_same_head_again(case):
    data = random_data(case, EVEN_LOSSES["squared, 2 outputs"], "plain", np.random.default_rng(2), s=4, d=2)
    head = case.build(data.gates)
    twin = type(head)(**head.config())
    one, two = (cf.Problem(h, data.X, data.Y, beta_ratio=0.2, **data.options) for h in (head, twin))
    assert one.beta_max == two.beta_max


# ---------------------------------------------------------------------- recovered networks


def test_recovery_has_one_head_for_each_nonzero_group_and_none_for_zeros():
    Z = torch.zeros(3, 2, 4).double()
    Z[0, :, 1], Z[2, :, 3] = torch.tensor([3.0, 4.0]), torch.tensor([0.0, 2.0])
    problem = cf.Problem("attention", torch.ones(2, 3, 2), torch.ones(2, 4), beta=1.0)
    network = problem.head.recover(Weights(Z), problem.layout)
    assert network.w1.tolist() == [[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]]
    assert network.decay().item() == pytest.approx(7.0)
    for w2, w3 in zip(network.w2, network.w3, strict=True):
        assert w2.norm().item() == pytest.approx(w3.abs().sum().item())  # balanced


def test_recovery_with_ordinary_decay_has_one_head_for_each_singular_value():
    rng = np.random.default_rng(0)
    Z = torch.zeros(3, 4, 3).double()
    Z[1] = torch.from_numpy(np.outer(rng.standard_normal(4), rng.standard_normal(3)))
    Z[2] = torch.from_numpy(rng.standard_normal((4, 2)) @ rng.standard_normal((2, 3)))
    problem = cf.Problem(cf.heads.Attention(decay="l2"), torch.ones(2, 3, 4), torch.ones(2, 3), beta=1.0)
    network = problem.head.recover(Weights(Z), problem.layout)
    assert network.w1.argmax(1).tolist() == [1, 2, 2]
    assert torch.allclose(network.lift().Z, Z)


@pytest.mark.parametrize("name", [name for name, case in HEADS.items() if case.model != "linear"])
def test_splitting_a_head_in_two_changes_nothing(name):
    """The lift is many-to-one: two halves of a head have its outputs and its decay."""
    case = HEADS[name]
    data = random_data(case, LOSSES["squared, 2 outputs"], "plain", np.random.default_rng(3))
    head = case.build(data.gates)
    problem = cf.Problem(head, data.X, data.Y, beta_ratio=0.2, **data.options)
    network = cf.solve(problem, tolerance=1e-6).network()
    state = {key: value.clone() for key, value in network.state_dict().items()}
    for key, value in state.items():
        if key in ("w1", "w2", "w3", "gate_index"):
            whole = key == "gate_index" or (key == "w1" and "w3" in state)  # simplex weights are not shared out
            state[key] = torch.cat([value, value]) if whole else torch.cat([value, value]) * 0.5**0.5
    twin = type(network)(**state, **network.config())
    assert torch.allclose(twin(data.X), network(data.X))
    assert twin.decay().item() == pytest.approx(network.decay().item())
    assert torch.allclose(twin.lift().Z, network.lift().Z)


@pytest.mark.parametrize("activation", ["linear", "gated_relu"])
def test_a_network_trained_by_adam_is_certified_and_stays_in_the_simplex(activation):
    data = random_data(HEADS["attention l2"], LOSSES["squared, 2 outputs"], "plain", np.random.default_rng(4))
    head = cf.heads.Attention(activation, "l2", gates=4)
    problem = cf.Problem(head, data.X, data.Y, beta_ratio=0.2)
    network = train_in_simplex(head.random_network(problem.layout, 8))
    before = cf.certify(network, problem)
    optimiser = torch.optim.Adam(network.parameters(), 0.03)
    for _ in range(150):
        optimiser.zero_grad()
        loss = 0.5 * (network(data.X) - torch.from_numpy(data.Y)).square().sum() + problem.beta * network.decay()
        loss.backward()
        optimiser.step()
    after, optimum = cf.certify(network, problem), cf.solve(problem, tolerance=1e-8).objective
    assert after.primal < before.primal
    for proof in (before, after):
        assert proof.dual <= optimum <= proof.primal
        assert proof.gap >= proof.primal - optimum


def test_masked_tokens_change_no_network():
    for case in [case for case in ALL_HEADS.values() if case.masks]:
        data = random_data(case, EVEN_LOSSES["squared, 2 outputs"], "mask", np.random.default_rng(5), s=4, d=2)
        problem = cf.Problem(case.build(data.gates), data.X, data.Y, beta_ratio=0.2, **data.options)
        network = case.network(problem.head)(problem.layout, 0)
        mask = data.options["mask"]
        zeros, junk = np.where(mask[..., None], data.X, 0.0), np.where(mask[..., None], data.X, 1e9)
        assert torch.equal(network(zeros, mask), network(junk, mask))


@pytest.mark.parametrize("name", [name for name, case in MORE_HEADS.items() if not case.masks])
def test_heads_that_mix_tokens_by_position_refuse_masks(name):
    case = MORE_HEADS[name]
    data = random_data(case, EVEN_LOSSES["squared, 2 outputs"], "plain", np.random.default_rng(5), s=4, d=2)
    mask = np.ones(data.X.shape[:2], dtype=bool)
    cf.Problem(case.build(data.gates), data.X, data.Y, beta=1.0, mask=mask)  # hides nothing
    mask[0, -1] = False
    with pytest.raises(ValueError, match="mask has no meaning"):
        cf.Problem(case.build(data.gates), data.X, data.Y, beta=1.0, mask=mask)


def test_per_token_outputs_of_masked_tokens_are_zero():
    data = random_data(HEADS["mlp per token"], LOSSES["squared, 2 outputs"], "all", np.random.default_rng(6))
    problem = cf.Problem("mlp", data.X, data.Y, beta_ratio=0.1, **data.options)
    solution = cf.solve(problem)
    mask = data.options["mask"]
    for outputs in (solution.predict(data.X, mask), solution.network()(data.X, mask).detach()):
        assert tuple(outputs.shape) == data.Y.shape
        assert float(outputs[torch.from_numpy(~mask)].abs().max()) == 0.0


# ---------------------------------------------------------------------- networks of another head are refused


@pytest.mark.parametrize(
    ("network", "message"),
    [
        (LinearNetwork(torch.zeros(3, 1)), "LinearNetwork"),
        (AttentionNetwork(torch.eye(3), torch.zeros(3, 3), torch.zeros(3, 1), decay="l2"), "decay is 'l2'"),
        (AttentionNetwork(torch.eye(3), torch.zeros(3, 2), torch.zeros(3, 1)), r"sizes .*\(3, 2, 1\)"),
        (
            AttentionNetwork(
                torch.eye(3),
                torch.zeros(3, 3),
                torch.zeros(3, 1),
                u1=torch.ones(1, 3),
                u2=torch.ones(1, 3),
                gate_index=torch.zeros(3, dtype=torch.int64),
            ),
            "gates differ",
        ),
        (torch.nn.Linear(3, 1), "Linear"),
    ],
)
def test_a_foreign_network_is_refused_with_the_reason(network, message):
    problem = cf.Problem("attention", np.ones((4, 3, 3)), np.arange(4.0), beta_ratio=0.2)
    with pytest.raises(ValueError, match=message):
        cf.certify(network, problem)


def test_a_bias_is_refused_where_the_problem_has_no_intercept():
    rng = np.random.default_rng(0)
    X, y = rng.standard_normal((8, 3, 2)), 5 + rng.standard_normal(8)
    plain, shifted = (cf.Problem("attention", X, y, beta_ratio=0.2, intercept=flag) for flag in (False, True))
    solution = cf.solve(shifted)
    for thing in (solution, solution.weights, solution.network()):
        with pytest.raises(ValueError, match="intercept=True"):
            cf.certify(thing, plain)


def test_biases_of_the_parts_of_a_sum_count():
    rng = np.random.default_rng(0)
    X, Y = rng.standard_normal((20, 3, 4)), rng.standard_normal((20, 2))
    head = cf.heads.Sum([cf.heads.MLP(), cf.heads.FNO()])
    plain, shifted = (cf.Problem(head, X, Y, beta_ratio=0.1, intercept=flag) for flag in (False, True))
    network = cf.solve(shifted, tolerance=1e-8).network()
    first = network.parts[0]
    bias = torch.tensor([5.0, -1.0]).double()
    network.parts[0] = cf.networks.MLPNetwork(
        first.w1, first.w2, bias, per_token=first.per_token, squeeze=first.squeeze
    )
    with pytest.raises(ValueError, match="intercept=True"):
        cf.certify(network, plain)
    own = 0.5 * (network(torch.tensor(X)) - torch.tensor(Y)).square().sum() + shifted.beta * network.decay()
    assert cf.certify(network, shifted).primal == pytest.approx(float(own.detach()), rel=1e-12)
    assert torch.allclose(cf.lift(network).intercept, network.bias + bias)
    network.bias = None
    assert torch.equal(cf.lift(network).intercept, bias)


@pytest.mark.parametrize("case", ALL_HEADS.values(), ids=ALL_HEADS.keys())
def test_a_solution_serves_its_own_head_on_other_data(case, tmp_path):
    rng = np.random.default_rng(3)
    loss = EVEN_LOSSES[next(iter(EVEN_LOSSES))]
    data, other = (random_data(case, loss, "none", rng, n=n, s=4, d=2) for n in (6, 9))
    train = cf.Problem(case.build(data.gates), data.X, data.Y, beta_ratio=0.3, **data.options)
    solution = cf.solve(train, tolerance=1e-5)
    cf.save(solution, tmp_path / "solution")
    for one in (solution, cf.load(tmp_path / "solution")):
        for thing in (one, one.weights, one.weights.to(dtype=torch.float32)):
            fresh = cf.Problem(case.build(data.gates), data.X, data.Y, beta=train.beta, **data.options)
            assert cf.certify(thing, fresh).primal == pytest.approx(solution.objective, rel=1e-5)
            away = cf.Problem(case.build(data.gates), other.X, other.Y, beta=1.0, **other.options)
            assert cf.certify(thing, away).primal > 0
            cf.solve(away, tolerance=0.1, warm_start=thing)


SEEDED = [cf.heads.Attention, cf.heads.SelfAttention, cf.heads.MLPMixer, cf.heads.FNO, cf.heads.BlockFNO]
SEEDED += [cf.heads.MLP, cf.heads.PoolFormer, cf.heads.FNet]
STRANGERS = [
    *((make("gated_relu", gates=2, seed=0), make("gated_relu", gates=2, seed=1), "gates differ") for make in SEEDED),
    (cf.heads.MLP(), cf.heads.PoolFormer(), "head is 'mlp', not 'poolformer'"),
    (cf.heads.PoolFormer(window=3), cf.heads.PoolFormer(window=5), "mixing of tokens"),
    (cf.heads.MLP(), cf.heads.Linear(), "head is 'mlp'"),
    (cf.heads.FNO(), cf.heads.MLP(), "head is 'fno'"),
    (cf.heads.Attention(decay="l1"), cf.heads.Attention(decay="l2"), "decay is 'l1'"),
    (
        cf.heads.Sum([cf.heads.MLP("gated_relu", gates=2), "fno"]),
        cf.heads.Sum([cf.heads.MLP("gated_relu", gates=2, seed=1), "fno"]),
        "parts differ",
    ),
]


@pytest.mark.parametrize(("own", "other", "reason"), STRANGERS)
def test_a_solution_of_another_head_or_other_gates_is_refused(own, other, reason):
    rng = np.random.default_rng(4)
    X, Y = rng.standard_normal((8, 6, 4)), rng.standard_normal((8, 2))
    solution = cf.solve(cf.Problem(own, X, Y, beta_ratio=0.3), tolerance=1e-3)
    problem = cf.Problem(other, X, Y, beta_ratio=0.3)
    assert tuple(solution.weights.Z.shape) == tuple(problem.operator.weight_shape)
    for thing in (solution, solution.weights, solution.weights.to(dtype=torch.float32)):
        for use in (lambda t: cf.certify(t, problem), lambda t: cf.solve(problem, warm_start=t)):
            with pytest.raises(ValueError, match=f"solution of another problem, with a {own.name} head") as error:
                use(thing)
            assert reason in str(error.value)
            assert "solution.head" in str(error.value)


def test_a_pooled_solution_is_refused_where_targets_are_per_token():
    rng = np.random.default_rng(4)
    X, Y = rng.standard_normal((8, 6, 4)), rng.standard_normal((8, 6, 2))
    head = cf.heads.MLP()
    solution = cf.solve(cf.Problem(head, X, Y.mean(1), beta_ratio=0.3))
    with pytest.raises(ValueError, match="per token"):
        cf.certify(solution, cf.Problem(head, X, Y, beta_ratio=0.3))


def test_a_solution_in_other_channel_blocks_is_refused_and_its_network_is_not():
    rng = np.random.default_rng(5)
    X, Y = rng.standard_normal((8, 6, 3)), rng.standard_normal((8, 6, 2))
    one, two = cf.heads.BlockSelfAttention([[0], [1, 2]]), cf.heads.BlockSelfAttention([[0, 1], [2]])
    solution = cf.solve(cf.Problem(one, X, Y, beta_ratio=0.1), tolerance=1e-6)
    problem = cf.Problem(two, X, Y, beta_ratio=0.1)
    assert solution.weights.shape == tuple(problem.operator.weight_shape)
    for use in (lambda: cf.certify(solution, problem), lambda: cf.solve(problem, warm_start=solution)):
        with pytest.raises(ValueError, match="blocks of channels"):
            use()
    whole = cf.Problem("self_attention", X, Y, beta=problem.beta)
    network = solution.network()
    own = 0.5 * (network(torch.tensor(X)) - torch.tensor(Y)).square().sum() + whole.beta * network.decay()
    assert cf.certify(network, whole).primal == pytest.approx(float(own.detach()), rel=1e-9)
    assert cf.solve(whole, tolerance=1e-6, warm_start=network).certificate.relative_gap <= 1e-6


# ---------------------------------------------------------------------- a head of the user's own


class Reversed(Head):
    """Attention on tokens read from the last to the first; ``fault`` breaks one of its maps."""

    name, per_token, positional = "reversed", False, True

    def __init__(self, fault=None):
        self.inner, self.fault = cf.heads.Attention(), fault

    def operator(self, tokens, layout):
        return self.inner.operator(type(tokens)(tokens.X.flip(1), tokens.mask), layout)

    def penalty(self, tokens, layout):
        return GroupNorm("class_token" if self.fault != "penalty" else "token")

    def recover(self, weights, layout):
        Z = weights.Z if self.fault == "recover" else weights.Z.flip(0)
        return self.inner.recover(Weights(Z, weights.intercept), layout)

    def lift(self, network, layout):
        weights = self.inner.lift(network, layout)
        return weights if self.fault == "lift" else Weights(weights.Z.flip(0), weights.intercept)

    def config(self):
        return {}


def test_check_head_accepts_a_head_of_the_users_own_and_catches_its_faults():
    rng = np.random.default_rng(0)
    X, Y = rng.standard_normal((8, 3, 2)), rng.standard_normal((8, 2))
    check_head(Reversed(), X, Y)
    for fault, message in {"recover": "outputs", "penalty": "decay", "lift": "primal|lift"}.items():
        with pytest.raises(AssertionError, match=message):
            check_head(Reversed(fault), X, Y)

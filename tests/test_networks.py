"""Recovered networks as a user has them: masks, gradients, half precision, and the way back to the program."""

import numpy as np
import pytest
import torch

import convexformer as cf
from cases import ALL_HEADS, EVEN_LOSSES, MORE_HEADS, random_data
from convexformer.testing import check_head

every_head = pytest.mark.parametrize("name", ALL_HEADS)


def solved(name, seed=0):
    """A problem of the head with a mask where it takes one, its network, tokens with zeros for padding, and the mask."""
    case = ALL_HEADS[name]
    option = "all" if case.masks else "intercept"
    data = random_data(case, EVEN_LOSSES["squared, 2 outputs"], option, np.random.default_rng(seed), 6, 4, 2)
    problem = cf.Problem(case.build(data.gates), data.X, data.Y, beta_ratio=0.1, **data.options)
    mask = data.options.get("mask")
    X = torch.from_numpy(np.nan_to_num(data.X))
    return problem, cf.solve(problem).network(), X, None if mask is None else torch.from_numpy(mask)


@every_head
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_networks_run_in_lower_precision(name, dtype):
    _, network, X, mask = solved(name)
    outputs = network.to(dtype)(X, mask).detach()
    assert outputs.dtype == dtype
    expected = network.double()(X.to(dtype), mask).detach()  # of the rounded weights and tokens: those decide the gates
    error = float((outputs.double() - expected).abs().max() / expected.abs().max())
    assert error < 16 * torch.finfo(dtype).eps


@every_head
def test_gradients_reach_the_tokens(name):
    _, network, X, mask = solved(name)
    direction = torch.from_numpy(np.random.default_rng(1).standard_normal(tuple(X.shape)))
    live = X.clone().requires_grad_()
    network(live, mask).square().sum().backward()
    h = 1e-6
    ends = [float(network(X + sign * h * direction, mask).detach().square().sum()) for sign in (1, -1)]
    assert float((live.grad * direction).sum()) == pytest.approx((ends[0] - ends[1]) / (2 * h), rel=1e-5)
    if mask is not None:
        assert float(live.grad[~mask].abs().max()) == 0.0


def test_gradients_pass_standardisation_padding_and_single_tokens():
    rng = np.random.default_rng(2)
    X, y = rng.standard_normal((30, 4, 3)), rng.integers(0, 2, 30)
    network = cf.TokenClassifier(beta_ratio=0.05).fit(X, y).network_
    live = torch.from_numpy(X[:5, :3]).requires_grad_()
    outputs = network(live, torch.ones(5, 3))  # padded to four tokens
    outputs.sum().backward()
    assert float(live.grad.abs().max()) > 0
    assert torch.equal(network(list(live.detach())), outputs)
    flat = torch.from_numpy(X[:, 0]).requires_grad_()
    cf.solve(cf.Problem("mlp", X[:, 0], y, beta_ratio=0.05)).network()(flat).sum().backward()
    assert flat.grad.shape == flat.shape
    assert float(flat.grad.abs().max()) > 0


@pytest.mark.parametrize("name", [name for name, case in MORE_HEADS.items() if not case.masks])
def test_networks_that_mix_tokens_by_position_refuse_masks(name):
    _, network, X, _ = solved(name)
    mask = torch.ones(X.shape[:2], dtype=torch.bool)
    mask[0, -1] = False
    with pytest.raises(ValueError, match="mask"):
        network(X, mask)


def test_a_sum_leaves_masked_tokens_at_zero():
    rng = np.random.default_rng(3)
    X, Y = rng.standard_normal((9, 5, 3)), 3 + rng.standard_normal((9, 5, 2))
    mask = np.arange(5) < rng.integers(2, 5, 9)[:, None]
    head = cf.heads.Sum(["mlp", "poolformer"])
    solution = cf.solve(cf.Problem(head, X, Y, beta_ratio=0.1, mask=mask, intercept=True))
    expected, network = solution.predict(X, mask), solution.network()
    assert float(expected[torch.from_numpy(~mask)].abs().max()) == 0.0
    ragged = [torch.from_numpy(x[own]) for x, own in zip(X, mask, strict=True)]
    assert torch.allclose(network(X, mask), expected, atol=1e-12)
    assert torch.allclose(network(ragged), expected[:, : mask.sum(1).max()], atol=1e-12)


@every_head
def test_a_lifted_network_is_a_point_of_the_program(name):
    problem, network, *_ = solved(name)
    expected = cf.certify(network, problem)
    alone = [] if problem.head.name == "block_self_attention" else [cf.lift(network)]  # a network shows no blocks
    for weights in (*alone, cf.lift(network, problem)):
        assert tuple(weights.Z.shape) == tuple(problem.operator.weight_shape)
        assert cf.certify(weights, problem).primal == pytest.approx(expected.primal, rel=1e-9)


@pytest.mark.parametrize(
    "parts", [["mlp", "mlp_mixer"], ["mlp_mixer", "fnet"], ["poolformer", "mlp_mixer"]], ids="+".join
)
@pytest.mark.parametrize("targets", ["pooled", "tokens"])
def test_sums_with_a_mixer_keep_the_contract(parts, targets):
    rng, head = np.random.default_rng(4), cf.heads.Sum(parts)
    X, Y = rng.standard_normal((6, 4, 2)), rng.standard_normal((6, 2) if targets == "pooled" else (6, 4, 2))
    check_head(head, X, Y, make_network=lambda layout, seed: head.random_network(layout, 3, seed))
    problem = cf.Problem(head, X, Y, beta_ratio=0.1)
    solution = cf.solve(problem)
    assert cf.certify(cf.lift(solution.network()), problem).primal == pytest.approx(solution.objective, rel=1e-9)


def test_a_lift_separates_into_blocks_of_channels_when_it_knows_the_problem():
    rng = np.random.default_rng(5)
    X, y = np.zeros((8, 4, 4)), rng.integers(0, 2, 8)
    X[:, :2, :2], X[:, 2:, 2:] = rng.standard_normal((2, 8, 2, 2))
    problem = cf.Problem(cf.heads.BlockSelfAttention(cf.heads.channel_blocks(X)), X, y, beta_ratio=0.1)
    assert len(problem.head.blocks) == 2
    solution = cf.solve(problem)
    lifted = cf.lift(solution.network(), problem)
    assert cf.certify(lifted, problem).primal == pytest.approx(solution.objective, rel=1e-9)

"""Every architecture of the duality paper: its program, its network, its certificate."""

import math

import numpy as np
import pytest
import torch

import architectures as arch
import convexformer as cf
from convexformer.gauges import Factored

N, S, D, C = 5, 4, 2, 2
RNG = np.random.default_rng(7)
X = RNG.standard_normal((N, S, D))
TOKEN_TARGETS = RNG.standard_normal((N, S, C))
LABELS = np.array([0, 1, 1, 0, 1])
GATES = {
    "attention": RNG.standard_normal((2, D, D)),
    "mixer": RNG.standard_normal((2, S, S)),
    "fno": RNG.standard_normal((2, S, D)),
    "block": RNG.standard_normal((2, 2, S, D // 2)),
    "token": RNG.standard_normal((3, D)),
}
GATED = "gated_relu"
POOL, POOL_GRID, FOURIER = arch.local_means(X, 3, (S,)), arch.local_means(X, 3, (2, 2)), arch.fourier_tokens(X)

# name -> the head, and the same architecture from the definitions
CASES = {
    "self_attention": (cf.heads.SelfAttention(), [arch.self_attention(X, C)]),
    "self_attention gated": (
        cf.heads.SelfAttention(GATED, gates=GATES["attention"]),
        [arch.self_attention(X, C, H) for H in GATES["attention"]],
    ),
    "mlp_mixer": (cf.heads.MLPMixer(), [arch.mixer(X, C)]),
    "mlp_mixer gated": (
        cf.heads.MLPMixer(GATED, gates=GATES["mixer"]),
        [arch.mixer(X, C, H) for H in GATES["mixer"]],
    ),
    "fno": (cf.heads.FNO(), [arch.fourier(X, C, (S,))]),
    "fno 2-D": (cf.heads.FNO(grid=(2, 2)), [arch.fourier(X, C, (2, 2))]),
    "fno gated": (cf.heads.FNO(GATED, gates=GATES["fno"]), [arch.fourier(X, C, (S,), h) for h in GATES["fno"]]),
    "fno gated 2-D": (
        cf.heads.FNO(GATED, grid=(2, 2), gates=GATES["fno"]),
        [arch.fourier(X, C, (2, 2), h) for h in GATES["fno"]],
    ),
    "block_fno": (cf.heads.BlockFNO(blocks=2), [arch.fourier(X, C, (S,), None, b, 2) for b in range(2)]),
    "block_fno gated": (
        cf.heads.BlockFNO(GATED, blocks=2, grid=(2, 2), gates=GATES["block"]),
        [arch.fourier(X, C, (2, 2), h, b, 2) for b in range(2) for h in GATES["block"][b]],
    ),
    "poolformer": (cf.heads.PoolFormer(), [arch.token_mlp(POOL, C)]),
    "poolformer gated 2-D": (
        cf.heads.PoolFormer(GATED, grid=(2, 2), gates=GATES["token"]),
        [arch.token_mlp(POOL_GRID, C, h) for h in GATES["token"]],
    ),
    "fnet": (cf.heads.FNet(), [arch.token_mlp(FOURIER, C)]),
    "fnet gated": (
        cf.heads.FNet(GATED, gates=GATES["token"]),
        [arch.token_mlp(FOURIER, C, h) for h in GATES["token"]],
    ),
    "mlp": (cf.heads.MLP(), [arch.token_mlp(X, C)]),
    "mlp gated": (cf.heads.MLP(GATED, gates=GATES["token"]), [arch.token_mlp(X, C, h) for h in GATES["token"]]),
    "fno + mlp": (cf.heads.Sum(["fno", "mlp"]), [arch.fourier(X, C, (S,)), arch.token_mlp(X, C)]),
}
pytestmark = pytest.mark.parametrize("name", CASES)
TARGETS = pytest.mark.parametrize("pooled", [False, True], ids=["tokens", "pooled"])


def problem_of(name, pooled, **options):
    return cf.Problem(CASES[name][0], X, LABELS if pooled else TOKEN_TARGETS, **options)


@TARGETS
@pytest.mark.parametrize("solver", ["fista", "staircase"])
def test_the_optimum_of_each_architecture_is_that_of_cvxpy(name, pooled, solver):
    problem = problem_of(name, pooled, beta_ratio=0.15)
    if not isinstance(problem.penalty, Factored) and solver == "staircase":
        solver = "auto"  # sums of heads have no common factors
    solution = cf.solve(problem, tolerance=1e-7, solver=solver)
    targets = np.eye(C)[LABELS] if pooled else TOKEN_TARGETS
    best = arch.optimum(CASES[name][1], targets, problem.beta, pooled)
    assert solution.status is cf.Status.CONVERGED
    assert solution.certificate.kind == "exact"
    assert solution.objective == pytest.approx(best, rel=1e-5)
    assert solution.certificate.dual <= best * (1 + 1e-7)
    network = solution.network()
    outputs = network(torch.from_numpy(X))
    assert torch.allclose(outputs, solution.predict(X), atol=1e-8)
    assert cf.certify(network, problem).primal == pytest.approx(solution.objective, rel=1e-9)


@TARGETS
def test_beta_max_is_the_spectral_norm_of_the_dense_construction(name, pooled):
    problem = problem_of(name, pooled, beta=1.0)
    gradient = (1 / C - np.eye(C)[LABELS]) if pooled else -TOKEN_TARGETS
    assert problem.beta_max == pytest.approx(arch.beta_max(CASES[name][1], gradient, pooled), rel=1e-10)
    above = cf.solve(problem.with_beta(problem.beta_max * (1 + 1e-10)))
    assert float(above.dense().abs().max()) == 0.0
    assert above.certificate.relative_gap < 1e-8


@TARGETS
def test_a_random_network_lifts_to_the_same_outputs_and_no_more_penalty(name, pooled):
    head, problem = CASES[name][0], problem_of(name, pooled, beta_ratio=0.3)
    network = head.random_network(problem.layout, 6, seed=3)
    lifted = head.lift(network, problem.layout)
    assert torch.allclose(
        network(torch.from_numpy(X)).reshape(problem.objective.targets.shape),
        problem.objective.outputs(lifted),
        atol=1e-10,
    )
    assert float(problem.penalty.value(lifted.Z)) <= float(network.decay().detach()) * (1 + 1e-10)
    found = cf.certify(network, problem)
    best = cf.solve(problem, tolerance=1e-8).objective
    assert found.primal - best <= found.gap * (1 + 1e-9)
    assert found.dual <= best * (1 + 1e-9)


def test_files_keep_every_architecture(name, tmp_path):
    problem = problem_of(name, True, beta_ratio=0.2, intercept=True)
    for solver in ("fista", "staircase" if isinstance(problem.penalty, Factored) else "auto"):
        solution = cf.solve(problem, tolerance=1e-6, solver=solver)
        back = cf.load(cf.save(solution, tmp_path / solver))
        assert torch.equal(back.predict(X), solution.predict(X))
        assert cf.certify(back, problem).primal == pytest.approx(solution.objective, rel=1e-12)
        network = cf.load(cf.save(solution.network(), tmp_path / f"{solver}-network"))
        assert torch.allclose(network(torch.from_numpy(X)), solution.predict(X), atol=1e-8)


def test_masks_work_where_they_make_sense_and_are_refused_elsewhere(name):
    head = CASES[name][0]
    mask = np.ones((N, S), dtype=bool)
    mask[1, 2:] = False
    if not head.masks:
        with pytest.raises(ValueError, match="mask has no meaning"):
            cf.Problem(head, X, LABELS, beta_ratio=0.2, mask=mask)
        return
    junk = np.where(mask[..., None], X, np.nan)
    solution = cf.solve(cf.Problem(head, junk, LABELS, beta_ratio=0.2, mask=mask), tolerance=1e-8)
    outputs = solution.predict(junk, mask=mask)
    assert torch.allclose(solution.network()(torch.from_numpy(X), torch.from_numpy(mask)), outputs, atol=1e-8)
    if not head.positional:  # a masked sample is a shorter sample
        assert torch.allclose(solution.predict(X[1:2, :2]), outputs[1:2], atol=1e-10)
    assert math.isfinite(solution.objective)

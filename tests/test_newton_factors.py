"""Newton steps on the factors of nuclear-norm programs: Hessians, preconditioners, and small betas on every head."""

import warnings

import numpy as np
import pytest
import torch

import convexformer as cf
from convexformer.heads.base import Head
from convexformer.operators import LowRank
from convexformer.solvers import SOLVERS
from convexformer.solvers.staircase import curvature as curvature_module
from convexformer.solvers.staircase.bursts import point_at
from convexformer.solvers.staircase.curvature import Curvature
from convexformer.solvers.staircase.frames import Frame, Frames, Products
from convexformer.solvers.staircase.growth import normal_pairs, prune
from convexformer.solvers.staircase.newton import _gradient
from convexformer.solvers.staircase.options import StaircaseOptions
from convexformer.solvers.staircase.preconditioner import Preconditioner
from convexformer.weights import Weights

RNG = np.random.default_rng(0)
X = RNG.standard_normal((40, 4, 4)) / np.arange(1, 5) ** 2  # the spectrum of the channels falls as 1/k^4
LABELS = RNG.integers(0, 3, 40)
TOKENS = RNG.standard_normal((40, 4, 2))

HEADS: dict[str, Head] = {
    "mlp": cf.heads.MLP(),
    "gated mlp": cf.heads.MLP(activation="gated_relu", gates=3),
    "poolformer": cf.heads.PoolFormer(),
    "fnet": cf.heads.FNet(),
    "fno": cf.heads.FNO(),
    "gated fno": cf.heads.FNO(activation="gated_relu", gates=2),
    "block_fno": cf.heads.BlockFNO(blocks=2),
    "mixer": cf.heads.MLPMixer(),
    "gated mixer": cf.heads.MLPMixer(activation="gated_relu", gates=2),
    "self_attention": cf.heads.SelfAttention(),
    "gated self_attention": cf.heads.SelfAttention(activation="gated_relu", gates=2),
    "attention": cf.heads.Attention(decay="l2"),
    "gated attention": cf.heads.Attention(decay="l2", activation="gated_relu", gates=3),
}
NO_OUTPUT_A_TOKEN = ("attention", "gated attention")  # their programs for such targets are others
PER_TOKEN = [name for name, head in HEADS.items() if head.per_token and name not in NO_OUTPUT_A_TOKEN]


def labels_problem(name, ratio=0.1, **options):
    classes = LABELS % 2 if name == "block_fno" else LABELS
    return cf.Problem(HEADS[name], X, classes, beta_ratio=ratio, loss="cross_entropy", intercept=True, **options)


def some_point(problem, terms=5, seed=0):
    """Balanced random factors, in random blocks, with the best intercept."""
    objective = problem.objective.factored()
    g = torch.Generator().manual_seed(seed)
    *lead, p, q = objective.weight_shape
    block = torch.randint(0, max(1, int(np.prod(lead))), (terms,), generator=g)
    U, V = (0.3 * torch.randn((terms, n), generator=g, dtype=torch.float64) for n in (p, q))
    Z = LowRank(U, V, block, objective.weight_shape).balanced()
    return objective, point_at(objective, Z, objective.apply(Z), None)


@pytest.mark.parametrize("loss", ["cross_entropy", "squared", "huber"])
@pytest.mark.parametrize("name", ["mlp", "gated mlp", "gated fno", "mixer", "self_attention", "gated self_attention"])
def test_products_are_the_curvature_along_the_path_of_a_step_with_the_intercept_following(monkeypatch, name, loss):
    monkeypatch.setattr(curvature_module, "CROSS_SHARE", np.inf)  # cross terms as they are
    weights = 0.5 + np.random.default_rng(1).random(40)
    Y = LABELS if loss == "cross_entropy" else TOKENS[:, 0]
    problem = cf.Problem(HEADS[name], X, Y, beta=0.3, loss=loss, intercept=True, sample_weight=weights)
    objective, point = some_point(problem)
    curvature = Curvature(objective, point)
    g = torch.Generator().manual_seed(1)
    step = [torch.randn(part.shape, dtype=torch.float64, generator=g) for part in (point.Z.U, point.Z.V)]
    loose = curvature.join(*step)
    D, E = curvature._stacked(loose)
    D, _ = curvature._outside(
        D, E
    )  # the same coefficients in both spans: other factors of the same step only cost more
    x = torch.cat([(D + (E @ curvature._unit_V.mT) @ curvature._unit_U).flatten(), E.flatten()])

    def value(t, x=x):
        Z, crossed = curvature.moved(t * x)
        assert not crossed
        outputs = objective.apply(Z)
        predicted = point.outputs + t * curvature.outputs_along(x) + t * t * curvature.outputs_across(x)
        assert torch.allclose(outputs, predicted, atol=30 * abs(t) ** 3 * float(outputs.abs().max()) + 1e-9)
        return float(point_at(objective, Z.balanced(), outputs, point.evaluation.intercept).value)

    h = 2e-4
    along = _gradient(objective, point)
    slope = float(curvature.join(along.U, along.V) @ x)
    assert (value(h) - value(-h)) / (2 * h) == pytest.approx(slope, rel=1e-3, abs=1e-3)
    bend = (value(h) + value(-h) - 2 * value(0.0)) / h**2
    assert float(x @ curvature.product(x)[0]) == pytest.approx(bend, rel=1e-2)
    bend = (value(h, loose) + value(-h, loose) - 2 * value(0.0)) / h**2
    assert float(loose @ curvature.product(loose)[0]) >= 0.99 * bend


@pytest.mark.parametrize("name", ["mlp", "gated mlp", "attention", "gated attention", "self_attention"])
def test_turned_operators_are_the_same_map_along_the_principal_axes(name):
    objective, point = some_point(labels_problem(name))
    products = Products.of(objective, torch.float64)
    assert products.turn is not None
    there = products.enter(point.Z)
    assert torch.allclose(products.objective.apply(there), point.outputs)
    assert torch.allclose(products.leave(there).dense(), point.Z.dense())
    turned = Products.of(products.objective, torch.float64)
    rows = turned.turn.rows.turns[0]  # the axes are principal now: nothing is left to turn but signs and order
    assert torch.allclose(rows.abs().amax(-1), torch.ones(()).double(), atol=1e-6)


def test_products_touch_the_tokens_in_use_alone():
    rng = np.random.default_rng(0)
    problem = cf.Problem(HEADS["attention"], rng.standard_normal((40, 12, 4)), LABELS, beta_ratio=0.1)
    objective = problem.objective.factored()
    Z = LowRank(*(0.3 * torch.randn((3, n), dtype=torch.float64) for n in (4, 3)), torch.tensor([2, 2, 7]), (12, 4, 3))
    Z = Z.balanced()
    point = point_at(objective, Z, objective.apply(Z), None)
    curvature = Curvature(objective, point)
    assert curvature._view.objective.operator.weight_shape == (2, 4, 3)
    x = curvature.join(Z.U, Z.V)
    assert torch.allclose(curvature.outputs_along(x), 2 * point.outputs)
    with_all = Curvature(objective, point)
    with_all._view = type(curvature._view)(objective, curvature._stack, few=0.0)
    assert with_all._view.objective is objective
    assert torch.allclose(with_all.product(x)[0], curvature.product(x)[0])


@pytest.mark.parametrize("name", ["mixer", "self_attention", "gated self_attention"])
def test_products_are_the_same_by_dense_matrices_by_formed_cross_terms_and_by_factors(monkeypatch, name):
    monkeypatch.setattr(curvature_module, "CROSS_SHARE", np.inf)
    objective, point = some_point(labels_problem(name))
    g = torch.Generator().manual_seed(2)
    step = [torch.randn(part.shape, generator=g, dtype=torch.float64) for part in (point.Z.U, point.Z.V)]
    found = []
    for dense, small in ((True, 0), (False, curvature_module.SMALL_CROSS), (False, 0)):
        monkeypatch.setattr(type(objective.operator), "dense_pays", lambda operator, m, dense=dense: dense)
        monkeypatch.setattr(curvature_module, "SMALL_CROSS", small)
        curvature = Curvature(objective, point)
        assert (curvature._M is None) == (not dense and not small)
        found.append(curvature.product(curvature.join(*step)))
    for other in found[1:]:
        assert torch.allclose(other[0], found[0][0], rtol=1e-10, atol=1e-10)
        assert torch.allclose(other[1], found[0][1], rtol=1e-10, atol=1e-12)


def test_terms_that_a_step_turns_against_themselves_are_left_out():
    objective, point = some_point(labels_problem("mlp"), terms=3)
    curvature = Curvature(objective, point)
    D = torch.zeros_like(point.Z.U)
    D[-1] = -3 * point.Z.U[-1]  # the singular value would become negative
    moved, crossed = curvature.moved(curvature.join(D, torch.zeros_like(point.Z.V)))
    assert crossed
    assert torch.allclose(moved.dense(), point.Z.select(torch.arange(point.Z.n_terms) < point.Z.n_terms - 1).dense())


def test_growth_asks_for_what_newton_steps_cannot_do():
    objective, point = some_point(labels_problem("gated mlp"), terms=4)
    M = objective.dual_matrix(point.evaluation.V)
    sigma, U, V, block = normal_pairs(M, point.Z, 3)
    for b, own in point.Z.spans():
        assert float((U[block == b] @ point.Z.U[own].T).abs().max()) < 1e-9
        assert float((V[block == b] @ point.Z.V[own].T).abs().max()) < 1e-9
    assert torch.allclose(((M.dense()[block] @ V[:, :, None])[:, :, 0] * U).sum(1), sigma)


@pytest.mark.parametrize("name", list(HEADS))
def test_preconditioners_are_symmetric_and_positive(name):
    objective, point = some_point(labels_problem(name))
    P = Preconditioner(Frames.of(objective), Curvature(objective, point), probes=2)
    g = torch.Generator().manual_seed(2)
    parts = [torch.randn(part.shape, generator=g, dtype=torch.float64) for part in (point.Z.U, point.Z.V) * 2]
    x, y = P.curvature.join(*parts[:2]), P.curvature.join(*parts[2:])
    assert float(x @ P(y)) == pytest.approx(float(y @ P(x)), rel=1e-9)
    assert float(x @ P(x)) > 0


def test_axes_turn_there_and_back_and_the_probed_diagonal_is_that_of_the_hessian():
    objective, point = some_point(labels_problem("attention"))
    frames = Frames.of(objective)
    turned = frames.rows.to_axes(point.Z.U, point.Z.block)
    assert torch.allclose(frames.rows.from_axes(turned, point.Z.block), point.Z.U)
    assert torch.allclose(turned.norm(dim=1), point.Z.U.norm(dim=1))
    assert Frame.of(()).sizes == ()
    curvature = Curvature(objective, point, cross=0.0)
    found = curvature.squares(4000)
    probed = torch.stack([torch.cat([a.flatten(), b.flatten()]).square() for a, b in found]).mean(0)
    free = cf.Problem(HEADS["attention"], X, LABELS, beta=1e-12, loss="cross_entropy").objective.factored()
    fixed = point_at(free, point.Z, point.outputs, None)
    fixed = type(fixed)(fixed.Z, fixed.outputs, point.evaluation, fixed.value)
    plain = Curvature(free, fixed, cross=0.0)
    cut, unit = point.Z.U.numel(), torch.eye(len(probed), dtype=torch.float64)
    rows = [plain.join(row[:cut].view_as(point.Z.U), row[cut:].view_as(point.Z.V)) for row in unit]
    diagonal = torch.stack([row @ plain.product(row)[0] for row in rows])
    assert torch.allclose(probed, diagonal, rtol=0.25, atol=0.02 * float(diagonal.max()))


@pytest.mark.parametrize("name", list(HEADS))
def test_small_betas_on_ill_conditioned_tokens_agree_with_fista(name):
    problem = labels_problem(name, ratio=0.05)
    ours = cf.solve(problem, tolerance=1e-6, solver="staircase")
    assert ours.status is cf.Status.CONVERGED
    assert ours.certificate.relative_gap <= 1e-6
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        other = cf.solve(problem, tolerance=1e-4, solver="fista", max_iter=500)
    assert ours.objective <= other.objective * (1 + 2e-6)
    assert ours.objective >= other.certificate.dual * (1 - 2e-6)


@pytest.mark.parametrize("name", PER_TOKEN)
def test_targets_per_token_and_the_squared_loss(name):
    problem = cf.Problem(HEADS[name], X, TOKENS, beta_ratio=0.02)
    ours = cf.solve(problem, tolerance=1e-7, solver="staircase")
    assert ours.status is cf.Status.CONVERGED
    assert cf.certify(ours.weights, problem).relative_gap <= 1e-7


@pytest.mark.parametrize("name", ["mlp", "gated mlp", "poolformer", "self_attention", "attention"])
def test_masks_and_weights_of_samples(name):
    mask = np.ones((40, 4), bool)
    mask[::3, 3:] = False
    rng = np.random.default_rng(3)
    problem = labels_problem(name, ratio=0.02, mask=mask, sample_weight=rng.exponential(size=40))
    ours = cf.solve(problem, tolerance=1e-7, solver="staircase")
    assert ours.certificate.relative_gap <= 1e-7


@pytest.mark.parametrize("classes", [2, 10])
def test_tiny_betas_that_first_order_methods_never_reach(classes):
    """The slow corner: 300 samples, channels that fall as 1/k^2, beta a thousandth of its largest value and less."""
    rng = np.random.default_rng(0)
    tokens, W = rng.normal(size=(300, 8, 24)), rng.normal(size=(24, classes))
    y = (tokens.mean(1) @ W + 0.3 * rng.gumbel(size=(300, classes)) * 3**0.5).argmax(1)
    tokens = tokens / np.arange(1, 25) ** 2
    problem = cf.Problem("mlp", tokens, y, beta_ratio=1e-4, loss="cross_entropy", intercept=True)
    solution = cf.solve(problem, tolerance=1e-5, max_iter=3000)
    assert solution.status is cf.Status.CONVERGED
    assert solution.solver == "fista, staircase"  # whose pace promises no end is relieved


def test_wide_tokens_take_products_in_float32_and_answers_in_float64(monkeypatch):
    rng = np.random.default_rng(4)
    tokens, y = rng.standard_normal((300, 2, 120)) / np.arange(1, 121), rng.integers(0, 4, 300)
    problem = cf.Problem("mlp", tokens, y, beta_ratio=0.01, loss="cross_entropy", intercept=True)
    seen = []
    whole = Curvature.product
    monkeypatch.setattr(Curvature, "product", lambda self, x: seen.append(self.V.dtype) or whole(self, x))
    solution = cf.solve(problem, tolerance=1e-9, solver="staircase")
    assert set(seen) == {torch.float32}
    assert solution.weights.Z.dtype == torch.float64
    assert solution.certificate.relative_gap <= 1e-9


def test_bursts_that_make_no_headway_give_way_to_newton(monkeypatch):
    problem = labels_problem("self_attention", ratio=0.01)
    monkeypatch.setitem(
        SOLVERS, "staircase", type(SOLVERS["staircase"])(StaircaseOptions(shortest_burst=2, longest_burst=3))
    )
    solution = cf.solve(problem, tolerance=1e-7, solver="staircase")
    assert solution.certificate.relative_gap <= 1e-7


def test_dying_terms_are_dropped_and_living_ones_kept():
    problem = labels_problem("mlp", ratio=0.2)
    solution = cf.solve(problem, tolerance=1e-8, solver="staircase")
    objective, Z = problem.objective.factored(), LowRank.of(solution.dense())
    g = torch.Generator().manual_seed(0)
    noise = [1e-2 * torch.randn((1, n), generator=g, dtype=torch.float64) for n in Z.shape]
    more = Z.append(*noise, torch.zeros(1, dtype=torch.int64)).balanced()
    point = point_at(objective, more, objective.apply(more), solution.weights.intercept)
    pruned = prune(objective, point, StaircaseOptions())
    assert pruned.Z.n_terms == Z.n_terms
    assert float(pruned.value) <= float(point.value)
    own = point_at(objective, Z.balanced(), objective.apply(Z), solution.weights.intercept)
    assert prune(objective, own, StaircaseOptions()) is own


def test_a_tolerance_below_rounding_ends_with_an_honest_stall():
    problem = labels_problem("mlp", ratio=0.05)
    with pytest.warns(UserWarning, match="stalled|progress|precision|rounding"):
        solution = cf.solve(problem, tolerance=1e-17, solver="staircase", max_iter=5000)
    assert solution.status is cf.Status.STALLED
    assert solution.certificate.relative_gap < 1e-9


def test_iterations_are_a_limit():
    problem = labels_problem("mlp", ratio=0.01)
    with pytest.warns(UserWarning, match="max_iter"):
        solution = cf.solve(problem, tolerance=1e-12, solver="staircase", max_iter=7)
    assert solution.n_iter == 7
    assert solution.status is cf.Status.MAX_ITER


def test_warm_starts_at_small_betas_cost_little():
    problem = labels_problem("mlp", ratio=0.01)
    near = cf.solve(problem.with_beta(1.5 * problem.beta), tolerance=1e-6, solver="staircase")
    cold = cf.solve(problem, tolerance=1e-6, solver="staircase")
    warm = cf.solve(problem, tolerance=1e-6, solver="staircase", warm_start=near)
    assert warm.n_iter < cold.n_iter
    assert warm.objective == pytest.approx(cold.objective, rel=2e-6)
    again = cf.solve(problem, tolerance=1e-6, solver="staircase", warm_start=Weights(warm.dense()))
    assert again.objective == pytest.approx(cold.objective, rel=2e-6)


def test_gates_of_full_rank_at_small_betas_take_few_products():
    """Blocks of full rank, and terms that come and go: Newton steps must not be cut short by small terms."""
    tokens, y = cf.data.digits(patch=2)
    tokens, y = tokens[:225].numpy(), y[:225].numpy()
    tokens = (tokens - tokens.mean((0, 1))) / tokens.std((0, 1))
    head = cf.heads.MLP(activation="gated_relu", gates=4)
    problem = cf.Problem(head, tokens, y, beta_ratio=1e-3, loss="cross_entropy", intercept=True)
    solution = cf.solve(problem, tolerance=1e-3, solver="staircase", max_iter=1600)
    assert solution.status is cf.Status.CONVERGED

"""Solving: warm starts, callbacks, limits, Ctrl-C, checkpoints, determinism."""

import math
import warnings

import numpy as np
import pytest
import torch
from sklearn.exceptions import ConvergenceWarning

import convexformer as cf
from cases import HEADS, LOSSES, random_data
from convexformer.certificates import certificate
from convexformer.gauges import Proximal, Sliced
from convexformer.solvers.auto import AutoOptions, select
from convexformer.solvers.checkpoint import Checkpoint
from convexformer.weights import Weights

RNG = np.random.default_rng(20)
X = RNG.standard_normal((40, 4, 3))
LABELS = RNG.integers(0, 3, 40)


def problem(beta_ratio=0.02, **options):
    return cf.Problem("attention", X, LABELS, beta_ratio=beta_ratio, **options)


def numbers(history):
    """A history without its clock."""
    return [(r.iteration, r.primal, r.dual, r.relative_gap) for r in history]


def assert_same(one, two):
    assert torch.equal(one.weights.Z, two.weights.Z)
    assert numbers(one.history) == numbers(two.history)
    assert one.certificate == two.certificate


# ---------------------------------------------------------------------- the ordinary solve


def test_a_solution_carries_everything():
    solution = cf.solve(problem(), tolerance=1e-5, solver="fista")
    assert solution.status is cf.Status.CONVERGED
    assert str(solution.status) == "the relative duality gap is below the tolerance"
    assert solution.objective == solution.certificate.primal
    assert solution.certificate.relative_gap <= 1e-5
    assert tuple(solution.dense().shape) == (4, 3, 3)
    assert tuple(solution.token_norms().shape) == (4,)
    assert solution.solver == "fista"
    seen = [r.iteration for r in solution.history]  # every ten, and where a candidate was found
    assert seen == sorted(set(seen))
    assert (seen[0], seen[1], seen[-1]) == (0, 10, solution.n_iter)
    assert solution.history[0].relative_gap > solution.history[-1].relative_gap
    assert all(r.relative_gap == pytest.approx((r.primal - r.dual) / r.primal) for r in solution.history)


def test_two_solves_are_identical():
    assert_same(cf.solve(problem(intercept=True), tolerance=1e-6), cf.solve(problem(intercept=True), tolerance=1e-6))


def test_naming_the_solver_changes_nothing():
    assert_same(cf.solve(problem()), cf.solve(problem(), solver="fista"))


@pytest.mark.parametrize("case", HEADS.values(), ids=HEADS.keys())
def test_the_two_solvers_agree_where_both_can_solve(case):
    data = random_data(case, LOSSES["cross_entropy"], "all", np.random.default_rng(1))
    built = cf.Problem(case.build(data.gates), data.X, data.Y, beta_ratio=0.1, **data.options)
    if case.penalty != "nuclear":
        with pytest.raises(ValueError, match="'fista'"):
            cf.solve(built, solver="staircase")
        return
    one, two = (cf.solve(built, tolerance=1e-7, solver=solver) for solver in ("fista", "staircase"))
    assert two.objective == pytest.approx(one.objective, rel=2e-7)
    outputs = two.network()(data.X, data.options["mask"]).detach()
    assert torch.allclose(two.predict(data.X, data.options["mask"]), outputs, atol=1e-8)


def test_the_progress_bar_changes_nothing(capsys):
    assert_same(cf.solve(problem()), cf.solve(problem(), progress=True))


def test_predict_gives_the_shape_of_the_targets():
    for name, case in HEADS.items():
        for loss, shape in {"squared": (9,), "squared, 2 outputs": (9, 2), "cross_entropy": (9, 3)}.items():
            data = random_data(case, LOSSES[loss], "plain", np.random.default_rng(0))
            built = cf.Problem(case.build(data.gates), data.X, data.Y, beta_ratio=0.2, **data.options)
            expected = (9, 3, max(shape[1:], default=1)) if case.per_token else shape
            assert tuple(cf.solve(built, tolerance=1e-2).predict(data.X).shape) == expected, name


def test_tolerance_is_met_and_not_overdone():
    iterations = [cf.solve(problem(), tolerance=10.0**-k).n_iter for k in (1, 3, 5, 7)]
    assert iterations == sorted(set(iterations))


# ---------------------------------------------------------------------- warm starts


def test_a_warm_start_saves_iterations():
    first = cf.solve(problem(0.022), tolerance=1e-6)
    cold, warm = cf.solve(problem(), tolerance=1e-6), cf.solve(problem(), tolerance=1e-6, warm_start=first)
    assert warm.n_iter < cold.n_iter
    assert warm.objective == pytest.approx(cold.objective, rel=1e-6)


@pytest.mark.parametrize("intercept", [False, True])
def test_a_solution_its_weights_and_its_network_are_starts_that_are_done(intercept):
    built = problem(intercept=intercept)
    solution = cf.solve(built, tolerance=1e-5)
    for start in (solution, solution.weights, solution.network(), solution.weights.Z):
        again = cf.solve(built, tolerance=1.01e-5, warm_start=start)
        assert again.n_iter == 0
        assert again.objective == pytest.approx(solution.objective, rel=1e-9)


def test_a_warm_start_with_an_intercept_serves_a_problem_without():
    start = cf.solve(problem(intercept=True))
    solution = cf.solve(problem(), warm_start=start)
    assert solution.weights.intercept is None
    assert solution.status is cf.Status.CONVERGED


# ---------------------------------------------------------------------- callbacks and Ctrl-C


def test_the_callback_sees_the_history_and_certified_points():
    seen = []
    built = problem()
    solution = cf.solve(built, callback=lambda record, weights: seen.append((record, weights)))
    assert [record for record, _ in seen] == list(solution.history)
    for record, weights in seen:
        assert certificate(built.objective, weights).primal == pytest.approx(record.primal, rel=1e-12)


def test_a_callback_that_returns_true_stops_the_solve():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stop = {"callback": lambda record, _: record.iteration == 20}
        solution = cf.solve(problem(), tolerance=1e-9, solver="fista", **stop)
    assert solution.status is cf.Status.INTERRUPTED
    assert solution.n_iter == 20
    assert solution.history[-1].iteration == 20


@pytest.mark.parametrize("true", [np.bool_(True), torch.tensor(True)], ids=lambda value: type(value).__name__)
def test_any_librarys_true_stops_the_solve(true):
    assert cf.solve(problem(), tolerance=1e-9, callback=lambda record, _: true).status is cf.Status.INTERRUPTED


def test_a_callback_that_returns_something_else_does_not():
    solution = cf.solve(problem(), callback=lambda record, weights: "yes")
    assert solution.status is cf.Status.CONVERGED


def interrupt_at(iteration):
    def callback(record, weights):
        if record.iteration == iteration:
            raise KeyboardInterrupt

    return callback


@pytest.mark.parametrize("iteration", [0, 20])
def test_ctrl_c_returns_the_best_point_so_far_certified(iteration):
    built = problem()
    with pytest.warns(ConvergenceWarning, match="interrupted") as caught:
        solution = cf.solve(built, tolerance=1e-9, solver="fista", callback=interrupt_at(iteration))
    assert caught[0].filename == __file__
    optimum = cf.solve(built, tolerance=1e-8).objective
    assert solution.status is cf.Status.INTERRUPTED
    assert "warm_start" in str(solution.status)
    assert solution.history[-1].iteration == iteration
    assert solution.certificate.relative_gap == pytest.approx(min(r.relative_gap for r in solution.history), rel=1e-6)
    assert solution.certificate.dual <= optimum <= solution.certificate.primal * (1 + 1e-12)
    resumed = cf.solve(built, warm_start=solution)
    assert resumed.status is cf.Status.CONVERGED


def test_an_error_in_a_callback_is_not_swallowed():
    def callback(record, weights):
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        cf.solve(problem(), callback=callback)


# ---------------------------------------------------------------------- limits


def test_iterations_have_a_default_limit_where_time_has_none(monkeypatch):
    monkeypatch.setattr("convexformer.solvers.run.MAX_ITER", 30)
    with pytest.warns(ConvergenceWarning, match="30 iterations"):
        assert cf.solve(problem(), tolerance=1e-6, solver="fista").status is cf.Status.MAX_ITER
    solution = cf.solve(problem(), tolerance=1e-6, solver="fista", max_time=1e9)
    assert solution.status is cf.Status.CONVERGED
    assert solution.n_iter > 30


def test_max_iter_warns_and_certifies_what_there_is():
    with pytest.warns(ConvergenceWarning, match="max_iter.*7 iterations"):
        solution = cf.solve(problem(), tolerance=1e-8, max_iter=7, solver="fista")
    assert solution.status is cf.Status.MAX_ITER
    assert solution.n_iter == 7
    assert solution.history[-1].iteration == 7
    assert solution.certificate.kind == "exact"
    assert solution.certificate.dual <= cf.solve(problem(), tolerance=1e-7).objective <= solution.certificate.primal


def test_convergence_on_the_last_allowed_iteration_is_no_reason_to_warn():
    needed = cf.solve(problem()).n_iter
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        solution = cf.solve(problem(), max_iter=needed)
    assert solution.status is cf.Status.CONVERGED


def test_max_time_warns_and_certifies_what_there_is():
    with pytest.warns(ConvergenceWarning, match="max_time"):
        solution = cf.solve(problem(), tolerance=1e-12, max_time=1e-9)
    assert solution.status is cf.Status.MAX_TIME
    assert math.isfinite(solution.certificate.gap)


def test_float32_that_gives_out_goes_on_in_float64():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rough, fine = (cf.solve(problem(dtype=torch.float32), tolerance=t) for t in (1e-4, 1e-10))
    assert rough.weights.Z.dtype == torch.float32
    assert fine.status is cf.Status.CONVERGED
    assert fine.certificate.relative_gap <= 1e-10


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_tolerance_beyond_float64_ends_with_a_warning(dtype):
    with pytest.warns(ConvergenceWarning, match="raise the tolerance \\(or, in float32"):
        solution = cf.solve(problem(dtype=dtype), tolerance=1e-17)
    assert solution.status is cf.Status.STALLED
    assert solution.certificate.relative_gap < 1e-12


@pytest.mark.parametrize("tolerance", [1e-12, 1e-13, 1e-14, 1e-15, 1e-16])
def test_converged_means_that_the_certificate_meets_the_tolerance(tolerance):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        solutions = [cf.solve(problem(intercept=flag), tolerance=tolerance) for flag in (False, True)]
    for solution in solutions:
        assert (solution.status is cf.Status.CONVERGED) == solution.certificate.meets(tolerance)


@pytest.mark.parametrize("status", cf.Status)
def test_every_status_is_a_sentence(status):
    assert len(str(status).split()) > 5


# ---------------------------------------------------------------------- checkpoints


def test_a_checkpoint_resumes_an_interrupted_solve(tmp_path):
    path = tmp_path / "deep" / "point.safetensors"
    first = cf.solve(
        problem(intercept=True), tolerance=1e-6, solver="fista", callback=interrupt_at(20), checkpoint=path
    )
    assert path.exists()
    second = cf.solve(problem(intercept=True), tolerance=1e-6, solver="fista", checkpoint=path)
    assert second.status is cf.Status.CONVERGED
    assert second.history[0].relative_gap == pytest.approx(first.certificate.relative_gap, rel=1e-6)
    assert second.n_iter > first.n_iter
    third = cf.solve(problem(intercept=True), tolerance=1.01e-6, solver="fista", checkpoint=path)
    assert third.n_iter == second.n_iter
    assert torch.equal(third.weights.Z, second.weights.Z)
    assert [file.name for file in path.parent.iterdir()] == ["point.safetensors"]


OTHER_PROBLEMS = {
    "beta": lambda: problem(0.03),
    "intercept": lambda: problem(intercept=True),
    "weights": lambda: problem(sample_weight=np.linspace(1, 2, 40)),
    "tokens": lambda: cf.Problem("attention", X + 1e-9, LABELS, beta=problem().beta),
    "order": lambda: cf.Problem("attention", X[::-1], LABELS, beta=problem().beta),
    "labels": lambda: cf.Problem("attention", X, (LABELS + 1) % 3, beta=problem().beta),
    "decay": lambda: cf.Problem(cf.heads.Attention(decay="l2"), X, LABELS, beta=problem().beta),
    "loss": lambda: cf.Problem("attention", X, np.eye(3)[LABELS], loss="squared", beta=problem().beta),
    "mask": lambda: problem(mask=np.arange(4) < np.full((40, 1), 3)),
}


@pytest.mark.parametrize("other", OTHER_PROBLEMS.values(), ids=OTHER_PROBLEMS.keys())
def test_a_checkpoint_of_another_problem_is_refused(tmp_path, other):
    path = tmp_path / "point.safetensors"
    cf.solve(problem(), checkpoint=path)
    with pytest.raises(ValueError, match="belongs to another problem"):
        cf.solve(other(), checkpoint=path)


def test_a_checkpoint_tells_masked_zeros_from_tokens_that_are_zero(tmp_path):
    """Both problems have the same stored tokens; pooled means differ."""
    zeros = np.where(np.arange(4)[:, None] < 3, X, 0.0)
    path = tmp_path / "point.safetensors"
    cf.solve(cf.Problem("mlp", zeros, LABELS, beta=1.0), checkpoint=path)
    with pytest.raises(ValueError, match="belongs to another problem"):
        cf.solve(cf.Problem("mlp", zeros, LABELS, beta=1.0, mask=np.tile(np.arange(4) < 3, (40, 1))), checkpoint=path)


@pytest.mark.parametrize(
    "gates", [np.int64(3), (np.ones((3, 4)), np.ones((3, 3))), (torch.ones(3, 4), torch.ones(3, 3))]
)
def test_gates_of_any_kind_can_be_fingerprinted(tmp_path, gates):
    built = cf.Problem(cf.heads.Attention("gated_relu", gates=gates), X, LABELS, beta_ratio=0.3)
    first = cf.solve(built, checkpoint=tmp_path / "point.safetensors")
    again = cf.solve(built, checkpoint=tmp_path / "point.safetensors")
    assert again.n_iter == first.n_iter
    assert torch.equal(again.weights.Z, first.weights.Z)


def test_sums_of_heads_have_checkpoints(tmp_path):
    def of(seed, **options):
        parts = [cf.heads.MLP("gated_relu", gates=np.random.default_rng(seed).standard_normal((2, 3))), "fno"]
        return cf.Problem(cf.heads.Sum(parts), X, LABELS, beta_ratio=0.1, **options)

    path = tmp_path / "resume.safetensors"
    first = cf.solve(of(0), tolerance=1e-6, checkpoint=path)
    assert torch.equal(cf.solve(of(0), tolerance=1.01e-6, checkpoint=path).weights.Z, first.weights.Z)
    with pytest.raises(ValueError, match="problem"):
        cf.solve(of(1), checkpoint=path)
    options = {"n_betas": 3, "beta_min_ratio": 0.1, "checkpoint": tmp_path / "path"}
    assert len(cf.path(cf.heads.Sum(["mlp", "fno"]), X, LABELS, **options)) == 3


def test_the_checkpoint_counts_the_iterations_of_all_solves(tmp_path):
    built, weights = problem(), Weights(torch.zeros(4, 3, 3).double())
    for total in (30, 60, 90):
        keeper = Checkpoint(tmp_path / "point.safetensors", built.fingerprint(), built.objective, every_seconds=0)
        keeper.resume()
        keeper.keep(weights, 10)
        keeper.keep(weights, 30)
        assert keeper.resume()[1] == total


@pytest.mark.parametrize("content", [b"", b"not a safetensors file", b"\xff" * 64])
def test_a_damaged_checkpoint_is_refused(tmp_path, content):
    path = tmp_path / "point.safetensors"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"cannot be read.*delete it"):
        cf.solve(problem(), checkpoint=path)


def test_a_truncated_checkpoint_is_refused(tmp_path):
    path = tmp_path / "point.safetensors"
    cf.solve(problem(), checkpoint=path)
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(ValueError, match="cannot be read"):
        cf.solve(problem(), checkpoint=path)


# ---------------------------------------------------------------------- relatives of a problem


def test_with_beta_is_the_problem_at_another_beta():
    built = problem()
    twin = built.with_beta(2 * built.beta)
    fresh = cf.Problem("attention", X, LABELS, beta=2 * built.beta)
    assert twin.beta_max == built.beta_max
    assert_same(cf.solve(twin), cf.solve(fresh))


def test_reference_is_the_problem_in_float64():
    single = problem(dtype=torch.float32)
    double = single.objective.reference()
    assert double.like.dtype == torch.float64
    assert double.beta == single.beta
    assert double.critical_beta() == pytest.approx(single.beta_max, rel=1e-5)
    assert problem().objective.reference().like.dtype == torch.float64
    zero = Weights(torch.zeros(4, 3, 3))
    assert certificate(single.objective, zero).primal == pytest.approx(40 * math.log(3), rel=1e-12)


def test_targets_weights_and_masks_are_copied_and_tokens_are_not():
    """Tokens may be most of the memory there is; the guide says so."""
    rng = np.random.default_rng(0)
    tokens, Y, w = rng.standard_normal((12, 4, 3)), rng.standard_normal((12, 2)), rng.uniform(1, 2, 12)
    mask = np.ones((12, 4), dtype=bool)
    mask[0, 3] = False  # one that hides nothing is dropped
    for given in (lambda a: a, torch.from_numpy):
        arrays = [given(a.copy()) for a in (tokens, Y, w, mask)]
        built = cf.Problem("attention", arrays[0], arrays[1], beta=0.5, sample_weight=arrays[2], mask=arrays[3])
        before = cf.solve(built, tolerance=1e-6).objective
        for array in arrays[1:3]:
            array *= 2
        arrays[3][:, 0] = False
        assert cf.solve(built, tolerance=1e-6).objective == before
        assert bool(built.tokens.mask[:, 0].all())
    plain = tokens.copy()
    assert np.shares_memory(cf.Problem("attention", plain, Y, beta=0.5).tokens.X.numpy(), plain)


def test_gated_filters_of_real_sizes_begin_on_factors_and_small_ones_on_dense_weights():
    head = cf.heads.FNO(activation="gated_relu", gates=4)
    chosen = []
    for N in (20, 6000):
        X, y = torch.randn((N, 16, 12), generator=torch.Generator().manual_seed(0)).double(), torch.arange(N) % 3
        problem = cf.Problem(head, X, y, loss="cross_entropy", beta_ratio=0.1)
        size = problem.objective.n_rows * math.prod(problem.objective.weight_shape)
        chosen.append((size > AutoOptions().few_filters, select(problem.objective)))
    assert chosen == [(False, "fista"), (True, "staircase")]


def test_a_capability_is_that_of_a_class():
    class Able:
        def prox(self, Z, step):
            return Z

    class Unable:
        pass

    for _ in range(2):  # the second time from memory
        assert isinstance(Able(), Proximal)
        assert not isinstance(Unable(), Proximal)
        assert not isinstance(Able(), Sliced)

"""Iterations on a device take their decisions there: the host reads no number between gap checks.

On a CPU a dispatch mode sees every read that would make a GPU wait; on a GPU torch itself raises at one.
"""

from functools import partial
from typing import NamedTuple
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import convexformer as cf
from cases import LOSSES
from convexformer.losses import CrossEntropy
from convexformer.operators import LowRank
from convexformer.solvers import cuda_graph
from convexformer.solvers.fista.fista import fista
from convexformer.solvers.staircase import bursts, staircase
from convexformer.threads import AsyncScalars
from convexformer.weights import Weights

# their results, or the shapes of them, are known to the host only after the device has answered
READS = {"_local_scalar_dense", "nonzero", "_unique2", "masked_select", "equal", "bincount", "is_nonzero"}

HEADS = {
    "attention": cf.heads.Attention(),
    "attention, l2": cf.heads.Attention(decay="l2"),
    "attention, gated": cf.heads.Attention(activation="gated_relu", gates=3),
    "linear": cf.heads.Linear(),
    "mlp, gated": cf.heads.MLP(activation="gated_relu", gates=3),
    "self_attention": cf.heads.SelfAttention(),
    "self_attention, gated": cf.heads.SelfAttention(activation="gated_relu", gates=2),
    "mlp_mixer": cf.heads.MLPMixer(),
    "mlp_mixer, gated": cf.heads.MLPMixer(activation="gated_relu", gates=2),
    "fno, gated": cf.heads.FNO(activation="gated_relu", gates=2, grid=(2, 2)),
    "block_fno": cf.heads.BlockFNO(blocks=2),
    "poolformer": cf.heads.PoolFormer(),
    "fnet": cf.heads.FNet(),
    "sum": cf.heads.Sum(["mlp", "fnet"]),
}
NUCLEAR = [name for name, head in HEADS.items() if name not in ("attention", "attention, gated", "linear", "sum")]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


class NoReads(TorchDispatchMode):
    """Raises where an operation would bring numbers to the host, while ``on``."""

    on = True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        masks = name == "index" and any(i is not None and i.dtype == torch.bool for i in args[1])
        if self.on and (name in READS or masks):
            raise AssertionError(f"{name} reads from the device")
        return func(*args, **(kwargs or {}))


class Strict:
    """Lets a solver iterate where nothing may be read, then once more for a check; without a device it only counts."""

    late = False

    def __init__(self, device, iterations):
        self.device, self.iterations = device, iterations
        self.due, self.seen, self.guard = False, [], NoReads()
        self._switch(on=False)

    def _switch(self, on):
        self.guard.on = on and self.device == "cpu"
        if self.device == "cuda":
            torch.cuda.set_sync_debug_mode("error" if on else "default")

    def __enter__(self):
        if self.device == "cpu":
            self.guard.__enter__()
        return self

    def __exit__(self, *why):
        self._switch(on=False)
        if self.device == "cpu":
            self.guard.__exit__(*why)

    def __iter__(self):
        self._switch(on=True)
        yield from range(self.iterations)
        self._switch(on=False)
        self.due = True
        yield self.iterations

    def check(self, Z, fit):
        self.seen.append((Z, fit))

    def excused(self, function):
        """Let a function read."""

        def reading(*args):
            self._switch(on=False)
            try:
                return function(*args)
            finally:
                self._switch(on=True)

        return reading

    def values(self, problem):
        return [float(fit.value) + problem.beta * float(problem.penalty.value(Z)) for Z, fit in self.seen]


def make(head, device, loss="cross_entropy", intercept=True, mask=False, ratio=0.1, per_token=False):
    rng = np.random.default_rng(0)
    X = rng.standard_normal((40, 4, 6))
    labels = rng.integers(0, 4, (40, 4) if per_token else 40)
    Y = labels if loss == "cross_entropy" else LOSSES[loss].targets(rng, 40)
    real = None
    if mask:
        real = rng.random((40, 4)) < 0.7
        real[:, 0] = True
    loss = CrossEntropy() if loss == "cross_entropy" else LOSSES[loss].loss
    return cf.Problem(head, X, Y, beta_ratio=ratio, loss=loss, intercept=intercept, mask=real, device=device)


def start_of(problem):
    """A few terms in every block."""
    shape, like = problem.weight_shape, problem.like
    g = torch.Generator().manual_seed(0)
    Z = 0.01 * torch.randn(shape, generator=g, dtype=torch.float64).to(like)
    Z = LowRank.of(Z)
    return bursts.point_at(problem, Z, problem.apply(Z), None)


@pytest.mark.parametrize("operation", [lambda x: float(x.sum()), lambda x: x[x > 0], lambda x: x.unique(), bool])
def test_the_guard_sees_reads(operation):
    with pytest.raises(AssertionError, match="reads from the device"), NoReads():
        operation(torch.ones(1))


# on a GPU torch waits for the eigenvalues of nuclear norms; there the staircase, which needs none, is tested
FISTA_CASES = [(name, "cpu") for name in HEADS]
FISTA_CASES += [
    pytest.param(name, "cuda", marks=pytest.mark.gpu) for name in ("attention", "attention, gated", "linear")
]


@pytest.mark.parametrize(("name", "device"), FISTA_CASES)
@torch.no_grad()
def test_fista_reads_nothing_between_checks(name, device):
    head = HEADS[name]
    problem = make(head, device, mask=head.masks)
    with Strict(device, 30) as watch:
        fista(problem.objective, Weights(problem.operator.zeros()), watch, sync_free=True)
    before, after = watch.values(problem)
    assert after < before


@pytest.mark.parametrize("device", DEVICES)
@torch.no_grad()
def test_fista_reads_nothing_for_attention_with_an_output_per_token(device):
    problem = make(cf.heads.Attention(stochastic="independent"), device, mask=True, per_token=True)
    with Strict(device, 30) as watch:
        fista(problem.objective, Weights(problem.operator.zeros()), watch, sync_free=True)
    before, after = watch.values(problem)
    assert after < before


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("loss", LOSSES)
@torch.no_grad()
def test_fista_reads_nothing_for_any_loss(loss, device):
    problem = make(HEADS["attention"], device, loss=loss)
    with Strict(device, 30) as watch:
        fista(problem.objective, Weights(problem.operator.zeros()), watch, sync_free=True)
    before, after = watch.values(problem)
    assert after < before


@pytest.mark.parametrize("name", ["attention", "mlp, gated", "self_attention"])
@pytest.mark.parametrize("loss", ["cross_entropy", "huber", "logistic", "squared_hinge"])
@torch.no_grad()
def test_sync_free_iterations_end_at_the_optimum(name, loss):
    problem = make(HEADS[name], "cpu", loss=loss, ratio=0.5)
    with Strict(None, 400) as watch:
        fista(problem.objective, Weights(problem.operator.zeros()), watch, sync_free=True)
    assert watch.values(problem)[-1] == pytest.approx(cf.solve(problem, tolerance=1e-8).objective, rel=1e-6)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("name", "per_token"),
    [(name, False) for name in NUCLEAR] + [(name, True) for name in NUCLEAR if name != "attention, l2"],
)
@torch.no_grad()
def test_a_burst_reads_nothing_but_verdicts(name, per_token, device, monkeypatch):
    head = HEADS[name]
    problem = make(head, device, mask=head.masks, per_token=per_token).objective.factored()
    point = start_of(problem)
    with Strict(device, 20) as watch:
        # where a step is refused the line is searched, and that may read
        search = Mock(side_effect=watch.excused(bursts._Line.searched))
        monkeypatch.setattr(bursts._Line, "searched", lambda line, at: search(line, at))
        monkeypatch.setattr(bursts._Line, "point", watch.excused(bursts._Line.point))
        found, _ = bursts.burst(problem, point, iter(watch), 0.0, 21, behind=1)
    assert search.call_count <= 10
    assert float(found.value) < float(point.value)


@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.parametrize("name", ["self_attention", "mlp_mixer, gated", "mlp, gated"])
@torch.no_grad()
def test_verdicts_read_late_lead_to_the_same_optimum(name, intercept, monkeypatch):
    problem = make(HEADS[name], "cpu", intercept=intercept)
    now = cf.solve(problem, tolerance=1e-7, solver="staircase")
    monkeypatch.setattr(staircase, "burst", partial(bursts.burst, behind=1))
    late = cf.solve(problem, tolerance=1e-7, solver="staircase")
    assert late.certificate.relative_gap <= 1e-7
    assert late.objective == pytest.approx(now.objective, rel=2e-7)


@pytest.mark.parametrize("device", DEVICES)
def test_a_reading_is_what_was_sent(device):
    x = torch.arange(3.0, device=device)
    reading = AsyncScalars(x)
    x += 7  # later work does not change it
    assert reading.read() == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("loss", LOSSES)
@torch.no_grad()
def test_an_inexact_intercept_catches_up(loss):
    problem = make(HEADS["attention"], "cpu", loss=loss)
    F = torch.from_numpy(np.random.default_rng(1).standard_normal(problem.objective.targets.shape))
    exact = problem.objective.evaluate(F)
    b = problem.objective.evaluate(F + 0.3).intercept
    for _ in range(8):  # as iterations would, at outputs that no longer move
        b = problem.objective.evaluate(F, b, inexact_intercept=True).intercept
    assert torch.allclose(b, exact.intercept, atol=1e-9)


@torch.no_grad()
def test_terms_are_sorted_by_block():
    g = torch.Generator().manual_seed(0)
    U, V = torch.randn(5, 3, generator=g), torch.randn(5, 2, generator=g)
    block = torch.tensor([2, 0, 2, 0, 0])
    Z = LowRank(U, V, block, (4, 3, 2))
    assert Z.block.tolist() == [0, 0, 0, 2, 2]
    assert Z.counts == (3, 0, 2, 0)
    assert [(b, own.start, own.stop) for b, own in Z.spans()] == [(0, 0, 3), (2, 3, 5)]
    expected = torch.zeros(4, 3, 2)
    for j, b in enumerate(block.tolist()):
        expected[b] += torch.outer(U[j], V[j])
    assert torch.allclose(Z.dense(), expected, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["attention", "attention, gated", "self_attention", "mlp_mixer, gated", "fno, gated"])
def test_a_recorded_solve_ends_where_an_eager_one_does(name, monkeypatch):
    problem = make(HEADS[name], "cuda")
    solver = "staircase" if name in NUCLEAR else "fista"
    captured = Mock(side_effect=torch.cuda.CUDAGraph)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", captured)
    replayed = cf.solve(problem, tolerance=1e-6, solver=solver)
    assert captured.call_count > 0
    monkeypatch.setattr(cuda_graph, "GRAPH_DATA", 0)
    eager = cf.solve(problem, tolerance=1e-6, solver=solver)
    assert replayed.certificate.relative_gap <= 1e-6
    assert replayed.objective == pytest.approx(eager.objective, rel=2e-6)


@pytest.mark.gpu
def test_what_cannot_be_recorded_goes_on_without():
    def stubborn(state):
        return (state[0] + float(state[0].sum()),)  # a read, which no graph can hold

    problem = make(HEADS["attention"], "cuda")
    iteration = cuda_graph.CudaGraphLoop(
        problem.objective, lambda state: One(*stubborn(state)), One(torch.ones(1, device="cuda")), record=True
    )
    for _ in range(4):
        iteration()
    assert not iteration.record
    assert iteration.state.x.tolist() == [16.0]


class One(NamedTuple):
    x: torch.Tensor

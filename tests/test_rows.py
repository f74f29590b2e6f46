"""Streams and many processes, by an operator and a ``Rows`` that live outside the package: nothing inside it changes."""

import os
import socket
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import load_file, save_file

import convexformer as cf
from convexformer.certificates import certificate
from convexformer.operators import Operator
from convexformer.rows import Rows
from convexformer.solvers import SOLVERS, minimise
from convexformer.solvers.run import Limits
from convexformer.testing import check_operator

TIGHT = Limits(tolerance=1e-10)


class Stream(Operator):
    """Flattened tokens that stay on disk, in batches; only one batch is in memory at a time."""

    def __init__(self, files, sizes, shape, dtype=torch.float64):
        self.files, self.sizes, self.dtype = files, sizes, dtype
        self.weight_shape = shape
        self.output_shape = (sum(sizes), shape[-1])

    @property
    def like(self):
        return torch.empty(0, dtype=self.dtype)

    def to(self, *, device=None, dtype=None):
        return Stream(self.files, self.sizes, self.weight_shape, dtype or self.dtype)

    def batches(self):
        for file in self.files:
            yield load_file(file)["X"].to(self.dtype).flatten(1)

    def apply(self, Z):
        flat = Z.reshape(-1, Z.shape[-1])
        return torch.cat([batch @ flat for batch in self.batches()])

    def adjoint(self, V):
        parts = (batch.T @ v for batch, v in zip(self.batches(), V.split(self.sizes), strict=True))
        return sum(parts).reshape(self.weight_shape)


def data(n=61):
    rng = np.random.default_rng(0)
    X = rng.standard_normal((n, 4, 3)) + 0.5
    return X, np.concatenate([np.arange(3), rng.integers(0, 3, n - 3)]), rng.uniform(0.5, 2, n)


def objective_of(decay, loss, intercept):
    X, labels, w = data()
    Y = labels if loss == "cross_entropy" else X[:, 0, :2] + 0.1 * X[:, 1, 1:]
    head = cf.heads.Attention(decay=decay)
    return cf.Problem(head, X, Y, beta_ratio=0.1, loss=loss, intercept=intercept, sample_weight=w).objective


def stream_of(objective, folder, sizes=(20, 1, 40)):
    X = objective.operator.features.view(-1, *objective.weight_shape[:2])
    files = []
    for k, part in enumerate(X.split(sizes)):
        files.append(str(folder / f"batch_{k}.safetensors"))
        save_file({"X": part.contiguous()}, files[-1])
    return Stream(files, list(sizes), objective.weight_shape)


CASES = [
    (decay, loss, intercept)
    for decay in ("l1", "l2")
    for loss in ("squared", "cross_entropy", "huber")
    for intercept in (False, True)
]


@pytest.mark.parametrize(("decay", "loss", "intercept"), CASES)
def test_a_stream_has_the_optimum_of_memory(decay, loss, intercept, tmp_path):
    objective = objective_of(decay, loss, intercept)
    operator = stream_of(objective, tmp_path)
    check_operator(operator)
    streamed = replace(objective, operator=operator)
    expected = minimise(objective, TIGHT, solver="fista").certificate
    ran = []
    for name, solver in SOLVERS.items():
        if solver.requires(streamed) is not None:
            continue
        found = minimise(streamed, TIGHT, solver=name)
        assert found.certificate.meets(1e-9)
        assert found.certificate.primal == pytest.approx(expected.primal, rel=1e-9)
        again = certificate(objective, found.weights)
        assert again.dual == pytest.approx(found.certificate.dual, rel=1e-9)
        ran.append(name)
    assert "fista" in ran
    assert ("staircase" in ran) == (decay == "l2")
    assert "working_set" not in ran  # it needs the tokens themselves
    assert streamed.critical_beta() == pytest.approx(objective.critical_beta(), rel=1e-9)


class AllReduce(Rows):
    """Every process holds some of the rows; sums are over all of them."""

    def sum(self, values):
        total = values.sum(0)
        dist.all_reduce(total)
        return total


def half_of(objective, rank, world):
    """This process's share of the rows."""
    rows = torch.arange(len(objective.targets)).chunk(world)[rank]
    X = objective.operator.features[rows]
    operator = type(objective.operator)(X, objective.weight_shape[:2], objective.n_outputs)
    return replace(
        objective,
        operator=operator,
        targets=objective.targets[rows],
        sample_weight=objective.sample_weight[rows],
        rows=AllReduce(),
    )


def work(rank, world, port, cases, results):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world)
    try:
        for case in cases:
            part = half_of(objective_of(*case), rank, world)
            for name, solver in SOLVERS.items():
                if solver.requires(part) is None:
                    found = minimise(part, TIGHT, solver=name)
                    proof = found.certificate
                    results.put((rank, case, name, proof.primal, proof.dual, proof.kind, found.weights.dense().numpy()))
            results.put((rank, case, "critical beta", part.critical_beta(), 0.0, "", None))
    finally:
        dist.destroy_process_group()


def test_two_processes_have_the_optimum_of_one():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = mp.get_context("spawn")
    results = context.SimpleQueue()
    workers = [context.Process(target=work, args=(rank, 2, port, CASES, results)) for rank in range(2)]
    for worker in workers:
        worker.start()
    # every case: FISTA and the critical beta on both, the staircase where it serves
    expected = 2 * sum(3 if decay == "l2" else 2 for decay, _, _ in CASES)
    found = [results.get() for _ in range(expected)]
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0
    for case in CASES:
        objective = objective_of(*case)
        best = minimise(objective, TIGHT, solver="fista").certificate.primal
        own = [row for row in found if row[1] == case]
        assert {row[2] for row in own} >= {"fista", "critical beta"}
        for _rank, _, name, primal, dual, kind, Z in own:
            if name == "critical beta":
                assert primal == pytest.approx(objective.critical_beta(), rel=1e-9)
                continue
            assert kind == "exact"
            assert primal == pytest.approx(best, rel=1e-9)
            assert dual == pytest.approx(best, rel=1e-9)
            # both processes hold the same weights, and in one process they certify as well
            weights = [row[6] for row in own if row[2] == name]
            assert all(np.array_equal(weights[0], other) for other in weights)
            assert objective.apply(torch.from_numpy(Z)).isfinite().all()

"""Every head and loss against an interior-point method on a program written down independently."""

import zlib

import numpy as np
import pytest
from cases import HEADS, LOSSES, OPTIONS, random_data
from reference import blocks, program_of

import convexformer as cf

GRID = [(head, loss, option) for head in HEADS for loss in LOSSES for option in OPTIONS]


@pytest.mark.parametrize(("head", "loss", "option"), GRID, ids=[", ".join(row) for row in GRID])
def test_the_certified_optimum_is_that_of_cvxpy(head, loss, option):
    case = HEADS[head]
    rng = np.random.default_rng(zlib.crc32(f"{head} {loss} {option}".encode()))
    data = random_data(case, LOSSES[loss], option, rng)
    problem = cf.Problem(case.build(data.gates), data.X, data.Y, beta_ratio=rng.uniform(0.05, 0.4), **data.options)
    solution = cf.solve(problem, tolerance=1e-6)
    reference = program_of(case, data, problem.beta)
    optimum, proof = reference.optimum(), solution.certificate

    assert solution.status is cf.Status.CONVERGED
    assert proof.kind == "exact"
    assert proof.relative_gap <= 1e-6
    assert solution.objective == pytest.approx(optimum, rel=1e-5)
    assert solution.objective == pytest.approx(reference.objective(*blocks(solution.weights)), rel=1e-10)
    assert proof.dual <= optimum * (1 + 1e-7) + 1e-8
    assert proof.primal >= optimum * (1 - 1e-7) - 1e-8

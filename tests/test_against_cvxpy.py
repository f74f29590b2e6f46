"""Every head and loss against an interior-point method on a program written down independently."""

import zlib

import numpy as np
import pytest

import convexformer as cf
from cases import ALL_HEADS, EVEN_LOSSES, HEADS, LOSSES, MORE_HEADS, OPTIONS, random_data
from convexformer.gauges import Factored
from reference import blocks, program_of

CORE = [(head, loss, option) for head in HEADS for loss in LOSSES for option in OPTIONS]
MORE = [
    (head, loss, option)
    for head, case in MORE_HEADS.items()
    for loss in EVEN_LOSSES
    for option in ("plain", "all" if case.masks else "intercept")
]


def problem_and_reference(head, loss, option, **sizes):
    case = ALL_HEADS[head]
    rng = np.random.default_rng(zlib.crc32(f"{head} {loss} {option}".encode()))
    data = random_data(case, ({**LOSSES, **EVEN_LOSSES})[loss], option, rng, **sizes)
    problem = cf.Problem(case.build(data.gates), data.X, data.Y, beta_ratio=rng.uniform(0.05, 0.4), **data.options)
    return problem, program_of(case, data, problem.beta)


def assert_optimal(solution, optimum):
    proof = solution.certificate
    assert solution.status is cf.Status.CONVERGED
    assert proof.kind == "exact"
    assert proof.relative_gap <= 1e-6
    assert solution.objective == pytest.approx(optimum, rel=1e-5)
    assert proof.dual <= optimum * (1 + 1e-7) + 1e-8
    assert proof.primal >= optimum * (1 - 1e-7) - 1e-8


@pytest.mark.parametrize(("head", "loss", "option"), CORE, ids=[", ".join(row) for row in CORE])
def test_the_certified_optimum_is_that_of_cvxpy(head, loss, option):
    problem, reference = problem_and_reference(head, loss, option)
    solution, optimum = cf.solve(problem, tolerance=1e-6), reference.optimum()
    assert_optimal(solution, optimum)
    if "attention" in head:
        assert_optimal(cf.solve(problem, tolerance=1e-6, solver="working_set"), optimum)
    assert solution.objective == pytest.approx(reference.objective(*blocks(solution.weights)), rel=1e-10)


@pytest.mark.parametrize(("head", "loss", "option"), MORE, ids=[", ".join(row) for row in MORE])
def test_the_optimum_of_every_other_head_is_that_of_cvxpy(head, loss, option):
    problem, reference = problem_and_reference(head, loss, option, n=6, s=4, d=2)
    optimum = reference.optimum()
    assert_optimal(cf.solve(problem, tolerance=1e-6), optimum)
    if isinstance(problem.penalty, Factored):
        assert_optimal(cf.solve(problem, tolerance=1e-6, solver="staircase"), optimum)

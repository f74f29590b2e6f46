"""Better dual points: the gain of averaging, of extrapolation and of Newton steps. One thread, a few minutes.

    python benchmarks/dual_points.py            # all
    python benchmarks/dual_points.py --quick    # without the large problem

First the gap of averaged and of extrapolated outputs at the end of a staircase run (self-attention, squared loss per token,
beta = 0.01 beta_max, where the gap lags the objective most; averaged outputs are those of averaged weights).
Then CPU seconds and iterations to a certified relative gap of 1e-4 and 1e-6, without and with Newton steps, alternating.
"""

from __future__ import annotations

import argparse
import time

import heads  # sets one thread
import numpy as np
import torch

import convexformer as cf
from convexformer.certificates import dual_point
from convexformer.solvers.fista.newton_polish import NewtonPolish

WITH = NewtonPolish.try_step


def extrapolate(outputs: list[torch.Tensor]) -> torch.Tensor:
    """Anderson's combination: the weights, summing to one, that make the differences cancel best."""
    F = torch.stack([f.flatten() for f in outputs])
    steps = F[1:] - F[:-1]
    gram = steps @ steps.T
    one = torch.ones(len(gram), dtype=gram.dtype)
    c = torch.linalg.solve(gram + 1e-10 * gram.trace() * torch.eye(len(gram), dtype=gram.dtype), one)
    return (c / c.sum() @ F[1:]).view_as(outputs[-1])


def combinations() -> None:
    """Gaps of averaged and extrapolated points, without Newton steps."""
    NewtonPolish.try_step = lambda self, *args: None
    problem = heads.make(cf.heads.SelfAttention(), 500, 49, 32, 10, 0.01)
    seen: list[tuple[float, torch.Tensor]] = []

    def remember(record, weights):
        seen.append((record.primal, problem.operator.apply(weights.Z)))

    cf.solve(problem, tolerance=1e-5, max_iter=260, callback=remember)
    best = min(primal for primal, _ in seen)
    outputs = [f for _, f in seen]
    trials = {f"mean of the last {k}": sum(outputs[-k:]) / k for k in (1, 2, 4)}
    trials |= {f"extrapolation of the last {k}": extrapolate(outputs[-k - 1 :]) for k in (3, 5)}
    for name, F in trials.items():
        dual = dual_point(problem.objective, problem.objective.evaluate(F)).value
        print(f"{name:28s} relative gap {(best - dual) / best:.1e}")


def classes(head, ratio, intercept=False, size=(1000, 16, 24, 10)):
    """Labels drawn from a planted model: rank three, or four tokens of rank two."""
    N, s, d, c = size
    rng = np.random.default_rng(0)
    X = torch.from_numpy(heads.tokens(rng, N, s, d))
    probe = cf.Problem(head, X, torch.arange(N) % c, beta=1.0, loss="cross_entropy")
    shape = probe.operator.weight_shape
    p, q = shape[-2:]
    Z = torch.zeros(shape, dtype=torch.float64)
    if len(shape) == 2:
        Z[:] = torch.from_numpy(rng.standard_normal((p, 3)) @ rng.standard_normal((3, q)))
    else:
        for k in rng.choice(shape[0], 4, replace=False):
            Z[k] = torch.from_numpy(rng.standard_normal((p, 2)) @ rng.standard_normal((2, q)))
    F = probe.operator.apply(Z)
    F = 2 * (F - F.mean(0)) / F.std()
    y = (F + torch.from_numpy(rng.gumbel(size=tuple(F.shape)))).argmax(1)
    y[:c] = torch.arange(c)
    return cf.Problem(head, X, y, beta_ratio=ratio, loss="cross_entropy", intercept=intercept)


def race(name, problem, solver):
    """CPU seconds to a certified gap without and with Newton steps."""
    problem.beta_max  # noqa: B018  (computed before the clock starts)
    row = f"{name:40s} {solver:10s}"
    for tolerance in (1e-4, 1e-6):
        found = []
        for better in (lambda self, *args: None, WITH):
            NewtonPolish.try_step = better
            started = time.process_time()
            solution = cf.solve(problem, tolerance=tolerance, solver=solver)
            found.append((time.process_time() - started, solution.n_iter))
        (a, m), (b, n) = found
        row += f"  {a:6.2f} s ({m:3d}) -> {b:6.2f} s ({n:3d}) {b / a:4.2f}"
    print(row, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    SA, Attention, FNO = cf.heads.SelfAttention, cf.heads.Attention, cf.heads.FNO
    print("seconds (iterations) to a gap of 1e-4, then 1e-6: without -> with Newton steps, ratio of seconds")
    for ratio in (0.1, 0.01):
        race(f"FNO, squared, beta {ratio}", heads.make(FNO(), 500, 49, 32, 10, ratio), "fista")
        for decay in ("l1", "l2"):
            race(f"attention {decay}, classes, beta {ratio}", classes(Attention(decay=decay), ratio), "fista")
    race("attention l2, intercept, beta 0.01", classes(Attention(decay="l2"), 0.01, intercept=True), "fista")
    race("self-attention, intercept, beta 0.01", classes(SA(), 0.01, intercept=True), "staircase")
    for ratio in (0.1, 0.01, 0.003):
        race(f"self-attention, classes, beta {ratio}", classes(SA(), ratio), "staircase")
        race(f"self-attention, classes, beta {ratio}", classes(SA(), ratio), "fista")
    if quick:
        return
    for solver in ("staircase", "fista"):
        race("self-attention, squared, beta 0.01", heads.make(SA(), 500, 49, 32, 10, 0.01), solver)
    combinations()


if __name__ == "__main__":
    main()

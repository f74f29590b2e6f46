"""Do averaged or extrapolated dual points close the gap sooner? The gap of each at the end of a staircase run.

    python benchmarks/dual_points.py

Self-attention, squared loss per token, (500, 49, 32, 10), beta = 0.01 beta_max: where the gap lags the objective most. For
the squared loss the dual point of averaged outputs is the average of the dual points.
"""

from __future__ import annotations

import heads  # sets one thread
import torch

import convexformer as cf
from convexformer.certificates import dual_point


def extrapolate(outputs: list[torch.Tensor]) -> torch.Tensor:
    """Anderson's combination: the weights, summing to one, that make the differences cancel best."""
    F = torch.stack([f.flatten() for f in outputs])
    steps = F[1:] - F[:-1]
    gram = steps @ steps.T
    one = torch.ones(len(gram), dtype=gram.dtype)
    c = torch.linalg.solve(gram + 1e-10 * gram.trace() * torch.eye(len(gram), dtype=gram.dtype), one)
    return (c / c.sum() @ F[1:]).view_as(outputs[-1])


def main() -> None:
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
        print(f"{name:28s} relative gap {(best - dual_point(problem, problem.fit(F)).value) / best:.1e}")


if __name__ == "__main__":
    main()

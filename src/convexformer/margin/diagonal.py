"""The l1-SVM of diagonal weights: a linear program that also finds Farkas vectors.

    min |b|_1   s.t.  B_il^T b >= 1,   B_il = z_i * (x_opt - x_il)             (Sheen et al. 2024, l1-SVM)
    max  m      s.t.  B_il^T b >= m,   |b|_1 <= 1

The second program is feasible and bounded for all data; its optimum is one over that of the first, or zero when nothing
separates. Its multipliers solve ``min polar(B^T lam)`` over the simplex in either case.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from scipy.optimize import linprog

from convexformer.gauges import L1Norm
from convexformer.margin.progress import Answer, Limits, Progress
from convexformer.operators import DenseOperator
from convexformer.solvers.status import Status


def solve_diagonal(operator: DenseOperator, limits: Limits) -> Answer:
    """Solve the l1-SVM with HiGHS, on the CPU."""
    progress = Progress(operator, L1Norm(), limits)
    B = operator.features.cpu().numpy()  # (m, d)
    scale = max(float(np.abs(B).max()), np.finfo(np.float64).tiny)
    m, d = B.shape
    B = B / scale
    # variables b+, b-, margin
    cost = np.concatenate([np.zeros(2 * d), [-1.0]])
    rows = np.hstack([-B, B, np.ones((m, 1))])
    budget = np.concatenate([np.ones(2 * d), [0.0]])
    options: dict[str, Any] = {"maxiter": limits.max_iter, "primal_feasibility_tolerance": 1e-10}
    options["dual_feasibility_tolerance"] = 1e-10
    if np.isfinite(limits.max_time):
        options["time_limit"] = limits.max_time
    found: Any = linprog(
        cost,
        A_ub=np.vstack([rows, budget]),
        b_ub=np.concatenate([np.zeros(m), [1.0]]),
        bounds=[(0, None)] * (2 * d + 1),
        method="highs",
        options=options,
    )
    if found.x is None:
        raise RuntimeError(f"the linear program was not solved: {found.message}")
    b = torch.from_numpy(found.x[:d] - found.x[d : 2 * d]).to(operator.like)
    lam = torch.from_numpy(np.maximum(-found.ineqlin.marginals[:m], 0.0)).to(operator.like)
    if not progress.see(b[:, None], lam[:, None], int(found.nit)):
        progress.status = Status.STALLED
    return progress.answer()

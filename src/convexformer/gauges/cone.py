"""The nuclear norm constrained to a cone, ``||Z||_{*,K}``: the norm of one cell of a ReLU layer."""

from __future__ import annotations

from typing import final

import numpy as np
import torch
from torch import Tensor

from convexformer.arrangements import split_in_cone
from convexformer.gauges.base import DualMatrix, Gauge, Polar, PolarKind, WeightsLike, as_tensor
from convexformer.gauges.cone_polar import (
    ConeProblem,
    branch_and_bound,
    column_polar,
    has_sdp,
    projected_power,
    sdp_bound,
)
from convexformer.registry import one_of

METHODS = ("auto", "branch", "sdp", "sigma", "power")


@final
class ConeNuclearNorm(Gauge):
    """``||Z||_{*,K} = inf{sum_j |u_j| |v_j| : Z = sum_j u_j v_j^T, K u_j >= 0}`` (Sahiner et al. 2022, (4)).

    Its atoms are ``+-u v^T`` with ``K u >= 0``. The value is computed for one column, where it is ``min |a| + |b|``
    over ``z = a - b`` in the cone; for more it is NP-hard. ``method`` is how the polar is bounded for several columns:
    ``"branch"`` (branch and bound over output directions: an upper bound, exact to ``tolerance``), ``"sdp"`` (CVXPY;
    an upper bound), ``"sigma"`` (``sigma_max``, an upper bound), ``"power"`` (projected power iterations: a lower
    bound, which certifies nothing), or ``"auto"``: the first for up to four columns, else the second where CVXPY is
    installed, else the third.
    """

    def __init__(self, K: Tensor, method: str = "auto", tolerance: float = 1e-7, budget: int = 40_000) -> None:
        self.K = np.asarray(torch.as_tensor(K, dtype=torch.float64))
        self.method = one_of("method", method, METHODS)
        self.tolerance, self.budget = tolerance, budget

    def value(self, Z: WeightsLike) -> Tensor:
        """Return the norm of one column; more are refused."""
        matrix = as_tensor(Z)
        if matrix.shape[-1] != 1 or matrix.ndim != 2:
            raise ValueError(
                f"Z has shape {tuple(matrix.shape)}; the cone-constrained nuclear norm is computed for (p, 1) only, since "
                "it is NP-hard for more columns. A factorisation inside the cone bounds it from above, polar() from below."
            )
        z = matrix[:, 0].detach().cpu().double().numpy()
        a, b = split_in_cone(self.K, z, steps=500, tolerance=1e-14)
        return matrix.new_tensor(float(np.linalg.norm(a) + np.linalg.norm(b)))

    def polar(self, M: DualMatrix) -> Polar:
        """``max |M^T u|`` over ``K u >= 0``, ``|u| <= 1``, with the kind of what was computed."""
        matrix = as_tensor(M).detach().cpu().double().numpy()
        problem, q = ConeProblem(self.K, matrix), matrix.shape[1]
        if q == 1:
            return Polar(max(column_polar(problem, np.array([sign]))[0] for sign in (1.0, -1.0)))
        lower = self._lower(problem)
        method = self.method
        if method == "auto":
            method = "branch" if q <= 4 else "sdp" if has_sdp() else "sigma"
        if method == "power":
            return Polar(lower, PolarKind.LOWER)
        if method == "branch":
            return Polar(branch_and_bound([problem], lower, self.tolerance, self.budget).upper, PolarKind.UPPER)
        return Polar(sdp_bound(problem) if method == "sdp" else float(np.linalg.norm(matrix, 2)), PolarKind.UPPER)

    def _lower(self, problem: ConeProblem, restarts: int = 8) -> float:
        q = problem.M.shape[1]
        _, _, Vh = np.linalg.svd(problem.M, full_matrices=False)
        starts = [*Vh, *-Vh, *np.random.default_rng(0).standard_normal((restarts, q))]
        return max(projected_power(problem, v)[0] for v in starts)

    def __repr__(self) -> str:
        return f"ConeNuclearNorm(K={self.K.shape})"

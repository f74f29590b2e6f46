"""Shortened proofs of inseparability: Farkas vectors with few contradicting constraints."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from scipy.optimize import linprog
from torch import Tensor

from convexformer.gauges import Gauge
from convexformer.operators import Operator

FARKAS_PROGRAM_SIZE = 400_000  # entries of the largest linear program that is solved to shorten a proof


def residual(operator: Operator, gauge: Gauge, lam: Tensor) -> float:
    """``polar(A^T lam) / sum(lam)``: no weights of gauge one have a larger margin than this."""
    return gauge.polar(operator.adjoint(lam)).value / max(float(lam.sum()), torch.finfo(lam.dtype).tiny)


def shortened(operator: Operator, gauge: Gauge, lam: Tensor, allowed: float) -> Tensor:
    """Return a Farkas vector that is a vertex: dropping any of its constraints leaves the others satisfiable.

    A vertex of ``{lam >= 0, A^T lam = 0, sum(lam) = 1}`` on the support of ``lam`` has a minimal support. The vector
    itself is returned where the program is too large or its solution proves less than ``allowed``.
    """
    support = (lam > 0).flatten().nonzero().flatten()
    size = operator.zeros().numel()
    if len(support) * size > FARKAS_PROGRAM_SIZE:
        return lam
    columns = []
    for index in support.tolist():
        unit = torch.zeros_like(lam).flatten()
        unit[index] = 1.0
        columns.append(operator.adjoint(unit.view_as(lam)).flatten())
    A = torch.stack(columns, 1).cpu().numpy()
    scale = max(float(np.abs(A).max()), np.finfo(np.float64).tiny)
    equal = np.vstack([A / scale, np.ones(A.shape[1])])
    target = np.concatenate([np.zeros(A.shape[0]), [1.0]])
    options: dict[str, Any] = {"time_limit": 10.0}
    found: Any = linprog(
        np.zeros(A.shape[1]), A_eq=equal, b_eq=target, bounds=(0, None), method="highs-ds", options=options
    )
    if found.x is None:
        return lam
    short = torch.zeros_like(lam).flatten()
    short[support] = torch.from_numpy(np.maximum(found.x, 0.0)).to(lam)
    short = short.view_as(lam)
    return short if float(short.sum()) > 0 and residual(operator, gauge, short) <= allowed else lam

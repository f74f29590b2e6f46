"""Matrix square roots and logarithms by matrix products alone, for runtimes without eigenvalue decompositions (ONNX)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

SETTLED = 7  # steps of Newton-Schulz from an eigenvalue of about one half to rounding: it converges quadratically
SERIES = 24  # terms of log(1 - x): at |x| <= 1/5 the rest is below 1e-18
REACH = 0.2


def eigenfree(kind: str, X: Tensor, eps: Tensor, spread: float) -> Tensor:
    """``h(X^T X + eps I)`` for ``X: (n, s, q)``, ``eps: (n, 1, 1)``, ``h`` the square root or the logarithm, in float64.

    ``spread`` bounds the ratio of the largest eigenvalue to ``eps``, the smallest: so the number of steps is known before.
    """
    x, eps = X.double(), eps.double()
    identity = torch.eye(X.shape[2], dtype=torch.float64, device=X.device)
    A = x.mT @ x + eps * identity
    size = A.diagonal(dim1=1, dim2=2).sum(1)[:, None, None]  # the trace is above the largest eigenvalue
    spread = spread * X.shape[2]  # of the trace to the smallest eigenvalue
    unit = A / size
    if kind == "sqrt":
        return (root(unit, spread) * size.sqrt()).to(X.dtype)
    halvings = max(0, math.ceil(math.log2(math.log(spread) / -math.log1p(-REACH))))
    for _ in range(halvings):  # inverse scaling and squaring: log A = 2^k log A^(1 / 2^k)
        unit, spread = root(unit, spread), math.sqrt(spread)
    rest = identity - unit  # eigenvalues in [0, 1/5]
    total = identity / SERIES
    for k in range(SERIES - 1, 0, -1):  # log(1 - x) = -x (1 + x/2 + x^2/3 + ...), by Horner's rule
        total = rest @ total + identity / k
    return (size.log() * identity - 2.0**halvings * (rest @ total)).to(X.dtype)


def root(A: Tensor, spread: float) -> Tensor:
    """``A^(1/2)`` for eigenvalues in ``[1 / spread, 1]``, by the coupled Newton-Schulz iteration (Higham 2008, 6.7)."""
    identity = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)
    steps = math.ceil(math.log(max(spread, 1.0)) / math.log(2.25)) + SETTLED  # small eigenvalues grow by 9/4 a step
    Y, Z = A, identity.expand_as(A)
    for _ in range(steps):
        T = 1.5 * identity - 0.5 * (Z @ Y)
        Y, Z = Y @ T, T @ Z
    return Y

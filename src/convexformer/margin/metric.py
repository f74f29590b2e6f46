"""The metric of L-BFGS on the factors of the nuclear-norm SVM: curvatures along tokens, queries and factors.

The Hessian of the augmented Lagrangian in ``U`` is ``I + penalty sum_J p p^T (x) V^T z z^T V`` over the binding constraints
J, but for a term that vanishes at the optimum. Its Kronecker approximation, the product of the sums of ``p p^T`` and of
``V^T z z^T V``, is diagonal in the eigenvectors of the two; likewise for ``V``. In coordinates scaled by its square root
L-BFGS no longer sees that one direction of the tokens is a hundred times longer than the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from convexformer.margin.operator import MarginOperator


@final
@dataclass(frozen=True)
class FactorMetric:
    """Coordinates ``x = scale * (rows^T F columns)`` of a pair of factors ``F: (2, d, r)``."""

    rows: Tensor
    """``(2, d, d)`` orthogonal."""
    columns: Tensor
    """``(2, r, r)`` orthogonal."""
    scale: Tensor
    """``(2, d, r)``, at least one."""

    @classmethod
    def at(cls, operator: MarginOperator, factors: Tensor, binding: Tensor, penalty: float) -> FactorMetric:
        """Return the metric of the constraints ``binding: (n, L-1)`` at the factors."""
        p, z = operator.differences, operator.queries
        weights = binding.to(p)
        total = weights.sum().clamp_min(1)
        of_tokens = (p * weights[..., None]).flatten(0, 1).mT @ p.flatten(0, 1)
        of_queries = (z * weights.sum(1)[:, None]).mT @ z
        tokens, queries = (torch.linalg.eigh(each) for each in (of_tokens, of_queries))
        U, V = factors
        # U meets the tokens, and the queries through V; V the other way round
        left, right = (torch.linalg.eigh(F.mT @ M @ F / total) for F, M in ((V, of_queries), (U, of_tokens)))
        scale = [
            (1 + penalty * own[0].clamp_min(0)[:, None] * other[0].clamp_min(0)).sqrt()
            for own, other in ((tokens, left), (queries, right))
        ]
        return cls(torch.stack([tokens[1], queries[1]]), torch.stack([left[1], right[1]]), torch.stack(scale))

    def enter(self, factors: Tensor) -> Tensor:
        """Return the coordinates of factors."""
        return (self.rows.mT @ factors @ self.columns) * self.scale

    def leave(self, x: Tensor) -> Tensor:
        """Return the factors of coordinates."""
        return self.rows @ (x / self.scale) @ self.columns.mT

    def pull(self, gradient: Tensor) -> Tensor:
        """Return the gradient in the coordinates."""
        return (self.rows.mT @ gradient @ self.columns) / self.scale

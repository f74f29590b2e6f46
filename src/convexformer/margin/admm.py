"""Alternating directions for small problems: any gauge with a prox, no factorisation, no rank to choose.

    min g(V) + [s >= 1]   s.t.  V = W,  s = A W                               (Boyd et al. 2011)

The ``W`` step solves ``(I + A^T A) W = ...`` through the inverse of ``I + A A^T``, formed once; the ``V`` step is the prox.
Fast where the data separates well, slow where it barely does; the caller then uses another method.
"""

from __future__ import annotations

import torch
from torch import Tensor

from convexformer.gauges import Norm
from convexformer.margin.operator import MarginOperator
from convexformer.margin.progress import Answer, Limits, Progress

RELAXATION = 1.6  # over-relaxation factor (Boyd et al. 2011, section 3.4.3 advise 1.5 to 1.8)
ADMM_CHECK_EVERY = 25  # iterations between gap checks
FIRST_ADMM_STEP = 3.0  # initial step of the prox, one over ADMM's penalty; residual balancing adapts it


def solve_admm(operator: MarginOperator, gauge: Norm, limits: Limits) -> Answer:
    """Solve ``min g(W)`` under the margin constraints; ``operator`` should have rows of norm about one."""
    progress = Progress(operator, gauge, limits)
    like, shape = operator.like, operator.output_shape
    gram = operator.gram(torch.arange(shape[0] * shape[1], device=like.device))
    gram.diagonal().add_(1.0)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(gram))  # eigenvalues in (0, 1], so as accurate as a solve

    def project(C: Tensor) -> Tensor:
        """``(I + A^T A)^{-1} C`` by Woodbury's identity."""
        return C - operator.adjoint((inverse @ operator.apply(C).flatten()).view(shape))

    V, s = operator.zeros(), torch.ones(shape, dtype=like.dtype, device=like.device)
    dual_V, dual_s = torch.zeros_like(V), torch.zeros_like(s)
    step, due = FIRST_ADMM_STEP, ADMM_CHECK_EVERY
    for iteration in range(1, limits.max_iter + 1):
        W = project(V - dual_V + operator.adjoint(s - dual_s))
        margins = operator.apply(W)
        mixed_W, mixed_s = RELAXATION * W + (1 - RELAXATION) * V, RELAXATION * margins + (1 - RELAXATION) * s
        old_V, old_s = V, s
        V, s = gauge.prox(mixed_W + dual_V, step), (mixed_s + dual_s).clamp_min(1.0)
        dual_V, dual_s = dual_V + mixed_W - V, dual_s + mixed_s - s
        if iteration % ADMM_CHECK_EVERY and iteration != limits.max_iter:
            continue
        # -dual_s / step tends to the multipliers
        if progress.see(V, (-dual_s).clamp_min(0), iteration):
            break
        if iteration >= due:
            # balance the residuals within a factor of two, at growing intervals so that the step settles
            primal = float((W - V).square().sum() + (margins - s).square().sum())
            dual = float((V - old_V).square().sum() + (s - old_s).square().sum())
            turn = 0.5 if primal > 4 * dual else 2.0 if dual > 4 * primal else 1.0
            step, dual_V, dual_s = step * turn, dual_V * turn, dual_s * turn
            due = iteration + max(ADMM_CHECK_EVERY, iteration // 4)
    return progress.answer()

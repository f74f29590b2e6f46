"""Certificates of margins: a bound on the distance to the optimum, and proofs that no matrix separates.

    primal   g(W) / min_il (A W)_il          for any W that separates
    dual     sum(lam) / polar(A^T lam)       for any lam >= 0

Weak duality: ``min (A W) sum(lam) <= <lam, A W> = <A^T lam, W> <= polar(A^T lam) g(W)``. Both sides are scale-free,
so the bound depends on ``W`` and ``lam`` alone. If ``A^T lam = 0`` with ``lam >= 0`` and
``sum(lam) = 1``, no ``W`` separates (Farkas).
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from convexformer.certificates import Certificate
from convexformer.gauges import Gauge
from convexformer.operators import Operator


class NotSeparableError(ValueError):
    """No attention matrix puts every optimal token first: assumption 1 fails, and ``farkas`` proves it.

    ``farkas: (n, L)`` is nonnegative, sums to one, is zero at optimal tokens, and ``sum_il farkas_il (x_opt - x_il) z_i^T``
    has polar at most ``residual`` (zero but for rounding); any ``W`` has a margin of at most ``residual * g(W)``.
    ``sequences`` are those whose constraints contradict each other.
    """

    def __init__(self, message: str, farkas: np.ndarray, sequences: tuple[int, ...], residual: float) -> None:
        super().__init__(message)
        self.farkas = farkas
        self.sequences = sequences
        self.residual = residual


def margin_certificate(operator: Operator, gauge: Gauge, W: Tensor, multipliers: Tensor) -> Certificate:
    """Return the certificate of ``W`` with the dual point ``multipliers``, from these and the data alone.

    ``kkt``: ``feasibility`` is the shortfall of ``W / margin`` from a margin of one (infinite if ``W`` does not separate),
    ``complementarity`` is ``sum lam_il (m_il - 1) / sum lam``, ``alignment`` is ``1 - <A^T lam, W> / (polar g(W))``.
    """
    margins = operator.apply(W)
    least, value = float(margins.min()), float(gauge.value(W))
    lam = multipliers.clamp_min(0)
    total = float(lam.sum())
    M = operator.adjoint(lam)
    polar = gauge.polar(M)
    primal = value / least if least > 0 else math.inf
    dual = 0.0 if total == 0 else (total / polar.value if polar.value > 0 else math.inf)
    # the smallest margin has the rounding error of the largest terms in its sum
    eps = torch.finfo(torch.float64).eps
    spread = float(margins.abs().max()) / least if least > 0 else 1.0
    dual = dual * (1 - 64 * eps * (1 + spread)) if polar.kind.certifies else -math.inf
    kkt = {
        "feasibility": 0.0 if least > 0 else math.inf,
        "complementarity": float((lam * (margins / least - 1)).sum()) / total if least > 0 and total > 0 else math.inf,
        "alignment": 1 - float((M * W).sum()) / (polar.value * value) if polar.value * value > 0 else math.inf,
    }
    kind = "none" if not polar.kind.certifies else ("exact" if polar.confidence == 1.0 else "probabilistic")
    return Certificate(primal, dual, kind, polar.confidence, kkt)

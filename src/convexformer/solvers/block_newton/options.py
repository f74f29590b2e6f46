"""Constants of the solver for block norms; set with benchmarks/probes.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final


@final
@dataclass(frozen=True)
class BlockNewtonOptions:
    """Constants of :class:`~convexformer.solvers.block_newton.BlockNewton`."""

    max_rows: int = 20_000
    """Rows up to which ``N x N`` matrices are formed."""
    single: float = 3e-5
    """Tolerance down to which float32 Cholesky factors serve as a metric."""
    memory: int = 8
    """Pairs that L-BFGS remembers."""
    inner_steps: int = 12
    """L-BFGS steps for each choice of block weights."""
    inner_tolerance: float = 0.005
    """Decrease left to the inner problem, as a fraction of the tolerance."""
    patience: int = 12
    """Outer steps without a smaller gap after which float64 factors are tried, then the solve has stalled."""
    trust: float = 3.0
    """Factor by which a block weight may change in a step at first; without a bound the steps cycle."""
    signal: float = 3.0
    """A change of the gradient counts as curvature from so many times the error that the inner problem leaves in it."""
    small_share: float = 0.03
    """Share of the penalty below which a block may vanish, or grow from nothing, in one step."""
    growth: float = 1.15
    """Block weights grow like ``beta ** -growth`` along a path: where the next beta begins."""
    nothing: float = 1e-4
    """Share of the penalty in the objective below which a start counts as zero."""
    start: float = 0.03
    """Size of the first block weights, in units of the inverse of a block's mean squared feature norm."""
    first: float = 0.1
    """Fraction of ``beta_max`` at which a solve from zero begins."""
    stride: float = 5.0
    """Factor between the betas that a solve passes through on its way down, each solved to ``passing``."""
    passing: float = 0.03
    """Relative gap of the betas passed through."""

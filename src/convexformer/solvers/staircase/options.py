"""Constants of the staircase."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final


@final
@dataclass(frozen=True)
class StaircaseOptions:
    """Bursts: set by benchmarks/heads.py (P4, three sizes) and benchmarks/gpu_heads.py. Newton: by mlp heads on TREC-6,
    CIFAR-10 and tokens with a channel spectrum of 1/k^2, 2 to 50 classes, betas down to 1e-4 of the largest.
    """

    first_terms: int = 8
    """Terms appended at a time, at least."""
    outputs_a_term: int = 2
    """With gates on a GPU, terms appended at a time: one for so many outputs, at least."""
    shortest_burst: int = 7
    longest_burst: int = 40
    longest_burst_cuda: int = 100
    """Iterations of a burst of L-BFGS; on a GPU they need no host sync, and Newton steps do."""
    memory: int = 30
    """Pairs of L-BFGS."""
    noise: float = 10
    """Two objective values are equal if they differ by at most this many roundings."""
    float32_range: float = 1e8
    """beta_max, or one over it, beyond which squares overflow in float32."""
    ladder: float = 0.3
    """Ratio of successive betas of a cold start."""
    coarse_gap: float = 1e-2
    """The relative local gap at which float32 hands over to float64."""
    dense_gap: float = 1e-2
    """The relative gap below which weights of high rank may be handed over to FISTA on dense weights."""
    dense_side: int = 64
    dense_entries: int = 1 << 20
    """Only for matrices of at least ``dense_side`` on the short side and at most ``dense_entries`` entries."""
    aim: float = 0.005
    """A burst ends at this fraction of the last duality gap."""
    single_aim: float = 2e-5
    """The local gap down to which bursts take place in float32 on a CPU: some hundred times its rounding."""
    newton_steps: int = 3
    """Newton steps between gap checks, at most."""
    settled: float = 1e-3
    """Fraction of the last gap below which the Newton decrement says that more terms are what is missing."""
    whole_cross: float = 1e-2
    """The decrement below which the Hessian is taken whole, negative curvature and all."""
    damping: float = 1e-2
    damp_by: float = 4.0
    least_damping: float = 1e-8
    most_damping: float = 10.0
    """Multiples of the preconditioner added to the Hessian: at first, by what factor they change, and their limits."""
    probes: int = 4
    """Random probes of the Hessian's diagonal."""
    cg_steps: int = 100
    cg_steps_bilinear: int = 60
    cg_residual: float = 1e-2
    cg_residual_least: float = 1e-6
    """Steps of conjugate gradients, and fewer for operators that are bilinear by nature, whose products cost more than
    evaluations; their residual in the norm of the preconditioner, relative to the gradient's."""
    shortest_step: float = 1e-6
    longest_step: float = 1e6
    """Steps along a Newton direction."""
    dead: float = 1e-7
    """Terms below this fraction of the largest singular value are dropped."""
    weak_pull: float = 1e-3
    small_term: float = 0.05
    """Terms below this fraction of the largest are dropped if the loss pulls less than beta by that fraction on them."""
    rung: float = 0.1
    """Ratio of successive betas of a cold start by Newton's method."""
    rung_gap: float = 0.1
    """The relative gap at which it goes on to the next beta."""
    rung_rounds: int = 10
    """Rounds of growth and Newton steps at such a beta, at most."""
    single_from: int = 1 << 15
    """Numbers of token data from which float32 products are faster than float64."""

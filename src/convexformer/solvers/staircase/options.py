"""Constants of the staircase."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final


@final
@dataclass(frozen=True)
class StaircaseOptions:
    """Set by benchmarks/heads.py (P4, three sizes) and benchmarks/gpu_heads.py."""

    first_terms: int = 8
    """Terms appended at a time, at least."""
    shortest_burst: int = 7
    longest_burst: int = 100
    """Iterations of a burst of L-BFGS."""
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
    """That is done for matrices of at least this short side and at most so many entries."""
    aim: float = 0.005
    """A burst ends at this fraction of the last duality gap."""

"""Constants of the row-space solver."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final


@final
@dataclass(frozen=True)
class RowSpaceOptions:
    """Set on gated self-attention and the gated mixer (benchmarks/gpu_heads.py), betas of .1 and .01 of the largest."""

    first: int = 6
    """Directions of each block at the start."""
    extra: int = 2
    """Directions that are tried beyond the rank of a block."""
    kept: int = 4
    """Directions without weight that stay in the space of a block, at least; as many as its rank, if that is more."""
    starts: int = 16
    """Vectors of each block that are left to estimates and to the certificate."""
    distant: float = 0.5
    """Blocks without weight whose polar is below this share of beta are left alone until the next survey."""
    idle: float = 0.9
    """Those below this share of beta take no part in the small program."""
    first_gap: float = 1e-2
    inner: float = 0.1
    floor: float = 0.2
    """The relative gap of the small program: at first, as a share of the last gap, and at least, as one of the tolerance."""
    longest: int = 1000
    """Iterations of the small program, at most."""
    ready: float = 0.5
    """The share of the tolerance at which the estimated gap, which knows only the directions that were tried, is believed
    enough to ask for the certificate."""
    silent: int = 3
    """Rounds between the two without a check, at most."""
    single_gap: float = 1e-4
    """The gap down to which products may take place in float32."""
    float32_range: float = 1e8
    """beta_max, or one over it, beyond which squares overflow in float32."""
    negligible: float = 1e-4
    """Directions along which a block reaches less than this share of beta beyond its space are no new ones."""
    rank: float = 1e-7
    """Terms below this fraction of the largest are dropped."""

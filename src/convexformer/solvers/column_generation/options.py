"""Constants of column generation, in one place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final


@final
@dataclass(frozen=True)
class ColumnOptions:
    """What column generation does in a round."""

    new_neurons: int = 4
    """Neurons that a round adds for each block, at least."""
    growth: float = 0.25
    """New neurons of a block, as a share of all there are."""
    wide: int = 48
    """Neurons in random directions that a round adds where there are too many cells to search, over all blocks."""
    weight_steps: int = 200
    """L-BFGS steps on the weights of fixed directions."""
    descent_steps: int = 150
    """L-BFGS steps on all neurons, for each choice of faces; more for few numbers (see ``exact_numbers``)."""
    exact_numbers: int = 400
    """Numbers in all neurons up to which a descent runs until L-BFGS makes no progress."""
    precision: float = 1e-9
    """A descent ends where a step lowers the objective by less than this share of the duality gap."""
    face_tolerances: tuple[float, ...] = (1e-9, 1e-5, 1e-3)
    """A neuron is held on the hyperplanes of the rows with ``|row u| <= tolerance |row| |u|``, for each of these."""
    face_rows: int = 4096
    """Hidden rows up to which faces are tried: beyond, optima on faces are no rule and their search is dear."""
    negligible: float = 1e-11
    """Neurons below this share of the largest are dropped; of ``faint`` where there are too many cells to search."""
    faint: float = 1e-4
    parallel: float = 1e-9
    """Neurons of one block with ``1 - cos`` of their inner weights below this are merged."""


OPTIONS = ColumnOptions()

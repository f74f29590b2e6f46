"""Constants of the working-set solver."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import final


@final
@dataclass(frozen=True)
class NewtonOptions:
    """Newton's method on the groups in use; set on CIFAR-10 and TREC tokens, their clusters as classes, and digits."""

    first_steps: int = 80
    most_steps: int = 640
    """Steps of conjugate gradients at first; twice as many after a step that they did not suffice for, up to the second."""
    residual: float = 0.3
    roughest: float = 0.03
    """CG stops at ``residual * min(roughest, gap)`` of the first energy of the gradient."""
    crossing_rounds: int = 3
    most_crossings: float = 0.2
    """How often groups that turn against themselves are set to zero, and the largest share of them."""
    shortest: float = 1e-3
    """Shortest step of the line search."""
    settled: float = 0.03
    """Newton's method waits until the support changes by at most this fraction in a round."""
    slow: float = 0.5
    """Newton's method takes over where a round of sweeps leaves more than this fraction of the gap."""
    idle_quadratic: int = 3
    """For a quadratic loss, whose sweeps are exact: after this many rounds in a row without a smaller gap."""
    sweeps: int = 2
    """Sweeps between two Newton steps that go well: enough to see the support change."""


@final
@dataclass(frozen=True)
class WorkingSetOptions:
    """Set by benchmarks/tokens/run.py (P1 to P3) unless said otherwise."""

    fewest_slices: int = 16
    first_part: int = 4
    """The first working set: ``fewest_slices`` slices, or one in ``first_part`` of all, whichever is more."""
    near: float = 0.9
    """A slice whose polar is below this fraction of beta waits for a later round."""
    widest_token: int = 512
    """Width of tokens up to which blocks are minimised exactly, by the spectrum of their Gram matrix."""
    single_spectra: tuple[int, float] = (128, 1e-5)
    """Spectra are computed in float32 for tokens of this width and tolerances from this one on: else their time is none."""
    gap_share: float = 0.05
    gap_margin: float = 0.3
    """A round ends at this share of the gap of the whole problem, or at this share of the tolerance."""
    complete_share: float = 0.01
    complete_margin: float = 0.8
    """The same where the last round's slices were enough, so that the gap on them is that of the whole problem."""
    sweeps: int = 8
    fewest_sweeps: int = 3
    """Sweeps of block descent between two extrapolations: as many as the last rate lets expect to suffice, within these."""
    sweeps_of_model: int = 2
    """Sweeps over one quadratic model of a loss that is not quadratic (CIFAR-10, TREC, digits: two beat one and three)."""
    curvature_floor: float = 0.1
    """Floor on the diagonal Hessian of a separable loss, as a fraction of its maximum."""
    patience: int = 8
    """Extrapolations without a smaller gap at which a round gives up."""
    refine_from: float = 1e-3
    """Relative gap below which the rounding of float32 features is corrected."""
    exact_from: float = 1e-6
    """Relative gap below which the state is computed anew in float64 at each round."""
    float32_until: float = 1e-4
    """Relative gap above which accelerated rounds have float32 features."""
    accelerated_iterations: int = 300
    """Iterations of an accelerated round, at most."""
    rung: float = 10.0
    rung_gap: float = 0.1
    """A solve from zero comes down by factors of ``rung`` in beta, to this relative gap at each."""
    idle_rounds: int = 8
    """Rounds without gain after which the solver says that it is stuck, so that another may take over."""
    columns_at_once: int = 2
    """Mean number of columns of a slice from which a sweep moves them all at once."""
    rows_at_once: int = 512
    """Rows from which it does so for single columns, too, without gates: products of BLAS in float32 are then faster than
    loops in float64 that leave out closed rows (N from 100 to 3,200, d 8, 32, 128)."""
    rows_turned: int = 3000
    """Rows for each output up to which tokens are turned to their axes. That costs ``N d^2``; blocks that are not diagonal
    cost ``d^2`` a visit and output, some hundred visits a solve."""
    single_until: float = 1e-6
    """Relative gap down to which sweeps over whole slices, whose residuals are float32, are exact enough."""
    newton: NewtonOptions = field(default_factory=NewtonOptions)

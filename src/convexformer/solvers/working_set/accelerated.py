"""Rounds of accelerated proximal gradient on the tokens of a working set: any loss, any gauge over slices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import final

import numpy as np
import torch
from torch import Tensor

from convexformer.certificates import dual_point
from convexformer.objective import Evaluation, Objective
from convexformer.solvers.fista import fista
from convexformer.solvers.monitor import CHECK_EVERY
from convexformer.solvers.working_set.options import WorkingSetOptions
from convexformer.solvers.working_set.step import StepContext, WorkingSetStep
from convexformer.weights import Operand, Weights


@final
class AcceleratedStep(WorkingSetStep):
    """FISTA on the tokens in the working set, whose features are gathered side by side."""

    def __init__(self, objective: Objective, Z: Tensor, options: WorkingSetOptions) -> None:
        self.objective, self.Z, self.options = objective, Z, options
        self.exact = False
        self._held: tuple[tuple[int, ...], torch.dtype, Objective] | None = None

    def round(self, slices: np.ndarray, at: StepContext, tolerance: float, late: Callable[[], bool]) -> Tensor:
        """Minimise over the tokens of some slices to an absolute gap of ``tolerance`` on them; return all weights."""
        self.exact |= at.gap <= self.options.float32_until
        dtype = self.Z.dtype if self.exact else torch.float32
        tokens = sorted({int(k) % self.Z.shape[-3] for k in slices})
        part = self._restricted(tuple(tokens), dtype).at(at.beta)
        where = torch.tensor(tokens, device=self.Z.device)
        watch = _Watch(part, tolerance, late, self.options.accelerated_iterations)
        fista(part, Weights(self.Z.index_select(-3, where).to(dtype), at.evaluation.intercept), watch)
        self.exact |= not watch.done  # float32 did not reach the goal
        assert isinstance(watch.best, Tensor)
        self.Z = self.Z.index_copy(-3, where, watch.best.to(self.Z.dtype))
        return self.Z

    def _restricted(self, tokens: tuple[int, ...], dtype: torch.dtype) -> Objective:
        """Return the objective on these tokens; the last one is kept."""
        if self._held is None or self._held[:2] != (tokens, dtype):
            self._held = None  # frees its memory first
            part = self.objective.restricted(torch.tensor(tokens, device=self.Z.device)).to(dtype=dtype)
            self._held = (tokens, dtype, part)
        return self._held[2]


@final
class _Watch:
    """Stops a round at an absolute gap on the working set; keeps the point of least gap."""

    def __init__(self, objective: Objective, tolerance: float, late: Callable[[], bool], max_iter: int) -> None:
        self.objective, self.tolerance, self._late, self.max_iter = objective, tolerance, late, max_iter
        self.iteration, self.least, self.done = 0, float("inf"), False
        self.best: Operand | None = None

    def __iter__(self) -> Iterator[int]:
        while not self.done and self.iteration < self.max_iter:
            self.iteration += 1
            yield self.iteration

    @property
    def late(self) -> bool:
        """Whether the time is up."""
        return self._late()

    @property
    def due(self) -> bool:
        """Whether it is time for a gap check."""
        return self.iteration % CHECK_EVERY == 0

    def check(self, Z: Operand, at: Evaluation) -> None:
        """Look at the gap."""
        objective = self.objective
        primal = float(at.value) + objective.beta * float(objective.penalty.value(Z))
        gap = primal - dual_point(objective, at, quick=True).value
        if gap < self.least or self.best is None:
            self.best, self.least = Z, gap
        self.done = self.iteration > 0 and (gap <= self.tolerance or self.late)

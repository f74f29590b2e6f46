"""Rounds of accelerated proximal gradient on the tokens of a working set: any loss, any gauge over slices."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import final

import numpy as np
import torch
from torch import Tensor

from convexformer.objective import Objective
from convexformer.solvers.fista import fista
from convexformer.solvers.monitor import TimeUp
from convexformer.solvers.watch import GapWatch
from convexformer.solvers.working_set.options import WorkingSetOptions
from convexformer.solvers.working_set.step import StepContext, WorkingSetStep
from convexformer.weights import Weights


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
        watch = GapWatch(part, tolerance, late, self.options.accelerated_iterations)
        start = self.Z.index_select(-3, where).to(dtype)
        watch.hold(start, None, None)
        with suppress(TimeUp):
            fista(part, Weights(start, at.evaluation.intercept), watch)
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

"""Rounds of accelerated proximal gradient on the tokens of a working set: any loss, any gauge over slices, any device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from convexformer.architecture import Weights
from convexformer.certificates import dual_point
from convexformer.problem import Fit, Problem
from convexformer.solvers.fista import fista
from convexformer.solvers.rounds import Place, Rounds

FLOAT32_UNTIL = 1e-4  # relative gap: above it the features of a round are float32
CHECK_EVERY, ITERATIONS = 10, 300


@final
class AcceleratedRounds(Rounds):
    """FISTA on the tokens in the working set, whose features are gathered side by side."""

    def __init__(self, problem: Problem, Z: Tensor, fit: Fit) -> None:
        self.problem, self.Z = problem, Z
        self.exact = False
        self._held: tuple[tuple[int, ...], torch.dtype, Problem] | None = None

    def round(self, slices: np.ndarray, at: Place, tolerance: float, late: Callable[[], bool]) -> Tensor:
        """Minimise over the tokens of some slices to an absolute gap of ``tolerance`` on them; return all weights."""
        self.exact |= at.gap <= FLOAT32_UNTIL
        dtype = self.Z.dtype if self.exact else torch.float32
        tokens = sorted({int(k) % self.Z.shape[-3] for k in slices})
        part = self._restricted(tuple(tokens), dtype)
        where = torch.tensor(tokens, device=self.Z.device)
        watch = _Watch(part, tolerance, late)
        fista(part, Weights(self.Z.index_select(-3, where).to(dtype), at.fit.intercept), watch)
        self.exact |= not watch.done  # float32 had its chance
        self.Z = self.Z.index_copy(-3, where, watch.best.to(self.Z.dtype))
        return self.Z

    def _restricted(self, tokens: tuple[int, ...], dtype: torch.dtype) -> Problem:
        """Return the problem on these tokens; the last one is kept."""
        if self._held is None or self._held[:2] != (tokens, dtype):
            self._held = None  # frees its memory first
            part = self.problem.restricted(torch.tensor(tokens, device=self.Z.device), dtype)
            self._held = (tokens, dtype, part)
        return self._held[2]


@final
class _Watch:
    """Stops a round at an absolute gap on the working set; keeps the point of least gap."""

    def __init__(self, problem: Problem, tolerance: float, late: Callable[[], bool]) -> None:
        self.problem, self.tolerance, self._late = problem, tolerance, late
        self.iteration, self.least, self.done = 0, float("inf"), False
        self.best: Any = None

    def __iter__(self) -> Iterator[int]:
        while not self.done and self.iteration < ITERATIONS:
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

    def check(self, Z: Tensor, fit: Fit) -> None:
        """Look at the gap."""
        problem = self.problem
        primal = float(fit.value) + problem.beta * float(problem.penalty.value(Z))
        gap = primal - dual_point(problem, fit, quick=True).value
        if gap < self.least or self.best is None:
            self.best, self.least = Z, gap
        self.done = self.iteration > 0 and (gap <= self.tolerance or self.late)

"""Interface of the benchmark's solvers (benchopt's), and a clock that stops while the objective is evaluated."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod


class Clock:
    """CPU seconds of this process since construction; evaluating a point is not counted.

    CPU time, not wall time: with one thread they agree on an idle machine, and the time of hidden threads is counted.
    """

    def __init__(self, objective, goal, limit):
        self.objective, self.goal, self.limit = objective, goal, limit
        self.curve = []
        self._started, self._paused, self._stated = time.process_time(), 0.0, None

    @property
    def seconds(self):
        return time.process_time() - self._started - self._paused if self._stated is None else self._stated

    def state(self, seconds):
        """Use the time that the tool reports, where its own work cannot be separated from the modelling around it."""
        self._stated = seconds

    def judge(self, Z):
        """Add a point to the curve; True when the goal is met or the time is up."""
        seconds, before = self.seconds, time.process_time()
        self.curve.append((seconds, self.objective.value(Z)))
        self._paused += time.process_time() - before
        return self.curve[-1][1] <= self.goal or seconds > self.limit


class Solver(ABC):
    """One tool. ``run`` alone is timed; preparing the data (``set_objective``) and compiling (``warm_up``) are not.

    ``sampling = "callback"``: one run, and the clock judges points on the way. ``sampling = "knob"``: a run for each of
    ``knobs``, tolerances from loose to tight, each from a cold start; a run counts with its whole time.
    """

    name: str
    environment = "peers"
    """``"peers"``: an environment of its own, because of an old numpy; ``"own"``: the library's."""
    package: str
    """What must be installed, for the table of versions."""
    sampling = "knob"
    knobs: tuple = (None,)

    @staticmethod
    def skip(facts):
        """Say why the tool does not apply to a problem (``kind``, ``beta_ratio``, ``size`` of the design); or nothing."""
        return ""

    @abstractmethod
    def set_objective(self, objective):
        """Convert the data to the form that suits the tool best."""

    def refresh(self):  # noqa: B027  (most tools cache nothing)
        """Clear what the last run may have cached; not timed."""

    def warm_up(self):  # noqa: B027  (most tools compile nothing)
        """Compile what is compiled on first use, on a sample of the data."""

    @abstractmethod
    def run(self, knob, clock):
        """Solve from a cold start."""

    @abstractmethod
    def get_result(self):
        """Return ``Z`` of the last run."""

    def extra(self):
        """Return further numbers of the last run for the report."""
        return {}

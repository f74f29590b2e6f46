"""The experiments by name. Each is a function ``run(output, *, quick, console) -> dict`` that writes a folder.

The result holds ``"certified"``: whether every optimum is certified and every claim that the experiment checks held.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, final

from convexformer.registry import unknown

Run = Callable[..., dict[str, Any]]


@final
@dataclass(frozen=True)
class Experiment:
    """Where an experiment lives, ``module:function``, and what it shows in one line. Imported when it is run."""

    target: str
    help: str

    def load(self) -> Run:
        """Import the function that runs it."""
        module, function = self.target.split(":")
        run: Run = getattr(import_module(module), function)
        return run


EXPERIMENTS: dict[str, Experiment] = {
    "implicit-bias": Experiment(
        "convexformer.experiments.implicit_bias:run",
        "gradient flow on keys and queries against the attention SVMs (Sheen et al. 2024)",
    ),
}


def experiment_of(name: str) -> Experiment:
    """Return the experiment of that name; an unknown one suggests the nearest."""
    if name not in EXPERIMENTS:
        raise ValueError(unknown("experiment", name, EXPERIMENTS))
    return EXPERIMENTS[name]

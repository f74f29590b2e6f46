"""The experiments by name. Each is a function ``run(output, *, quick, console) -> dict`` that writes a folder.

The result holds ``"certified"``: whether every optimum is certified and, for ``implicit-bias``, every prediction held; and
``"untested"``: how many claims its mode could not test. Those on trained stacks also take a ``preset``, ``seeds`` (how
many), a ``budget`` (iterations that no model exceeds) and ``resume`` (keep each training in ``output/checkpoints`` and go
on from what is there); their claims and measurements do not affect ``"certified"``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, final

from convexformer.registry import one_of, unknown

Run = Callable[..., dict[str, Any]]
PRESETS = ("tuned", "paper", "report", "all")  # our sweep, Ergen et al., Fisher et al. (a report), all of them
# division mod 97 also: (12) as printed, at 1e-3 and tuned (dense), figure 7 of Ergen et al. over moduli, and what moves the
# scale of grokking
GROKKING_PRESETS = ("tuned", "paper", "printed", "dense", "moduli", "scale", "report", "all")


@final
@dataclass(frozen=True)
class Experiment:
    """Where an experiment lives, ``module:function``, and what it shows in one line. Imported when it is run."""

    target: str
    help: str
    presets: tuple[str, ...] = ()
    """The settings to choose from; empty where there is only one."""
    data: bool = False
    """Whether it takes a file of data."""

    def load(self) -> Run:
        """Import the function that runs it."""
        module, function = self.target.split(":")
        run: Run = getattr(import_module(module), function)
        return run

    def options(
        self,
        preset: str | None,
        data: str | None = None,
        seeds: int | None = None,
        budget: int | None = None,
        resume: bool = False,
    ) -> dict[str, Any]:
        """Return the keyword arguments for what was given; those that the experiment does not take are an error."""
        if data is not None and not self.data:
            raise ValueError(f"data={data!r} was given; this experiment has its own data. Leave --data out.")
        if preset is not None and not self.presets:
            raise ValueError(f"preset={preset!r} was given; this experiment has no presets. Leave --preset out.")
        for name, value in (("seeds", seeds), ("budget", budget)):
            if value is not None and not self.presets:
                raise ValueError(
                    f"{name}={value} was given; this experiment trains no stacks of layers. Leave --{name} out."
                )
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} was given; expected a positive whole number.")
        if resume and not self.presets:
            raise ValueError("resume was given; this experiment trains no stacks of layers. Leave --resume out.")
        if preset is not None:
            one_of("preset", preset, self.presets)
        given = {"preset": preset, "data": data, "seeds": seeds, "budget": budget, "resume": resume or None}
        return {name: value for name, value in given.items() if value is not None}


EXPERIMENTS: dict[str, Experiment] = {
    "implicit-bias": Experiment(
        "convexformer.experiments.implicit_bias:run",
        "gradient flow on keys and queries against the attention SVMs (Sheen et al. 2024)",
    ),
    "grokking": Experiment(
        "convexformer.experiments.grokking:run",
        "division mod 97, stacks against softmax transformers (Ergen et al. 2022, figures 4, 5, 7; Fisher et al., figure 1)",
        GROKKING_PRESETS,
    ),
    "mod15": Experiment(
        "convexformer.experiments.mod15:run",
        "division mod 15, by share of training data (Ergen et al. 2022, figure 6)",
        PRESETS,
    ),
    "periodicity": Experiment(
        "convexformer.experiments.periodicity:run", "the periodicity task (Fisher et al., figure 2)", PRESETS
    ),
    "spectra": Experiment(
        "convexformer.experiments.spectra:run",
        "singular values over training (Fisher et al., figures 3 and 4)",
        PRESETS,
    ),
    "student-teacher": Experiment(
        "convexformer.experiments.student_teacher:run",
        "an attention layer learned from its activations (Ergen et al. 2022, figures 2 and 3); --data FILE",
        data=True,
    ),
    "claims": Experiment(
        "convexformer.experiments.claims:run",
        "every claim of the papers beside our measurement: numerical checks, and the other experiments",
    ),
}


def experiment_of(name: str) -> Experiment:
    """Return the experiment of that name; an unknown one suggests the nearest."""
    if name not in EXPERIMENTS:
        raise ValueError(unknown("experiment", name, EXPERIMENTS))
    return EXPERIMENTS[name]

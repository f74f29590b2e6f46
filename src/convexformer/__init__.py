"""Attention heads on frozen tokens, trained to a certified global optimum.

Names are imported when they are first used, so that ``convexformer --help`` need not wait for torch.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from convexformer import data, deep, features, gauges, heads, losses, margin, networks, operators, relu, solvers
    from convexformer.certificates import Certificate
    from convexformer.counts import cost
    from convexformer.embedding import embed
    from convexformer.estimators import (
        Leaderboard,
        TokenClassifier,
        TokenClassifierCV,
        TokenRegressor,
        TokenRegressorCV,
    )
    from convexformer.estimators.compare import compare
    from convexformer.io import ModelFileError, export, load, save
    from convexformer.objective import Objective
    from convexformer.path import Path, path
    from convexformer.problem import Problem
    from convexformer.registry import MissingMaskWarning, ZeroSolutionWarning
    from convexformer.solution import Solution, Status
    from convexformer.solving import certify, lift, solve

__all__ = [
    "Certificate",
    "Leaderboard",
    "MissingMaskWarning",
    "ModelFileError",
    "Objective",
    "Path",
    "Problem",
    "Solution",
    "Status",
    "TokenClassifier",
    "TokenClassifierCV",
    "TokenRegressor",
    "TokenRegressorCV",
    "ZeroSolutionWarning",
    "certify",
    "compare",
    "cost",
    "data",
    "deep",
    "embed",
    "export",
    "features",
    "gauges",
    "heads",
    "lift",
    "load",
    "losses",
    "margin",
    "networks",
    "operators",
    "path",
    "relu",
    "save",
    "solve",
    "solvers",
]

_HOMES = {  # where the public names that are no modules are defined
    "certificates": ("Certificate",),
    "counts": ("cost",),
    "estimators": (
        "Leaderboard",
        "TokenClassifier",
        "TokenClassifierCV",
        "TokenRegressor",
        "TokenRegressorCV",
        "compare",
    ),
    "embedding": ("embed",),
    "io": ("ModelFileError", "export", "load", "save"),
    "objective": ("Objective",),
    "path": ("Path", "path"),
    "problem": ("Problem",),
    "registry": ("MissingMaskWarning", "ZeroSolutionWarning"),
    "solution": ("Solution", "Status"),
    "solving": ("certify", "lift", "solve"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is not None:
        return getattr(import_module(f"convexformer.{home}"), name)
    if not name.startswith("_"):
        try:
            return import_module(f"convexformer.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"convexformer.{name}":
                raise
    raise AttributeError(f"module 'convexformer' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """This module, in which the function ``path`` hides the subpackage of that name, whichever is imported first."""

    @property
    def path(self) -> Any:
        return import_module("convexformer.path.walk").path

    @path.setter
    def path(self, module: Any) -> None:  # the import system sets subpackages as attributes
        pass


sys.modules[__name__].__class__ = _Package

"""Named settings: those that the papers print, and those that a sweep found to work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, final

from convexformer.data import SymbolTask
from convexformer.deep.base import SequenceModel
from convexformer.deep.convex import ConvexTransformer
from convexformer.deep.options import Training
from convexformer.deep.report import ReportTransformer
from convexformer.deep.softmax import SoftmaxTransformer
from convexformer.registry import unknown

MODELS: dict[str, type[SequenceModel]] = {
    "convex": ConvexTransformer,
    "softmax": SoftmaxTransformer,
    "report": ReportTransformer,
}


@final
@dataclass(frozen=True)
class Recipe:
    """A model with its options and the way it is trained."""

    label: str
    family: str
    training: Training
    shape: dict[str, Any] = field(default_factory=dict)

    def model(self, task: SymbolTask, seeds: int | Sequence[int] = 1) -> SequenceModel:
        """Build the model for a task."""
        return MODELS[self.family](task.n_symbols, task.n_classes, task.n_tokens, **self.shape, seeds=seeds)

    def but(self, label: str | None = None, shape: dict[str, Any] | None = None, **changes: Any) -> Recipe:
        """Return the same with another label, some of the shape, or some options of training changed."""
        return replace(
            self,
            label=label or self.label,
            shape={**self.shape, **(shape or {})},
            training=self.training.but(**changes) if changes else self.training,
        )

    def settings(self) -> dict[str, Any]:
        """Return everything, for a file."""
        return {"label": self.label, "family": self.family, "shape": self.shape, "training": asdict(self.training)}


def recipe(name: str) -> Recipe:
    """Return the recipe of that name; an unknown one suggests the nearest."""
    if name not in RECIPES:
        raise ValueError(unknown("recipe", name, RECIPES))
    return RECIPES[name]


# Fisher et al., section 5.2: width 128, one head, batches of 32, Adam at 1e-3, ridge 1e-4, decay 1e-6; softmax: decay 1
_AS_REPORTED = Training(
    iterations=300_000, learning_rate=1e-3, betas=(0.9, 0.999), batch_size=32, evaluate_every=500, weight_decay=1.0
)
_RIDGE = _AS_REPORTED.but(weight_decay=1e-6, penalty="ridge", beta=1e-4)
# Power et al. 2022: AdamW at 1e-3, weight decay 1
_POWER = Training(iterations=8000, learning_rate=1e-3, evaluate_every=50)
# gates as printed in equation (12) of Ergen et al. 2022: rank one, on all channels
_PRINTED: dict[str, Any] = {"width": 128, "blocks": 1, "gates": 16, "rank_one": True}
# division mod 15: full batches of 60 pairs
_SMALL: dict[str, Any] = {"batch_size": None, "iterations": 4000, "evaluate_every": 50}
# what stacks of four layers need to train on every seed
_STEADY: dict[str, Any] = {"normalize": True, "residual": True}


def _blocks(label: str, depth: int, width: int = 32, *, shape: dict[str, Any] | None = None, **training: Any) -> Recipe:
    """Gates on blocks of two channels."""
    own = {"depth": depth, "width": width, "blocks": width // 2, "gates": 8, **(shape or {})}
    return Recipe(f"convex, {label}, L={depth}", "convex", Training(**training), own)


def _dense(label: str, depth: int, *, width: int, gates: int, **training: Any) -> Recipe:
    """Gates as printed in equation (12): of rank one, on all channels."""
    own = {"depth": depth, "width": width, "blocks": 1, "gates": gates, "rank_one": True}
    return Recipe(f"convex, as printed, {label}, L={depth}", "convex", Training(**training), own)


def _softmax(label: str, depth: int, width: int, **training: Any) -> Recipe:
    own = {"depth": depth, "width": width, "norm": "pre"}
    return Recipe(f"softmax, {label}, L={depth}", "softmax", Training(**training), own)


RECIPES: dict[str, Recipe] = {
    # division mod 97, the best of benchmarks/gpu_grokking.py for each family and depth
    "convex-1": _blocks("tuned", 1, 64, learning_rate=2e-2, weight_decay=3.0),
    "convex-2": _blocks("tuned", 2, learning_rate=1e-2, weight_decay=3.0, shape={"normalize": True}),
    "convex-4": _blocks("tuned", 4, learning_rate=1e-2, weight_decay=1.0, half_life=300, shape=_STEADY),
    "softmax-1": _softmax("tuned", 1, 128, learning_rate=2e-3, weight_decay=6.0, iterations=3000),
    "softmax-2": _softmax("tuned", 2, 128, learning_rate=2e-3, weight_decay=6.0, iterations=3000),
    "softmax-4": _softmax("tuned", 4, 128, learning_rate=2e-3, weight_decay=3.0, iterations=3000),
    # the same model at the learning rate of the papers, and with the penalty of the theorem
    "convex-1-slow": _blocks("learning rate 1e-3", 1, learning_rate=1e-3, iterations=8000, evaluate_every=50),
    "convex-1-group": _blocks("group penalty", 1, learning_rate=2e-2, penalty="group", beta=3e-5),
    # equation (12) as printed, the best of a sweep of its own (family dense of the same script): narrow tokens, many gates
    "dense-1": _dense(
        "tuned", 1, width=8, gates=128, learning_rate=4e-2, weight_decay=0.3, iterations=1200, evaluate_every=20
    ),
    "dense-2": _dense("tuned", 2, width=64, gates=64, learning_rate=1e-2, weight_decay=3.0, evaluate_every=20),
    # Ergen et al. 2022: equation (12) as printed, trained as the softmax of Power et al. 2022
    "paper-dense-1": Recipe("convex, as printed, L=1", "convex", _POWER, {"depth": 1, **_PRINTED}),
    "paper-dense-2": Recipe("convex, as printed, L=2", "convex", _POWER, {"depth": 2, **_PRINTED}),
    "paper-fixed-1": Recipe(
        "convex, fixed embedding, L=1",
        "convex",
        _POWER.but(iterations=3000),
        {"depth": 1, **_PRINTED, "embedding": "fixed"},
    ),
    "paper-softmax-1": Recipe("softmax, Power et al., L=1", "softmax", _POWER, {"depth": 1}),
    "paper-softmax-2": Recipe("softmax, Power et al., L=2", "softmax", _POWER, {"depth": 2}),
    # Fisher et al., section 5.2
    "report-convex": Recipe("convex, Fisher et al.", "report", _RIDGE),
    "report-kernel": Recipe("convex kernel, Fisher et al.", "report", _RIDGE, {"kernel": "chi"}),
    "report-softmax": Recipe("softmax, Fisher et al.", "softmax", _AS_REPORTED, {"depth": 2, "heads": 1}),
    # periodicity, the best of the same sweep; one convex layer is wider than its grid, whose corner (width 64) stops at 98%
    "periodicity-convex-1": _blocks(
        "tuned", 1, 128, learning_rate=2e-2, weight_decay=1.5, iterations=4000, shape={"separate": True}
    ),
    "periodicity-convex-2": _blocks(
        "tuned",
        2,
        64,
        learning_rate=5e-3,
        weight_decay=6.0,
        iterations=4000,
        shape={"separate": True, "normalize": True},
    ),
    "periodicity-softmax-1": _softmax("tuned", 1, 128, learning_rate=2e-3, weight_decay=6.0, iterations=4000),
    "periodicity-softmax-2": _softmax("tuned", 2, 128, learning_rate=2e-3, weight_decay=6.0, iterations=4000),
    # division mod 15: 60 training pairs at once
    "mod15-convex-1": _blocks("mod 15", 1, **_SMALL, learning_rate=2e-2, weight_decay=1.0),
    "mod15-convex-2": _blocks("mod 15", 2, **_SMALL, learning_rate=5e-3, weight_decay=3.0),
    "mod15-convex-2-long": _blocks(
        "mod 15, long", 2, **{**_SMALL, "iterations": 15_000}, learning_rate=5e-3, weight_decay=3.0
    ),
    "mod15-convex-4": _blocks("mod 15", 4, **_SMALL, learning_rate=5e-3, weight_decay=3.0, shape=_STEADY),
    "mod15-softmax-1": _softmax("mod 15", 1, 64, **_SMALL, learning_rate=5e-3, weight_decay=3.0),
    "mod15-softmax-4": _softmax("mod 15", 4, 64, **_SMALL, learning_rate=2e-3, weight_decay=3.0),
}

"""How a model is trained: every number that decides the result, checked once."""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass, fields, replace
from typing import Any, final

from convexformer.registry import one_of, unknown

PENALTIES = ("none", "group", "ridge")  # added to the cross-entropy, see :class:`Training`
OPTIMIZERS = ("adamw", "adam")  # weight decay apart from the gradient, or as an l2 penalty in it


@final
@dataclass(frozen=True)
class Training:
    """AdamW or Adam on ``mean cross-entropy + penalty`` over minibatches; the mean, not the sum of the convex problems.

    ``penalty="group"`` adds ``beta`` times the group norm of theorem 3 (Ergen et al. 2022) and takes the layers out of the
    weight decay; ``"ridge"`` adds ``beta / batch_size`` times the sum of squares (Fisher et al., section 5.2). The learning
    rate rises over ``warmup`` iterations; it is then constant, or halves every ``half_life`` iterations.

    ``optimizer="adam"`` puts the weight decay into the gradient (``g + decay * w``, rescaled by Adam with the rest of the
    gradient); ``"adamw"`` shrinks the weights apart from it. At decay 1 these are different methods: the first minimises
    ``cross-entropy + |w|^2 / 2``, whose minimum is near zero.

    Parameters
    ----------
    iterations : int
        At most so many steps.
    learning_rate, weight_decay, betas : float, float, (float, float)
        Of the optimiser.
    warmup : int
        Iterations over which the learning rate rises.
    half_life : int, optional
        Iterations in which the learning rate halves, from the first on; None for a constant rate. Not in the papers.
    batch_size : int, optional
        Samples an iteration; None for full batches.
    penalty : {"none", "group", "ridge"}
        What is added to the cross-entropy.
    beta : float
        Its strength.
    train_fraction : float
        The share of samples to train on.
    target : float, optional
        Accuracy, in training and in test, at which all seeds may stop.
    evaluate_every : int
        Iterations between evaluations.
    spectra_every : int, optional
        Iterations between records of singular values.
    max_time : float, optional
        Seconds after which training stops.
    optimizer : {"adamw", "adam"}
        Where the weight decay enters.
    """

    iterations: int = 1000
    learning_rate: float = 2e-2
    weight_decay: float = 1.0
    betas: tuple[float, float] = (0.9, 0.98)
    warmup: int = 10
    half_life: int | None = None
    """Iterations in which the learning rate halves; None for a constant rate."""
    batch_size: int | None = 512
    """Samples per iteration; None, or more than the training set has, for full batches."""
    penalty: str = "none"
    beta: float = 0.0
    train_fraction: float = 0.5
    target: float | None = 0.99
    """Stop when every seed has reached this accuracy, once in training and once in test; None runs all iterations."""
    evaluate_every: int = 10
    spectra_every: int | None = None
    """Iterations between records of singular values; None records none."""
    max_time: float | None = None
    optimizer: str = "adamw"

    def __post_init__(self) -> None:
        for name in ("iterations", "warmup", "evaluate_every"):
            _whole(name, getattr(self, name))
        for name in ("batch_size", "spectra_every", "half_life"):
            if getattr(self, name) is not None:
                _whole(name, getattr(self, name))
        if not (_real(self.learning_rate) and self.learning_rate > 0):
            raise ValueError(f"learning_rate={self.learning_rate!r} was given; expected a positive number.")
        if self.max_time is not None and not (_real(self.max_time) and self.max_time > 0):
            raise ValueError(f"max_time={self.max_time!r} was given; expected positive seconds or None.")
        for name, value in (("weight_decay", self.weight_decay), ("beta", self.beta)):
            if not (_real(value) and value >= 0):
                raise ValueError(f"{name}={value!r} was given; expected a number from 0.")
        if self.target is not None and not 0 < self.target <= 1:
            raise ValueError(f"target={self.target} was given; expected an accuracy in (0, 1], or None.")
        one_of("penalty", self.penalty, PENALTIES)
        one_of("optimizer", self.optimizer, OPTIMIZERS)
        if self.penalty == "none" and self.beta > 0:
            raise ValueError(
                f"beta={self.beta} was given without a penalty; set penalty='group' or 'ridge', or beta=0."
            )
        if self.spectra_every is not None and self.spectra_every % self.evaluate_every:
            raise ValueError(
                f"spectra_every={self.spectra_every} is no multiple of evaluate_every={self.evaluate_every}; "
                "singular values are recorded at evaluations."
            )

    def but(self, **changes: Any) -> Training:
        """Return the same with some fields changed; an unknown name suggests the nearest."""
        known = [field.name for field in fields(self)]
        for name in changes:
            if name not in known:
                raise TypeError(unknown("option of train", name, known))
        return replace(self, **changes)


def _real(value: Any) -> bool:
    return isinstance(value, numbers.Real) and math.isfinite(value)


def _whole(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 1:
        raise ValueError(f"{name}={value!r} was given; expected a positive whole number.")

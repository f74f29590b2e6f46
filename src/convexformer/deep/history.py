"""The history of a training: accuracies, losses and singular values over iterations, one column per seed."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, final

import numpy as np

from convexformer.deep.spectra import effective_rank
from convexformer.registry import one_of

if TYPE_CHECKING:
    from convexformer.deep.base import SequenceModel
    from convexformer.deep.options import Training

SERIES = ("train_accuracy", "train_loss", "test_accuracy", "test_loss")  # rows of an evaluation, in this order


class Outcome(Enum):
    """How training ended, and what to do about it."""

    TARGET = "every seed reached the target accuracy on train and test data"
    ITERATIONS = "all iterations done; raise `iterations` to go on from the checkpoint"
    MAX_TIME = "stopped at max_time; raise it to go on from the checkpoint"
    INTERRUPTED = "interrupted; call again with the same checkpoint to go on"
    DIVERGED = "the loss is not finite for any seed; lower the learning rate or lengthen the warm-up"

    def __str__(self) -> str:
        return self.value


@final
@dataclass
class History:
    """``iteration: (E,)`` and ``seconds: (E,)`` of training time; the series are ``(E, S)``.

    ``spectra[name]: (K, S, r)`` are singular values of a layer, largest first, at ``spectra_iteration: (K,)``.
    """

    iteration: np.ndarray
    seconds: np.ndarray
    train_accuracy: np.ndarray
    train_loss: np.ndarray
    test_accuracy: np.ndarray
    test_loss: np.ndarray
    spectra_iteration: np.ndarray
    spectra: dict[str, np.ndarray] = field(default_factory=dict)

    def effective_rank(self, name: str) -> np.ndarray:
        """``(K, S)`` exponential of the entropy of a layer's normalised singular values (Roy and Vetterli 2007)."""
        return effective_rank(self.spectra[one_of("layer", name, self.spectra)])

    def spectral_norm(self, name: str) -> np.ndarray:
        """``(K, S)`` the largest singular value of a layer."""
        return self.spectra[one_of("layer", name, self.spectra)][..., 0]

    def first(self, series: str, level: float) -> np.ndarray:
        """``(S,)`` index of the first evaluation at which a series reaches ``level``; -1 where it never does."""
        reached = getattr(self, one_of("series", series, SERIES)) >= level
        return np.where(reached.any(0), reached.argmax(0), -1)


@final
@dataclass(frozen=True)
class Run:
    """A trained model with its history and the options it was trained with."""

    model: SequenceModel
    training: Training
    history: History
    outcome: Outcome
    task: str
    device: str
    setup_seconds: float
    """Before the first iteration: moving data and, on a GPU, warming up and capturing graphs."""

    def iterations_to(self, accuracy: float = 0.99, part: str = "test") -> np.ndarray:
        """``(S,)`` iterations until each seed first had this accuracy; nan where it never had."""
        return self._at(self.history.iteration, accuracy, part)

    def seconds_to(self, accuracy: float = 0.99, part: str = "test") -> np.ndarray:
        """``(S,)`` seconds of training until each seed first had this accuracy, all seeds at once."""
        return self._at(self.history.seconds, accuracy, part)

    def grokking_gap(self, accuracy: float = 0.99) -> np.ndarray:
        """``(S,)`` iterations between train and test accuracy: the amount of grokking (Ergen et al. 2022, figure 7b)."""
        return self.iterations_to(accuracy, "test") - self.iterations_to(accuracy, "train")

    def summary(self, accuracy: float = 0.99) -> dict[str, Any]:
        """Return the numbers of a table row as plain JSON; None where a seed never reached the accuracy."""
        test = self.iterations_to(accuracy)
        return {
            "task": self.task,
            "parameters": self.model.n_parameters,
            "seeds": list(self.model.seeds),
            "iterations_train": plain(self.iterations_to(accuracy, "train")),
            "iterations_test": plain(test),
            "grokking_gap": plain(self.grokking_gap(accuracy)),
            "seconds_test": plain(self.seconds_to(accuracy)),
            "reached": int(np.isfinite(test).sum()),
            "best_test_accuracy": self.history.test_accuracy.max(0).tolist(),
            "final_test_accuracy": self.history.test_accuracy[-1].tolist(),
            "final_test_loss": self.history.test_loss[-1].tolist(),
            "iterations": int(self.history.iteration[-1]),
            "seconds": float(self.history.seconds[-1]),
            "setup_seconds": self.setup_seconds,
            "device": self.device,
            "outcome": self.outcome.name.lower(),
        }

    def _at(self, clock: np.ndarray, accuracy: float, part: str) -> np.ndarray:
        index = self.history.first(f"{one_of('part', part, ('train', 'test'))}_accuracy", accuracy)
        return np.where(index >= 0, clock[index], np.nan)


def plain(values: np.ndarray) -> list[float | None]:
    """Return numbers for JSON: NaN as None, whole numbers as integers."""
    rounded = (round(float(v), 6) for v in values)
    return [None if v != v else int(v) if v == int(v) else v for v in rounded]

"""Checkpoints of training: weights, moments and history in one safetensors file, with a fingerprint of the run."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import final

import numpy as np
import torch
from torch import Tensor

from convexformer.data.files import read_checkpoint, write_checkpoint
from convexformer.data.fingerprint import fingerprint
from convexformer.deep.base import SequenceModel
from convexformer.deep.batches import Split
from convexformer.deep.options import Training

UNFIXED_OPTIONS = ("iterations", "target", "max_time", "spectra_every")  # may differ between a run and its continuation


@final
class TrainingCheckpoint:
    """Reads a file before training and rewrites it as training goes on."""

    def __init__(self, path: str | os.PathLike[str], model: SequenceModel, split: Split, training: Training) -> None:
        self.path = Path(path)
        self.fingerprint = _fingerprint(model, split, training)

    def read(self) -> tuple[int, dict[str, Tensor], dict[str, np.ndarray]] | None:
        """Return the iteration, the state of training and the history so far; None when there is no file yet."""
        found = read_checkpoint(self.path, self.fingerprint, "run (other model, seeds, data or options)")
        if found is None:
            return None
        iteration, tensors = found
        past = {key[8:]: value.numpy() for key, value in tensors.items() if key.startswith("history.")}
        state = {key: value for key, value in tensors.items() if not key.startswith("history.")}
        return iteration, state, past

    def write(self, iteration: int, state: dict[str, Tensor], history: dict[str, np.ndarray]) -> None:
        """Replace the file as a whole."""
        tensors = {name: value.detach().cpu().contiguous().clone() for name, value in state.items()}
        tensors |= {
            f"history.{name}": torch.from_numpy(np.ascontiguousarray(values)) for name, values in history.items()
        }
        write_checkpoint(self.path, self.fingerprint, iteration, tensors)


def _fingerprint(model: SequenceModel, split: Split, training: Training) -> str:
    """Hash what defines a run: model, seeds, samples, and all options that change an iteration."""
    options = {key: value for key, value in asdict(training).items() if key not in UNFIXED_OPTIONS}
    for name, default in (("half_life", None), ("optimizer", "adamw")):
        if options[name] == default:
            del options[name]  # checkpoints from before this option stay valid
    return fingerprint(
        {
            "model": type(model).__name__,
            "config": model.config(),
            "seeds": model.seeds,
            "training": options,
            "train": split.train,
            "test": split.test,
        }
    )

"""Small built-in data sets, as tokens with labels."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor


class LabelledTokens(NamedTuple):
    """Tokens ``X: (N, s, d)`` and labels ``y: (N,)``; unpacks as ``X, y``."""

    X: Tensor
    y: Tensor

    def split(self, train: float = 0.7, seed: int = 0) -> tuple[LabelledTokens, LabelledTokens]:
        """Shuffle and split into a train and a test part; ``train`` is the fraction kept for training."""
        if not 0 < train < 1:
            raise ValueError(f"train={train} was given; expected a fraction strictly between 0 and 1.")
        order = torch.from_numpy(np.random.default_rng(seed).permutation(len(self.y)))
        cut = round(train * len(order))
        return tuple(LabelledTokens(self.X[rows], self.y[rows]) for rows in (order[:cut], order[cut:]))  # type: ignore[return-value]


def digits(patch: int = 2, positions: bool = True) -> LabelledTokens:
    """Scikit-learn's bundled 8x8 digits (1,797 images, 10 classes) as patch tokens.

    ``patch=2`` cuts each image into 16 tokens of 4 pixels, row by row. With ``positions`` two more channels
    hold the row and the column of the patch, in [-1, 1]. Pixels are scaled to [0, 1].
    """
    if patch not in (1, 2, 4, 8):
        raise ValueError(f"patch={patch} was given; expected 1, 2, 4 or 8, which divide the 8x8 image.")
    images, labels = load_digits(return_X_y=True)
    side = 8 // patch
    X = (images / 16.0).reshape(-1, side, patch, side, patch).transpose(0, 1, 3, 2, 4)
    X = X.reshape(len(images), side * side, patch * patch)
    if positions:
        axis = np.linspace(-1, 1, side) if side > 1 else np.zeros(1)
        grid = np.stack(np.meshgrid(axis, axis, indexing="ij"), axis=-1).reshape(1, side * side, 2)
        X = np.concatenate([X, np.repeat(grid, len(X), axis=0)], axis=2)
    return LabelledTokens(torch.from_numpy(np.ascontiguousarray(X)), torch.from_numpy(labels.astype(np.int64)))

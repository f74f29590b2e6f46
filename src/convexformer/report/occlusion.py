"""What each token of a sample did for its prediction, for any head: the score falls when the token is taken away."""

from __future__ import annotations

import time
from typing import final

import numpy as np
import torch
from sklearn.base import is_classifier

from convexformer.data import TokenDataset
from convexformer.estimators import TokenEstimator

MEMORY = 1 << 26  # numbers of one batch of occluded samples: 512 MiB in float64


@final
class Occlusion:
    """``contribution_k = f(X) - f(X without token k)``, ``f`` the centred score of the class predicted for ``X``.

    For a regressor ``f`` is its prediction (the mean of several), the sign being such that positive is away from zero.

    A token is taken away by putting the mean training token in its place (the mean test token, where the model does not
    standardise). For heads whose outputs are linear in the tokens the contributions of all tokens add up to the score's
    distance from that of a sample of mean tokens; for others they are what they are, one token at a time.
    """

    def __init__(self, model: TokenEstimator, tokens: TokenDataset, seconds: float) -> None:
        self.model, self.tokens = model, tokens
        self.left = seconds
        mean = model.mean_
        self._mean = (tokens.X.mean((0, 1)) if mean is None else mean).to(tokens.X)

    def of(self, row: int) -> np.ndarray | None:
        """``(s_i,)`` contributions of the real tokens of a sample; None when the time is up."""
        if self.left <= 0:
            return None
        began = time.perf_counter()
        sample = self.tokens.X[row]  # (s, d)
        real = (
            torch.arange(len(sample)) if self.tokens.mask is None else self.tokens.mask[row].nonzero().squeeze(1).cpu()
        )
        whole = self._scores(sample[None], row)
        at = int(whole[0].argmax()) if whole.shape[1] > 1 else 0
        sign = 1.0 if whole.shape[1] > 1 else float(np.sign(whole[0, 0]) or 1.0)
        step = max(1, MEMORY // sample.numel())
        found: list[np.ndarray] = []
        for start in range(0, len(real), step):
            part = real[start : start + step]
            occluded = sample.repeat(len(part), 1, 1)
            occluded[torch.arange(len(part)), part] = self._mean
            found.append(sign * (whole[0, at] - self._scores(occluded, row)[:, at]))
        self.left -= time.perf_counter() - began
        return np.concatenate(found)

    def _scores(self, X: torch.Tensor, row: int) -> np.ndarray:
        """``(n, c)`` outputs, centred over the classes, so that a shift of all logits does not count."""
        mask = None if self.tokens.mask is None else self.tokens.mask[row].expand(len(X), -1)
        outputs = self.model.outputs(TokenDataset(X, mask))
        outputs = outputs.reshape(len(outputs), -1)
        if not is_classifier(self.model):
            return outputs.mean(1, keepdims=True)
        return outputs - outputs.mean(1, keepdims=True) if outputs.shape[1] > 1 else outputs

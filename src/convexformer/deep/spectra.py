"""Spectra of weights: singular values, effective rank, spectral norm (Fisher et al., section 7)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from convexformer.deep.base import SequenceModel


def singular_values(model: SequenceModel) -> dict[str, np.ndarray]:
    """Return ``(S, r)`` singular values of every layer, largest first."""
    with torch.no_grad():
        return {name: _values(Z).cpu().numpy() for name, Z in model.matrices().items()}


def effective_rank(values: Any) -> np.ndarray:
    """``exp(entropy of s / sum(s))`` along the last axis, from 1 to their number (Roy and Vetterli 2007)."""
    s = np.asarray(values, dtype=float)
    share = s / np.maximum(s.sum(-1, keepdims=True), np.finfo(float).tiny)
    logs = np.log(np.where(share > 0, share, 1.0))
    return np.exp(-(share * logs).sum(-1))


def stable_rank(values: Any) -> np.ndarray:
    """``|Z|_F^2 / |Z|_2^2`` along the last axis."""
    s = np.asarray(values, dtype=float)
    return (s**2).sum(-1) / np.maximum(s[..., 0] ** 2, np.finfo(float).tiny)


def _values(Z: Tensor) -> Tensor:
    """From the eigenvalues of the smaller Gram matrix, in float64: many times faster than an SVD, exact enough to plot."""
    Z = Z.double()
    gram = Z.mT @ Z if Z.shape[-1] <= Z.shape[-2] else Z @ Z.mT
    return torch.linalg.eigvalsh(gram).flip(-1).clamp_min(0).sqrt()

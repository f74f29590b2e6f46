"""Optimal atomic decompositions, from slices of ``Z`` to the two factors of each head."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import one_hot

RANK_TOLERANCE = 1e-13  # singular values below this fraction of the largest get no head


def group_heads(slices: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Nonzero columns ``z`` of ``(b, d, c)`` slices: slice index, ``z / sqrt|z|``, ``e_l sqrt|z|``."""
    norms = slices.norm(dim=1)  # (b, c)
    where, column = norms.nonzero(as_tuple=True)
    roots = norms[where, column].sqrt()
    w2 = slices[where, :, column] / roots[:, None]
    w3 = one_hot(column, slices.shape[2]).to(slices) * roots[:, None]
    return where, w2, w3


def singular_heads(slices: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Singular triples of ``(b, d, c)`` slices: slice index, ``sqrt(sigma) u``, ``sqrt(sigma) v``."""
    U, sigma, Vh = torch.linalg.svd(slices, full_matrices=False)
    top = sigma.max() if sigma.numel() else 0.0
    where, rank = (sigma > RANK_TOLERANCE * top).nonzero(as_tuple=True)
    roots = sigma[where, rank].sqrt()[:, None]
    return where, roots * U[where, :, rank], roots * Vh[where, rank]

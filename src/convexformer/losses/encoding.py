"""Targets as users give them, validated and turned into float64 ``(R, c)``."""

from __future__ import annotations

import torch
from torch import Tensor


def real_targets(Y: Tensor, loss: str) -> Tensor:
    """Return real targets ``(R,)`` or ``(R, c)`` as float64 ``(R, c)``."""
    if Y.ndim not in (1, 2):
        raise ValueError(f"Y has shape {tuple(Y.shape)}; the {loss} loss expects (N,) or (N, c).")
    if Y.is_complex():
        raise ValueError("Y holds complex numbers; expected real targets. Complex data is not supported.")
    return (Y[:, None] if Y.ndim == 1 else Y).to(torch.float64)


def signs(Y: Tensor, loss: str) -> Tensor:
    """Return labels -1/+1 as float64 ``(R, 1)``, both of them present."""
    flat = Y[:, 0] if Y.ndim == 2 and Y.shape[1] == 1 else Y
    if flat.ndim != 1:
        raise ValueError(
            f"Y has shape {tuple(Y.shape)}; the {loss} loss expects one label -1 or +1 a sample, (N,). "
            "For several classes use loss='cross_entropy'."
        )
    values = flat.to(torch.float64)
    found = values.unique().tolist()
    if not set(found) <= {-1.0, 1.0}:
        raise ValueError(
            f"Y holds {[round(v, 6) for v in found[:5]]}; the {loss} loss expects labels -1 and +1. "
            "Convert 0/1 labels by 2 * Y - 1."
        )
    if len(found) < 2:
        raise ValueError(f"Y holds one class only ({found[0]:+.0f}); a classifier needs samples of both classes.")
    return values[:, None]


def probabilities(Y: Tensor) -> Tensor:
    """Return rows of probabilities ``(R, c)`` as float64, each of sum one."""
    if Y.ndim != 2:
        raise ValueError(f"Y has shape {tuple(Y.shape)}; cross_entropy expects labels (N,) or probabilities (N, c).")
    P = Y.to(torch.float64)
    if P.shape[1] < 2:
        raise ValueError(f"Y has {P.shape[1]} column; cross_entropy needs the probabilities of at least two classes.")
    sums = P.sum(1)
    if bool((P < 0).any()) or bool(((sums - 1).abs() > 1e-3).any()):
        worst = int((sums - 1).abs().argmax())
        raise ValueError(
            f"Y has shape {tuple(Y.shape)} and cross_entropy reads it as rows of probabilities, but row {worst} "
            f"sums to {float(sums[worst]):.4g} (smallest entry {float(P.min()):.4g}). Pass integer labels (N,), or "
            "rows that are nonnegative and sum to one."
        )
    return P / sums[:, None]


def one_hot(labels: Tensor) -> Tensor:
    """Return integer labels ``(R,)`` as float64 ``(R, c)``; ``c`` is the largest label plus one."""
    if labels.is_floating_point() or labels.is_complex():
        raise TypeError(
            f"labels are {str(labels.dtype).removeprefix('torch.')}; cross_entropy expects integer labels 0..c-1, shape "
            "(N,). Convert them (Y.astype(int)), or use loss='squared' for real targets."
        )
    index = labels.to(torch.int64)
    if int(index.min()) < 0:
        raise ValueError(
            f"labels contain {int(index.min())}; cross_entropy expects integers 0..c-1. For labels -1/+1 use "
            "loss='logistic', or relabel with np.unique(y, return_inverse=True)."
        )
    present = index.unique()
    if present.numel() < 2:
        raise ValueError(f"Y holds one class only ({int(present[0])}); a classifier needs at least two classes.")
    c = int(index.max()) + 1
    if c > 100_000 or c > 1000 * present.numel():
        raise ValueError(
            f"the largest label is {c - 1} but only {present.numel()} labels occur; relabel them 0..c-1 "
            "with np.unique(y, return_inverse=True)."
        )
    return torch.nn.functional.one_hot(index, c).to(torch.float64)

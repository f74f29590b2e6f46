"""Second moments of features: the axes along which the curvature of a loss is nearly diagonal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from torch import Tensor

from convexformer.rows import Rows

AXIS_WORK = 2e8  # operations of all eigendecompositions of one axis, at most: a few tenths of a second
AXIS_SIDE = 640  # the longest axis that is turned
SAMPLED_BLOCKS = 8  # blocks that stand for all where each one's own moments would cost too much


@final
@dataclass(frozen=True)
class Axis:
    """One of the axes that the rows (or columns) of a block of ``Z`` unfold into, row-major."""

    size: int
    moments: Tensor | None = None
    """``(k, size, size)``, block ``b`` has number ``b % k``; None where nothing is known of the axis."""


@final
@dataclass(frozen=True)
class Moments:
    """What an operator knows of its features: axes of the rows and of the columns of ``Z``.

    With ``(A Z)_i = Phi_i Z`` the rows have one axis, with ``sum_i w_i phi_i phi_i^T``. The last axis of the columns is that
    of the outputs where ``outputs`` says so.
    """

    rows: tuple[Axis, ...]
    columns: tuple[Axis, ...]
    outputs: bool = True


def block_moments(features: Tensor, w: Tensor, rows: Rows, *, centred: bool) -> Tensor | None:
    """``(k, d, d)`` weighted moments of ``features: (R, B, d)`` about zero or their mean; None where that costs too much.

    One for each block, or one that all share (``k = 1``, from a few of the blocks) where those would cost too much.
    """
    _, B, d = features.shape
    if d > AXIS_SIDE:
        return None
    shared = B * float(d) ** 3 > AXIS_WORK
    if shared:
        features = features[:, :: -(-B // SAMPLED_BLOCKS)]
    X = features.transpose(0, 1)  # (B, R, d)
    w = w.to(X)
    S = rows.total((X * w[:, None]).mT @ X)
    if centred:
        mean = rows.total(w @ X)  # (B, d)
        S = S - mean[:, :, None] * mean[:, None, :] / rows.sum(w)
    return S.mean(0, keepdim=True) if shared else S

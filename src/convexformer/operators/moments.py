"""Second moments of features: the axes along which the curvature of a loss is nearly diagonal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias, final

from torch import Tensor

from convexformer.operators.budget import sample_chunks
from convexformer.rows import Rows

AXIS_WORK = 2e8  # operations of all eigendecompositions of one axis, at most: a few tenths of a second
AXIS_SIDE = 640  # the longest axis that is turned
SAMPLED_BLOCKS = 8  # blocks that stand for all where each one's own moments would cost too much


Turns: TypeAlias = "tuple[Tensor | None, ...]"
"""For each axis ``(k, n, n)`` with new axes in columns, block ``b`` has number ``b % k``; None: left as it is."""


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


def mixing_moments(X: Tensor, c: int, rows: Rows, like: Tensor) -> Moments:
    """Moments of the positions and of the channels of ``X: (N, s, d)``; the rows of ``Z`` unfold into ``(t, o)``."""
    N, s, d = X.shape
    positions, channels = X.new_zeros((s, s)), X.new_zeros((d, d))
    for part in sample_chunks(N, 2 * s * d, X):
        tall, wide = X[part].transpose(0, 1).flatten(1), X[part].flatten(0, 1)  # (s, n d), (n s, d)
        positions.addmm_(tall, tall.T)
        channels.addmm_(wide.T, wide)
    positions, channels = rows.total(positions.to(like)), rows.total(channels.to(like))
    return Moments((Axis(s, positions[None]), Axis(s)), (Axis(d, channels[None]), Axis(c)))


def turned_blocks(features: Tensor, turn: Tensor) -> Tensor:
    """``features: (R, B * d)`` with each block of ``d`` along the axes ``turn: (B or 1, d, d)``."""
    d = turn.shape[-1]
    if len(turn) == 1:
        return (features.reshape(-1, d) @ turn[0]).view(features.shape)
    X = features.view(len(features), -1, d).transpose(0, 1)  # (B, R, d)
    return (X @ turn).transpose(0, 1).reshape(features.shape)

"""Outputs linear in one feature vector a row."""

from __future__ import annotations

import math
from typing import final
from weakref import ref

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from convexformer.operators.base import Operator, TokenFeatures, gather_tokens, times
from convexformer.operators.moments import Axis, Moments, Turns, block_moments, turned_blocks
from convexformer.rows import LOCAL, Rows

SMALL_GRAM = 1 << 18  # entries of a Gram matrix up to which one product is as fast as blocks


@final
class DenseOperator(Operator):
    """``A Z = Phi Z`` with features ``Phi: (R, p)`` and ``Z`` of ``(*axes, c)``, ``p = prod(axes)``.

    Convex attention on flattened tokens (``axes = (s, d)``), the MLP head on pooled gated tokens (``(g, d)``), a
    linear head on the mean token (``(d,)``). ``columns`` folds ``Z`` into a matrix of that many columns, row-major (the
    pooled mixer's ``s x dc``).
    """

    def __init__(self, features: Tensor, axes: tuple[int, ...], n_outputs: int, columns: int | None = None) -> None:
        if features.ndim != 2 or features.shape[1] != math.prod(axes):
            raise ValueError(f"features {tuple(features.shape)} do not match weight axes {axes}.")
        self.features = features
        self.axes = axes
        self.columns, self.n_outputs = columns, n_outputs
        self.weight_shape = (*axes, n_outputs) if columns is None else (math.prod(axes) * n_outputs // columns, columns)
        self.output_shape = (features.shape[0], n_outputs)

    @property
    def like(self) -> Tensor:
        """The features."""
        return self.features

    def apply(self, Z: Tensor) -> Tensor:
        """``Phi Z``: O(R p c), or less where most token slices of ``Z`` are zero."""
        if (parts := self.token_features()) is not None and (few := sparse_tokens(Z)) is not None:
            X = parts.features
            out = X.new_zeros(self.output_shape)
            for k in few:
                out.addmm_(X[:, k], Z[k])
            return out
        return times(self.features, Z.reshape(self.features.shape[1], -1))

    def adjoint(self, V: Tensor) -> Tensor:
        """``Phi^T V``: O(R p c)."""
        return times(self.features.T, V).reshape(self.weight_shape)

    def statistics(self) -> tuple[Tensor, ...]:
        """The features."""
        return (self.features,)

    def of_statistics(self, parts: tuple[Tensor, ...]) -> DenseOperator:
        """The same weights on other features."""
        return DenseOperator(parts[0], self.axes, self.n_outputs, self.columns)

    def row_gram(self) -> Tensor:
        """``Phi Phi^T``."""
        return gram_of(self.features)

    def represent(self, alpha: Tensor) -> Tensor:
        """``Phi^T alpha``."""
        return self.adjoint(alpha)

    def compressed(self, Y: Tensor, w: Tensor) -> tuple[Operator, Tensor] | None:
        """The triangular factor of the weighted features, where there are more rows than columns."""
        R, p = self.features.shape
        if 2 * p > R:
            return None
        root = w.sqrt()[:, None]
        Q, T = torch.linalg.qr(root * self.features)
        return DenseOperator(T, self.axes, self.n_outputs, self.columns), Q.T @ (root * Y)

    def moments(self, w: Tensor, rows: Rows = LOCAL, *, centred: bool = False) -> Moments | None:
        """``sum_i w_i phi_i phi_i^T`` for each block; of a folded ``Z`` those of its rows and of its channels."""
        R, c = self.output_shape
        if self.columns is None:
            d = self.axes[-1]
            return Moments(
                (Axis(d, block_moments(self.features.view(R, -1, d), w, rows, centred=centred)),), (Axis(c),)
            )
        s, d = self.weight_shape[0], self.columns // c
        X = self.features.view(R, s, d)
        tall, wide = (
            block_moments(x, w, rows, centred=centred) for x in (X.mT, X)
        )  # (d or 1, s, s) and (s or 1, d, d)
        positions = None if tall is None else tall.sum(0, keepdim=True)
        channels = None if wide is None else wide.sum(0, keepdim=True)
        return Moments((Axis(s, positions),), (Axis(d, channels), Axis(c)))

    def turned(self, rows: Turns, columns: Turns) -> DenseOperator | None:
        """The features along other axes."""
        if self.columns is not None or columns[-1] is not None:
            return None
        features = self.features if rows[0] is None else turned_blocks(self.features, rows[0].to(self.features))
        return DenseOperator(features, self.axes, self.n_outputs)

    def token_features(self) -> TokenFeatures | None:
        """The tokens, where the features are tokens side by side."""
        if len(self.axes) != 2 or self.columns is not None:
            return None
        return TokenFeatures(self.features.view(-1, *self.axes), None)

    def restricted(self, tokens: Tensor) -> DenseOperator:
        """The same map on some of the tokens; their features are copied."""
        part = gather_tokens(self.features, self.axes, tokens)
        return DenseOperator(part, (len(tokens), self.axes[1]), self.n_outputs)

    def to(self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> DenseOperator:
        """Move the features."""
        return DenseOperator(self.features.to(device=device, dtype=dtype), self.axes, self.n_outputs, self.columns)


def gram_of(features: Tensor, others: Tensor | None = None) -> Tensor:
    """``Phi Phi^T``, or ``Phi Psi^T``, kept as long as the features live: linear and Gaussian kernels of them share it."""
    others = features if others is None else others
    found = _GRAMS.get(features)
    if found is None or found[0]() is not others:
        found = (ref(others), _symmetric(features) if others is features else features @ others.T)
        _GRAMS[features] = found
    return found[1]


_GRAMS = WeakTensorKeyDictionary()


def _symmetric(features: Tensor) -> Tensor:
    """``Phi Phi^T``, on a CPU by the lower triangle of blocks: a little more than half the work."""
    N = len(features)
    if features.is_cuda or N * N < SMALL_GRAM:
        return features @ features.T
    found, step = features.new_empty((N, N)), -(-N // 8)
    for k in range(0, N, step):
        part = features[k:] @ features[k : k + step].T
        found[k:, k : k + step] = part
        found[k : k + step, k:] = part.T
    return found


def sparse_tokens(Z: Tensor) -> list[int] | None:
    """Return the tokens of ``Z: (s, d, c)`` that are not zero, on a CPU and where they are few; else None."""
    if Z.is_cuda or len(Z) < 8:
        return None
    found = Z.flatten(1).any(1).nonzero()[:, 0].tolist()
    return found if 2 * len(found) <= len(Z) else None

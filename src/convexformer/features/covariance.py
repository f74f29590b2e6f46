"""Second-order features: a function of each sample's token covariance."""

from __future__ import annotations

import math
import numbers
from typing import final

import torch
from torch import Tensor

from convexformer.data.stores import Tokens
from convexformer.data.tokens import TokenDataset
from convexformer.features.base import FEATURES, TokenFeature
from convexformer.features.eigenfree import eigenfree
from convexformer.registry import one_of

KINDS = ("sqrt", "log", "raw")


@final
class CovariancePooling(TokenFeature):
    """The upper triangle of ``h(C + eps I)``, ``C: (q, q)`` the covariance of a sample's real tokens about their mean.

    ``kind``: ``h`` is the matrix square root (Li et al. 2017, "Is second-order information helpful for large-scale visual
    recognition?"; the Bures geometry), the matrix logarithm (Arsigny et al. 2007), or nothing. ``eps`` is ``shrinkage``
    times the mean of the diagonal of ``C``. Tokens of more than ``max_channels`` channels are first projected on so many
    principal channels of the training tokens. Off-diagonal entries count ``sqrt(2)``, so that the inner product of two
    features is that of the matrices.

    Parameters
    ----------
    kind : {"sqrt", "log", "raw"}
        The function ``h`` of the covariance.
    shrinkage : float
        ``eps`` over the mean of the diagonal of ``C``.
    max_channels : int
        Wider tokens are projected on so many principal channels first.
    """

    mean: Tensor  # (d,)
    basis: Tensor  # (d, q)
    eigenvectors: bool = True
    """False takes matrix products alone instead of eigenvectors, which ONNX lacks; float64 inside."""

    def __init__(self, kind: str = "sqrt", shrinkage: float = 1e-3, max_channels: int = 128) -> None:
        super().__init__()
        self.kind = kind
        self.shrinkage = shrinkage
        self.max_channels = max_channels

    def learn(self, tokens: Tokens) -> None:
        """Learn the principal channels, where there are more than ``max_channels``."""
        one_of("kind", self.kind, KINDS)
        if not isinstance(self.shrinkage, numbers.Real) or not (math.isfinite(self.shrinkage) and self.shrinkage > 0):
            raise ValueError(f"shrinkage={self.shrinkage} was given; expected a positive fraction such as 1e-3.")
        if not isinstance(self.max_channels, numbers.Integral) or self.max_channels < 1:
            raise ValueError(f"max_channels={self.max_channels} was given; expected a positive whole number.")
        if tokens.width > self.max_channels:
            mean, _ = tokens.moments()
            _, vectors = torch.linalg.eigh(tokens.scatter(mean))  # rising
            self.register_buffer("mean", mean)
            self.register_buffer("basis", vectors[:, -int(self.max_channels) :].contiguous())

    def compute(self, tokens: TokenDataset) -> Tensor:
        """``(n, q (q + 1) / 2)``."""
        X = tokens.X.to(torch.promote_types(tokens.X.dtype, torch.float32))  # no decompositions in half precision
        basis = getattr(self, "basis", None)
        if basis is not None:
            X = (X - self.mean.to(X)) @ basis.to(X)
        lengths = tokens.lengths.to(X)[:, None, None]
        real = None if tokens.mask is None else tokens.mask[..., None].to(X)
        X = X if real is None else X * real
        X = X - X.sum(1, keepdim=True) / lengths
        X = X if real is None else X * real
        return _triangle(self._function(X / lengths.sqrt())).to(tokens.X.dtype)

    def _function(self, X: Tensor) -> Tensor:
        """``h(X^T X + eps I)`` through the eigenvectors of the smaller of ``X^T X`` and ``X X^T``, for ``X: (n, s, q)``."""
        s, q = X.shape[1:]
        eps = (float(self.shrinkage) / q) * X.square().sum((1, 2))[:, None]  # (n, 1)
        eps = eps.clamp_min(torch.finfo(X.dtype).tiny ** 0.25)
        identity = torch.eye(q, dtype=X.dtype, device=X.device)
        if self.kind == "raw":
            return X.mT @ X + eps[..., None] * identity
        if not self.eigenvectors:
            return eigenfree(self.kind, X, eps[..., None], spread=1 + q / float(self.shrinkage))
        values, Q = torch.linalg.eigh(X @ X.mT if s < q else X.mT @ X)
        values = values.clamp_min(0)
        directions = X.mT @ Q if s < q else Q * values.sqrt()[:, None]  # (n, q, m), of lengths sqrt(values)
        if self.kind == "sqrt":
            slope, floor = 1 / ((values + eps).sqrt() + eps.sqrt()), eps.sqrt()  # (h(l + eps) - h(eps)) / l
        else:
            ratio = values / eps
            slope = torch.where(ratio > 0, torch.log1p(ratio) / ratio, torch.ones_like(ratio)) / eps
            floor = eps.log()
        return (directions * slope[:, None]) @ directions.mT + floor[..., None] * identity

    def sample_size(self, n_tokens: int, width: int) -> int:
        """A few matrices."""
        q = min(width, int(self.max_channels))
        return 3 * q * q + 2 * n_tokens * (q + min(n_tokens, q))


def _triangle(H: Tensor) -> Tensor:
    """``(n, q (q + 1) / 2)`` the upper triangle, off-diagonal entries times ``sqrt(2)``."""
    q = H.shape[1]
    i, j = torch.triu_indices(q, q, device=H.device)
    weight = torch.where(i == j, 1.0, math.sqrt(2.0)).to(H)
    return H.flatten(1)[:, i * q + j] * weight


FEATURES.register("CovariancePooling", CovariancePooling)

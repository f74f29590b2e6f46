"""Networks on a fixed map of the tokens: a linear layer, and a kernel machine that keeps its training features."""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor

from convexformer.features import TokenFeature
from convexformer.networks.base import TokenNetwork, fixed, optional, owned
from convexformer.operators.kernel import kernel_product
from convexformer.registry import one_of
from convexformer.weights import Representer, Weights

DECAYS = ("ridge", "frobenius", "nuclear")


class _OnFeatures(TokenNetwork):
    """What the two share: reading tokens, the bias, the shape of the outputs."""

    feature: TokenFeature
    bias: Tensor | None
    squeeze: bool
    decay_kind: str

    def features(self, X: Tensor, mask: Tensor | None) -> Tensor:
        """``(N, p)`` normalised features, in the dtype of the weights."""
        return self.feature.embed(self.tokens(X, mask, length=self.token_size[0]))

    @property
    def token_size(self) -> tuple[int | None, int]:
        """``(s, d)`` of the map."""
        return self.feature.n_tokens_in_ if self.feature.positional else None, self.feature.n_features_in_

    def finish(self, outputs: Tensor) -> Tensor:
        """Add the bias and give the outputs the shape of the targets."""
        outputs = outputs if self.bias is None else outputs + self.bias
        return outputs.squeeze(-1) if self.squeeze else outputs


@final
class FeatureNetwork(_OnFeatures):
    """``f(X) = phi(X) weight + bias``: a linear layer ``(p, c)`` on a fitted feature map, centred and scaled.

    ``decay()`` is half the squared norm of the weight, its norm, or its nuclear norm, by ``decay_kind``.
    """

    def __init__(
        self,
        feature: TokenFeature,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        decay_kind: str = "ridge",
        squeeze: bool = False,
    ) -> None:
        super().__init__()
        self.feature = feature
        self.weight, self.bias = owned(weight), optional(bias)
        self.decay_kind, self.squeeze = one_of("decay", decay_kind, DECAYS), squeeze

    def forward(self, X: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return outputs ``(N, c)``, or ``(N,)`` where the targets were."""
        return self.finish(self.features(X, mask) @ self.weight)

    def decay(self) -> Tensor:
        """Return the penalty of the weight."""
        if self.decay_kind == "ridge":
            return 0.5 * self.weight.square().sum()
        return torch.linalg.matrix_norm(self.weight, "fro" if self.decay_kind == "frobenius" else "nuc")

    def lift(self) -> Weights:
        """Return the weight and the bias."""
        return Weights(self.weight.detach().clone(), fixed(self.bias))

    def config(self) -> dict[str, Any]:
        """Return the options and the map."""
        return {"feature": self.feature, "decay_kind": self.decay_kind, "squeeze": self.squeeze}


@final
class KernelNetwork(_OnFeatures):
    """``f(X) = sum_i alpha_i k(phi(X), phi_i) + bias`` over the training samples, ``k`` centred and scaled on them.

    It stores the normalised training features ``centers: (N, p)``: ``N p`` numbers. ``decay()`` is the penalty of the
    function in the Hilbert space of the kernel.
    """

    centers: Tensor
    column_mean: Tensor
    total_mean: Tensor
    unit: Tensor

    def __init__(
        self,
        feature: TokenFeature,
        alpha: Tensor,
        bias: Tensor | None = None,
        *,
        centers: Tensor,
        column_mean: Tensor,
        total_mean: Tensor,
        unit: Tensor,
        kernel: Any = "gaussian",
        width: float = 2.0,
        decay_kind: str = "ridge",
        squeeze: bool = False,
    ) -> None:
        super().__init__()
        self.feature = feature
        self.alpha, self.bias = owned(alpha), optional(bias)
        for name, values in (("centers", centers), ("column_mean", column_mean), ("total_mean", total_mean)):
            self.register_buffer(name, values)
        self.register_buffer("unit", unit)
        self.kernel, self.width = kernel, width
        self.decay_kind, self.squeeze = one_of("decay", decay_kind, DECAYS[:2]), squeeze

    def forward(self, X: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return outputs ``(N, c)``, or ``(N,)`` where the targets were."""
        K = self._kernel(self.features(X, mask))
        return self.finish(K @ self.alpha)

    def decay(self) -> Tensor:
        """Return the penalty of the function; ``N x N`` kernel values are computed."""
        K = self._kernel(self.centers.to(self.alpha.dtype))
        squared = (self.alpha * kernel_product(K, self.alpha)).sum().abs()
        return 0.5 * squared if self.decay_kind == "ridge" else squared.sqrt()

    def lift(self) -> Weights:
        """Return the coefficients and the bias."""
        return Weights(Representer(self.alpha.detach().clone()), fixed(self.bias))

    def config(self) -> dict[str, Any]:
        """Return the options and the map."""
        own = {"kernel": self.kernel, "width": self.width, "decay_kind": self.decay_kind, "squeeze": self.squeeze}
        return {"feature": self.feature, **own}

    def _kernel(self, phi: Tensor) -> Tensor:
        raw = kernel_values(self.kernel, self.width, phi, self.centers.to(phi.dtype))
        return centred(raw, self.column_mean.to(phi.dtype), self.total_mean.to(phi.dtype)) * self.unit.to(phi.dtype)


def kernel_values(kernel: Any, width: float, phi: Tensor, centers: Tensor, gram: Tensor | None = None) -> Tensor:
    """``(R, n)`` kernel values of features ``(R, p)`` and ``(n, p)``; ``gram`` are their inner products, where known."""
    if callable(kernel):
        return kernel(phi, centers)
    inner = phi @ centers.T if gram is None else gram
    if kernel == "linear":
        return inner.clone() if gram is not None else inner
    if phi is centers:
        a = b = inner.diagonal().clone()
    else:
        a, b = (torch.linalg.vector_norm(part, dim=1).square() for part in (phi, centers))
    squared = torch.sub(a[:, None] + b, inner, alpha=2.0).clamp_min_(0)
    return squared.mul_(-1 / width).exp_()


def centred(raw: Tensor, column_mean: Tensor, total_mean: Tensor) -> Tensor:
    """Centre kernel values ``(R, n)`` in feature space, by the means over the training samples; ``raw`` is overwritten."""
    raw -= raw.mean(1, keepdim=True)
    raw -= column_mean - total_mean
    return raw

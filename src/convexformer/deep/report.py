"""The two-layer model of Fisher et al., *Convex Self-Attention Mechanisms* (a report of UC San Diego), section 5.2."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, final

from torch import Tensor, nn
from torch.nn import functional

from convexformer.deep.base import Embedding, SequenceModel, positive
from convexformer.deep.convex import apply_fastfood, stacked_fastfood


@final
class ReportTransformer(SequenceModel):
    """``logits_l = <Z2_l, phi(m(h))>``, ``h_l = <Z1_l, phi(X)>``: program (5) of Fisher et al. twice, a ReLU MLP m between.

    ``kernel="chi"`` is its kernel preconditioning, ``phi_cvx``, which is a fixed linear map (``features.Fastfood``);
    ``None`` leaves ``phi`` out. Fisher et al. do not specify the MLP; here it has four times the width and one bias. Learned
    embeddings, so the training problem is not convex.
    """

    def __init__(
        self,
        n_symbols: int,
        n_classes: int,
        n_tokens: int = 2,
        *,
        width: int = 128,
        kernel: str | None = None,
        sigma: float = 1.0,
        seeds: int | Sequence[int] = 1,
    ) -> None:
        super().__init__(n_symbols, n_classes, n_tokens, seeds)
        self.width, self.kernel, self.sigma = positive("width", width), kernel, sigma
        self.embedding = Embedding(self.n_symbols, self.n_tokens, width, "learned", False, self.draws)
        draw, inner = self.draws.normal, 4 * width
        first, second = (self._kernel(layer, width) for layer in range(2))
        inputs = self.n_tokens * first
        self.Z1 = nn.Parameter(draw(inputs, width, scale=inputs**-0.5))
        self.up = nn.Parameter(draw(width, inner, scale=math.sqrt(2 / width)))
        self.bias = nn.Parameter(draw(inner, scale=0.0))
        self.down = nn.Parameter(draw(inner, width, scale=inner**-0.5))
        self.Z2 = nn.Parameter(draw(second, n_classes, scale=second**-0.5))

    def last_tokens(self, symbols: Tensor) -> Tensor:
        """``(S, B, 1, d)``: ``phi`` of the output of the MLP."""
        X = self._mapped(self.embedding(self.expanded(symbols)), 0)
        h = X.flatten(2) @ self.Z1
        h = functional.relu(h @ self.up + self.bias[:, None]) @ self.down
        return self._mapped(h.unsqueeze(2), 1)

    def last_weights(self) -> Tensor:
        """``(S, 1, d, c)``."""
        return self.Z2.unsqueeze(1)

    def matrices(self) -> dict[str, Tensor]:
        """Return ``Z1``, ``Z2`` and the MLP: the weights that the penalty of Fisher et al. covers, without the bias."""
        return {"Z1": self.Z1, "up": self.up, "down": self.down, "Z2": self.Z2}

    def group_norm(self) -> Tensor:
        """The group norm of program (5) on both layers: one group per token and output."""
        rows = self.Z1.view(len(self.seeds), self.n_tokens, -1, self.width).norm(dim=2).sum((1, 2))
        return rows + self.Z2.norm(dim=1).sum(1)

    def ridge(self) -> Tensor:
        """``|Z|^2 + |Z2|^2 + |MLP|^2``, the bias included, as printed."""
        return super().ridge() + self.bias.square().sum(1)

    def config(self) -> dict[str, Any]:
        """Return the constructor's arguments, but for the seeds."""
        return {
            **self.sizes(),
            "width": self.width,
            "kernel": self.kernel,
            "sigma": self.sigma,
        }

    def _kernel(self, layer: int, size: int) -> int:
        if self.kernel is None:
            return size
        self._activate, features = stacked_fastfood(self, layer, size, self.kernel, self.sigma)
        return features

    def _mapped(self, X: Tensor, layer: int) -> Tensor:
        return X if self.kernel is None else apply_fastfood(self, layer, X, self._activate)

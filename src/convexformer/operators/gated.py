"""Outputs linear in a feature vector that gates switch on and off; the gated design is never formed."""

from __future__ import annotations

import math
from typing import final

import torch
from torch import Tensor

from convexformer.operators.base import Operator, TokenFeatures, gather_tokens, times
from convexformer.operators.moments import Axis, Moments, Turns, block_moments, turned_blocks
from convexformer.rows import LOCAL, Rows


@final
class GatedOperator(Operator):
    """``(A Z)_i = sum_g D[i, g] Phi_i Z_g`` with ``Phi: (R, p)``, gates ``D: (R, g)`` and ``Z: (g, *axes, c)``.

    The dense design would be ``(R, g p)``; here features and gates are kept apart, so memory is that of the tokens.
    """

    def __init__(self, features: Tensor, gates: Tensor, axes: tuple[int, ...], n_outputs: int) -> None:
        if features.ndim != 2 or features.shape[1] != math.prod(axes):
            raise ValueError(f"features {tuple(features.shape)} do not match weight axes {axes}.")
        if gates.ndim != 2 or gates.shape[0] != features.shape[0]:
            raise ValueError(f"gates {tuple(gates.shape)} do not match features {tuple(features.shape)}.")
        self.features = features
        self.gates = gates.to(features.dtype)
        self.axes = axes
        self.weight_shape = (gates.shape[1], *axes, n_outputs)
        self.output_shape = (features.shape[0], n_outputs)

    @property
    def like(self) -> Tensor:
        """The features."""
        return self.features

    def apply(self, Z: Tensor) -> Tensor:
        """One product with all gates side by side, then a gated sum: O(R p g c)."""
        (R, p), g, c = self.features.shape, self.gates.shape[1], self.weight_shape[-1]
        wide = Z.reshape(g, p, c).transpose(0, 1).reshape(p, g * c)
        return torch.einsum("rgc,rg->rc", times(self.features, wide).reshape(R, g, c), self.gates)

    def adjoint(self, V: Tensor) -> Tensor:
        """``A_g^T V = Phi^T (D_g * V)``, all gates in one product."""
        (R, p), g, c = self.features.shape, self.gates.shape[1], self.weight_shape[-1]
        masked = (self.gates[:, :, None] * V[:, None, :]).reshape(R, g * c)
        return times(self.features.T, masked).reshape(p, g, c).transpose(0, 1).reshape(self.weight_shape)

    def statistics(self) -> tuple[Tensor, ...]:
        """Features and gates."""
        return self.features, self.gates

    def of_statistics(self, parts: tuple[Tensor, ...]) -> GatedOperator:
        """The same weights on other features."""
        features, gates = parts
        return GatedOperator(features, gates, self.axes, self.weight_shape[-1])

    def moments(self, w: Tensor, rows: Rows = LOCAL, *, centred: bool = False) -> Moments | None:
        """Those of the features where every gate is open, half of them: gates share their axes."""
        d, c = self.axes[-1], self.weight_shape[-1]
        X = self.features.view(len(self.features), -1, d)
        return Moments((Axis(d, block_moments(X, w, rows, centred=centred)),), (Axis(c),))

    def turned(self, rows: Turns, columns: Turns) -> GatedOperator | None:
        """The features along other axes, which gates share."""
        if columns[-1] is not None:
            return None
        features = self.features if rows[0] is None else turned_blocks(self.features, rows[0].to(self.features))
        return GatedOperator(features, self.gates, self.axes, self.weight_shape[-1])

    def token_features(self) -> TokenFeatures | None:
        """Tokens and gates, where the features are tokens side by side."""
        return TokenFeatures(self.features.view(-1, *self.axes), self.gates) if len(self.axes) == 2 else None

    def restricted(self, tokens: Tensor) -> GatedOperator:
        """The same map on some of the tokens; their features are copied, the gates shared."""
        part = gather_tokens(self.features, self.axes, tokens)
        return GatedOperator(part, self.gates, (len(tokens), self.axes[1]), self.weight_shape[-1])

    def to(self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> GatedOperator:
        """Move features and gates."""
        features = self.features.to(device=device, dtype=dtype)
        return GatedOperator(features, self.gates.to(device=device), self.axes, self.weight_shape[-1])

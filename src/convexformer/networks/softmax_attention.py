"""Standard softmax self-attention, the baseline that convex attention is compared with."""

from __future__ import annotations

import math
from typing import Any, final

import torch
from torch import Tensor
from torch.nn.functional import layer_norm

from convexformer.networks.base import TokenNetwork, owned
from convexformer.networks.token_attention import finish
from convexformer.weights import Weights


@final
class SoftmaxAttentionNetwork(TokenNetwork):
    """``f(X) = sum_j softmax(X Wq_j Wk_j^T X^T) X Wv_j Wo_j`` (Ergen et al. 2022, (2), (3)): an output per token.

    ``query, key, value: (h, d, e)``, ``out: (h, e, c)``; the paper has one head with ``e = d``. ``decay()`` is half the sum
    of the squares of all four. ``scaled`` divides the scores by ``sqrt(e)``. ``norm`` applies LayerNorm (without
    parameters) to the outputs and ``skip`` adds the tokens, as a block of (1) does; ``skip`` needs ``c = d``. Masked tokens
    are not attended to. The model has no convex program, so it cannot be lifted or certified.
    """

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        *,
        scaled: bool = False,
        norm: bool = False,
        skip: bool = False,
    ) -> None:
        super().__init__()
        if skip and out.shape[2] != query.shape[1]:
            raise ValueError(f"skip=True adds tokens of size {query.shape[1]} to outputs of size {out.shape[2]}.")
        self.query, self.key, self.value, self.out = owned(query), owned(key), owned(value), owned(out)
        self.scaled, self.norm, self.skip = scaled, norm, skip

    @classmethod
    def random(
        cls, width: int, n_outputs: int, n_heads: int = 1, head_width: int | None = None, seed: int = 0, **options: bool
    ) -> SoftmaxAttentionNetwork:
        """Return a random start for training, Gaussian with variance one over the number of inputs of each matrix."""
        e = width if head_width is None else head_width
        generator = torch.Generator().manual_seed(seed)

        def draw(rows: int, columns: int) -> Tensor:
            return torch.randn((n_heads, rows, columns), generator=generator, dtype=torch.float64) / math.sqrt(rows)

        return cls(draw(width, e), draw(width, e), draw(width, e), draw(e, n_outputs), **options)

    def forward(self, X: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return outputs ``(N, s, c)``, zero at masked tokens."""
        tokens = self.tokens(X, mask)
        attention = self._attention(tokens.X, tokens.mask)
        values = torch.einsum("nkd,hde->nhke", tokens.X, self.value)
        outputs = torch.einsum("nhre,hec->nrc", attention @ values, self.out)
        if self.norm:
            outputs = layer_norm(outputs, outputs.shape[-1:])
        return finish(outputs + tokens.X if self.skip else outputs, None, tokens.mask)

    def attention(self, X: Tensor, mask: Tensor | None = None) -> Tensor:
        """``(N, h, s, s)`` the attention of each head on each sample."""
        tokens = self.tokens(X, mask)
        return self._attention(tokens.X, tokens.mask)

    def _attention(self, X: Tensor, mask: Tensor | None) -> Tensor:
        queries = torch.einsum("nkd,hde->nhke", X, self.query)
        keys = torch.einsum("nkd,hde->nhke", X, self.key)
        scores = queries @ keys.mT
        if self.scaled:
            scores = scores / math.sqrt(self.query.shape[2])
        if mask is not None:
            scores = scores.masked_fill(~mask[:, None, None, :], -torch.inf)
        return scores.softmax(-1)

    def decay(self) -> Tensor:
        """``1/2 (||Wq||^2 + ||Wk||^2 + ||Wv||^2 + ||Wo||^2)``."""
        return 0.5 * sum((W.square().sum() for W in (self.query, self.key, self.value, self.out)), torch.zeros(()))

    def lift(self) -> Weights:
        """Raise: softmax attention has no convex program."""
        raise TypeError(
            "a SoftmaxAttentionNetwork has no convex program, so it has no lift and no certificate. Certify the alternative "
            "attention instead: a PositionAttentionNetwork or a StochasticAttentionNetwork."
        )

    def config(self) -> dict[str, Any]:
        """Return the options."""
        return {"scaled": self.scaled, "norm": self.norm, "skip": self.skip}

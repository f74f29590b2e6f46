"""The nonconvex models of attention with an output per token (Ergen et al. 2022, appendix A.7 and (9))."""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor

from convexformer.networks.base import TokenNetwork, fixed, optional, owned
from convexformer.registry import one_of
from convexformer.weights import Weights

ROW_SUM = 1e-6  # rows of attention weights may miss their sum by this much
NEGATIVE = 1e-9  # and entries may be below zero by this much


@final
class StochasticAttentionNetwork(TokenNetwork):
    """``f(X) = sum_j w1_j X w2_j w3_j^T + bias``, an output per token (Ergen et al. 2022, remark A.2).

    ``w1: (h, s, s)`` attention weights, row-stochastic (``stochastic="row"``) or substochastic (``"sub"``: rows may sum to
    less than one); ``w2: (h, d)``, ``w3: (h, c)``. ``decay()`` is ``1/2 sum_j (||w2_j||_1^2 + ||w3_j||_1^2)``.
    """

    def __init__(
        self, w1: Tensor, w2: Tensor, w3: Tensor, bias: Tensor | None = None, *, stochastic: str = "row"
    ) -> None:
        super().__init__()
        self.w1, self.w2, self.w3, self.bias = owned(w1), owned(w2), owned(w3), optional(bias)
        self.stochastic = one_of("stochastic", stochastic, ("row", "sub"))

    def forward(self, X: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return outputs ``(N, s, c)``, zero at masked tokens."""
        tokens = self.tokens(X, mask, length=self.w1.shape[1])
        values = tokens.X @ self.w2.T  # (N, s, h)
        mixed = torch.einsum("hrk,nkh->nrh", self.w1, values)
        return finish(mixed @ self.w3, self.bias, tokens.mask)

    def attention_map(self) -> Tensor:
        """``(s, s)`` the mean of the heads' attention, each weighted by its part of the decay."""
        weights = self.w2.detach().abs().sum(1) * self.w3.detach().abs().sum(1)  # (h,)
        return normalised(torch.einsum("h,hrk->rk", weights, self.w1.detach()))

    def decay(self) -> Tensor:
        """``1/2 sum_j (||w2_j||_1^2 + ||w3_j||_1^2)``."""
        return 0.5 * (self.w2.abs().sum(1).square() + self.w3.abs().sum(1).square()).sum()

    def lift(self) -> Weights:
        """``Z = sum_j w1_j (x) w2_j (x) w3_j``, after checking the attention weights."""
        w1 = self.w1.detach()
        check_stochastic(w1, self.stochastic)
        w1, w2, w3 = w1.double(), self.w2.detach().double(), self.w3.detach().double()
        if self.stochastic == "row":  # sums are one to rounding: the program asks for equal sums
            w1 = w1 / w1.sum(-1, keepdim=True)
        return Weights(torch.einsum("hrk,ha,hl->rkal", w1, w2, w3), fixed(self.bias))

    def config(self) -> dict[str, Any]:
        """Return the options."""
        return {"stochastic": self.stochastic}


@final
class PositionAttentionNetwork(TokenNetwork):
    """``f(X)_r = sum_j (w1_j^T X w2_j) w3_j[r] + bias`` with ``w1_j`` in the simplex: an output per token.

    The alternative attention of Ergen et al. (2022, (9)) with the ``s c`` numbers of all tokens as its outputs:
    ``w1: (h, s)``, ``w2: (h, d)``, ``w3: (h, s, c)``. Heads that write to one token each are stored as ``w3: (h, c)`` with
    ``position: (h,)``.
    ``decay()`` is ``1/2 sum_j (||w2_j||_2^2 + ||w3_j||^2)``, ``||w3_j||`` the sum over tokens r of ``||w3_j[r]||_1`` for
    ``decay="l1"`` (theorem 2) and of ``||w3_j[r]||_2`` for ``"l2"`` (ordinary weight decay of heads with one token each).
    """

    position: Tensor | None

    def __init__(
        self,
        w1: Tensor,
        w2: Tensor,
        w3: Tensor,
        bias: Tensor | None = None,
        *,
        decay: str = "l1",
        position: Tensor | None = None,
    ) -> None:
        super().__init__()
        if w3.ndim != (3 if position is None else 2):
            raise ValueError(
                f"w3 has shape {tuple(w3.shape)}; expected (h, s, c), or (h, c) with a position for each head."
            )
        self.w1, self.w2, self.w3, self.bias = owned(w1), owned(w2), owned(w3), optional(bias)
        self.kind = one_of("decay", decay, ("l1", "l2"))
        self.register_buffer("position", fixed(position))

    def forward(self, X: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return outputs ``(N, s, c)``, zero at masked tokens."""
        tokens = self.tokens(X, mask, length=self.w1.shape[1])
        if self.position is None:
            scores = torch.einsum("nkh,hk->nh", tokens.X @ self.w2.T, self.w1)
            outputs = torch.einsum("nh,hrc->nrc", scores, self.w3)
        else:
            flat = tokens.X.flatten(1)
            outputs = torch.stack([flat @ self.slice_weights(r).flatten(0, 1) for r in range(self.w1.shape[1])], 1)
        return finish(outputs, self.bias, tokens.mask)

    def slice_weights(self, r: int) -> Tensor:
        """``Z[r]: (s, d, c)``, the weights that make the output of token r."""
        if self.position is None:
            return torch.einsum("hs,hd,hc->sdc", self.w1, self.w2, self.w3[:, r])
        own = self.position == r
        return torch.einsum("hs,hd,hc->sdc", self.w1[own], self.w2[own], self.w3[own])

    def attention_map(self) -> Tensor:
        """``(s, s)`` the penalty of each pair of tokens, as a share of its row: that of :meth:`lift`."""
        with torch.no_grad():
            rows = [pair_norms(self.slice_weights(r)[None], self.kind)[0] for r in range(self.w1.shape[1])]
        return normalised(torch.stack(rows))

    def decay(self) -> Tensor:
        """Return the weight decay of the nonconvex problem."""
        per_token = self.w3.abs().sum(-1) if self.kind == "l1" else torch.linalg.vector_norm(self.w3, dim=-1)
        last = per_token if self.position is not None else per_token.sum(1)
        return 0.5 * (self.w2.square().sum() + last.square().sum())

    def lift(self) -> Weights:
        """``Z[r] = sum_j w1_j (x) w2_j (x) w3_j[r]``, after checking the attention weights."""
        check_stochastic(self.w1.detach(), "row")
        with torch.no_grad():
            return Weights(torch.stack([self.slice_weights(r) for r in range(self.w1.shape[1])]), fixed(self.bias))

    def config(self) -> dict[str, Any]:
        """Return the options."""
        return {"decay": self.kind}


def finish(outputs: Tensor, bias: Tensor | None, mask: Tensor | None) -> Tensor:
    """Add the bias, and set the outputs of masked tokens to zero."""
    outputs = outputs if bias is None else outputs + bias
    return outputs if mask is None else outputs * mask[..., None]


def pair_norms(Z: Tensor, decay: str) -> Tensor:
    """``(s, s)`` the part of each pair of tokens in the penalty of ``Z: (s, s, d, c)``: group norms, or nuclear norms."""
    if decay == "l1":
        return torch.linalg.vector_norm(Z, dim=-2).sum(-1)
    return torch.linalg.svdvals(Z).sum(-1)


def normalised(scores: Tensor) -> Tensor:
    """Scale the rows of nonnegative scores ``(s, s)`` to sum to one; rows of zeros become uniform."""
    total = scores.sum(-1, keepdim=True)
    return torch.where(total > 0, scores / total.clamp_min(torch.finfo(scores.dtype).tiny), 1.0 / scores.shape[-1])


def check_stochastic(w1: Tensor, rows: str) -> None:
    """Raise unless the rows of ``w1: (..., s)`` are nonnegative and sum to one (``"sub"``: to at most one)."""
    if not w1.numel():
        return
    low, total = float(w1.min()), w1.sum(-1)
    off = (total - 1).clamp_min(0) if rows == "sub" else (total - 1).abs()
    if low >= -NEGATIVE and float(off.max()) <= ROW_SUM:
        return
    worst = float(total.flatten()[off.flatten().argmax()])
    wanted = "to at most one" if rows == "sub" else "to one"
    raise ValueError(
        f"w1 must be nonnegative with rows that sum {wanted}: its smallest entry is {low:.3g} and a row sums to "
        f"{worst:.6g}. The nonconvex problem has that constraint; normalise w1 (softmax or projection) before certifying."
    )

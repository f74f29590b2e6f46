"""Pulls: the coefficient of each token in the gradient of the exponential loss, computed in log space.

The loss is ``1/n sum_i exp(-gamma_i^T sigma_i)``, ``sigma_i = softmax(X_i W z_i)`` (Sheen et al. 2024, section 3.2). Its
negative gradient in ``W`` is ``sum_il c_il (x_i,opt - x_il) z_i^T`` with

    c_il = 1/n exp(-gamma_i^T sigma_i) sigma_il sum_k sigma_ik (gamma_ik - gamma_il)

(under assumption 2 the last sum is ``sigma_i,opt (gamma_i,opt - gamma_i,nopt)``). All ``c`` underflow once margins pass 700.
The flow therefore runs in the normalised time ``dtau = sum|c| dt``: the same trajectory, driven by ``c / sum|c|``. The
logarithm of ``sum|c|`` gives the logarithm of physical time.
"""

from __future__ import annotations

import math
from typing import final

import torch
from torch import Tensor

from convexformer.margin.data import Sequences


@final
class Pull:
    """Turns attention logits relative to the optimal token, ``(R, n, L)`` with the optimal token first, into pulls."""

    def __init__(self, data: Sequences) -> None:
        n = data.shape[0]
        top = data.optimal_scores[:, None]  # (n, 1)
        gaps = torch.cat([torch.zeros_like(data.score_gaps[:, :, :1]), data.score_gaps], 2)  # (n, k, l)
        self.to_top = gaps[:, 0]  # gamma_opt - gamma_l, zero at the optimal token
        self.offset = -top - math.log(n)
        self.equal_rest = data.equal_rest
        if not bool((self.to_top != 0).any()):
            raise ValueError("all tokens of every sequence have the same score y v^T x: the loss does not depend on W.")
        silent = torch.full_like(self.to_top, -math.inf)
        silent[:, 1:] = 0.0  # the optimal token's own difference is zero: it never pulls
        self.mute = silent
        self.log_gap = self.to_top.log()  # -inf where the gap is zero
        self.sign, self.log_gaps = gaps.sign(), gaps.abs().log()

    def __call__(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the normalised signed pulls ``(R, n, L)``, whose absolute values sum to one, and ``log sum|c|: (R,)``."""
        log_share = torch.log_softmax(logits, -1)
        lost = (log_share.exp() * self.to_top).sum(-1, keepdim=True)  # gamma_opt - gamma^T sigma
        common = log_share + (lost + self.offset)
        if self.equal_rest:
            size = (common + log_share[..., :1] + self.log_gap).flatten(-2)
            return torch.softmax(size, -1).view_as(logits), torch.logsumexp(size, -1)
        # signed log-sum-exp over k of sigma_k (gamma_k - gamma_l)
        terms = log_share[..., :, None] + self.log_gaps
        peak = terms.amax(-2).clamp_min(-1e300)
        signed = (self.sign * (terms - peak[..., None, :]).exp()).sum(-2)
        size = (common + peak + signed.abs().log() + self.mute).flatten(-2)
        return torch.softmax(size, -1).view_as(logits) * signed.sign(), torch.logsumexp(size, -1)


def log_excess(data: Sequences, margins: Tensor) -> Tensor:
    """``log(L - L*)`` for margins ``(..., n, L-1)``: finite long after ``L`` itself equals ``L*`` in floating point.

    ``L - L* = 1/n sum_i exp(-gamma_i,opt) (exp(u_i) - 1)`` with ``u_i = sum_l sigma_il (gamma_i,opt - gamma_il)``.
    """
    logits = torch.cat([torch.zeros_like(margins[..., :1]), -margins], -1)
    log_share = torch.log_softmax(logits, -1)[..., 1:]
    log_lost = torch.logsumexp(log_share + data.score_gaps[:, 0].log(), -1)  # log u_i
    # log(exp(u) - 1) = log u where u is tiny
    small = log_lost < -30
    lost = log_lost.clamp(-30, 700).exp()
    log_growth = torch.where(small, log_lost, torch.expm1(lost).log())
    return torch.logsumexp(log_growth - data.optimal_scores, -1) - math.log(data.shape[0])

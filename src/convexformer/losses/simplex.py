"""Dual points of losses on probabilities, ``u_i = q_i - y_i`` with ``q_i`` in the simplex: how to balance them."""

from __future__ import annotations

import torch
from torch import Tensor


def mix_with_constant(r: Tensor, mass: Tensor, total: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return ``1 - a``, ``a``, ``q: (c,)`` in the simplex and ``1 - q`` with ``(1 - a) r + a (total q - mass) = 0``.

    ``r = sum_i w_i u_i`` and ``mass = sum_i w_i y_i`` are of shape ``(c,)`` and ``total = sum_i w_i``, so
    ``(1 - a) u_i + a (q - y_i)``, a mixture with the dual point of a constant predictor, has sum zero and stays in the
    domain. That is ``q = (mass - r / rho) / total`` with ``rho = a / (1 - a)``. Nonnegative needs
    ``rho >= max_l r_l / mass_l``; twice as much is taken, which keeps every ``q_l`` above half of that class's frequency.
    """
    tiny = torch.finfo(r.dtype).tiny
    rho = (2 * r.clamp_min(0) / mass.clamp_min(tiny)).amax().clamp(tiny, 1 / tiny)
    q = ((mass - r / rho) / total).clamp(0, 1)
    return 1 / (1 + rho), rho / (1 + rho), q, _sum_of_others(q)


def _sum_of_others(q: Tensor) -> Tensor:
    """``sum_{m != l} q_m`` for each ``l``, by sums from both ends: no digits cancel."""
    zero = q.new_zeros(1)
    before = torch.cat([zero, q[:-1].cumsum(0)])
    after = torch.cat([zero, q[1:].flip(0).cumsum(0)]).flip(0)
    return before + after

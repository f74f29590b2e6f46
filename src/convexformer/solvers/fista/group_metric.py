"""Newton's equations on the groups in use, where the penalty is the sum of the norms of columns of token slices.

On the support the norms are smooth: with ``u = z / |z|`` the Hessian is ``A^T F'' A + beta / |z| (I - u u^T)``. Its blocks
for one output, without the coupling of outputs through the loss, are small where few groups of an output are in use, and
their Cholesky factors precondition conjugate gradients: they know how the features of different tokens overlap.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import final

import torch
from torch import Tensor

from convexformer.gauges import Sliced
from convexformer.objective import Evaluation, Objective
from convexformer.solvers.base import Watcher

MOST_WORK = 30  # products with the operator that forming the blocks may cost
MOST_NUMBERS = 1 << 26  # of all blocks
RIDGE = 1e-6  # share of a diagonal entry that is added to it, for the rounding of float32 products

ROUNDS = 4  # solutions, each without the groups that the one before turned against themselves
STEPS = 40  # of conjugate gradients in each of them
DROP = 1e-2  # of the residual, in the norm of the blocks


def forms_blocks(objective: Objective, Z: Tensor) -> bool:
    """Tell whether the blocks of the support of ``Z: ([g,] s, d, c)`` may be formed."""
    parts = objective.operator.token_features()
    if parts is None or not (isinstance(objective.penalty, Sliced) and objective.penalty.column_groups):
        return False
    if not objective.rows.in_process:
        return False
    *_, d, c = Z.shape
    used = d * Z.any(-2).reshape(-1, c).sum(0).double()  # (c,)
    gates = 1 if parts.gates is None else parts.gates.shape[1]
    work = float(used.square().sum()) / (2.0 * c * gates * parts.features.shape[1] * d)
    return work <= MOST_WORK and c * float(used.max()) ** 2 <= MOST_NUMBERS


@final
class GroupMetric:
    """Products with the penalty's Hessian at ``Z``, and with the inverse of the blocks of each output."""

    def __init__(self, objective: Objective, Z: Tensor, curvature: Tensor) -> None:
        """``curvature: (R, c)`` is the diagonal of the loss's Hessian, weighted."""
        parts = objective.operator.token_features()
        assert parts is not None
        *_, d, c = Z.shape
        norms = torch.linalg.vector_norm(Z.double(), dim=-2, keepdim=True)
        self.mask = norms > 0
        self.bend = torch.where(self.mask, objective.beta / norms.clamp_min(torch.finfo(torch.float64).tiny), 0.0)
        self.unit = torch.where(self.mask, Z / norms.clamp_min(torch.finfo(torch.float64).tiny), 0.0)
        slices = self.mask.reshape(-1, c)  # (g s, c)
        most = d * int(slices.sum(0).max())
        tokens = parts.features.shape[1]
        self._places = torch.full((c, most), Z.numel(), device=Z.device)
        factor = torch.eye(most, dtype=torch.float64, device=Z.device).repeat(c, 1, 1)
        bend, unit = self.bend.reshape(-1, c), self.unit.reshape(-1, d, c)
        for l in range(c):
            own = slices[:, l].nonzero()[:, 0]
            n = d * len(own)
            if n == 0:
                continue
            features = parts.features[:, own % tokens]
            if parts.gates is not None:
                features = features * parts.gates[:, own // tokens, None]
            X = (features * curvature[:, l].sqrt()[:, None, None].to(features)).reshape(len(features), n)
            block = (X.T @ X).double()
            at, v = bend[own, l], unit[own, :, l]
            arc = at[:, None, None] * (torch.eye(d, dtype=v.dtype, device=v.device) - v[:, :, None] * v[:, None, :])
            block.view(len(own), d, len(own), d).diagonal(dim1=0, dim2=2).add_(arc.permute(1, 2, 0))
            block.diagonal().mul_(1 + RIDGE)
            factor[l, :n, :n] = torch.linalg.cholesky_ex(block)[0]
            entries = (own[:, None] * d + torch.arange(d, device=own.device)).flatten()
            self._places[l, :n] = entries * c + l
        self._factor = factor

    def bent(self, P: Tensor) -> Tensor:
        """The penalty's Hessian times ``P``, a step on the support."""
        P = P.double()
        return self.bend * (P - (self.unit * P).sum(-2, keepdim=True) * self.unit)

    def solve(self, R: Tensor) -> Tensor:
        """The inverse of the blocks times a residual; zero off the support."""
        flat = torch.cat([R.double().flatten(), R.new_zeros(1, dtype=torch.float64)])
        found = torch.cholesky_solve(flat[self._places][..., None], self._factor)[..., 0]
        out = torch.zeros_like(flat)
        out[self._places.flatten()] = found.flatten()
        return out[:-1].view(R.shape)


def group_step(
    objective: Objective,
    rough: Objective,
    Z: Tensor,
    at: Evaluation,
    hessian: Callable[[Tensor], Tensor],
    steps: Watcher,
) -> Tensor | None:
    """Return Newton's step from ``Z`` on its support, by products with ``rough``; None where iterations run out.

    A group that the step would turn against itself is set to zero, where the norm has its kink, and the step is solved
    again for the others. ``hessian`` is that of the loss, on outputs; every product counts as an iteration of ``steps``.
    """
    known = objective.loss.hessian(at.outputs, objective.targets)
    assert known is not None
    curvature, dtype = objective.sample_weight[:, None] * known.diagonal(), rough.like.dtype

    def product(P: Tensor) -> Tensor:
        return rough.adjoint(hessian(rough.apply(P.to(dtype))).to(dtype)).double()

    metric = whole = GroupMetric(rough, Z, curvature)
    gradient = objective.adjoint(at.V).double() + objective.beta * whole.unit
    step, live, enough = torch.zeros_like(gradient), whole.mask, 0.0
    r = torch.where(live, -gradient, 0.0)
    for _ in range(ROUNDS):
        p = y = metric.solve(r)
        energy = float((r * y).sum())
        enough = enough or DROP**2 * energy
        for count, _ in zip(range(STEPS + 1), steps, strict=False):
            if not energy > enough or count == STEPS:
                break
            Hp = torch.where(live, whole.bent(p) + product(p), 0.0)
            bend = float((p * Hp).sum())
            if not bend > 0:
                break
            step, r = step + energy / bend * p, r - energy / bend * Hp
            y = metric.solve(r)
            before, energy = energy, float((r * y).sum())
            p = y + energy / before * p
        if steps.done:
            return None
        crossed = live & (((Z + step) * whole.unit).sum(-2, keepdim=True) <= 0)
        if not bool(crossed.any()):
            break
        jump, live = torch.where(crossed, -Z - step, 0.0), live & ~crossed
        step, r = step + jump, torch.where(live, r - product(jump), 0.0)
        metric = GroupMetric(rough, torch.where(live, Z, 0.0), curvature)
    return step.to(Z.dtype)

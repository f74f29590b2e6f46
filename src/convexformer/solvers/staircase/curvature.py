"""The Hessian of a factored objective at a point, through products, and a diagonal that stands for it.

With ``Z = sum_j U_j V_j^T``, ``M = A^T V`` the gradient in ``Z`` and the intercept minimised over, a step ``(D, E)`` of the
factors meets

    H(D, E) = (K V_j + M E_j + beta D_j,  K^T U_j + M^T D_j + beta E_j),    K = A^T F''_b A(sum_j D_j V_j^T + U_j E_j^T),

where ``F''_b = F'' - F'' 1 S^+ 1^T F''``, ``S = sum_i w_i L''_i``, is the curvature of the loss once the intercept follows.
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from convexformer.objective import Objective
from convexformer.operators import BilinearOperator, LowRank
from convexformer.operators.bilinear import block_products
from convexformer.solvers.staircase.bursts import Point, factor_weight


@final
class Curvature:
    """Products with the Hessian at a point, in the precision of ``objective``; vectors are in float64."""

    def __init__(self, objective: Objective, point: Point, cross: float = 1.0) -> None:
        A = objective.operator
        assert isinstance(A, BilinearOperator)
        dtype = objective.like.dtype
        self.objective, self.Z = objective, point.Z.to(dtype=dtype)
        self.beta, self.cross = factor_weight(objective), cross
        self.outputs, self.targets = point.evaluation.outputs.to(dtype), objective.targets.to(dtype)
        self.w = objective.sample_weight.to(dtype)
        self.hessian = objective.loss.hessian(self.outputs, self.targets)
        self.V = point.evaluation.V.to(dtype)
        self._M = objective.rows.total(A.dense_adjoint(self.V)) if A.dense_pays(self.Z.n_terms) else None
        twice = torch.cat([self.Z.block, self.Z.block])
        self._order = twice.argsort(stable=True) if self.Z.n_blocks > 1 else None
        self._block = twice if self._order is None else twice[self._order]
        self._root = _pseudo_inverse(self._intercept_curvature()) if objective.intercept else None

    def split(self, x: Tensor) -> LowRank:
        """A vector ``(U, V)`` as factors in the blocks of ``Z``, in the precision of the products."""
        x, cut = x.to(self.Z.dtype), self.Z.U.numel()
        return self.Z.with_factors(x[:cut].view_as(self.Z.U), x[cut:].view_as(self.Z.V))

    def outputs_along(self, step: LowRank) -> Tensor:
        """``A(sum_j D_j V_j^T + U_j E_j^T)``, shape ``(R, c)``."""
        U, V = torch.cat([step.U, self.Z.U]), torch.cat([self.Z.V, step.V])
        if self._order is not None:
            U, V = U[self._order], V[self._order]
        counts = tuple(2 * n for n in self.Z.counts)
        return self.objective.apply(LowRank(U, V, self._block, self.Z.shape, counts))

    def intercept_along(self, outputs: Tensor) -> Tensor | None:
        """``(c,)`` the change of the best intercept as outputs change by so much, to first order."""
        if self._root is None:
            return None
        slope = self.objective.rows.weighted(self.w, self._loss_product(outputs))
        return -(self._root @ slope.double()).to(outputs)

    def product(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """``H x`` and the change of outputs along ``x``, without that of the intercept."""
        step = self.split(x)
        outputs = self.outputs_along(step)
        b = self.intercept_along(outputs)
        bent = self.w[:, None] * self._loss_product(outputs if b is None else outputs + b)
        KV, KU = self.objective.factor_gradients(bent, self.Z)
        if self._M is None:
            MV, MU = self.objective.factor_gradients(self.V, step)
        else:
            MV, MU = block_products(self._M, step)
        return torch.cat(
            [(KV + self.cross * MV).flatten(), (KU + self.cross * MU).flatten()]
        ).double() + self.beta * x, outputs

    def squares(self, probes: int, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
        """``(K V_j, K^T U_j)`` for random ``K = A^T F''^(1/2) z``: the mean of their squares is the Hessian's diagonal.

        Without the cross terms and beta; ``E[K V_j (K V_j)^T]`` is the block of term j (Hutchinson 1990).
        """
        generator = torch.Generator().manual_seed(seed)
        found, root = [], self.w.sqrt()[:, None]
        for _ in range(probes):
            z = torch.randint(0, 2, self.V.shape, generator=generator, dtype=torch.int8).to(self.V) * 2 - 1
            bent = self.objective.loss.curvature**0.5 * z if self.hessian is None else self.hessian.root(z)
            found.append(self.objective.factor_gradients(root * bent, self.Z))
        return found

    def output_weights(self) -> Tensor:
        """``(c,)`` the mean curvature of the loss in each output."""
        if self.hessian is None:
            return torch.ones_like(self.V[0])
        return self.objective.rows.weighted(self.w, self.hessian.diagonal()) / self.objective.rows.sum(self.w)

    def _loss_product(self, D: Tensor) -> Tensor:
        if self.hessian is not None:
            return self.hessian.product(D)
        return self.objective.loss.hessian_product(self.outputs, self.targets, D)

    def _intercept_curvature(self) -> Tensor:
        """``S = sum_i w_i L''_i``, shape ``(c, c)``."""
        if self.hessian is not None:
            return self.hessian.total(self.w, self.objective.rows)
        unit = torch.eye(self.V.shape[1], dtype=self.V.dtype, device=self.V.device)
        columns = [self.objective.rows.weighted(self.w, self._loss_product(row.expand_as(self.V))) for row in unit]
        return torch.stack(columns, 1)


def _pseudo_inverse(S: Tensor) -> Tensor:
    """``S^+`` in float64, without directions whose curvature is rounding: an intercept need not move along them."""
    values, vectors = torch.linalg.eigh(0.5 * (S + S.T).double())
    keep = values > 100 * torch.finfo(S.dtype).eps * values[-1]
    return (vectors * torch.where(keep, 1 / values.clamp_min(torch.finfo(values.dtype).tiny), 0.0)) @ vectors.T

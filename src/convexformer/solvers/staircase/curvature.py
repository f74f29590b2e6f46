"""The Hessian of a factored objective at a point, through products, and a diagonal that stands for it.

With ``Z = sum_j U_j V_j^T``, ``M = A^T V`` the gradient in ``Z`` and the intercept minimised over, a step ``(D, E)`` of the
factors meets

    H(D, E) = (K V_j + M E_j + beta D_j,  K^T U_j + M^T D_j + beta E_j),    K = A^T F''_b A(sum_j D_j V_j^T + U_j E_j^T),

where ``F''_b = F'' - F'' 1 S^+ 1^T F''``, ``S = sum_i w_i L''_i``, is the curvature of the loss once the intercept follows.

Away from a stationary point the cross terms ``M`` make this Hessian indefinite, and its steps are short. What stands for
``M`` is ``-beta U^T V + (I - P) M (I - Q)``, with unit rows and ``P``, ``Q`` the projections on the spans of all ``U_j`` and
``V_j``. The two agree at a stationary point, and along the path of :meth:`Curvature.moved` it is the Hessian of
``F(A Z) + beta |Z|_*``, positive as soon as the part outside the spans is below beta, which :func:`growth.grow` sees to.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import final

import torch
from torch import Tensor

from convexformer.objective import Objective
from convexformer.operators import BilinearOperator, LowRank
from convexformer.operators.lowrank import Stack
from convexformer.solvers.staircase.bursts import Point, factor_weight

SAFE_CORE = 0.2  # least singular value of the core of a step, next to one, from which weights keep their rank
SMALL_SIDE = 256  # short side of blocks up to which the largest singular value of the cross terms is found
CROSS_SHARE = 0.8  # of beta: the largest cross terms outside the spans, so that the Hessian is safely positive
SMALL_CROSS = (
    1 << 22
)  # numbers of all blocks up to which the cross terms are formed: one product with them is then cheap
FEW_TOKENS = 0.7  # share of the tokens in use up to which their features are gathered for the products of a Newton step


@final
class Curvature:
    """Products with the Hessian at a point, in the precision of ``objective``; vectors are in float64."""

    def __init__(self, objective: Objective, point: Point, cross: float = 1.0, Z: LowRank | None = None) -> None:
        """``Z``: the factors of the point in the coordinates of ``objective``, where those differ."""
        A = objective.operator
        assert isinstance(A, BilinearOperator)
        dtype = objective.like.dtype
        self._exact = point.Z if Z is None else Z
        self.objective, self.Z = objective, self._exact.to(dtype=dtype)
        self.beta, self.cross = factor_weight(objective), cross
        self.outputs, self.targets = point.evaluation.outputs.to(dtype), objective.targets.to(dtype)
        self.w = objective.sample_weight.to(dtype)
        self.hessian = objective.loss.hessian(self.outputs, self.targets)
        self.V = point.evaluation.V.to(dtype)
        self._stack = Stack(self.Z)
        self._dense = A.dense_pays(self.Z.n_terms)
        self._U, self._V = self._stack.put(self.Z.U), self._stack.put(self.Z.V)
        self._unit_U, self._unit_V = (_unit_rows(factor) for factor in (self._U, self._V))
        self._M: Tensor | None = None
        if self._dense or A.size <= SMALL_CROSS:
            self._view = _ActiveBlocks(objective, self._stack)
            self._M = self._cross_matrix(self._view.adjoint(self.V))
        self._root = _pseudo_inverse(self._intercept_curvature()) if objective.intercept else None

    # ------------------------------------------------------------------ vectors

    def join(self, U: Tensor, V: Tensor) -> Tensor:
        """One vector of factors ``(m, p)`` and ``(m, q)``: stacked by blocks, zero where a block has fewer terms."""
        return torch.cat([self._stack.put(U).flatten(), self._stack.put(V).flatten()])

    def parts(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Undo :meth:`join`."""
        D, E = self._stacked(x)
        return self._stack.take(D), self._stack.take(E)

    def split(self, x: Tensor) -> LowRank:
        """A vector as factors in the blocks of ``Z``, in the precision of the products."""
        return self.Z.with_factors(*self.parts(x.to(self.Z.dtype)))

    def _stacked(self, x: Tensor) -> tuple[Tensor, Tensor]:
        B, r, (p, q) = len(self._stack.blocks), self._stack.depth, self.Z.shape[-2:]
        cut = B * r * p
        return x[:cut].view(B, r, p), x[cut:].view(B, r, q)

    # ------------------------------------------------------------------ products

    def outputs_along(self, x: Tensor) -> Tensor:
        """``A(sum_j D_j V_j^T + U_j E_j^T)``, shape ``(R, c)``."""
        if self._dense:
            D, E = self._stacked(x.to(self.Z.dtype))
            return self._view.apply(torch.baddbmm(self._U.mT @ E, D.mT, self._V))
        step = self.split(x)  # operators know their products with the point's U from the step before
        moved, turned = self.Z.with_factors(step.U, self.Z.V), self.Z.with_factors(self.Z.U, step.V)
        return self.objective.apply(moved) + self.objective.apply(turned)

    def outputs_across(self, x: Tensor) -> Tensor:
        """``A(sum_j D_j E_j^T)`` of the parts outside the spans: outputs are ``F_0 + t outputs_along + t^2`` these."""
        D, E = self._outside(*self._stacked(x.to(self.Z.dtype)))
        if self._dense:
            return self._view.apply(D.mT @ E)
        return self.objective.apply(self.Z.with_factors(self._stack.take(D), self._stack.take(E)))

    def moved(self, x: Tensor) -> tuple[LowRank, bool]:
        """Return ``Z + D^T V + U^T E + D_o^T E_o`` for a step ``(D, E)``, whose parts outside the spans are ``D_o, E_o``.

        To second order these are the weights of the same rank nearest to ``Z + D^T V + U^T E``. In the spans the path is
        straight; ``(U + D)^T (V + E)`` would bend there as soon as a step is longer than a small term. Terms that the step
        turns against themselves are left out instead, for there the nuclear norm has a kink; the second value says whether
        there were any.
        """
        D, E = self._stacked(x)
        U, V = (self._stack.put(part).double() for part in (self._exact.U, self._exact.V))
        size = U.norm(dim=-1, keepdim=True)  # (B', r, 1), roots of the singular values
        U, V = _unit_rows(U), _unit_rows(V)
        Do, Eo = D - (D @ U.mT) @ U, E - (E @ V.mT) @ V
        T = torch.diag_embed(size[..., 0].square()) + (size * (D @ U.mT)).mT + size * (E @ V.mT)  # Z moves to U^T T V
        values, W = torch.linalg.eigh(0.5 * (T + T.mT))
        least = 1e-12 * values.abs().amax(-1, keepdim=True)
        gone = values <= least  # and places without a term
        P = W @ ((~gone)[..., None] * W.mT)
        T, Do, Eo = P @ T @ P, P @ (size * Do), P @ (size * Eo)
        before = (W.square() * size.square()).sum(1)  # (B', r) the singular values that these directions had
        safe = (gone | (values > SAFE_CORE * before)).all(-1)[:, None, None]
        inverse = torch.where(size > 0, size, 1.0).square().reciprocal()
        return self._joined((U, V, Do, Eo), T, P, inverse, safe), bool((values < -least).any())

    def _joined(
        self, parts: tuple[Tensor, Tensor, Tensor, Tensor], T: Tensor, P: Tensor, inverse: Tensor, safe: Tensor
    ) -> LowRank:
        """``U^T T V + D_o^T V + U^T E_o + D_o^T S^-1 E_o`` with all but ``S`` in the range of ``P``.

        In ``safe`` blocks, where ``T`` is near ``S``, it is ``(U + T^-T D_o)^T (T V + E_o)``, the same up to third order, in
        as many terms as there are; elsewhere it is formed as it stands, in twice as many.
        """
        U, V, Do, Eo = parts
        take = self._stack.take
        unit = torch.eye(T.shape[-1], dtype=T.dtype, device=T.device)
        top = T.abs().amax((-2, -1), keepdim=True)
        size = torch.where(top > 0, top, 1.0)  # of the part that is not asked for: the scale of the tokens is in T
        core = torch.where(safe, T + size * (unit - P), unit)
        left = U + torch.where(safe, torch.linalg.solve(core.mT, Do), 0.0)
        moved = self.Z.with_factors(take(left), take(T @ V + Eo))
        if bool(safe.all()):
            return moved
        more = take((~safe).expand(*Do.shape[:2], 1))[:, 0]
        return moved.append(take(Do)[more], take(V + inverse * Eo)[more], self.Z.block[more])

    def intercept_along(self, outputs: Tensor) -> Tensor | None:
        """``(c,)`` the change of the best intercept as outputs change by so much, to first order."""
        if self._root is None:
            return None
        slope = self.objective.rows.weighted(self.w, self._loss_product(outputs))
        return -(self._root @ slope.double()).to(outputs)

    def product(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """``H x`` and the change of outputs along ``x``, without that of the intercept."""
        outputs = self.outputs_along(x)
        b = self.intercept_along(outputs)
        bent = self.w[:, None] * self._loss_product(outputs if b is None else outputs + b)
        if self._dense:
            assert self._M is not None
            D, E = self._stacked(x.to(self.Z.dtype))
            K = self._view.adjoint(bent)
            U = torch.baddbmm(self._V @ K.mT, E, self._M.mT)
            V = torch.baddbmm(self._U @ K, D, self._M)
            return torch.cat([U.flatten(), V.flatten()]).double().add_(x, alpha=self.beta), outputs
        KV, KU = self.objective.factor_gradients(bent, self.Z)
        MV, MU = self._cross_products(x.to(self.Z.dtype))
        return (self.join(KV, KU) + torch.cat([MV.flatten(), MU.flatten()])).double().add_(x, alpha=self.beta), outputs

    def _outside(self, D: Tensor, E: Tensor) -> tuple[Tensor, Tensor]:
        """The parts of stacked steps that are orthogonal to the columns and the rows of ``Z``."""
        U, V = self._unit_U.to(D), self._unit_V.to(E)
        return D - (D @ U.mT) @ U, E - (E @ V.mT) @ V

    def _cross_matrix(self, M: Tensor) -> Tensor:
        """``-beta U^T V + (I - P) M (I - Q)`` with unit rows: see the module's text."""
        U, V = self._unit_U, self._unit_V
        M = M - U.mT @ (U @ M)
        M = M - (M @ V.mT) @ V
        if min(M.shape[-2:]) <= SMALL_SIDE:
            top = float(torch.linalg.eigvalsh(M.mT @ M if M.shape[-2] >= M.shape[-1] else M @ M.mT)[:, -1].max()) ** 0.5
            self.cross = min(1.0, CROSS_SHARE * self.beta / top) if top > 0 else 1.0
        return torch.baddbmm(self.cross * M, U.mT, V, alpha=-self.beta)

    def _cross_products(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The same matrix times the other factors of a step; it is formed only where it is small."""
        D, E = self._stacked(x)
        if self._M is not None:
            return E @ self._M.mT, D @ self._M
        Do, Eo = self._outside(D, E)
        outside = self.Z.with_factors(self._stack.take(Do), self._stack.take(Eo))
        MV, MU = self._outside(*(self._stack.put(part) for part in self.objective.factor_gradients(self.V, outside)))
        U, V = self._unit_U, self._unit_V
        return self.cross * MV - self.beta * (E @ V.mT) @ U, self.cross * MU - self.beta * (D @ U.mT) @ V

    def squares(self, probes: int, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
        """``(K V_j, K^T U_j)`` for random ``K = A^T F''^(1/2) z``: the mean of their squares is the Hessian's diagonal.

        Without the cross terms and beta; ``E[K V_j (K V_j)^T]`` is the block of term j (Hutchinson 1990).
        """
        generator = torch.Generator().manual_seed(seed)
        found, root = [], self.w.sqrt()[:, None]
        for _ in range(probes):
            z = torch.randint(0, 2, self.V.shape, generator=generator, dtype=torch.int8).to(self.V) * 2 - 1
            bent = self.objective.loss.curvature**0.5 * z if self.hessian is None else self.hessian.root(z)
            found.append(self._gradients(root * bent))
        return found

    def _gradients(self, D: Tensor) -> tuple[Tensor, Tensor]:
        """``K V_j`` and ``K^T U_j`` for ``K = A^T D``."""
        if not self._dense:
            return self.objective.factor_gradients(D, self.Z)
        K = self._view.adjoint(D)
        return self._stack.take(self._V @ K.mT), self._stack.take(self._U @ K)

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


def _sizes(rows: Tensor) -> Tensor:
    """``(B', 1, r)`` norms of stacked rows, one where there is none."""
    norms = rows.norm(dim=-1)
    return torch.where(norms > 0, norms, 1.0)[:, None, :]


def _unit_rows(rows: Tensor) -> Tensor:
    """Stacked rows of norm one, or zero where there is none."""
    return rows / _sizes(rows).mT


@final
class _ActiveBlocks:
    """The operator on the blocks that have terms, ``(B', p, q)``: on their tokens alone where the others are many."""

    def __init__(self, objective: Objective, stack: Stack, few: float = FEW_TOKENS) -> None:
        self.objective, blocks = objective, stack.numbers
        self.shape: tuple[int, ...] = objective.weight_shape
        self.n_blocks = math.prod(self.shape[:-2])
        self.blocks: Tensor | None = None if len(stack.blocks) == self.n_blocks else blocks
        tokens = self.shape[-3] if len(self.shape) > 2 else 1
        used = sorted({b % tokens for b in stack.blocks})
        if len(used) <= few * tokens and objective.operator.token_features() is not None:
            where = torch.tensor(used, device=blocks.device)
            self.objective = replace(objective, operator=objective.operator.restricted(where), derived=None)
            self.shape = self.objective.weight_shape
            self.n_blocks = math.prod(self.shape[:-2])
            own = blocks // tokens * len(used) + torch.searchsorted(where, blocks % tokens)
            self.blocks = None if len(own) == self.n_blocks else own

    def apply(self, Z: Tensor) -> Tensor:
        """``A Z`` for ``Z: (B', p, q)``, zero in other blocks."""
        if self.blocks is not None:
            Z = Z.new_zeros((self.n_blocks, *Z.shape[1:])).index_copy(0, self.blocks, Z)
        return self.objective.apply(Z.view(self.shape))

    def adjoint(self, V: Tensor) -> Tensor:
        """``A^T V`` in these blocks, ``(B', p, q)``."""
        M = self.objective.adjoint(V).reshape(-1, *self.shape[-2:])
        return M if self.blocks is None else M.index_select(0, self.blocks)


def _pseudo_inverse(S: Tensor) -> Tensor:
    """``S^+`` in float64, without directions whose curvature is rounding: an intercept need not move along them."""
    values, vectors = torch.linalg.eigh(0.5 * (S + S.T).double())
    keep = values > 100 * torch.finfo(S.dtype).eps * values[-1]
    return (vectors * torch.where(keep, 1 / values.clamp_min(torch.finfo(values.dtype).tiny), 0.0)) @ vectors.T

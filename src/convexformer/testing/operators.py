"""The contract of an operator."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from convexformer.operators import BilinearOperator, LowRank, Operator, TokenFeatures
from convexformer.testing.tools import at_most, equal, inner, normals, same_shape

COMPARED_ENTRIES = 1 << 16  # operators with at most this many entries are also compared as matrices


def check_operator(operator: Operator, seed: int = 0) -> None:
    """Shapes, linearity, ``<V, A Z> = <A^T V, Z>`` in any memory layout, and ``norm_squared()`` from below ``||A||^2``."""
    draw = normals(seed, operator.like)
    slack = 1e3 * torch.finfo(operator.like.dtype).eps
    Z, Z2, V = draw(operator.weight_shape), draw(operator.weight_shape), draw(operator.output_shape)
    AZ, AtV = operator.apply(Z), operator.adjoint(V)
    same_shape("apply(Z)", AZ, operator.output_shape)
    same_shape("adjoint(V)", AtV, operator.weight_shape)
    same_shape("zeros()", operator.zeros(), operator.weight_shape)
    size = float(V.norm() * AZ.norm() + AtV.norm() * Z.norm())
    equal("<V, A Z> and <A^T V, Z>", inner(V, AZ), inner(AtV, Z), slack * size)
    mixed, apart = operator.apply(2.0 * Z - 0.5 * Z2), 2.0 * AZ - 0.5 * operator.apply(Z2)
    equal("A(2 Z - Z'/2) and 2 A Z - A Z'/2", mixed, apart, slack * float(1 + apart.abs().max()))
    equal("A Z for another layout of Z in memory", operator.apply(_reordered(Z)), AZ, slack * float(1 + AZ.abs().max()))
    other = operator.adjoint(_reordered(V))
    equal("A^T V for another layout of V in memory", other, AtV, slack * float(1 + AtV.abs().max()))
    if isinstance(operator, BilinearOperator):
        _check_factors(operator, Z, AZ, V, AtV, slack)
    if (parts := operator.token_features()) is not None:
        _check_slices(operator, parts, Z, V, AtV, slack)
    p, r = math.prod(operator.weight_shape), math.prod(operator.output_shape)
    if p * r > COMPARED_ENTRIES:
        return
    columns = torch.eye(p, dtype=Z.dtype, device=Z.device).reshape(p, *operator.weight_shape)
    rows = torch.eye(r, dtype=Z.dtype, device=Z.device).reshape(r, *operator.output_shape)
    A = torch.stack([operator.apply(e).flatten() for e in columns], 1).to(torch.float64)
    At = torch.stack([operator.adjoint(e).flatten() for e in rows], 1).to(torch.float64)
    equal("the matrices of adjoint and of apply, transposed", At, A.T, slack * float(A.abs().max()))
    exact, estimate = float(torch.linalg.matrix_norm(A, 2)) ** 2, operator.norm_squared()
    at_most("norm_squared() against ||A||^2", estimate, exact, slack * exact)
    at_most("half of ||A||^2 against norm_squared()", 0.5 * exact, estimate, slack * exact)


def _check_slices(operator: Operator, parts: TokenFeatures, Z: Tensor, V: Tensor, AtV: Tensor, slack: float) -> None:
    """``token_features()`` reproduce the operator; ``restricted(tokens)`` equals it with all other slices at zero."""
    X, gates = parts.features, parts.gates
    one = Z if gates is not None else Z[None]
    D = X.new_ones(len(X), 1) if gates is None else gates
    whole = torch.einsum("ru,rka,ukac->rc", D, X, one)
    equal("A Z and the sum over token features", operator.apply(Z), whole, slack * float(1 + whole.abs().max()))
    some = torch.arange(0, X.shape[1], 2, device=Z.device)
    alone = torch.zeros_like(Z).index_copy(-3, some, Z.index_select(-3, some))
    part = operator.restricted(some)
    scale = slack * float(1 + whole.abs().max())
    equal(
        "A on some tokens and A with the others zero",
        part.apply(Z.index_select(-3, some)),
        operator.apply(alone),
        scale,
    )
    equal(
        "A^T on some tokens and its slices", part.adjoint(V), AtV.index_select(-3, some), slack * float(1 + AtV.norm())
    )


def _check_factors(operator: BilinearOperator, Z: Tensor, AZ: Tensor, V: Tensor, AtV: Tensor, slack: float) -> None:
    """Low-rank weights have the outputs of the tensor they stand for; products with factors are those of ``A^T V``."""
    factors = LowRank.of(Z)
    size = float(1 + AZ.abs().max() + AtV.abs().max()) * float(1 + factors.U.abs().max() + factors.V.abs().max())
    M = AtV.reshape(-1, *AtV.shape[-2:])[factors.block]  # (m, p, q)
    for D, terms in ((V, factors), (_reordered(V), factors.with_factors(_reordered(factors.U), _reordered(factors.V)))):
        own = [(operator.matvec(D, terms.V[at], b), operator.rmatvec(D, terms.U[at], b)) for b, at in terms.spans()]
        apart = (torch.cat([left for left, _ in own]), torch.cat([right for _, right in own]))
        for AF in (
            operator.apply(terms),
            operator.apply_factors(terms),
        ):  # the first may go through dense matrices, the second never does
            equal("A applied to factors and to the tensor", AF, AZ, slack * size)
        for left, right in (operator.factor_gradients(D, terms), apart):
            equal("matvec products and A^T V", left, (M @ factors.V[:, :, None])[:, :, 0], 10 * slack * size)
            equal("rmatvec products and A^T V", right, (factors.U[:, None] @ M)[:, 0], 10 * slack * size)


def _reordered(values: Tensor) -> Tensor:
    """Return the same numbers with the axes stored in reverse order and with gaps in memory."""
    wide = torch.stack([values, values], -1).permute(*reversed(range(values.ndim)), values.ndim).contiguous()
    return wide[..., 0].permute(*reversed(range(values.ndim)))

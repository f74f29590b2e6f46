"""Operators on tokens that stay on disk: batch by batch, or gathered once where little is kept of a sample."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import final

import torch
from torch import Tensor

from convexformer.data.stores import TokenStream
from convexformer.data.tokens import TokenDataset
from convexformer.operators.base import Operator
from convexformer.operators.bilinear import BilinearOperator
from convexformer.operators.budget import budget_on
from convexformer.operators.lowrank import LowRank
from convexformer.rows import LOCAL, Rows

Build = Callable[[TokenDataset], Operator]
NORM_PASSES = 8  # power iterations over a stream, each one a pass


def streamed(tokens: TokenStream, build: Build, *, per_token: bool = False) -> Operator:
    """Return the operator that ``build`` makes of tokens, on tokens that come in batches; its rows are samples or tokens.

    Where all that the operator keeps of its samples (Gram matrices and mean tokens of self-attention, pooled gated tokens,
    features) fits the memory budget, it is gathered in one pass, and no product reads the store again. Otherwise every
    product is a pass: each batch's operator is built, used and dropped.
    """
    batches = _Batches(tokens, build, per_token)
    if (kept := batches.probe.statistics()) is not None:
        size = sum(part[0].numel() * part.element_size() for part in kept)
        if batches.n_rows * size <= budget_on(tokens.device).stored:
            return _gathered(batches)
    return StreamedBilinear(batches) if isinstance(batches.probe, BilinearOperator) else StreamedOperator(batches)


@final
class _Batches:
    """The operators of the batches of a stream, one after the other, and the rows of outputs that they have."""

    def __init__(self, tokens: TokenStream, build: Build, per_token: bool) -> None:
        self.tokens, self.build, self.per_token = tokens, build, per_token
        self.probe = build(tokens.first())
        real = tokens.n_samples * tokens.n_tokens if tokens.mask is None else int(tokens.mask.sum())
        self.n_rows = real if per_token else tokens.n_samples

    def __iter__(self) -> Iterator[tuple[slice, Operator]]:
        start = 0
        for batch in self.tokens.batches():
            operator = self.build(batch)
            stop = start + operator.output_shape[0]
            yield slice(start, stop), operator
            start = stop

    def to(self, device: torch.device | str | None, dtype: torch.dtype | None) -> _Batches:
        return _Batches(self.tokens.to(device=device, dtype=dtype), self.build, self.per_token)


def _gathered(batches: _Batches) -> Operator:
    """Copy what each batch's operator keeps into one; memory for all of it is taken once."""
    whole: tuple[Tensor, ...] = ()
    for rows, operator in batches:
        parts = operator.statistics()
        assert parts is not None
        if not whole:
            whole = tuple(part.new_empty((batches.n_rows, *part.shape[1:])) for part in parts)
        for target, part in zip(whole, parts, strict=True):
            target[rows] = part
    return batches.probe.of_statistics(whole)


class _Streamed(Operator):
    """What both kinds share: sizes, dense products, sums over passes."""

    def __init__(self, batches: _Batches) -> None:
        self.batches = batches
        self.weight_shape = batches.probe.weight_shape
        self.output_shape = (batches.n_rows, batches.probe.output_shape[1])
        self._like = torch.empty(0, dtype=batches.tokens.dtype, device=batches.tokens.device)

    @property
    def like(self) -> Tensor:
        """An empty tensor of the dtype of the products."""
        return self._like

    @property
    def data_size(self) -> int:
        """All tokens."""
        return math.prod(self.batches.tokens.shape)

    def norm_squared(self, iterations: int = 30, w: Tensor | None = None, rows: Rows = LOCAL) -> float:
        """Estimate from below by fewer power iterations, each of them one pass."""
        generator = torch.Generator().manual_seed(0)
        Z = torch.randn(self.weight_shape, generator=generator, dtype=torch.float64).to(self.like)
        size = 0.0
        for _ in range(min(iterations, NORM_PASSES)):
            norm = float(torch.linalg.vector_norm(Z))
            if norm == 0 or not math.isfinite(norm):
                break
            unit, Z = Z / norm, torch.zeros_like(Z)
            for part, operator in self.batches:
                outputs = operator.apply(unit)
                Z += operator.adjoint(outputs if w is None else w[part].to(outputs)[:, None] * outputs)
            Z = rows.total(Z)
            size = float(torch.linalg.vector_norm(Z))
        return size

    def _outputs(self, product: Callable[[Operator], Tensor]) -> Tensor:
        """Outputs of all rows, in one pass."""
        out = self.like.new_empty(self.output_shape)
        for rows, operator in self.batches:
            out[rows] = product(operator)
        return out

    def _total(self, product: Callable[[Operator, slice], Tensor]) -> Tensor:
        """Sum over batches, in one pass."""
        total: Tensor | None = None
        for rows, operator in self.batches:
            part = product(operator, rows)
            total = part.clone() if total is None else total.add_(part)
        assert total is not None, "a store has samples"
        return total


@final
class StreamedOperator(_Streamed):
    """Any operator, on batches from disk: ``A Z = [A_1 Z; A_2 Z; ...]``, ``A^T V = sum_k A_k^T V_k``, one pass a product."""

    def apply(self, Z: Tensor) -> Tensor:
        """One pass."""
        return self._outputs(lambda operator: operator.apply(Z))

    def adjoint(self, V: Tensor) -> Tensor:
        """One pass."""
        return self._total(lambda operator, rows: operator.adjoint(V[rows]))

    def compressed(self, Y: Tensor, w: Tensor) -> tuple[Operator, Tensor] | None:
        """Compress batch after batch together with what is left of those before, where one batch can be: one pass."""
        p = math.prod(self.weight_shape) // self.output_shape[1]
        if self.batches.probe.statistics() is None or 2 * p > self.output_shape[0]:
            return None
        if 8 * p * p * self.like.element_size() > budget_on(self.like.device).stored:
            return None
        left: tuple[tuple[Tensor, ...], Tensor] | None = None
        for rows, operator in self.batches:
            parts, targets, weights = operator.statistics(), Y[rows], w[rows]
            assert parts is not None
            if left is not None:  # rows that are compressed already have the weight 1
                parts = tuple(torch.cat(pair) for pair in zip(left[0], parts, strict=True))
                targets = torch.cat([left[1], targets])
                weights = torch.cat([weights.new_ones(len(left[1])), weights])
            found = operator.of_statistics(parts).compressed(targets, weights)
            if found is None:  # too few rows for that yet
                root = weights.sqrt()[:, None]
                scaled = tuple((part.flatten(1) * root).view(part.shape) for part in parts)
                found = operator.of_statistics(scaled), targets * root
            small, targets = found
            kept = small.statistics()
            assert kept is not None
            left = kept, targets
        assert left is not None
        return self.batches.probe.of_statistics(left[0]), left[1]

    def to(self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> StreamedOperator:
        """Read the same tokens in another dtype or onto another device."""
        return StreamedOperator(self.batches.to(device, dtype))


@final
class StreamedBilinear(_Streamed, BilinearOperator):
    """The same for operators whose weights are met through factors: self-attention by token, gated heads."""

    @property
    def _probe(self) -> BilinearOperator:
        assert isinstance(self.batches.probe, BilinearOperator)
        return self.batches.probe

    def dense_pays(self, m: int) -> bool:
        """As for one batch."""
        return self._probe.dense_pays(m)

    @property
    def block_cost(self) -> float:
        """Forming a block takes one pass, as a product with a vector does."""
        return 1.0

    def apply_factors(self, Z: LowRank) -> Tensor:
        """One pass."""
        return self._outputs(lambda operator: _bilinear(operator).apply_factors(Z))

    def apply_dense(self, Z: Tensor) -> Tensor:
        """One pass."""
        return self._outputs(lambda operator: _bilinear(operator).apply_dense(Z))

    def matvec(self, D: Tensor, V: Tensor, b: int) -> Tensor:
        """One pass."""
        return self._total(lambda operator, rows: _bilinear(operator).matvec(D[rows], V, b))

    def rmatvec(self, D: Tensor, U: Tensor, b: int) -> Tensor:
        """One pass."""
        return self._total(lambda operator, rows: _bilinear(operator).rmatvec(D[rows], U, b))

    def factor_gradients(self, D: Tensor, Z: LowRank) -> tuple[Tensor, Tensor]:
        """Both gradients in one pass."""
        m = Z.n_terms
        both = self._total(lambda operator, rows: _joined(_bilinear(operator).factor_gradients(D[rows], Z)))
        GU, GV = both.split([m * self.weight_shape[-2], m * self.weight_shape[-1]])
        return GU.view(m, -1), GV.view(m, -1)

    def adjoint(self, V: Tensor) -> Tensor:
        """One pass."""
        return self._total(lambda operator, rows: operator.adjoint(V[rows]))

    def adjoint_block(self, V: Tensor, b: int) -> Tensor:
        """One pass."""
        return self._total(lambda operator, rows: _bilinear(operator).adjoint_block(V[rows], b))

    def to(self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> StreamedBilinear:
        """Read the same tokens in another dtype or onto another device."""
        return StreamedBilinear(self.batches.to(device, dtype))


def _bilinear(operator: Operator) -> BilinearOperator:
    assert isinstance(operator, BilinearOperator)
    return operator


def _joined(pair: tuple[Tensor, Tensor]) -> Tensor:
    return torch.cat([part.flatten() for part in pair])

"""The blocks of an objective whose penalty is a sum of Hilbert norms and ridges, through their Gram matrices."""

from __future__ import annotations

import math
from typing import final

import torch
from torch import Tensor

from convexformer.objective import Objective
from convexformer.operators import Operator, RowGram
from convexformer.operators.base import times


def missing(objective: Objective, max_rows: int) -> str | None:
    """Say what an objective lacks; None where nothing is."""
    kinds = objective.penalty.hilbert_blocks()
    if kinds is None:
        return f"works on sums of Hilbert norms and ridges; {objective.penalty!r} is another penalty"
    blocks = objective.operator.blocks()
    if len(blocks) != len(kinds) or not all(isinstance(block, RowGram) for block in blocks):
        return "works on operators with one feature vector a row"
    if not objective.rows.in_process:
        return "works in one process"
    if objective.targets.shape[0] > max_rows:
        return f"forms matrices of rows x rows, and {objective.targets.shape[0]:,} rows are more than {max_rows:,}"
    return None


@final
class Blocks:
    """``K_b: (N, N)`` for each block, ``Z_b = k_b represent_b(alpha)``, and the penalty of each.

    A norm ``s_b |Z_b|`` is ``min_eta (|Z_b|^2 s_b^2 / eta + eta) / 2``, so ``k_b = eta_b / s_b^2``; a ridge has
    ``k_b = 1 / (beta s_b)``, which is fixed. All norms and polars here are over ``s_b``.
    """

    def __init__(self, objective: Objective) -> None:
        kinds = objective.penalty.hilbert_blocks()
        assert kinds is not None
        self.objective = objective
        self.operators: list[Operator] = list(objective.operator.blocks())
        self.grams = [block.row_gram() for block in self.operators if isinstance(block, RowGram)]
        self.ridge = torch.tensor([kind.squared for kind in kinds])
        self.scale = torch.tensor([kind.weight for kind in kinds], dtype=torch.float64)

    def mean_diagonals(self) -> Tensor:
        """``(B,)`` mean squared feature norms, over ``s_b^2``."""
        means = torch.stack([gram.diagonal().double().mean().cpu() for gram in self.grams])
        return torch.where(means > 0, means, 1.0) / self.scale.square()

    def coefficients(self, eta: Tensor, beta: float) -> list[float]:
        """``k_b`` for block weights ``eta: (B,)``."""
        return torch.where(self.ridge, 1 / (beta * self.scale), eta / self.scale.square()).tolist()

    def combined(self, eta: Tensor, beta: float, dtype: torch.dtype) -> Tensor:
        """``sum_b k_b K_b``."""
        self.objective.begin_product()
        K: Tensor | None = None
        for k, gram in zip(self.coefficients(eta, beta), self.grams, strict=True):
            if k > 0:
                K = gram.to(dtype) * k if K is None else K.add_(gram, alpha=k)
        return torch.zeros_like(self.grams[0], dtype=dtype) if K is None else K

    def product(self, b: int, V: Tensor) -> Tensor:
        """``K_b V`` in the Gram matrix's dtype, returned in float64."""
        self.objective.begin_product()
        gram = self.grams[b]
        return times(gram, V.to(gram)).double()

    def squared(self, b: int, V: Tensor, image: Tensor) -> float:
        """``tr(V^T K_b V) / s_b^2`` given ``K_b V``."""
        return max(float(self.objective.rows.dot(V, image)), 0.0) / float(self.scale[b]) ** 2

    def weights(self, alpha: Tensor, eta: Tensor, beta: float) -> Tensor:
        """``Z`` of the whole operator."""
        self.objective.begin_product()
        like = self.objective.like
        alpha, pieces = alpha.to(like), []
        for k, block in zip(self.coefficients(eta, beta), self.operators, strict=True):
            assert isinstance(block, RowGram)
            pieces.append(k * block.represent(alpha) if k > 0 else block.zeros())
        if len(pieces) == 1:
            return pieces[0].reshape(self.objective.weight_shape)
        return torch.cat([piece.flatten() for piece in pieces])

    def shared(self, Z: Tensor, V: Tensor) -> Tensor:
        """``(N, c)`` the coefficients that the blocks of ``Z`` share at an optimum, where they are ``-V``.

        Their direction is that of the largest block on coefficients: ``-V`` has the error of the outputs, which ``K`` would
        magnify. Their length is that of ``-V``. It alone where no block has coefficients.
        """
        sizes = [math.prod(block.weight_shape) for block in self.operators]
        own = [
            piece.view(block.weight_shape).double()
            for block, piece in zip(self.operators, Z.flatten().split(sizes), strict=True)
            if block.on_coefficients
        ]
        largest = max(own, key=lambda piece: float(piece.square().sum()), default=None)
        if largest is None:
            return -V
        length = -float((largest * V).sum()) / max(float(largest.square().sum()), 1e-300)
        return length * largest if length > 0 else -V

    def norms(self, Z: Tensor) -> Tensor:
        """``(B,)`` ``s_b |Z_b|`` of any weights; zero for ridges, whose ``k_b`` needs no norm."""
        return torch.where(self.ridge, 0.0, self.objective.penalty.block_values(Z).cpu())

"""ReLU neurons as weights: a finite measure on directions, the form that the points of an exact ReLU program take."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from convexformer.operators.base import Operator

NO_MATRIX = (
    "the weights of an exact ReLU head are neurons, not one tensor: relu(X u) v^T depends on u and v apart. Use "
    "solution.network(), or solution.weights.Z.U and .V."
)


@final
@dataclass(frozen=True)
class Neurons:
    """``f = sum_j relu(rows_b U_j) V_j`` with ``b = block_j``: ``U: (m, p)``, ``V: (m, q)``, ``block: (m,)``.

    Unlike :class:`~convexformer.operators.LowRank` factors, neurons are no matrix: outputs are not linear in ``U_j V_j^T``.
    They are a point of the cell program of Sahiner et al. (2022): ``Z_c = sum_j U_j V_j^T`` over the neurons in cell ``c``,
    where the program has one block for each cell and the neurons name only those in use. ``shape`` is ``(B, p, q)``.
    """

    U: Tensor
    V: Tensor
    block: Tensor
    shape: tuple[int, ...]

    @classmethod
    def none(cls, shape: tuple[int, ...], like: Tensor) -> Neurons:
        """No neurons at all."""
        empty = torch.zeros(0, dtype=torch.int64, device=like.device)
        return cls(like.new_zeros((0, shape[-2])), like.new_zeros((0, shape[-1])), empty, tuple(shape))

    @property
    def n_terms(self) -> int:
        """m, the number of neurons."""
        return self.U.shape[0]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the factors."""
        return self.U.dtype

    @property
    def device(self) -> torch.device:
        """The device of the factors."""
        return self.U.device

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.U.nbytes + self.V.nbytes + self.block.nbytes

    def dense(self, limit: float = math.inf) -> Tensor:
        """Refuse: neurons are no matrix."""
        raise ValueError(NO_MATRIX)

    def singular_values(self) -> Tensor:
        """Refuse: neurons are no matrix."""
        raise ValueError(NO_MATRIX)

    def operand(self) -> Neurons:
        """Return the neurons."""
        return self

    def to(self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Neurons:
        """Move to another device or dtype."""
        U, V = (factor.to(device=device, dtype=dtype) for factor in (self.U, self.V))
        return Neurons(U, V, self.block.to(device=device), self.shape)

    def tensors(self) -> dict[str, Tensor]:
        """Return all numbers by name, for a file."""
        return {"neurons_in": self.U, "neurons_out": self.V, "neurons_block": self.block}

    def with_factors(self, U: Tensor, V: Tensor) -> Neurons:
        """Return other factors in the same blocks."""
        return Neurons(U, V, self.block, self.shape)

    def select(self, keep: Tensor) -> Neurons:
        """Return some of the neurons."""
        return Neurons(self.U[keep], self.V[keep], self.block[keep], self.shape)

    def append(self, more: Neurons) -> Neurons:
        """Return these neurons and more."""
        return Neurons(
            torch.cat([self.U, more.U.to(self.U)]),
            torch.cat([self.V, more.V.to(self.V)]),
            torch.cat([self.block, more.block.to(self.block)]),
            self.shape,
        )

    def balanced(self, output_norms: Tensor) -> Neurons:
        """Scale each neuron so that ``|U_j|`` equals its output norm, ``(m,)``; those that carry nothing are dropped.

        ``relu`` is positively homogeneous, so outputs stay as they are; ``1/2 (|U_j|^2 + norm_j^2)`` becomes the product.
        """
        inner = self.U.norm(dim=1)
        keep = (inner > 0) & (output_norms > 0)
        ratio = (output_norms[keep] / inner[keep]).sqrt()[:, None]
        return Neurons(ratio * self.U[keep], self.V[keep] / ratio, self.block[keep], self.shape)


class NeuronOperator(Operator):
    """An operator on neurons: linear in the measure that they are, not in their weights."""

    @abstractmethod
    def apply(self, Z: Tensor | Neurons) -> Tensor:
        """Outputs ``(R, c)`` of the network with these neurons; a tensor is refused."""

    @abstractmethod
    def factor_gradients(self, V: Tensor, Z: Neurons) -> tuple[Tensor, Tensor]:
        """Gradients of ``<V, A Z>`` in ``U: (m, p)`` and in ``V: (m, q)``."""

    @abstractmethod
    def hidden_rows(self) -> list[Tensor]:
        """Return the hidden rows ``(H, p)`` of each block; ReLU has its kinks where one vanishes."""

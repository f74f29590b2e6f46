"""A growing set of atoms: the weights and the outputs of their combinations."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from convexformer.gauges import DualMatrix, Gauge, Polar, WeightsLike
from convexformer.gauges.base import as_tensor
from convexformer.objective import Objective
from convexformer.operators import Operator


@final
class AtomSet:
    """Atoms ``a_1, ..., a_m`` by their nonzero entries, and their outputs ``A a_j``."""

    def __init__(self, objective: Objective) -> None:
        self.objective, operator = objective, objective.operator
        self._entries: list[tuple[Tensor, Tensor]] = []  # flat indices and values
        self.outputs = operator.like.new_zeros((0, operator.output_shape[0] * operator.output_shape[1]))

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, atoms: list[Tensor]) -> None:
        """Append atoms of the shape of ``Z``."""
        found = [self.objective.apply(atom).flatten() for atom in atoms]
        for atom in atoms:
            flat = atom.flatten()
            index = flat.nonzero()[:, 0]
            self._entries.append((index, flat[index]))
        self.outputs = torch.cat([self.outputs, torch.stack(found)])

    def keep(self, which: Tensor) -> None:
        """Drop all atoms but these, given as a mask ``(m,)``."""
        self._entries = [entry for entry, kept in zip(self._entries, which.tolist(), strict=True) if kept]
        self.outputs = self.outputs[which]

    def combine(self, t: Tensor) -> Tensor:
        """``Z = sum_j t_j a_j``."""
        operator = self.objective.operator
        Z = operator.zeros().flatten()
        for size, (index, values) in zip(t, self._entries, strict=True):
            Z[index] += size * values  # the indices of one atom are distinct
        return Z.view(operator.weight_shape)


@final
class AtomOperator(Operator):
    """``t -> sum_j t_j A a_j``: outputs as a function of the coefficients ``t: (m,)``."""

    def __init__(self, outputs: Tensor, output_shape: tuple[int, int]) -> None:
        self.outputs, self.output_shape = outputs, output_shape
        self.weight_shape = (len(outputs),)

    @property
    def like(self) -> Tensor:
        """The outputs of the atoms."""
        return self.outputs

    def apply(self, Z: Tensor) -> Tensor:
        """Combine the outputs."""
        return (Z @ self.outputs).view(self.output_shape)

    def adjoint(self, V: Tensor) -> Tensor:
        """Inner products with the outputs of each atom."""
        return self.outputs @ V.flatten()

    def to(self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> AtomOperator:
        """Move the outputs."""
        return AtomOperator(self.outputs.to(device=device, dtype=dtype), self.output_shape)


@final
class CoefficientNorm(Gauge):
    """``sum_j |t_j|``: what a combination of atoms costs; atoms come with both signs."""

    def value(self, Z: WeightsLike) -> Tensor:
        """Sum of absolute values."""
        return as_tensor(Z).abs().sum()

    def polar(self, M: DualMatrix) -> Polar:
        """Return the largest absolute value."""
        return Polar(float(as_tensor(M).abs().max()))

    def prox(self, Z: Tensor, step: float | Tensor) -> Tensor:
        """Soft threshold."""
        return Z.sign() * (Z.abs() - step).clamp_min(0)

"""Outputs linear in the coefficients of training samples: a kernel machine, and the dual points that it is certified by."""

from __future__ import annotations

import math
from typing import final

import torch
from torch import Tensor

from convexformer.operators.base import Operator, times
from convexformer.rows import LOCAL, Rows

CHUNK = {
    "cpu": 1 << 18,
    "cuda": 1 << 26,
}  # entries of a kernel converted at a time: 2 MiB in float64 stay in a CPU's cache


@final
class RepresenterDual:
    """``M = sum_i v_i phi(x_i)`` in a kernel's Hilbert space, by its coefficients ``V: (N, c)`` and ``K V``.

    Its norm there is ``sqrt(tr V^T K V)``, whatever ``K``'s rank. As a functional of coefficients ``alpha`` it is ``K V``.
    """

    def __init__(self, coefficients: Tensor, image: Tensor) -> None:
        self.coefficients, self.image = coefficients, image

    def norm(self) -> float:
        """``sqrt(tr V^T K V)``."""
        inner = (self.coefficients.double() * self.image.double()).sum()
        return float(inner.abs().sqrt())  # below zero by rounding alone: its size counts

    def dense(self) -> Tensor:
        """``K V``."""
        return self.image

    def __rmul__(self, scale: float) -> RepresenterDual:
        return RepresenterDual(scale * self.coefficients, scale * self.image)


@final
class StackedDual:
    """The dual matrices of several operators side by side."""

    def __init__(self, parts: list[Tensor | RepresenterDual]) -> None:
        self.parts = parts

    def norm(self) -> float:
        """The root of the sum of squares."""
        norms = [float(torch.linalg.vector_norm(p.double())) if isinstance(p, Tensor) else p.norm() for p in self.parts]
        return sum(norm**2 for norm in norms) ** 0.5

    def dense(self) -> Tensor:
        """All functionals of weights, flattened, one after the other."""
        return torch.cat([(p if isinstance(p, Tensor) else p.dense()).flatten() for p in self.parts])

    def __rmul__(self, scale: float) -> StackedDual:
        return StackedDual([scale * part for part in self.parts])


@final
class KernelOperator(Operator):
    """``A alpha = K alpha`` for coefficients ``alpha: (n, c)`` of the ``n`` training samples and ``K: (R, n)``.

    On the training samples ``K`` is symmetric and positive semidefinite, and ``Z = sum_i phi(x_i) alpha_i^T`` (``trains``);
    on other samples it is only a map to outputs. ``K`` stays in its own dtype; products convert some rows at a time.
    """

    def __init__(self, K: Tensor, n_outputs: int, *, trains: bool, dtype: torch.dtype | None = None) -> None:
        self.K, self.trains = K, trains
        self.weight_shape = (K.shape[1], n_outputs)
        self.output_shape = (K.shape[0], n_outputs)
        self._like = K.new_empty((1,), dtype=dtype)

    @property
    def like(self) -> Tensor:
        """An empty tensor of the working dtype."""
        return self._like

    @property
    def on_coefficients(self) -> bool:
        """They are."""
        return True

    @property
    def data_size(self) -> int:
        """The entries of ``K``."""
        return self.K.numel()

    def apply(self, Z: Tensor) -> Tensor:
        """``K alpha``: O(R n c)."""
        return kernel_product(self.K, Z)

    def adjoint(self, V: Tensor) -> Tensor:
        """``K^T V``."""
        return kernel_product(self.K if self.trains else self.K.T, V)

    def dual_matrix(self, V: Tensor, rows: Rows = LOCAL) -> RepresenterDual:
        """``-sum_i v_i phi(x_i)`` with its norm in the Hilbert space; only on the training samples."""
        if not self.trains or not rows.in_process:
            raise TypeError("a kernel head is certified on the samples that it was fitted to, in one process.")
        return RepresenterDual(-V, -self.apply(V))

    def mean_norm(self, share: Tensor) -> float | None:
        """``sqrt(c w^T K w)`` in ``K``'s own dtype, and what rounding may hide: no entry exceeds the diagonal's largest."""
        if not self.trains:
            return None
        w, largest = share.to(self.K), float(self.K.diagonal().max())
        lost = 2 * len(w) * torch.finfo(self.K.dtype).eps * largest
        return math.sqrt(self.output_shape[1] * (max(float(w @ (self.K @ w)), 0.0) + lost))

    def row_gram(self) -> Tensor:
        """``K``: the Gram matrix of the rows."""
        return self.K

    def represent(self, alpha: Tensor) -> Tensor:
        """``Z = sum_i phi(x_i) alpha_i^T`` has the coefficients ``alpha``."""
        return alpha

    def to(self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> KernelOperator:
        """Move ``K``; its own dtype stays as it is."""
        dtype = self.like.dtype if dtype is None else dtype
        return KernelOperator(self.K.to(device=device), self.output_shape[1], trains=self.trains, dtype=dtype)


def kernel_product(K: Tensor, V: Tensor) -> Tensor:
    """``K V`` in the dtype of ``V``; a ``K`` of another dtype is converted some rows at a time."""
    if K.dtype == V.dtype:
        return times(K, V)
    step = max(1, CHUNK.get(K.device.type, 1 << 22) // K.shape[1])
    return torch.cat([times(part.to(V.dtype), V) for part in K.split(step)])

"""The exact ReLU operator: hidden rows, a ReLU, and a readout; one form for every head.

Every two-layer ReLU head has hidden values ``a = rows u`` and outputs ``f_r = sum_{h in r} w_h relu(a_h) (E_h^T W)``:

    head                  row of the hidden layer        p      E_h         W
    MLP, PoolFormer, FNet token h_t                      d      1           (1, c)
    FNO                   circ(X)_o                      s d    1           (1, c), per block (1, c/B)
    MLPMixer              X[:, a]^T (x) e_o              s^2    e_a         (d, c)
    SelfAttention         x_t (x) x_o                    d^2    x_t         (d, c)
    Attention, token k    x_k                            d      1           (1, c)

The sum over ``h in r`` is the head's own (over t in self-attention, over a in the mixer) and the mean over tokens
where the output is pooled. ``<V, A(u v^T)> = relu(rows u)^T T v`` with ``T_h = w_h E_h (x) V_r``: polars depend on
``rows`` and ``T`` alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor

from convexformer.gauges import Candidate
from convexformer.operators.base import Operator
from convexformer.operators.neurons import NeuronOperator, Neurons
from convexformer.rows import LOCAL, Rows


@final
@dataclass(frozen=True)
class HiddenLayer:
    """One block of a hidden layer: see the module's docstring."""

    rows: Tensor
    """``(H, p)``."""
    embedding: Tensor | None
    """``E: (H, k)``; None: ones, k = 1."""
    output: Tensor
    """``(H,)`` the output row that each hidden row adds to."""
    weight: Tensor | None
    """``(H,)`` pooling weights; None: ones."""
    columns: slice
    """The outputs that this block writes."""

    def to(self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> HiddenLayer:
        """Move to another device or dtype."""

        def moved(values: Tensor | None) -> Tensor | None:
            return None if values is None else values.to(device=device, dtype=dtype)

        rows = self.rows.to(device=device, dtype=dtype)
        return HiddenLayer(rows, moved(self.embedding), self.output.to(device=device), moved(self.weight), self.columns)

    def read(self, hidden: Tensor, V: Tensor, n_rows: int) -> Tensor:
        """Outputs ``(R, c)`` of hidden values ``(H, m)`` and output weights ``V: (m, k c)``."""
        if self.weight is not None:
            hidden = hidden * self.weight[:, None]
        if self.embedding is None:
            values = hidden @ V  # (H, c)
        else:
            k = self.embedding.shape[1]
            wide = hidden @ V  # (H, k c)
            values = (self.embedding[:, :, None] * wide.view(len(wide), k, -1)).sum(1)
        return self._add(values, n_rows)

    def _add(self, values: Tensor, n_rows: int) -> Tensor:
        return values.new_zeros((n_rows, values.shape[1])).index_add_(0, self.output, values)

    def dual(self, V: Tensor) -> Tensor:
        """``T: (H, k c)``, the readout's adjoint at ``V: (R, c)``."""
        own = V[self.output, self.columns]  # (H, c)
        if self.weight is not None:
            own = own * self.weight[:, None]
        if self.embedding is None:
            return own
        return (self.embedding[:, :, None] * own[:, None, :]).flatten(1)


@final
@dataclass(frozen=True)
class ReLUDual:
    """``-A^T V`` of a ReLU operator as the pairs ``(rows, T)`` of each block: ``<M, (u, v)> = relu(rows u)^T T v``."""

    parts: tuple[tuple[Tensor, Tensor], ...]
    found: list[Candidate] = field(default_factory=list, compare=False, repr=False)
    """Neurons that an estimate of the polar found, for the next search to start from."""
    guard: Callable[[], None] | None = field(default=None, compare=False, repr=False)
    """Called before every step of a search; it raises where a solve's time is up."""

    def dense(self) -> Tensor:
        """Refuse: it is a function of directions, not a matrix."""
        raise ValueError("the dual of an exact ReLU operator is a function of directions, not one tensor.")

    def __rmul__(self, scale: float) -> ReLUDual:
        """``scale * M``; a negative scale is a sign of ``T``."""
        return ReLUDual(tuple((rows, scale * T) for rows, T in self.parts), guard=self.guard)

    def inner(self, Z: Neurons) -> Tensor:
        """``(m,)`` the products ``relu(rows U_j)^T T V_j``."""
        terms = Z.U.new_zeros(Z.n_terms)
        for b, (rows, T) in enumerate(self.parts):
            own = Z.block == b
            if bool(own.any()):
                terms[own] = ((rows @ Z.U[own].T).clamp_min(0) * (T @ Z.V[own].T)).sum(0)
        return terms

    def norm(self) -> float:
        """Return a bound on the polar: ``max_b sigma_max(rows_b) |T_b|_F``."""
        sizes = [
            float(torch.linalg.matrix_norm(rows.double(), 2)) * float(T.double().norm())
            for rows, T in self.parts
            if rows.numel()
        ]
        return max(sizes, default=0.0)


@final
class ReLUOperator(NeuronOperator):
    """``A(u, v) = readout(relu(rows u), v)``, linear in the measure that :class:`Neurons` are; ``weight_shape = (B, p, q)``.

    It takes neurons, on training tokens and on new ones alike; the cells of the training rows are the penalty's.
    """

    def __init__(self, layers: Sequence[HiddenLayer], n_rows: int, n_outputs: int) -> None:
        self.layers = tuple(layers)
        first = self.layers[0]
        k = 1 if first.embedding is None else first.embedding.shape[1]
        width = len(range(*first.columns.indices(n_outputs)))
        self.weight_shape = (len(self.layers), first.rows.shape[1], k * width)
        self.output_shape = (n_rows, n_outputs)

    @property
    def like(self) -> Tensor:
        """The hidden rows of the first block."""
        return self.layers[0].rows

    def apply(self, Z: Tensor | Neurons) -> Tensor:
        """Outputs of the network with these neurons: O(H m (p + q))."""
        if not isinstance(Z, Neurons):
            raise TypeError(f"an exact ReLU head takes Neurons, not a tensor of shape {tuple(Z.shape)}.")
        n_rows = self.output_shape[0]
        if len(self.layers) == 1:
            return self.layers[0].read((self.layers[0].rows @ Z.U.T).clamp_min(0), Z.V, n_rows)
        outputs = Z.U.new_zeros(self.output_shape)
        for layer, own in self._in_use(Z):
            outputs[:, layer.columns] += layer.read((layer.rows @ Z.U[own].T).clamp_min(0), Z.V[own], n_rows)
        return outputs

    def _in_use(self, Z: Neurons) -> list[tuple[HiddenLayer, Tensor | slice]]:
        """The blocks that have neurons, each with the places of its neurons."""
        if len(self.layers) == 1:
            return [(self.layers[0], slice(None))]
        return [(self.layers[b], Z.block == b) for b in Z.block.unique().tolist()]

    def factor_gradients(self, V: Tensor, Z: Neurons) -> tuple[Tensor, Tensor]:
        """Gradients of ``<V, A Z>`` in ``U: (m, p)`` and in ``V: (m, q)``."""
        GU, GV = torch.zeros_like(Z.U), torch.zeros_like(Z.V)
        for layer, own in self._in_use(Z):
            T = layer.dual(V)
            hidden = layer.rows @ Z.U[own].T  # (H, m)
            GV[own] = hidden.clamp_min(0).T @ T
            GU[own] = ((hidden > 0) * (T @ Z.V[own].T)).T @ layer.rows
        return GU, GV

    def hidden_rows(self) -> list[Tensor]:
        """Return the hidden rows of each block."""
        return [layer.rows for layer in self.layers]

    def adjoint(self, V: Tensor) -> Tensor:
        """Refuse: the adjoint is a function of directions, see :meth:`dual_matrix`."""
        raise TypeError("the adjoint of an exact ReLU operator is a function of directions; use dual_matrix.")

    def dual_matrix(self, V: Tensor, rows: Rows = LOCAL) -> ReLUDual:
        """``-A^T V``, as a function of directions."""
        if not rows.in_process:
            raise TypeError("exact ReLU heads are solved in one process: cells are those of all rows together.")
        return ReLUDual(tuple((layer.rows, -layer.dual(V)) for layer in self.layers))

    @property
    def data_size(self) -> int:
        """The entries of all hidden rows."""
        return sum(layer.rows.numel() for layer in self.layers)

    def to(self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> ReLUOperator:
        """Move every block."""
        layers = [layer.to(device=device, dtype=dtype) for layer in self.layers]
        return ReLUOperator(layers, *self.output_shape)


@final
class CellOperator(Operator):
    """The gated program on the cells of a ReLU layer: ``A Z = sum_c readout(D_c rows Z_c)``, ``Z: (P, p, q)``, no cones.

    Its optimum with nuclear norms is below that of the ReLU program: the lower end of the sandwich of bounds.
    """

    def __init__(self, layers: Sequence[HiddenLayer], patterns: Sequence[Tensor], n_rows: int, n_outputs: int) -> None:
        self.layers, self.patterns = tuple(layers), tuple(patterns)  # patterns of each block: (P_b, H_b)
        _, p, q = ReLUOperator(layers, n_rows, n_outputs).weight_shape
        self.weight_shape = (sum(len(D) for D in self.patterns), p, q)
        self.output_shape = (n_rows, n_outputs)

    @property
    def like(self) -> Tensor:
        """The hidden rows of the first block."""
        return self.layers[0].rows

    def apply(self, Z: Tensor) -> Tensor:
        """One product with all cells side by side, then a gated sum."""
        outputs = Z.new_zeros(self.output_shape)
        for layer, D, own in zip(self.layers, self.patterns, self._split(Z), strict=True):
            wide = torch.einsum("hp,cpq,ch->hq", layer.rows, own, D.to(Z.dtype))
            each = torch.eye(wide.shape[1], dtype=Z.dtype, device=Z.device)  # hidden values differ by output weight
            outputs[:, layer.columns] += layer.read(wide, each, self.output_shape[0])
        return outputs

    def adjoint(self, V: Tensor) -> Tensor:
        """``M_c = rows^T D_c T``."""
        parts = [
            torch.einsum("hp,ch,hq->cpq", layer.rows, D.to(V.dtype), layer.dual(V))
            for layer, D in zip(self.layers, self.patterns, strict=True)
        ]
        return torch.cat(parts)

    def _split(self, Z: Tensor) -> Sequence[Tensor]:
        return Z.split([len(D) for D in self.patterns])

    def to(self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> CellOperator:
        """Move every block."""
        layers = [layer.to(device=device, dtype=dtype) for layer in self.layers]
        return CellOperator(layers, [D.to(device=device) for D in self.patterns], *self.output_shape)

"""Points of a convex program: ``Z`` in one of a few forms, and the intercept.

A form is :class:`Dense`, :class:`~convexformer.operators.LowRank` factors, :class:`GroupSparse`, :class:`Representer`, or
the :class:`~convexformer.operators.Neurons` of an exact ReLU head. All of them know their ``shape``, ``dtype``, ``device``
and ``nbytes``, and have ``dense()``, ``to()``, ``tensors()`` and ``operand()``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias, final

import torch
from torch import Tensor

from convexformer.operators import BilinearOperator, LowRank, NeuronOperator, Neurons, Operator

Operand: TypeAlias = Tensor | LowRank | Neurons
"""What operators and penalties work on."""
Identity: TypeAlias = Mapping[str, object]
"""The head's options and the sizes of the problem that weights depend on, by name."""


@final
@dataclass(frozen=True)
class Dense:
    """``Z`` as one tensor."""

    tensor: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of ``Z``."""
        return tuple(self.tensor.shape)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the numbers."""
        return self.tensor.dtype

    @property
    def device(self) -> torch.device:
        """The device of the numbers."""
        return self.tensor.device

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.tensor.nbytes

    def dense(self) -> Tensor:
        """Return the tensor."""
        return self.tensor

    def operand(self) -> Tensor:
        """Return the tensor."""
        return self.tensor

    def to(self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Dense:
        """Move to another device or dtype."""
        return Dense(self.tensor.to(device=device, dtype=dtype))

    def tensors(self) -> dict[str, Tensor]:
        """Return all numbers by name, for a file."""
        return {"Z": self.tensor}


@final
@dataclass(frozen=True)
class GroupSparse:
    """The nonzero groups of ``Z: (..., d, c)``, a group being the ``d`` numbers of one token and one output."""

    rows: Tensor
    """``(k, d)``, the groups that are not zero."""
    index: Tensor
    """``(k,)``, their indices among all groups."""
    shape: tuple[int, ...]

    @classmethod
    def of(cls, Z: Tensor) -> GroupSparse:
        """Pack a tensor; :meth:`dense` gives the same numbers, bitwise."""
        groups = Z.movedim(-2, -1).reshape(-1, Z.shape[-2])
        index = groups.ne(0).any(1).nonzero().squeeze(1)
        return cls(groups[index].contiguous(), index, tuple(Z.shape))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the numbers."""
        return self.rows.dtype

    @property
    def device(self) -> torch.device:
        """The device of the numbers."""
        return self.rows.device

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.rows.nbytes + self.index.nbytes

    def dense(self) -> Tensor:
        """Return the whole tensor."""
        *outer, d, c = self.shape
        groups = self.rows.new_zeros((math.prod(outer) * c, d))
        groups[self.index] = self.rows
        return groups.reshape(*outer, c, d).movedim(-1, -2).contiguous()

    def operand(self) -> Tensor:
        """Return the whole tensor."""
        return self.dense()

    def to(self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> GroupSparse:
        """Move to another device or dtype."""
        return GroupSparse(self.rows.to(device=device, dtype=dtype), self.index.to(device=device), self.shape)

    def tensors(self) -> dict[str, Tensor]:
        """Return all numbers by name, for a file."""
        return {"rows": self.rows, "index": self.index}


@final
@dataclass(frozen=True)
class Representer:
    """``Z = sum_i phi(x_i) alpha_i^T`` by its coefficients, one row a training sample (the representer theorem).

    ``Z`` may have more rows than there are numbers (a Gaussian kernel: infinitely many), so that operators, penalties and
    files work on ``alpha``, and norms come from the kernel: ``|Z|^2 = tr(alpha^T K alpha)``.
    """

    alpha: Tensor
    """``(N, c)``."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of ``alpha``."""
        return tuple(self.alpha.shape)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the numbers."""
        return self.alpha.dtype

    @property
    def device(self) -> torch.device:
        """The device of the numbers."""
        return self.alpha.device

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.alpha.nbytes

    def in_features(self, phi: Tensor) -> Tensor:
        """``Z: (p, c)`` for explicit features ``phi: (N, p)`` of the training samples."""
        return phi.to(self.alpha).T @ self.alpha

    def norm(self, K: Tensor) -> Tensor:
        """``|Z| = sqrt(tr(alpha^T K alpha))`` with the kernel ``K: (N, N)`` of the training samples."""
        return (self.alpha * (K.to(self.alpha) @ self.alpha)).sum().abs().sqrt()

    def dense(self) -> Tensor:
        """Return the coefficients."""
        return self.alpha

    def operand(self) -> Tensor:
        """Return the coefficients."""
        return self.alpha

    def to(self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Representer:
        """Move to another device or dtype."""
        return Representer(self.alpha.to(device=device, dtype=dtype))

    def tensors(self) -> dict[str, Tensor]:
        """Return all numbers by name, for a file."""
        return {"alpha": self.alpha}


Form: TypeAlias = Dense | LowRank | GroupSparse | Representer | Neurons


def form_of(Z: Tensor | Form) -> Form:
    """Return a form as it is, and a tensor as :class:`Dense`."""
    return Dense(Z) if isinstance(Z, Tensor) else Z


@final
@dataclass(frozen=True, init=False)
class Weights:
    """A point of the convex program: ``Z`` and, where the problem has one, the intercept ``(c,)``."""

    form: Form
    intercept: Tensor | None
    origin: Identity | None = field(repr=False, compare=False)
    """Identity of the problem that was solved; None for weights made by hand or lifted from a network."""

    def __init__(self, Z: Tensor | Form, intercept: Tensor | None = None, origin: Identity | None = None) -> None:
        object.__setattr__(self, "form", form_of(Z))
        object.__setattr__(self, "intercept", intercept)
        object.__setattr__(self, "origin", origin)

    @property
    def Z(self) -> Operand:
        """``Z`` as operators take it: a tensor, low-rank factors, or neurons."""
        return self.form.operand()

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of ``Z``."""
        return self.form.shape

    def dense(self) -> Tensor:
        """``Z`` as one tensor."""
        return self.form.dense()

    def tensors(self) -> dict[str, Tensor]:
        """Return all numbers by name, for a file."""
        own = self.form.tensors()
        return own if self.intercept is None else {**own, "intercept": self.intercept}

    @classmethod
    def of_tensors(cls, tensors: Mapping[str, Tensor], shape: tuple[int, ...]) -> Weights:
        """Undo :meth:`tensors`; ``shape`` is that of a dense ``Z``, which the tensors must fit."""
        form: Form
        _check_shape(tensors, shape)
        if "Z" in tensors:
            form = Dense(tensors["Z"])
        elif "alpha" in tensors:
            form = Representer(tensors["alpha"])
        elif "rows" in tensors:
            form = GroupSparse(tensors["rows"], tensors["index"], tuple(shape))
        elif "neurons_in" in tensors:
            U, V, block = (tensors[f"neurons_{part}"] for part in ("in", "out", "block"))
            form = Neurons(U, V, block, tuple(shape))
        else:
            form = LowRank(tensors["U"], tensors["V"], tensors["block"], tuple(shape))
        return cls(form, tensors.get("intercept"))

    def to(self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Weights:
        """Move to another device or dtype."""
        b = None if self.intercept is None else self.intercept.to(device=device, dtype=dtype)
        return Weights(self.form.to(device=device, dtype=dtype), b, self.origin)

    def with_intercept(self, intercept: Tensor | None) -> Weights:
        """Return the same ``Z`` with another intercept."""
        return Weights(self.form, intercept, self.origin)

    def incompatibility(self, identity: Identity) -> str:
        """Say why these weights do not fit a problem of that identity; empty if they do, or if their origin is unknown.

        Equal shapes are not enough: gates, mixing or pooling may differ.
        """
        if self.origin is None:
            return ""
        for name in dict.fromkeys([*self.origin, *identity]):
            own, other = self.origin.get(name), identity.get(name)
            if own != other:
                hashed = any(str(value).startswith("fingerprint") for value in (own, other))
                what = f"its {name} differ" if hashed else f"its {name} is {own!r}, not {other!r}"
                return (
                    f"these weights are a solution of another problem, with a {self.origin.get('head')} head: {what}. Build "
                    "the problem with the solution's own head (solution.head) and tokens of the same sizes, or solve this "
                    "problem anew."
                )
        return ""

    def check_compatible(self, identity: Identity) -> None:
        """Raise ValueError with the reason that :meth:`incompatibility` gives, if any."""
        if reason := self.incompatibility(identity):
            raise ValueError(reason)


def apply_weights(operator: Operator, Z: Operand) -> Tensor:
    """``A Z``; low-rank weights are made dense for operators that do not take factors."""
    if isinstance(operator, NeuronOperator):
        return operator.apply(Z.dense(math.inf) if isinstance(Z, LowRank) else Z)
    if isinstance(Z, Neurons):
        raise TypeError(
            f"a {type(operator).__name__} does not take neurons; they belong to a head with activation='relu'."
        )
    if isinstance(operator, BilinearOperator):
        return operator.apply(Z)
    return operator.apply(Z.dense(math.inf) if isinstance(Z, LowRank) else Z)


def _check_shape(tensors: Mapping[str, Tensor], shape: tuple[int, ...]) -> None:
    """Raise if tensors cannot be those of weights of this shape; nothing of that size is allocated."""
    whole = tensors.get("Z", tensors.get("alpha"))
    if whole is not None:
        fits = tuple(whole.shape) == tuple(shape)
    elif "rows" in tensors:
        index = tensors["index"]
        groups = math.prod(shape) // max(1, shape[-2])
        fits = tensors["rows"].shape[1] == shape[-2] and (index.numel() == 0 or int(index.max()) < groups)
    else:
        names = ("neurons_in", "neurons_out", "neurons_block") if "neurons_in" in tensors else ("U", "V", "block")
        U, V, block = (tensors[name] for name in names)
        n_blocks = math.prod(shape[:-2])
        fits = (U.shape[1], V.shape[1]) == tuple(shape[-2:]) and (block.numel() == 0 or int(block.max()) < n_blocks)
    if not fits:
        sizes = ", ".join(f"{name} {tuple(values.shape)}" for name, values in tensors.items())
        raise ValueError(
            f"its weights are said to have the shape {tuple(shape)}, which their tensors ({sizes}) do not fit."
        )

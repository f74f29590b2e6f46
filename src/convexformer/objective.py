"""The formula: ``min_{Z, b} sum_i w_i L(A_i(Z) + b, y_i) + beta g(Z) + offset``.

Solvers, certificates and checkpoints work on an :class:`Objective` only.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol, final

import torch
from torch import Tensor

from convexformer.gauges import Penalty
from convexformer.jit import interpreted
from convexformer.losses import Loss
from convexformer.operators import (
    BilinearOperator,
    FactoredView,
    ImplicitMatrix,
    LowRank,
    NeuronOperator,
    Neurons,
    Operator,
    ReLUDual,
)
from convexformer.operators.bilinear import frobenius_norm
from convexformer.rows import LOCAL, Rows
from convexformer.weights import Operand, Weights, apply_weights

if TYPE_CHECKING:
    from convexformer.operators.base import DualMatrix


@final
@dataclass(frozen=True)
class Evaluation:
    """The loss at some outputs, with the intercept fitted where the objective has one."""

    value: Tensor
    """A float64 scalar on the device of the outputs, so that computing it needs no host sync."""
    outputs: Tensor
    """``(R, c)`` with the intercept added, in float64."""
    intercept: Tensor | None
    U: Tensor
    """``(R, c)`` gradient of each row's loss, in float64; balanced (``sum_i w_i u_i = 0``) where the intercept is exact."""
    V: Tensor
    """``(R, c)`` gradient of the weighted sum, ``w * U``: a dual point before scaling, in the operator's dtype."""


@final
class _Derived:
    """Cache of what depends on operator, targets, weights and rows only; shared by objectives that differ in beta."""

    def __init__(self, objective: Objective, exact: Callable[[], Objective] | None = None) -> None:
        self._of = (objective.operator, objective.targets, objective.sample_weight, objective.rows)
        self._offset = objective.offset
        self.exact = exact
        self.factored: BilinearOperator | None = None
        self.compressed: tuple[Operator, Tensor] | None = None
        self.compression_tried = False
        self.mean_feature_norm: float | None = None
        self.reference: Objective | None = None

    def belongs_to(self, objective: Objective) -> bool:
        """Tell whether an objective has the same operator, targets, weights and rows, by identity (``is``)."""
        theirs = (objective.operator, objective.targets, objective.sample_weight, objective.rows)
        same = all(own is other for own, other in zip(self._of, theirs, strict=True))
        return same and self._offset == objective.offset


@final
@dataclass(frozen=True)
class Objective:
    """``min_{Z, b} sum_i w_i L(A_i(Z) + b, y_i) + beta g(Z) + offset``.

    Frozen: a variant (another beta, fewer slices, another precision) is a new, complete objective that evaluates and
    certifies by itself. It holds no tokens, head or file; ``rows`` sums over the processes that share the samples.
    The intercept is minimised out at every evaluation, so that solvers see a program in ``Z`` alone.

    Attributes
    ----------
    operator : Operator
        ``A``.
    loss : Loss
        ``L``.
    penalty : Penalty
        ``g``.
    targets : Tensor (R, c)
        ``y``, encoded as the loss expects.
    sample_weight : Tensor (R,)
        ``w``.
    beta : float
        The strength of the penalty.
    intercept : bool
        Whether ``b`` is there.
    rows : Rows
        Takes every sum over samples.
    offset : float
        A constant, from compressions.
    guard : callable, optional
        Called before every product with the operator; it raises where a solve's time is up.
    derived : optional
        What variants of one objective share; leave it out.
    """

    operator: Operator
    loss: Loss
    penalty: Penalty
    targets: Tensor
    """``(R, c)`` encoded targets in float64, the rows of this process."""
    sample_weight: Tensor
    """``(R,)`` in float64."""
    beta: float
    intercept: bool = False
    rows: Rows = LOCAL
    offset: float = 0.0
    """A constant of the loss: the part that :meth:`compressed` removes from the targets."""
    guard: Callable[[], None] | None = field(default=None, repr=False, compare=False)
    derived: _Derived | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_beta(self.beta)
        if self.derived is None or not self.derived.belongs_to(self):
            object.__setattr__(self, "derived", _Derived(self))

    # ------------------------------------------------------------------ sizes

    @property
    def n_rows(self) -> int:
        """The number of rows of all processes."""
        return len(self.targets) if self.rows.in_process else int(self.rows.sum(torch.ones_like(self.sample_weight)))

    @property
    def n_outputs(self) -> int:
        """c, the number of outputs of a row."""
        return self.targets.shape[1]

    @property
    def weight_shape(self) -> tuple[int, ...]:
        """The shape of ``Z``."""
        return tuple(self.operator.weight_shape)

    @property
    def like(self) -> Tensor:
        """A tensor of the operator's device and dtype."""
        return self.operator.like

    # ------------------------------------------------------------------ the terms of the formula

    def apply(self, Z: Operand) -> Tensor:
        """``A Z``, shape ``(R, c)``."""
        self.begin_product()
        return apply_weights(self.operator, Z)

    def adjoint(self, V: Tensor) -> Tensor:
        """``A^T V`` over all rows."""
        self.begin_product()
        return self.rows.total(self.operator.adjoint(V))

    def dual_matrix(self, V: Tensor) -> DualMatrix:
        """``-A^T V`` over all rows: a tensor, a linear map, or points of a Hilbert space."""
        return self._dual_matrix(self.operator, V)

    def _dual_matrix(self, operator: Operator, V: Tensor) -> DualMatrix:
        self.begin_product()
        M = operator.dual_matrix(V, self.rows)
        if self.guard is not None and isinstance(M, ImplicitMatrix):
            M.guard = self.guard
        if self.guard is not None and isinstance(M, ReLUDual):
            M = replace(M, guard=self.guard)
        return M

    def factor_gradients(self, V: Tensor, Z: LowRank | Neurons) -> tuple[Tensor, Tensor]:
        """``M V_j`` and ``M^T U_j`` for ``M = A^T V`` over all rows and each term of ``Z``."""
        self.begin_product()
        if isinstance(Z, Neurons):
            assert isinstance(self.operator, NeuronOperator)
            return self.operator.factor_gradients(V, Z)
        assert isinstance(self.operator, BilinearOperator)
        GU, GV = self.operator.factor_gradients(V, Z)
        return self.rows.total(GU), self.rows.total(GV)

    def begin_product(self) -> None:
        """Say that a product with the operator is to begin; solvers call it where they have products of their own."""
        if self.guard is not None:
            self.guard()

    def evaluate(self, outputs: Tensor, start: Tensor | None = None, *, inexact_intercept: bool = False) -> Evaluation:
        """Evaluate the loss at outputs ``A Z``: value, intercept, gradients.

        ``inexact_intercept``: take a few steps from ``start``, the intercept of outputs nearby, without a host sync;
        else the intercept is minimised over exactly, and the gradients are balanced.
        """
        b, dtype = None, outputs.dtype
        w, Y, rows = self.sample_weight, self.targets, self.rows
        outputs = outputs.double()  # sums over samples in float32 would cost three digits of the gap
        if self.intercept:
            first = Y.new_zeros(self.n_outputs) if start is None else start.double()
            at_once = self.loss.evaluate_nearly if inexact_intercept else self.loss.evaluate_exactly
            if (known := at_once(outputs, Y, w, first, rows)) is not None:
                value, b, outputs, U, V = known
                return Evaluation(value + self.offset, outputs, b, U, V.to(dtype))
            find = self.loss.inexact_intercept if inexact_intercept else self.loss.best_intercept
            b = find(outputs, Y, w, first, rows)
            outputs = outputs + b
        values, U = self.loss.value_and_gradient(outputs, Y)
        if self.intercept and not inexact_intercept:
            U = self.loss.balance(U, Y, w, rows)
        value = rows.dot(w, values) + self.offset
        return Evaluation(value, outputs, b, U, (w[:, None] * U).to(dtype))

    def zero_evaluation(self) -> Evaluation:
        """Evaluate the loss at ``Z = 0``, with the best constant outputs where there is an intercept.

        By plain code, so that ``beta_max`` and all that is scaled by it is the same whatever has been compiled before.
        """
        with interpreted():
            return self.evaluate(self.like.new_zeros(self.targets.shape))

    def outputs(self, weights: Weights) -> Tensor:
        """``A Z + b``, shape ``(R, c)``."""
        outputs = self.apply(weights.Z)
        return outputs if weights.intercept is None else outputs + weights.intercept

    def value(self, weights: Weights) -> float:
        """Return the primal value at these weights and their own intercept."""
        values = self.loss.value(self.outputs(weights).double(), self.targets)
        data = float(self.rows.dot(self.sample_weight, values)) + self.offset
        return data + self.beta * float(self.penalty.value(weights.Z))

    def curvature(self) -> float:
        """Estimate the largest curvature of the loss as a function of ``Z``."""
        return self.loss.curvature * self.operator.norm_squared(w=self.sample_weight, rows=self.rows)

    def critical_beta(self) -> float:
        """Return about the smallest beta at which ``Z = 0`` is optimal; zero where the polar is rounding noise.

        An estimate where the polar is one (large implicit matrices). With an intercept, a polar below
        :meth:`cancellation_error` (constant features) counts as zero.
        """
        at = self.zero_evaluation()
        polar = self.penalty.critical_beta(self.dual_matrix(at.V), self.curvature)
        if self.penalty.sparse and polar.value <= self.cancellation_error(at):
            return 0.0
        return polar.value

    def cancellation_error(self, at: Evaluation) -> float:
        """Bound the rounding error of ``A^T V`` that remains where an intercept cancels the mean feature."""
        if not self.intercept:
            return 0.0
        size = float(self.rows.sum(at.V.abs().double().sum(1)))
        left = float(self.rows.weighted(self.sample_weight, at.U).abs().sum())
        return (8 * torch.finfo(self.like.dtype).eps * size + left) * self.mean_feature_norm()

    def mean_feature_norm(self) -> float:
        """Return about ``|A^T w| / sum w``, the norm of the mean feature, or a little more."""
        assert self.derived is not None
        if self.derived.mean_feature_norm is None:
            w = self.sample_weight
            share = (w / self.rows.sum(w)).to(self.like)
            V = share[:, None].expand(self.targets.shape).contiguous()
            norms = []
            for block in self.operator.blocks():
                bound = block.mean_norm(share)
                norms.append(frobenius_norm(self._dual_matrix(block, V)) if bound is None else bound)
            self.derived.mean_feature_norm = math.hypot(*norms)
        return self.derived.mean_feature_norm

    # ------------------------------------------------------------------ variants, each a complete objective

    def at(self, beta: float) -> Objective:
        """Return the same objective at another beta; cached quantities of the data are shared."""
        return replace(self, beta=float(beta))

    def guarded(self, guard: Callable[[], None] | None) -> Objective:
        """Return the same objective with ``guard`` called before every product, also of its variants."""
        return self if guard is self.guard else replace(self, guard=guard)

    def with_exact(self, exact: Callable[[], Objective]) -> Objective:
        """Return the same objective with a function that rebuilds it in float64 from the data."""
        return replace(self, derived=_Derived(self, exact))

    def reference(self) -> Objective:
        """Return the same objective in float64, without a guard where it is another: for certificates."""
        if self.like.dtype == torch.float64:
            return self
        assert self.derived is not None
        if self.derived.exact is None:
            kept = self.derived.reference
            if kept is None:
                kept = replace(self, operator=self.operator.to(dtype=torch.float64), guard=None)
                if self.penalty.of_data:  # kernels are converted row by row, so that keeping this costs little
                    self.derived.reference = kept
            return replace(kept, loss=self.loss, penalty=self.penalty, beta=self.beta, intercept=self.intercept)
        made = self.derived.exact()  # not cached: it may take most of a GPU's memory
        penalty = made.penalty if self.penalty.of_data else self.penalty
        return replace(made, loss=self.loss, penalty=penalty, beta=self.beta, intercept=self.intercept, guard=None)

    def to(self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Objective:
        """Return the same objective on another device or in another dtype; targets stay in float64."""
        source = self.reference().guarded(self.guard) if dtype == torch.float64 else self
        moved = replace(
            source,
            operator=source.operator.to(device=device, dtype=dtype),
            targets=self.targets.to(device=device),
            sample_weight=self.sample_weight.to(device=device),
        )
        return moved.with_exact(lambda: self.reference().to(device=device))

    def compressed(self) -> Objective:
        """Return a smaller objective with the same value, where the squared loss allows one; else this one."""
        if not (self.loss.quadratic and self.rows.in_process) or self.intercept:
            return self
        derived, w = self.derived, self.sample_weight
        assert derived is not None
        if not derived.compression_tried:  # the same at every beta, so a path compresses once
            derived.compressed = self.operator.compressed(self.targets.to(self.like.dtype), w.to(self.like.dtype))
            derived.compression_tried = True
        if derived.compressed is None:
            return self
        operator, targets = derived.compressed[0], derived.compressed[1].double()
        whole = float(self.rows.dot(w, self.targets.square().sum(1)))
        small = replace(
            self,
            operator=operator,
            targets=targets,
            sample_weight=torch.ones(len(targets), dtype=w.dtype, device=w.device),
            offset=self.offset + 0.5 * max(0.0, whole - float(targets.square().sum())),
        )
        return small.with_exact(lambda: self.reference().compressed())

    def restricted(self, tokens: Tensor) -> Objective:
        """Return the objective on the slices of some token positions alone, all others being zero."""
        part = replace(self, operator=self.operator.restricted(tokens))
        return part.with_exact(lambda: self.reference().restricted(tokens))

    def factored(self) -> Objective:
        """Return the same objective with an operator that works on factors of the weights."""
        if isinstance(self.operator, BilinearOperator):
            return self
        assert self.derived is not None
        if self.derived.factored is None:
            own = self.operator.on_factors()
            self.derived.factored = FactoredView(self.operator) if own is None else own
        view = replace(self, operator=self.derived.factored)
        return view.with_exact(lambda: self.reference().factored())


class HasObjective(Protocol):
    """A problem, as far as solvers and certificates look at it."""

    objective: Objective


def objective_of(thing: Objective | HasObjective) -> Objective:
    """Return an objective itself, and that of a problem."""
    return thing if isinstance(thing, Objective) else thing.objective


def check_beta(beta: float, name: str = "beta") -> None:
    """Raise unless beta is a positive, finite number."""
    if isinstance(beta, bool) or not isinstance(beta, numbers.Real):
        raise TypeError(f"{name} is a {type(beta).__name__}; expected a positive number.")
    if not (math.isfinite(beta) and beta > 0):
        raise ValueError(f"{name}={beta} was given; expected a positive, finite number.")

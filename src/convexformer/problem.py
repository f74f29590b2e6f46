"""The problem: ``min_{Z, b} sum_i w_i L(A_i(Z) + b, y_i) + beta g(Z)``."""

from __future__ import annotations

import copy
import math
import numbers
from dataclasses import dataclass
from functools import cached_property
from typing import Any, final

import torch
from torch import Tensor

from convexformer.architecture import Head, Layout, Weights, resolve_head
from convexformer.data import TokenDataset
from convexformer.gauges import Penalty, Polar
from convexformer.losses import Loss
from convexformer.operators import BilinearOperator, FactoredView, Operator
from convexformer.operators.bilinear import as_operand, size_of
from convexformer.targets import read_targets


@final
@dataclass(frozen=True)
class Fit:
    """The loss at some outputs, with the intercept fitted exactly where the problem has one."""

    value: Tensor
    """A scalar in float64, on the device of the outputs: an iteration need not wait for it."""
    outputs: Tensor
    """``(R, c)`` with the intercept added."""
    intercept: Tensor | None
    U: Tensor
    """``(R, c)`` gradient of each row's loss, in float64."""
    V: Tensor
    """``(R, c)`` gradient of the weighted sum, ``w * U``: a dual point before scaling, in the operator's dtype.

    With an exact intercept it sums to zero over the rows, apart from rounding, and what rounding leaves is taken out: it
    would be multiplied by the mean of the features.
    """


@final
class Problem:
    """A head, tokens, targets, a loss and a beta.

    The objective is a sum over samples, as in the papers: ``sum_i w_i L(f_i, y_i) + beta * gauge(Z)``. Give either
    ``beta``, which is absolute, or ``beta_ratio``, a fraction of ``beta_max``. An intercept is never penalised; it is
    minimised exactly at every evaluation, so the program that a solver sees is one in ``Z`` alone.

    **Tokens are not copied** where device and dtype agree with the caller's (a float64 array on a CPU): they may be most of
    the memory there is. Do not change ``X`` in place while the problem is in use, or pass ``X.copy()``. Targets, weights
    and masks are copied; solutions and estimators hold no training data.
    """

    def __init__(
        self,
        head: str | Head,
        X: Any,
        Y: Any,
        beta: float | None = None,
        beta_ratio: float | None = None,
        loss: str | Loss = "auto",
        mask: Any = None,
        sample_weight: Any = None,
        intercept: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        _check_betas(beta, beta_ratio)
        self.head = resolve_head(head)
        self.tokens = TokenDataset.of(X, mask, device=device, dtype=dtype)
        self._targets, self.loss = read_targets(Y, self.tokens, loss, sample_weight)
        self.layout = Layout(
            n_tokens=self.tokens.n_tokens,
            width=self.tokens.width,
            n_outputs=self._targets.Y.shape[1],
            per_token=self._targets.per_token,
            squeeze=self._targets.squeeze,
        )
        self.head.check(self.layout)
        if self.tokens.mask is not None and not self.head.masks:
            raise ValueError(
                f"the {self.head.name} head mixes tokens by position, so a mask has no meaning for it. Pass samples of "
                "equal length without mask, or choose a head that pools over real tokens, such as 'self_attention' or 'mlp'."
            )
        self.layout = self.head.prepare(self.tokens, self.layout)
        self.intercept = bool(intercept)
        if self.intercept:
            self.loss.check_intercept(self._targets.Y, self._targets.w)
        self.penalty: Penalty = self.head.penalty(self.layout)
        self.Y, self.w = self._targets.Y, self._targets.w
        self._intercept_start = self.Y.new_zeros(self.layout.n_outputs)
        self.offset = 0.0
        self.shared: dict[str, Any] = {}  # what problems that differ in beta alone have in common
        self.beta = float(beta) if beta is not None else self._beta_from_ratio(float(beta_ratio or 0))

    # ------------------------------------------------------------------ the terms of the formula

    @cached_property
    def operator(self) -> Operator:
        """The linear map from ``Z`` to outputs ``(R, c)``."""
        return self.head.operator(self.tokens, self.layout)

    @cached_property
    def beta_max(self) -> float:
        """The smallest beta at which ``Z = 0`` is optimal (for the ridge: the curvature scale, see ``Ridge``)."""
        return self._zero_polar().value

    def fit(self, outputs: Tensor, start: Tensor | None = None, *, follow: bool = False) -> Fit:
        """Evaluate the loss at outputs ``A Z``: value, intercept, gradients.

        With ``follow`` the intercept takes a few steps from ``start``, that of outputs nearby, and nothing is read by the
        host; else it is minimised exactly.
        """
        b, dtype = None, outputs.dtype
        outputs = outputs.double()  # sums over samples: in float32 they would cost three digits of the gap
        if self.intercept:
            first = self._intercept_start if start is None else start.double()
            find = self.loss.follow_intercept if follow else self.loss.best_intercept
            b = find(outputs, self.Y, self.w, first)
            outputs = outputs + b
        values, U = self.loss.value_and_gradient(outputs, self.Y)
        value = self.w @ values + self.offset
        V = self.w[:, None] * U
        if self.intercept and not follow:
            V = V - (self.w / self.w.sum())[:, None] * V.sum(0)
        return Fit(value, outputs, b, U, V.to(dtype))

    def objective(self, weights: Weights) -> float:
        """Return the primal value at these weights, intercept included."""
        outputs = self.outputs(weights).double()
        data = (self.w * self.loss.value(outputs, self.Y)).sum()
        return float(data) + self.beta * float(self.penalty.value(weights.Z))

    def outputs(self, weights: Weights) -> Tensor:
        """``A Z + b``, shape ``(R, c)``."""
        outputs = as_operand(self.operator, weights.Z)
        return outputs if weights.intercept is None else outputs + weights.intercept

    # ------------------------------------------------------------------ relatives of this problem

    def with_beta(self, beta: float) -> Problem:
        """Return the same problem at another beta; tokens and operator are shared."""
        _check_betas(beta, None)
        self.operator  # noqa: B018  (build it once, for both)
        twin = copy.copy(self)
        twin.beta = float(beta)
        return twin

    def compressed(self) -> Problem:
        """Return a smaller problem with the same objective, where the squared loss allows one; else this one.

        ``offset`` is the part of the loss that no weights can change.
        """
        if self.loss.name != "squared" or self.intercept:
            return self
        if "small" not in self.shared:  # the same at every beta, so a path compresses once
            like = self.operator.like
            self.shared["small"] = self.operator.compressed(self.Y.to(like.dtype), self.w.to(like.dtype))
        small = self.shared["small"]
        if small is None:
            return self
        twin = copy.copy(self)
        twin.operator, twin.Y = small[0], small[1].double()
        twin.w = torch.ones(len(twin.Y), dtype=self.w.dtype, device=self.w.device)
        whole = float((self.w[:, None] * self.Y.square()).sum())
        twin.offset = self.offset + 0.5 * max(0.0, whole - float(twin.Y.square().sum()))
        return twin

    def factored(self) -> Problem:
        """Return the same problem with an operator that works on factors of the weights."""
        if isinstance(self.operator, BilinearOperator):
            return self
        twin = copy.copy(self)
        twin.operator = FactoredView(self.operator)
        return twin

    def restricted(self, tokens: Tensor, dtype: torch.dtype) -> Problem:
        """Return the problem on some token positions alone, all others being zero; for solvers."""
        twin = copy.copy(self)
        twin.operator = self.operator.restricted(tokens).to(dtype=dtype)
        twin.shared = {}
        return twin

    def coarse(self) -> Problem:
        """Return the same problem with an operator in float32, for the first steps of a solver."""
        twin = copy.copy(self)
        twin.operator = self.operator.to(dtype=torch.float32)
        return twin

    def reference(self) -> Problem:
        """Return the same problem in float64, from the tokens up: what certificates are computed with."""
        if self.tokens.X.dtype == torch.float64:
            return self
        twin = copy.copy(self)
        for cached in ("operator", "beta_max"):
            twin.__dict__.pop(cached, None)
        twin.tokens = self.tokens.to(dtype=torch.float64)
        twin.shared = {}
        return twin

    # ------------------------------------------------------------------ inside

    def _zero_polar(self) -> Polar:
        fit = self.fit(self.operator.like.new_zeros(self.Y.shape))
        M = self.operator.dual_matrix(fit.V)
        return self.penalty.zero_beta(M, self._curvature)

    def mean_size(self) -> float:
        """The size of the mean feature, ``|A^T w| / sum w``: what an intercept cancels, and rounding does not quite."""
        if "mean size" not in self.shared:
            share = (self.w / self.w.sum()).to(self.operator.like)
            M = self.operator.dual_matrix(share[:, None].expand(self.Y.shape).contiguous())
            self.shared["mean size"] = size_of(M)
        return self.shared["mean size"]

    def _curvature(self) -> float:
        return self.loss.curvature * self.operator.norm_squared(w=self.w)

    def _beta_from_ratio(self, ratio: float) -> float:
        # where nothing can be learnt (beta_max = 0) any positive beta has the same answer, Z = 0
        if not math.isfinite(self.beta_max):
            raise ValueError(
                f"beta_max is {self.beta_max} in {self.tokens.X.dtype}: the tokens are too large (their largest entry is "
                f"{float(self.tokens.X.abs().max()):.3g}). Standardise them, or pass dtype=torch.float64."
            )
        return ratio * self.beta_max if self.beta_max > 0 else ratio

    def __repr__(self) -> str:
        N, s, d = self.tokens.X.shape
        return (
            f"Problem({self.head!r}, X=({N}, {s}, {d}), outputs={self.layout.n_outputs}, loss={self.loss!r}, "
            f"beta={self.beta:.4g}, intercept={self.intercept})"
        )


def _check_betas(beta: float | None, beta_ratio: float | None) -> None:
    """Exactly one of the two, positive and finite."""
    if (beta is None) == (beta_ratio is None):
        given = "neither" if beta is None else f"both (beta={beta}, beta_ratio={beta_ratio})"
        raise ValueError(
            f"{given} of beta and beta_ratio given; expected exactly one: beta is the penalty's weight, "
            "beta_ratio a fraction of beta_max, e.g. beta_ratio=0.1."
        )
    name, value = ("beta", beta) if beta is not None else ("beta_ratio", beta_ratio)
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} is a {type(value).__name__}; expected a positive number.")
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name}={value} was given; expected a positive, finite number.")

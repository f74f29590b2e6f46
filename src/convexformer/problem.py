"""The problem as users state it: a head, tokens, targets, a loss and a beta. It builds an :class:`Objective`."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, final

import torch

from convexformer.data.fingerprint import fingerprint
from convexformer.data.stores import Tokens, read_tokens
from convexformer.data.targets import read_targets
from convexformer.gauges import Penalty
from convexformer.heads.base import Head, Layout, resolve_head
from convexformer.losses import Loss
from convexformer.objective import Objective, check_beta
from convexformer.operators import Operator
from convexformer.weights import Weights


@final
class Problem:
    """A head, tokens, targets, a loss and a beta.

    The objective is a sum over samples, as in the papers: ``sum_i w_i L(f_i, y_i) + beta * gauge(Z)``. Give either
    ``beta``, which is absolute, or ``beta_ratio``, a fraction of ``beta_max``. An intercept is never penalised.

    **Tokens are not copied** where device and dtype agree with the caller's (a float64 array on a CPU), since they may
    take most of the memory. Do not change ``X`` in place while the problem is in use, or pass ``X.copy()``. Targets, weights
    and masks are copied; solutions and estimators hold no training data.

    Parameters
    ----------
    head : str or Head
        A name (``"attention"``, ``"self_attention"``, ...) or an object from ``convexformer.heads``.
    X : array (N, s, d), array (N, p), list of arrays (s_i, d), or store
        Tokens; those of a store (``convexformer.data.open``) that is larger than memory are streamed.
    Y : array
        Real targets ``(N,)`` or ``(N, c)``, class labels ``(N,)``, or targets per token ``(N, s, c)``.
    beta, beta_ratio : float
        Exactly one of the two.
    loss : str or Loss
        ``"auto"`` takes cross-entropy for integer labels and the squared loss for real targets.
    mask : array (N, s), optional
        True where a token is real.
    sample_weight : array (N,), optional
        Weights of the samples.
    intercept : bool
        Whether to add an unpenalised intercept.
    device, dtype : optional
        Where and in which precision to solve: float64 on a CPU and float32 on a GPU by default.
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
        head = resolve_head(head)
        tokens = read_tokens(X, mask, device=device, dtype=dtype)
        targets, chosen = read_targets(Y, tokens, loss, sample_weight)
        layout = Layout(
            n_tokens=tokens.n_tokens,
            width=tokens.width,
            n_outputs=targets.Y.shape[1],
            per_token=targets.per_token,
            squeeze=targets.squeeze,
        )
        head.check(layout)
        if tokens.mask is not None and not head.masks:
            raise ValueError(
                f"the {head.name} head mixes tokens by position, so a mask has no meaning for it. Pass samples of "
                "equal length without mask, or choose a head that pools over real tokens, such as 'self_attention' or 'mlp'."
            )
        head = head.fitted(tokens)
        if intercept:
            chosen.check_intercept(targets.Y, targets.w)

        def build(tokens: Tokens) -> Objective:
            operator, penalty = head.program_on(tokens, layout)
            at = 1.0 if beta is None else float(beta)
            return Objective(operator, chosen, penalty, targets.Y, targets.w, at, bool(intercept))

        first = build(tokens)

        def exact() -> Objective:
            operator = first.operator.exact()
            return build(tokens.to(dtype=torch.float64)) if operator is None else replace(first, operator=operator)

        objective = first.with_exact(exact) if head.rebuilds else first
        self._set(head, tokens, layout, objective, None)
        if beta is None:
            self._set(head, tokens, layout, objective.at(self._beta_from_ratio(float(beta_ratio or 0))), self._beta_max)

    def _set(self, head: Head, tokens: Tokens, layout: Layout, objective: Objective, beta_max: float | None) -> None:
        self.head, self.tokens, self.layout = head, tokens, layout
        self.objective = objective
        self._beta_max = beta_max

    # ------------------------------------------------------------------ the terms of the formula

    @property
    def beta(self) -> float:
        """The weight of the penalty."""
        return self.objective.beta

    @property
    def loss(self) -> Loss:
        """The loss of a row."""
        return self.objective.loss

    @property
    def penalty(self) -> Penalty:
        """The gauge of the head."""
        return self.objective.penalty

    @property
    def operator(self) -> Operator:
        """The linear map from ``Z`` to outputs ``(R, c)``."""
        return self.objective.operator

    @property
    def intercept(self) -> bool:
        """Whether there is an intercept."""
        return self.objective.intercept

    @property
    def beta_max(self) -> float:
        """About the smallest beta at which ``Z = 0`` is optimal (for the ridge: the curvature scale, see ``Ridge``).

        Exact where the polar is; for weights too large to form it is an estimate from below, good to a few digits.
        """
        if self._beta_max is None:
            self._beta_max = self.objective.critical_beta()
        return self._beta_max

    def value(self, weights: Weights) -> float:
        """Return the primal value at these weights, intercept included."""
        return self.objective.value(weights)

    def identity(self) -> dict[str, object]:
        """Return the head's options and the sizes that weights depend on, by name."""
        return self.head.identity(self.layout)

    def fingerprint(self) -> str:
        """Return a hash of what defines the problem: head, loss, beta, sizes, targets, and sums over the tokens."""
        return fingerprint(
            {
                "head": self.head,
                "loss": self.loss,
                "beta": self.beta,
                "intercept": self.intercept,
                "shape": [*self.tokens.shape, self.layout.n_outputs],
                **self.tokens.signature(),
                "targets": self.objective.targets,
                "weights": self.objective.sample_weight,
            }
        )

    def with_beta(self, beta: float) -> Problem:
        """Return the same problem at another beta; tokens, operator and ``beta_max`` are shared."""
        check_beta(beta)
        twin = object.__new__(Problem)
        twin._set(self.head, self.tokens, self.layout, self.objective.at(beta), self._beta_max)
        return twin

    # ------------------------------------------------------------------ inside

    def _beta_from_ratio(self, ratio: float) -> float:
        # at beta_max = 0 the solution is Z = 0 for every positive beta
        if not math.isfinite(self.beta_max):
            raise ValueError(
                f"beta_max is {self.beta_max} in {self.tokens.dtype}: the tokens are too large (their largest entry is "
                f"{self.tokens.largest():.3g}). Standardise them, or pass dtype=torch.float64."
            )
        return ratio * self.beta_max if self.beta_max > 0 else ratio

    def __repr__(self) -> str:
        N, s, d = self.tokens.shape
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
    if beta is not None:
        check_beta(beta)
    elif beta_ratio is not None:
        check_beta(beta_ratio, "beta_ratio")

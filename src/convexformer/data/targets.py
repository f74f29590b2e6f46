"""Targets: which loss they imply, which rows they belong to, and how they are encoded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from convexformer.data.stores import Tokens
from convexformer.data.tokens import as_tensor, check_finite
from convexformer.losses import LOSSES, Loss


@final
@dataclass(frozen=True)
class Targets:
    """Encoded targets ``Y: (R, c)`` in float64 and the weight ``w: (R,)`` of each row.

    A row is a sample, or a real token when targets are per token.
    """

    Y: Tensor
    w: Tensor
    per_token: bool
    squeeze: bool


def read_targets(Y: Any, tokens: Tokens, loss: str | Loss, sample_weight: Any) -> tuple[Targets, Loss]:
    """Validate targets against the tokens and encode them for the loss (``"auto"`` chooses it)."""
    values = _read_values(Y)
    N, s = tokens.n_samples, tokens.n_tokens
    if values.ndim == 0 or values.shape[0] != N:
        raise ValueError(
            f"X has {N} samples and Y has {values.shape[0] if values.ndim else 'no axis'}; they must match. "
            f"Shapes given: X {tokens.shape}, Y {tuple(values.shape)}."
        )
    integers = not values.is_floating_point() and not values.is_complex()
    token_labels = values.ndim == 2 and integers and values.shape[1] == s and values.shape[1] > 1
    chosen = _choose_loss(loss, values, integers, token_labels)
    if token_labels and chosen.class_labels and _is_one_hot(values):
        raise ValueError(
            f"Y is an integer array {tuple(values.shape)} of one-hot rows: one class per sample, or one label per token? "
            "Pass class labels (Y.argmax(1)), or one-hot token targets of shape (N, s, c) as floats."
        )
    per_token = values.ndim == 3 or (token_labels and chosen.class_labels)
    if values.ndim > 3 or (per_token and values.shape[1] != s):
        raise ValueError(
            f"Y has shape {tuple(values.shape)}; expected (N,), (N, c) or, per token, (N, s, c) with s={s} tokens."
        )
    squeeze = values.ndim == 1 and not chosen.class_labels
    w = _read_weights(sample_weight, N)
    if per_token:
        keep = torch.ones((N, s), dtype=torch.bool) if tokens.mask is None else tokens.mask.cpu()
        values, w = values[keep], w[:, None].expand(N, s)[keep]
    else:  # copies (indexing by a mask copies too): later changes to the caller's arrays must not change the problem
        values, w = values.clone(), w.clone()
    if not integers:
        check_finite(values, "Y")
    encoded = chosen.encode(values)
    where = tokens.device
    return Targets(encoded.to(where), w.to(where), per_token, squeeze), chosen


def _is_one_hot(values: Tensor) -> bool:
    return bool(((values == 0) | (values == 1)).all()) and bool((values.sum(1) == 1).all())


def _read_values(Y: Any) -> Tensor:
    if Y is None:
        raise ValueError("Y is None; expected targets, one row per sample.")
    try:
        return as_tensor(Y, "Y").cpu()
    except TypeError as error:
        raise TypeError(
            "Y holds text or objects; expected integer labels 0..c-1 or real targets. Encode labels with "
            "np.unique(Y, return_inverse=True), or use TokenClassifier, which does so itself."
        ) from error


def _choose_loss(loss: str | Loss, Y: Tensor, integers: bool, token_labels: bool) -> Loss:
    """``"auto"``: integer labels mean cross-entropy, real targets the squared loss."""
    if isinstance(loss, Loss):
        return loss
    if not isinstance(loss, str):
        raise TypeError(f"loss is a {type(loss).__name__}; expected a name or an object from convexformer.losses.")
    if loss != "auto":
        return LOSSES[loss]()
    if not integers:
        return LOSSES["squared"]()
    if Y.ndim == 1 or token_labels:
        return LOSSES["cross_entropy"]()
    raise ValueError(
        f"Y is an integer array of shape {tuple(Y.shape)}, which loss='auto' cannot read. Pass labels (N,), "
        "probabilities (N, c) as floats with loss='cross_entropy', or real targets as floats with loss='squared'."
    )


def _read_weights(sample_weight: Any, N: int) -> Tensor:
    """``(N,)`` nonnegative weights, ones by default."""
    if sample_weight is None:
        return torch.ones(N, dtype=torch.float64)
    w = as_tensor(sample_weight, "sample_weight").cpu().to(torch.float64)
    if w.ndim == 0:
        w = w.expand(N)
    if tuple(w.shape) != (N,):
        raise ValueError(f"sample_weight has shape {tuple(w.shape)}; expected (N,) = ({N},), one weight per sample.")
    check_finite(w, "sample_weight")
    if bool((w < 0).any()):
        raise ValueError(
            f"sample_weight holds negative values (smallest {float(w.min()):.4g}); expected weights >= 0. "
            "A negative weight would make the problem nonconvex."
        )
    if float(w.sum()) == 0:
        raise ValueError("sample_weight is zero for every sample; expected at least one positive weight.")
    return w

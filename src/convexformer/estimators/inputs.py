"""Readers of the estimators' inputs: tokens or a table, labels, real targets, a head by name, a random state."""

from __future__ import annotations

import numbers
from typing import Any

import numpy as np
import torch
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import column_or_1d
from torch import Tensor

from convexformer.data import TokenDataset, TokenStore
from convexformer.data.stores import TokenStream
from convexformer.data.tokens import as_tensor
from convexformer.heads.base import HEADS, Head
from convexformer.registry import MissingMaskWarning, unknown, warn

OWN_TYPES = (TokenDataset, TokenStore, TokenStream)  # tokens that come with their mask
EXAMPLES = {  # heads that are nothing without an argument
    "sum": "cf.heads.Sum(['attention', 'mlp'])",
    "feature": "cf.heads.Feature(cf.features.CovariancePooling())",
    "kernel": "cf.heads.Kernel(cf.features.CovariancePooling())",
    "block_self_attention": "cf.heads.BlockSelfAttention(cf.heads.channel_blocks(X))",
}


def is_tokens(X: Any) -> bool:
    """Tell whether ``X`` holds tokens: 3-D, ragged, a dataset or a store; scikit-learn validates all else as a table."""
    return isinstance(X, OWN_TYPES) or _depth(X) >= 3


def warn_of_padding(X: Any) -> None:
    """Warn when a model fitted with a mask gets one array without a mask.

    Not an error, since samples without padding need no mask.
    """
    if not isinstance(X, (*OWN_TYPES, list, tuple)) and getattr(X, "dtype", None) != np.dtype(object):
        warn(
            "this estimator was fitted with a mask, and X is one array without: padding, if there is any, counts as tokens. "
            "Pass its mask (all ones where nothing is padded) or a list of (s_i, d) arrays.",
            MissingMaskWarning,
        )


def as_table(X: Any) -> Any:
    """Return ``X`` for scikit-learn's validation: tensors as arrays, bfloat16 (which NumPy lacks) as float32."""
    if not isinstance(X, Tensor):
        return X
    X = X.detach().cpu()
    return (X.float() if X.dtype == torch.bfloat16 else X).numpy()


def read_labels(y: Any) -> np.ndarray:
    """Return class labels as a 1-D array, numbers or text."""
    values = y.detach().cpu().numpy() if isinstance(y, Tensor) else y
    check_classification_targets(values)
    return column_or_1d(values, warn=True)


def plain_label(label: Any) -> Any:
    """Return a label without NumPy's type, for a message."""
    return label.item() if isinstance(label, np.generic) else label


def read_real(y: Any) -> np.ndarray:
    """Return real targets as float64."""
    values = as_tensor(y, "y").cpu().to(torch.float64)
    if not bool(torch.isfinite(values).all()):
        raise ValueError("Input y contains NaN or infinity. Drop those samples or impute their targets.")
    if values.ndim == 0:
        raise ValueError("y is a single number; expected one target per sample.")
    return values.numpy()


def single_sample(X: Any, n: int) -> str:
    """Return a hint where a table may be one sample ``(s, d)`` that lacks its first axis."""
    shape = tuple(getattr(X, "shape", ()))
    return f" If X {shape} is the tokens of a single sample, pass X[None]." if len(shape) == 2 and n <= 1 else ""


def read_head(head: str | Head, options: dict[str, Any], usual: dict[str, Any], whose: str) -> Head:
    """Return the head of that name with those of the options that it takes; an object as it is.

    ``usual`` are the options' defaults: any other value that would do nothing is an error.
    """
    if isinstance(head, type) and issubclass(head, Head):
        raise TypeError(f"{whose} got the class {head.__name__} as head; pass an object: head={head.__name__}().")
    if not isinstance(head, (str, Head)):
        raise TypeError(
            f"{whose} got a {type(head).__name__} as head; expected a name or an object from convexformer.heads."
        )
    changed = {key: options[key] for key, value in usual.items() if not _same(options[key], value)}
    if isinstance(head, Head):
        known = head.config()
        useless = [key for key, value in changed.items() if key not in known or not _same(known[key], value)]
        if useless:
            raise ValueError(
                f"{whose} got {_listed(changed, useless)} besides the head {head!r}, which has its own options: "
                f"{'it' if len(useless) == 1 else 'they'} would do nothing. Give options to the head itself."
            )
        return head
    if head not in HEADS:
        raise ValueError(unknown("head", head, HEADS))
    factory = HEADS[head]
    try:
        known = factory().config()
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"{whose} got head={head!r}, which is not a head without its parts: pass an object, for example "
            f"head={EXAMPLES.get(head, f'cf.heads.{factory.__name__}(...)')}."
        ) from error
    useless = [key for key in changed if key not in known]
    if useless:
        takes = ", ".join(sorted(set(known) - {"seed"})) or "no options"
        raise ValueError(
            f"{whose} got {_listed(changed, useless)}, which the {head} head does not have: "
            f"{'it' if len(useless) == 1 else 'they'} would do nothing. It takes: {takes}."
        )
    return factory(**{key: value for key, value in options.items() if key in known})


def _listed(options: dict[str, Any], names: list[str]) -> str:
    return " and ".join(f"{name}={options[name]!r}" for name in names)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, (str, int, float)) and isinstance(other, (str, int, float)):
        return type(one) is type(other) and one == other
    return one is other


def read_seed(random_state: Any, drawn: int | None = None) -> int:
    """Return a whole number as it is; for None or a RandomState the number ``drawn`` before, or a new one."""
    if isinstance(random_state, numbers.Integral) and not isinstance(random_state, bool):
        return int(random_state)
    return drawn if drawn is not None else int(check_random_state(random_state).randint(2**31 - 1))


def _depth(X: Any) -> int:
    """Count the axes of nested lists, by their first elements, and those of the array inside."""
    depth = 0
    while isinstance(X, (list, tuple)) or (isinstance(X, np.ndarray) and X.dtype == object and X.ndim == 1):
        depth += 1
        if len(X) == 0:
            return depth
        X = X[0]
    return depth + getattr(X, "ndim", 0)

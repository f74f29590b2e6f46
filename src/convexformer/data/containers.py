"""What users have instead of an array of tokens, and what to do about it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

IDS = 255  # whole numbers in a table above this, none negative, look like token ids rather than pixels or counts


def check_container(X: Any, whose: str = "tokens") -> None:
    """Raise for outputs of a model, loaders, columns of arrays, and token ids; ``whose`` names who wants the tokens."""
    kind = type(X).__name__
    wanted = f"{whose} takes tokens (N, s, d) as an array or tensor, or a list of (s_i, d) arrays; X is a {kind}"
    mapping = isinstance(X, Mapping) and not hasattr(X, "shape")  # some sparse matrices are mappings
    if mapping or hasattr(X, "last_hidden_state"):
        names = list(X) if mapping else ["last_hidden_state"]
        best = "last_hidden_state" if "last_hidden_state" in names or not names else names[0]
        how = f"X.{best}" if hasattr(X, str(best)) else f"X[{best!r}]"
        raise TypeError(
            f"{wanted} with {', '.join(map(str, names[:6])) or 'nothing in it'}. Pass one tensor of it: {how}."
        )
    if hasattr(X, "dataset") and hasattr(X, "batch_size"):
        raise TypeError(
            f"{wanted}, which yields batches. Collect them first: X = torch.cat([tokens for tokens, _ in loader]), in the "
            "order of the targets."
        )
    if hasattr(X, "iloc") and getattr(X, "ndim", 0) == 1 and X.dtype == object and len(X) and np.ndim(X.iloc[0]) >= 1:
        how = "np.stack(X)" if len({np.shape(x) for x in X}) == 1 else "list(X)"
        raise TypeError(f"{wanted}, a column of arrays. Pass {how}.")
    if hasattr(X, "__next__"):
        raise TypeError(f"{wanted}, which can be read only once. Pass list(X), or np.stack(list(X)).")


def check_token_ids(X: Any, whose: str) -> None:
    """Raise for a table of whole numbers that look like token ids."""
    kind = X.dtype if isinstance(X, (np.ndarray, Tensor)) else None
    if kind is None or X.ndim != 2 or X.shape[1] < 2 or 0 in X.shape:
        return
    whole = not (X.is_floating_point() or X.is_complex()) if isinstance(X, Tensor) else X.dtype.kind in "iu"
    if whole and str(kind).rsplit(".", 1)[-1] != "bool" and int(X.min()) >= 0 and int(X.max()) > IDS:
        raise ValueError(
            f"{whose} takes tokens (N, s, d) as vectors; X is a table {tuple(X.shape)} of {kind}, from {int(X.min())} to "
            f"{int(X.max())}, which look like token ids. Embed them first (the hidden states of a backbone); if they are "
            "measurements, pass them as floats."
        )

"""Python values as JSON, their arrays moved to a table of tensors by name."""

from __future__ import annotations

from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from convexformer.heads.base import HEADS, Head
from convexformer.losses import LOSSES, Loss


@final
class Codec:
    """Encodes values as JSON that refers to ``tensors``, and decodes it again.

    A tensor or array is ``{"tensor": name}``, a tuple or list ``{"tuple": [...]}``, a dictionary ``{"dict": [[key,
    value], ...]}``, a head ``{"head": {"name": ..., "config": ...}}``; numbers, text, booleans and None are themselves.
    """

    def __init__(self, tensors: dict[str, Tensor] | None = None) -> None:
        self.tensors: dict[str, Tensor] = {} if tensors is None else tensors

    def encode(self, name: str, value: Any) -> Any:
        """Return ``value`` as JSON; its arrays are stored under names that begin with ``name``."""
        if isinstance(value, (Tensor, np.ndarray)):
            self.tensors[name] = torch.as_tensor(value).detach().cpu().contiguous().clone()
            return {"tensor": name}
        if isinstance(value, (tuple, list)):
            return {"tuple": [self.encode(f"{name}.{i}", item) for i, item in enumerate(value)]}
        if isinstance(value, dict):
            pairs = [[plain(key), self.encode(f"{name}.{i}", item)] for i, (key, item) in enumerate(value.items())]
            return {"dict": pairs}
        if isinstance(value, Head):
            return {"head": self.encode_head(name, value)}
        return plain(value)

    def decode(self, value: Any) -> Any:
        """Undo :meth:`encode`; lists come back as tuples."""
        if not isinstance(value, dict):
            return value
        if "tensor" in value:
            return self.tensors[value["tensor"]]
        if "tuple" in value:
            return tuple(self.decode(item) for item in value["tuple"])
        if "head" in value:
            return self.decode_head(value["head"])
        return {key: self.decode(item) for key, item in value["dict"]}

    def encode_all(self, prefix: str, values: dict[str, Any]) -> dict[str, Any]:
        """Encode every value of a dictionary whose keys are identifiers, so that they stay JSON keys."""
        return {key: self.encode(f"{prefix}{key}", value) for key, value in values.items()}

    def decode_all(self, values: dict[str, Any]) -> dict[str, Any]:
        """Undo :meth:`encode_all`."""
        return {key: self.decode(value) for key, value in values.items()}

    def encode_head(self, name: str, head: Head) -> dict[str, Any]:
        """Return a head as its registered name and its options."""
        if head.name not in HEADS:
            raise TypeError(
                f"the head {head!r} is not registered, so a file could not be read back; register it in HEADS."
            )
        return {"name": head.name, "config": self.encode_all(f"{name}.", head.config())}

    def decode_head(self, body: dict[str, Any]) -> Head:
        """Undo :meth:`encode_head`."""
        return HEADS[body["name"]](**self.decode_all(body["config"]))


def encode_loss(loss: Loss) -> dict[str, Any]:
    """Return a loss as its registered name and its options."""
    if loss.name not in LOSSES:
        raise TypeError(
            f"the loss {loss!r} is not registered, so a file could not be read back; register it in LOSSES."
        )
    return {"name": loss.name, "config": loss.config()}


def decode_loss(body: dict[str, Any]) -> Loss:
    """Undo :func:`encode_loss`."""
    return LOSSES[body["name"]](**body["config"])


def plain(value: Any) -> Any:
    """Return a number, text or None as JSON has it."""
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, torch.device):
        return str(value)
    raise TypeError(f"cannot save a {type(value).__name__} in a model file; expected numbers, text or arrays.")

"""Fingerprints of problems and runs; a checkpoint resumes only where its fingerprint matches."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from convexformer.capability import Capability


@runtime_checkable
class Configured(Protocol, metaclass=Capability):
    """A head, a loss, ...: an object determined by its name and its options."""

    @property
    def name(self) -> str:
        """The registered name."""

    def config(self) -> Mapping[str, Any]:
        """Return the options."""


def fingerprint(facts: Mapping[str, object]) -> str:
    """Return a sha256 of the facts, the same in every process and on every machine.

    Tensors and arrays count by dtype, shape and bytes, wherever they are; NumPy's numbers count as Python's, tuples as
    lists; dictionaries count without their order; heads and losses by name and options. Anything else is a TypeError.
    """
    text = json.dumps(_canonical(facts), sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _canonical(value: object) -> Any:
    """Return plain JSON; every type but text, whole numbers, booleans, None and lists is marked by a tag."""
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"number": str(value)}
    if isinstance(value, Tensor):
        return _array(str(value.dtype).removeprefix("torch."), tuple(value.shape), _tensor_bytes(value))
    if isinstance(value, np.ndarray):
        if value.dtype == object:
            raise TypeError("a fingerprint of an array of Python objects was asked for; expected numbers or text.")
        native = np.ascontiguousarray(value, dtype=value.dtype.newbyteorder("="))
        return _array(native.dtype.name, value.shape, native.tobytes())
    if isinstance(value, (list, tuple)):
        return [_canonical(item) for item in value]
    if isinstance(value, Mapping):
        pairs = [[_canonical(key), _canonical(item)] for key, item in value.items()]
        return {"mapping": sorted(pairs, key=lambda pair: json.dumps(pair[0], sort_keys=True))}
    if isinstance(value, Configured):
        return {"configured": [value.name, _canonical(value.config())]}
    if isinstance(value, (torch.dtype, torch.device, PurePath)):
        return str(value)
    raise TypeError(f"a fingerprint of a {type(value).__name__} was asked for; expected numbers, text or arrays.")


def _array(dtype: str, shape: tuple[int, ...], data: bytes) -> dict[str, list[Any]]:
    return {"array": [dtype, list(shape), hashlib.sha256(data).hexdigest()]}


def _tensor_bytes(tensor: Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes()  # as bytes: NumPy has no bfloat16

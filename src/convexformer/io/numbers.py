"""Infinity and NaN in strict JSON, which has neither: ``{"number": "inf"}``, read back as the same float."""

from __future__ import annotations

import math
from typing import Any

NUMBER_TAG = "number"  # the only key of an encoded infinity or NaN


def encode_numbers(value: Any) -> Any:
    """Return JSON with every number that is not finite replaced by its tag."""
    if isinstance(value, float) and not math.isfinite(value):
        return {NUMBER_TAG: str(value)}
    if isinstance(value, dict):
        return {key: encode_numbers(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [encode_numbers(item) for item in value]
    return value


def decode_numbers(value: Any) -> Any:
    """Undo :func:`encode_numbers`."""
    if isinstance(value, dict):
        if value.keys() == {NUMBER_TAG}:
            return float(value[NUMBER_TAG])
        return {key: decode_numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [decode_numbers(item) for item in value]
    return value

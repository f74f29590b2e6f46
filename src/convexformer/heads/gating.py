"""Helpers of gated heads: reading the ``gates`` argument and comparing it with the gates of a network."""

from __future__ import annotations

import numbers
from typing import Any

import numpy as np
import torch
from torch import Tensor

from convexformer.data.tokens import as_tensor, check_finite
from convexformer.operators.gates import draw
from convexformer.registry import unknown

MAX_GATES = 1_000_000
ACTIVATIONS = ("linear", "gated_relu", "relu")  # of every head that has an ``activation``


def check_activation(activation: str) -> None:
    """Raise unless the activation is one of ``linear``, ``gated_relu`` and ``relu``."""
    if activation not in ACTIVATIONS:
        raise ValueError(unknown("activation", activation, ACTIVATIONS))


def is_whole(value: Any) -> bool:
    """Tell whether a value is a whole number, Python's or NumPy's; booleans are not."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def check_gates(gates: Any, parts: int) -> None:
    """Accept a positive number of gates, or the gates themselves (``parts`` arrays)."""
    if isinstance(gates, bool):
        raise TypeError("gates is a bool; expected a number of gates or the gates themselves.")
    if isinstance(gates, (int, float, np.integer, np.floating)):
        if gates < 1:
            raise ValueError(f"gates={gates} was given; expected at least one gate.")
        if gates > MAX_GATES:
            raise ValueError(f"gates={gates} was given; expected at most {MAX_GATES:,}: weights have a block for each.")
        if is_whole(gates):
            return
        if parts == 1:
            raise TypeError(
                f"gates is a {type(gates).__name__} ({gates}); expected a whole number, or the gates themselves."
            )
    if parts > 1 and not (isinstance(gates, (tuple, list)) and len(gates) == parts):
        raise TypeError(f"gates is a {type(gates).__name__}; expected a number, or a tuple of {parts} arrays.")


def read_gate(values: Any, shape: tuple[int | None, ...], name: str) -> Tensor:
    """Validate one array of gates; ``None`` in ``shape`` is the axis of gates, of any size >= 1."""
    tensor = as_tensor(values, name).to("cpu", torch.float64)
    fits = tensor.ndim == len(shape) and all(
        want in (None, have) for want, have in zip(shape, tensor.shape, strict=True)
    )
    if not fits or 0 in tensor.shape:
        wanted = ", ".join("g" if size is None else str(size) for size in shape)
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}; expected ({wanted}) to match the tokens.")
    check_finite(tensor, name)
    return tensor


def draw_gates(shape: tuple[int, ...], seed: Any) -> Tensor:
    """Draw Gaussian gates, after checking the seed."""
    if not is_whole(seed):
        raise TypeError(
            f"seed is a {type(seed).__name__}; expected a whole number, which draws the same gates everywhere."
        )
    return draw(shape, int(seed))


def gate_tensor(gates: Any, shape: tuple[int | None, ...], seed: int) -> Tensor:
    """Return the gates given, or draw as many as asked for."""
    if isinstance(gates, (int, np.integer)):
        return draw_gates(tuple(int(gates) if size is None else size for size in shape), seed)
    return read_gate(gates, shape, "gates")


def random_factors(sizes: list[tuple[int, ...]], n_heads: int, seed: int) -> list[Tensor]:
    """Return Gaussian factors for ``n_heads`` heads, divided by the root of the size of their last axis."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn((n_heads, *size), generator=generator, dtype=torch.float64) / size[-1] ** 0.5 for size in sizes]


def same_gates(network_gates: Tensor | None, gates: Tensor | None) -> bool:
    """Tell whether a network was built with these gates."""
    if network_gates is None or gates is None:
        return network_gates is gates
    return network_gates.shape == gates.shape and bool(torch.equal(network_gates.cpu().to(gates.dtype), gates))


def mismatch(head: str, expected: str, reason: str) -> ValueError:
    """Return the error for a network that does not belong to a problem."""
    return ValueError(f"this network does not belong to the problem's {head} head ({expected}): {reason}.")

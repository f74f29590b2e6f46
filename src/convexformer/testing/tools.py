"""Helpers of the checks: random points, and comparisons that raise with the numbers that disagree."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor


def normals(seed: int, like: Tensor | None = None) -> Callable[..., Tensor]:
    """Return a function from shapes to Gaussian tensors; each call draws anew."""
    generator = torch.Generator().manual_seed(seed)

    def draw(shape: Iterable[int]) -> Tensor:
        normal = torch.randn(tuple(shape), generator=generator, dtype=torch.float64)
        return normal if like is None else normal.to(like)

    return draw


def inner(A: Tensor, B: Tensor) -> float:
    """``<A, B>``."""
    return float((A * B).sum())


def require(holds: bool, message: str) -> None:
    """Raise with the message unless the condition holds."""
    if not holds:
        raise AssertionError(message)


def same_shape(name: str, tensor: Tensor, expected: tuple[int, ...]) -> None:
    """Raise unless a tensor has the expected shape."""
    require(tuple(tensor.shape) == tuple(expected), f"{name} has shape {tuple(tensor.shape)}; expected {expected}")


def equal(name: str, got: Tensor | float | None, expected: Tensor | float, allowed: float) -> None:
    """Raise where two values differ by more than ``allowed``."""
    a, b = (torch.as_tensor(value, dtype=torch.float64).detach() for value in (got, expected))
    worst = float((a - b).abs().max()) if a.numel() else 0.0
    require(worst <= allowed, f"{name} differ by {worst:.3g} (allowed {allowed:.3g}): {_show(a)} and {_show(b)}")


def at_most(name: str, got: Tensor | float, bound: Tensor | float, allowed: float) -> None:
    """Raise where a value exceeds its bound by more than ``allowed``."""
    a, b = (torch.as_tensor(value, dtype=torch.float64).detach() for value in (got, bound))
    worst = float((a - b).max())
    require(worst <= allowed, f"{name}: too large by {worst:.3g} (allowed {allowed:.3g}): {_show(a)} and {_show(b)}")


def _show(values: Tensor) -> str:
    return f"{float(values):.10g}" if values.numel() == 1 else f"a tensor of norm {float(values.norm()):.6g}"

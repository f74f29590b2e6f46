"""Fixed maps that mix tokens before a token-wise network: local averages and the Fourier transform."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from convexformer.data import TokenDataset
from convexformer.registry import ClassTokenWarning, warn

SMALL_SIDE = 4  # images of fewer patches a side are as likely to be no images


def local_mean(tokens: TokenDataset, window: int, grid: tuple[int, int] | None) -> TokenDataset:
    """PoolFormer's ``h(X)``: the mean over the tokens that exist in a window centred at each token."""
    real = tokens.X.new_ones(tokens.X.shape[:2]) if tokens.mask is None else tokens.mask.to(tokens.X.dtype)
    total, count = _window_sum(tokens.X, window, grid), _window_sum(real[..., None], window, grid)
    X = total / count.clamp_min(1)
    return TokenDataset(X if tokens.mask is None else X * real[..., None], tokens.mask)


def fourier_mix(tokens: TokenDataset) -> TokenDataset:
    """FNet's ``h(X) = Re(F_s X F_d^T)``, unnormalised."""
    if tokens.X.numel() == 0:  # the transforms of MKL refuse it
        return TokenDataset(tokens.X, None)
    X = tokens.X.to(torch.promote_types(tokens.X.dtype, torch.float32))  # FFTs know no half types
    return TokenDataset(torch.fft.fft2(X).real.to(tokens.X.dtype).contiguous(), None)


def check_grid(grid: tuple[int, ...] | None, n_tokens: int) -> tuple[int, ...]:
    """Return the grid of the tokens, one line of them by default."""
    if grid is None:
        return (n_tokens,)
    if len(grid) == 2 and math.prod(grid) == n_tokens - 1:
        raise ValueError(
            f"grid={grid} was given and there are {n_tokens} tokens, one more than places: is one of them a class token? "
            "It has no place on a grid; drop it: X[:, 1:]."
        )
    if len(grid) != 2 or min(grid) < 1 or math.prod(grid) != n_tokens:
        raise ValueError(
            f"grid={grid} was given and there are {n_tokens} tokens; expected (h, w) with h * w = {n_tokens}."
        )
    return tuple(int(side) for side in grid)


def _window_sum(X: Tensor, window: int, grid: tuple[int, int] | None) -> Tensor:
    """Sum over the window around each token; nothing lies beyond the edges."""
    if grid is None:
        return _slide(X, window)
    n, s, k = X.shape
    rows = _slide(X.reshape(n, *grid, k).flatten(2), window)  # (n, h, w k)
    columns = rows.reshape(n, *grid, k).transpose(1, 2).flatten(2)  # (n, w, h k)
    return _slide(columns, window).reshape(n, grid[1], grid[0], k).transpose(1, 2).reshape(n, s, k)


def _slide(X: Tensor, window: int) -> Tensor:
    """Sums of ``window`` neighbours along axis 1, by shifts: every dtype and every exporter knows these operations."""
    reach, length = window // 2, X.shape[1]
    if window > 2 * length:  # every window holds all tokens
        return X.sum(1, keepdim=True).expand_as(X)
    padded = pad(X, (0, 0, reach, reach))
    return torch.stack([padded[:, k : k + length] for k in range(window)]).sum(0)


def ask_about_class_token(head: str, grid: tuple[int, ...] | None, n_tokens: int) -> None:
    """Warn where the number of tokens is that of a square image and one more."""
    side = math.isqrt(n_tokens - 1)
    if grid is None and side >= SMALL_SIDE and side * side == n_tokens - 1:
        warn(
            f"there are {n_tokens} = 1 + {side} x {side} tokens: is one of them a class token? The {head} head mixes tokens "
            f"by position, as neighbours on a line; for image patches drop it, X[:, 1:]"
            f"{'' if head == 'fnet' else f', and pass grid=({side}, {side})'}.",
            ClassTokenWarning,
        )

"""Circular convolutions over a grid of tokens, by FFT or by matrices, and the gates that they decide."""

from __future__ import annotations

import cmath
import math

import torch
from torch import Tensor

from convexformer.operators.fourier import grid_fft, grid_ifft


def convolve(X: Tensor, w: Tensor, grid: tuple[int, ...], fft: bool = True) -> Tensor:
    """``(N, s, h)`` the sums ``sum_u X[o - u] . w_j[u]`` for tokens ``X: (N, s, d)`` and kernels ``w: (h, s, d)``.

    A product at every frequency. Without ``fft`` the transforms are products with real matrices ``(s, s)``, and no complex
    number occurs: O(s) instead of O(log s) a number, in operations that every runtime has (ONNX knows no complex types).
    """
    return _by_fft(X, w, grid) if fft else _by_matrices(X, w, grid)


def open_fourier(X: Tensor, h: Tensor, grid: tuple[int, ...], fft: bool = True) -> Tensor:
    """``(N, s, g)`` bool, ``1{sum_u roll(X, u) h[u] >= 0}`` decided in float64 for ``h: (g, s, d)``, in one go.

    Sums within the rounding of the transforms count as zero, which is open: so exact ties are ties, and other gates agree
    with those of the operator unless their sum is that small and negative.
    """
    x, h = X.double(), h.to(X.device, torch.float64)
    s = h.shape[1]
    rounding = torch.finfo(torch.float64).eps * (16 * math.log2(2 * s) if fft else 4 * s)
    norms = x.flatten(1).square().sum(1).sqrt()[:, None] * h.flatten(1).square().sum(1).sqrt()  # (N, g)
    return convolve(x, h, grid, fft) >= -rounding * norms[:, None]


def _by_fft(X: Tensor, w: Tensor, grid: tuple[int, ...]) -> Tensor:
    single = torch.promote_types(X.dtype, torch.float32)  # torch has no FFT in half precision
    kernel = grid_fft(w.transpose(0, 1).flatten(1)[None].to(single), grid)[0]  # (f, h d)
    kernel = kernel.unflatten(1, (w.shape[0], w.shape[2])).transpose(1, 2)  # (f, d, h)
    spectrum = grid_fft(X.to(single), grid).transpose(0, 1)  # (f, N, d)
    return grid_ifft((spectrum @ kernel).transpose(0, 1), grid).to(X.dtype)


def _by_matrices(X: Tensor, w: Tensor, grid: tuple[int, ...]) -> Tensor:
    single = torch.promote_types(X.dtype, torch.float32)
    C, S = (part.to(X.device) for part in _fourier_matrices(grid))  # the transform is C - i S
    kernel = w.transpose(0, 1).flatten(1).double()  # (s, h d)
    a, b = ((part @ kernel).unflatten(1, (w.shape[0], w.shape[2])).transpose(1, 2).to(single) for part in (C, S))
    C, S, x = C.to(single), S.to(single), X.to(single)
    A, B = (C @ x).transpose(0, 1), (S @ x).transpose(0, 1)  # (s, N, d), one matrix a frequency
    real, imaginary = (A @ a - B @ b).transpose(0, 1), (A @ b + B @ a).transpose(0, 1)  # (N, s, h)
    return ((C @ real + S @ imaginary) / C.shape[0]).to(X.dtype)


def _fourier_matrices(grid: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Cosines and sines ``(s, s)`` of the transform over a grid, in float64; symmetric.

    By Python's own numbers, so that a trace holds them as constants: the ONNX exporter stores scalar factors in float32.
    """
    parts = [[[cmath.exp(-2j * math.pi * (j * k % n) / n) for k in range(n)] for j in range(n)] for n in grid]
    whole = parts[0]
    for part in parts[1:]:  # the Kronecker product
        whole = [[a * b for a in row for b in other] for row in whole for other in part]
    real = torch.tensor([[value.real for value in row] for row in whole], dtype=torch.float64)
    return real, torch.tensor([[-value.imag for value in row] for row in whole], dtype=torch.float64)

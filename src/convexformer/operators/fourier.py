"""Fourier neural operators: circular convolution over tokens, by FFT."""

from __future__ import annotations

import math
from typing import final

import torch
from torch import Tensor

from convexformer.operators.base import Operator


@final
class FourierOperator(Operator):
    """``f_i[o, block b] = sum_g D[i, b, g, o] sum_u X_i[o - u, block b] Z[b, g, u]``, tokens on a grid, shifts circular.

    ``Z: (B, g, s*d/B, c/B)``, row ``u*d/B + a`` for shift u and channel a; axes of size one given in ``axes`` are dropped
    from ``weight_shape``. ``gates: (N, B, g, s)`` or None. Cost a pass: O(N s (d + g c) log s + N s d g c / B).
    """

    def __init__(
        self,
        X: Tensor,
        grid: tuple[int, ...],
        n_outputs: int,
        gates: Tensor | None = None,
        *,
        blocks: int = 1,
        pooled: bool = False,
        axes: str = "bg",
    ) -> None:
        self.X, self.grid, self.gates = X, grid, gates
        self.B, self.pooled, self.axes = blocks, pooled, axes
        self.N, self.s, self.d = X.shape
        self.g = 1 if gates is None else gates.shape[2]
        self.db, self.cb = self.d // blocks, n_outputs // blocks
        lead = tuple(size for axis, size in (("b", blocks), ("g", self.g)) if axis in axes)
        self.weight_shape = (*lead, self.s * self.db, self.cb)
        self.output_shape = (self.N if pooled else self.N * self.s, n_outputs)
        # (frequency, B, N, db): one matrix of samples by channels for each frequency and block
        self.spectrum = self._fft(X).view(self.N, -1, blocks, self.db).permute(1, 2, 0, 3).contiguous()

    @property
    def like(self) -> Tensor:
        """The tokens."""
        return self.X

    def to(self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> FourierOperator:
        """Move tokens and gates."""
        gates = None if self.gates is None else self.gates.to(device=device)
        X, c = self.X.to(device=device, dtype=dtype), self.B * self.cb
        return FourierOperator(X, self.grid, c, gates, blocks=self.B, pooled=self.pooled, axes=self.axes)

    def apply(self, Z: Tensor) -> Tensor:
        """Multiply spectra, go back, gate and add."""
        Z = Z.reshape(self.B, self.g, self.s, self.db, self.cb)
        kernel = self._fft(Z.permute(2, 0, 3, 1, 4).reshape(1, self.s, -1))[0]  # (f, B*db*g*cb)
        kernel = kernel.view(-1, self.B, self.db, self.g * self.cb)
        out = (self.spectrum @ kernel).permute(2, 0, 1, 3)  # (N, f, B, g*cb)
        out = self._ifft(out.reshape(self.N, out.shape[1], -1)).view(self.N, self.s, self.B, self.g, self.cb)
        if self.gates is not None:
            out = torch.einsum("nobgc,nbgo->nobc", out, self.gates.to(out.dtype))
        out = out.reshape(self.N, self.s, self.B * self.cb)
        return out.mean(1) if self.pooled else out.flatten(0, 1)

    def adjoint(self, V: Tensor) -> Tensor:
        """Correlate: multiply by conjugate spectra."""
        if self.pooled:
            V = (V / self.s)[:, None].expand(-1, self.s, -1)
        V = V.reshape(self.N, self.s, self.B, 1, self.cb)
        if self.gates is not None:
            V = V * self.gates.to(V.dtype).permute(0, 3, 1, 2)[..., None]
        hat = self._fft(V.reshape(self.N, self.s, -1)).view(self.N, -1, self.B, self.g * self.cb)
        product = self.spectrum.conj().mT @ hat.permute(1, 2, 0, 3)  # (f, B, db, g*cb)
        out = self._ifft(product.reshape(1, product.shape[0], -1))[0]
        out = out.view(self.s, self.B, self.db, self.g, self.cb).permute(1, 3, 0, 2, 4)
        return out.reshape(self.weight_shape)

    def compressed(self, Y: Tensor, w: Tensor) -> tuple[Operator, Tensor] | None:
        """The triangular factor of the samples at each frequency: convolution is diagonal there."""
        if self.gates is not None or self.pooled or 2 * self.db > self.N:
            return None
        roots = w.view(self.N, self.s)[:, :1].sqrt()  # one weight a sample
        Q, T = torch.linalg.qr(self.spectrum * roots)  # (f, B, N, db), (f, B, db, db)
        hat = self._fft((Y * w.sqrt()[:, None]).view(self.N, self.s, -1)).view(self.N, -1, self.B, self.cb)
        small = SpectralOperator(T, self)
        return small, small.rows(Q.mH @ hat.permute(1, 2, 0, 3))

    def _fft(self, x: Tensor) -> Tensor:
        """Real FFT over the grid of axis 1: ``(n, s, k) -> (n, f, k)``."""
        n, _, k = x.shape
        hat = torch.fft.rfftn(x.reshape(n, *self.grid, k), dim=tuple(range(1, 1 + len(self.grid))))
        return hat.reshape(n, -1, k)

    def _ifft(self, hat: Tensor) -> Tensor:
        """Inverse of :meth:`_fft`: ``(n, f, k) -> (n, s, k)``."""
        n, _, k = hat.shape
        half = (*self.grid[:-1], self.grid[-1] // 2 + 1)
        dims = tuple(range(1, 1 + len(self.grid)))
        return torch.fft.irfftn(hat.reshape(n, *half, k), s=self.grid, dim=dims).reshape(n, self.s, k)


@final
class SpectralOperator(Operator):
    """``Z -> T_f Zhat_f`` for every frequency f, with the factors of Parseval's identity: a compressed Fourier operator.

    ``T: (f, B, k, d/B)`` complex; outputs are the real and imaginary parts, ``(f B k, 2 c/B)``. Only a loss that is the same
    for every output may see them: the squared one.
    """

    def __init__(self, T: Tensor, whole: FourierOperator) -> None:
        self.T, self.whole = T, whole
        self.weight_shape = whole.weight_shape
        last = whole.grid[-1]
        twice = torch.full((last // 2 + 1,), 2.0, dtype=whole.X.dtype, device=T.device)
        twice[0] = 1.0
        if last % 2 == 0:
            twice[-1] = 1.0  # frequencies that are their own mirror image count once
        copies = T.shape[0] // len(twice)
        self.factor = (twice.repeat(copies) / whole.s).sqrt().view(-1, 1, 1, 1)
        self.forward = T * self.factor
        self.backward = (T / self.factor).mH.resolve_conj().contiguous()  # 1/factor: irfft counts mirror images
        self.output_shape = (T.shape[:3].numel(), 2 * whole.cb)

    @property
    def like(self) -> Tensor:
        """The tokens of the whole operator."""
        return self.whole.X

    def apply(self, Z: Tensor) -> Tensor:
        """Multiply at every frequency."""
        A = self.whole
        Z = Z.reshape(A.B, A.s, A.db, A.cb).permute(1, 0, 2, 3)
        kernel = A._fft(Z.reshape(1, A.s, -1))[0].view(-1, A.B, A.db, A.cb)
        return torch.view_as_real(self.forward @ kernel).reshape(self.output_shape)

    def adjoint(self, V: Tensor) -> Tensor:
        """Multiply by the conjugate and go back."""
        A = self.whole
        hat = self.backward @ torch.view_as_complex(V.contiguous().view(*self.T.shape[:3], A.cb, 2))
        out = A._ifft(hat.reshape(1, hat.shape[0], -1))[0].view(A.s, A.B, A.db, A.cb)
        return out.permute(1, 0, 2, 3).reshape(self.weight_shape)

    def rows(self, hat: Tensor) -> Tensor:
        """Return spectra ``(f, B, k, c/B)`` as outputs, of the same norm as the signal."""
        return torch.view_as_real(hat * self.factor).reshape(self.output_shape)

    def to(self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> SpectralOperator:
        """Move; complex numbers take the matching precision."""
        kind = None if dtype is None else torch.complex128 if dtype == torch.float64 else torch.complex64
        return SpectralOperator(self.T.to(device=device, dtype=kind), self.whole.to(device=device, dtype=dtype))


def fourier_gates(X: Tensor, h: Tensor, grid: tuple[int, ...]) -> Tensor:
    """``(N, B, g, s)`` bool, ``1{sum_u roll(X^(b), u) h[b, g, u] >= 0}`` in float64; ``h: (B, g, s, d/B)``.

    The FFT decides where it is far enough from zero for its rounding; the rest are direct sums in a fixed order. So a gate
    depends on its own sample alone, whatever the batch, and ties are ties wherever the direct sum is exact.
    """
    B, g, s, db = h.shape
    h = h.to(X.device, torch.float64)
    # rounding of the transforms and of the direct sum, relative to ||X|| ||h|| <= s d/B max|X| max|h|
    rounding = torch.finfo(torch.float64).eps * (64 * math.log2(2 * s) + s * db) * s * db
    reach = rounding * h.abs().amax((2, 3))[:, :, None]  # (B, g, 1)
    parts = []
    for x in X.split(max(1, (1 << 24) // (s * (X.shape[2] + B * g)))):
        x = x.to(torch.float64)
        operator = FourierOperator(x, grid, B, blocks=B)
        # each gate is a Fourier operator with one output a block
        hidden = torch.stack([operator.apply(h[:, j].reshape(B, 1, -1, 1)) for j in range(g)], 1)  # (n*s, g, B)
        hidden = hidden.view(-1, s, g, B).permute(0, 3, 2, 1)
        x = x.reshape(-1, s, B, db)
        largest = x.abs().amax((1, 3))[:, :, None, None]
        near = ~(hidden.abs() > reach * largest) & (reach > 0) & (largest > 0)  # NaN of an overflow counts as near
        open_gates = hidden >= 0
        if bool(near.any()):
            open_gates[near] = _direct_sums(x, h, grid, near) >= 0
        parts.append(open_gates)
    return torch.cat(parts)


def _direct_sums(x: Tensor, h: Tensor, grid: tuple[int, ...], where: Tensor) -> Tensor:
    """Return the sums behind the gates ``where: (n, B, g, s)`` one by one, for ``x: (n, s, B, d/B)``."""
    s, db = h.shape[2:]
    place = torch.arange(s, device=x.device).view(grid)
    dims = tuple(range(len(grid)))
    shifts = torch.cartesian_prod(*(torch.arange(size) for size in grid)).view(s, len(grid)).tolist()
    source = torch.stack([place.roll(shift, dims).flatten() for shift in shifts], 1)  # (o, u): o - u on the grid
    used = h.ne(0).any(3).flatten(0, 1).any(0)  # gates given by hand often look at few shifts
    source, h = source[:, used], h[:, :, used]
    sums = []
    for index in where.nonzero().split(max(1, (1 << 22) // (s * db))):
        n, b, g, o = index.T
        terms = (x[n[:, None], source[o], b[:, None]] * h[b, g]).flatten(1)  # (m, u d/B)
        while (k := terms.shape[1]) > 1:  # halves onto each other: the order of a library's sum may depend on m
            terms[:, : k // 2] += terms[:, k - k // 2 :]
            terms = terms[:, : k - k // 2]
        sums.append(terms[:, 0])
    return torch.cat(sums)

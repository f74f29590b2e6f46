"""Fourier neural operators: circular convolution over tokens, by FFT."""

from __future__ import annotations

import math
from functools import cached_property
from typing import TYPE_CHECKING, final

import torch
from torch import Tensor

from convexformer.operators.base import Operator
from convexformer.operators.budget import sample_chunks, worth_storing

if TYPE_CHECKING:
    from convexformer.operators.bilinear import BilinearOperator

WIDE = 3
"""Channels a output from which ``X^ Z^`` is formed rather than ``conj(D^) X^``: twice the operations, fewer numbers."""


@final
class FourierOperator(Operator):
    """``f_i[o, block b] = sum_g D[i, b, g, o] sum_u X_i[o - u, block b] Z[b, g, u]``, tokens on a grid, shifts circular.

    ``Z: (B, g, s*d/B, c/B)``, row ``u*d/B + a`` for shift u and channel a; axes of size one given in ``axes`` are dropped
    from ``weight_shape``. ``gates: (N, B, g, s)`` or None. Outputs a token: multiply spectra and go back, O(N s (d + g c)
    log s + 4 N s d g c / B). Pooled and gated outputs never leave the frequencies, by Parseval's identity they are::

        f_i = 1/s^2 sum_f Re(conj(D^_i[g, f]) X^_i[f] Z^[g, f])

    linear in the products ``conj(D^) X^``, 2 N s d g c / B operations and N s d g numbers; or, where outputs are fewer than
    channels, ``X^ Z^`` first: twice the operations, N s g c numbers.
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
        dtype: torch.dtype | None = None,
    ) -> None:
        self.X, self.grid, self.gates = X, grid, gates
        self.B, self.pooled, self.axes = blocks, pooled, axes
        self.N, self.s, self.d = X.shape
        self.g = 1 if gates is None else gates.shape[2]
        self.db, self.cb = self.d // blocks, n_outputs // blocks
        lead = tuple(size for axis, size in (("b", blocks), ("g", self.g)) if axis in axes)
        self.weight_shape = (*lead, self.s * self.db, self.cb)
        self.output_shape = (self.N if pooled else self.N * self.s, n_outputs)
        self.n_frequencies = math.prod(grid[:-1]) * (grid[-1] // 2 + 1)
        self._like = X.new_empty(0, dtype=dtype)

    @property
    def like(self) -> Tensor:
        """An empty tensor: products may be wider than the tokens."""
        return self._like

    @property
    def data_size(self) -> int:
        """The tokens, once for each gate."""
        return self.X.numel() * self.g

    def to(self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> FourierOperator:
        """Move tokens and gates; wider numbers are made chunk by chunk."""
        gates = None if self.gates is None else self.gates.to(device=device)
        kind = self._like.dtype if dtype is None else dtype
        narrower = kind.itemsize < self.X.dtype.itemsize
        X, c = self.X.to(device=device, dtype=kind if narrower else None), self.B * self.cb
        return FourierOperator(X, self.grid, c, gates, blocks=self.B, pooled=self.pooled, axes=self.axes, dtype=kind)

    def exact(self) -> FourierOperator:
        """The same operator with wider products: gates were decided in float64, tokens are what they are."""
        return self.to(dtype=torch.float64)

    def on_factors(self) -> BilinearOperator | None:
        """Filters one by one, where gates make the dense weights large."""
        from convexformer.operators.fourier_factors import FourierFactors

        return FourierFactors(self) if self.pooled and self.gates is not None else None

    def apply(self, Z: Tensor) -> Tensor:
        """Multiply spectra, a chunk of the samples at a time."""
        Z = Z.reshape(self.B, self.g, self.s, self.db, self.cb)
        kernel = self._fft(Z.permute(2, 0, 3, 1, 4).reshape(1, self.s, -1))[0]
        kernel = kernel.view(-1, self.B, self.db, self.g, self.cb)  # (f, B, db, g, cb)
        if not (self.pooled and self.gates is not None):
            return torch.cat([self._filtered(kernel.flatten(3), part) for part in self._parts()])
        kernel = kernel * (self._multiplicity / self.s**2).view(-1, 1, 1, 1, 1)
        if self._features_first:
            # Re(P Z^) = Re P Re Z^ - Im P Im Z^: products of real matrices
            wide = torch.view_as_real(kernel.conj().resolve_conj()).permute(1, 3, 0, 2, 5, 4)  # (B, g, f, db, 2, cb)
            wide = wide.reshape(self.B, -1, self.cb)
            parts = [(self._features(part) @ wide).transpose(0, 1).flatten(1) for part in self._parts()]
            return torch.cat(parts)
        return torch.cat([self._pooled_outputs(kernel.flatten(3), part) for part in self._parts()])

    def adjoint(self, V: Tensor) -> Tensor:
        """Correlate: multiply by conjugate spectra."""
        features_first = self.pooled and self.gates is not None and self._features_first
        total: Tensor | None = None
        for part in self._parts():
            if features_first:
                rows = (V[part] / self.s).view(-1, self.B, self.cb).transpose(0, 1)
                features = self._features(part).mT  # (B, g*f*db*2, n)
                total = features @ rows if total is None else total.baddbmm_(features, rows)
            else:
                new = self._spectrum(part).conj().mT @ self._spectral_rows(V, part)  # (f, B, db, g*cb)
                total = new if total is None else total.add_(new)
        assert total is not None
        if features_first:
            total = total.view(self.B, self.g, -1, self.db, 2, self.cb).transpose(4, 5).contiguous()
            total = torch.view_as_complex(total).conj().resolve_conj().permute(2, 0, 3, 1, 4)  # (f, B, db, g, cb)
        out = self._ifft(total.reshape(1, self.n_frequencies, -1))[0]
        out = out.view(self.s, self.B, self.db, self.g, self.cb).permute(1, 3, 0, 2, 4)
        return out.reshape(self.weight_shape)

    # ------------------------------------------------------------------ pieces of a chunk of samples

    def _filtered(self, kernel: Tensor, part: slice) -> Tensor:
        """Outputs by token of a chunk: back from the frequencies, gate and add; their mean where pooled."""
        out = (self._spectrum(part) @ kernel).permute(2, 0, 1, 3)  # (n, f, B, g*cb)
        n = len(out)
        out = self._ifft(out.reshape(n, self.n_frequencies, -1)).view(n, self.s, self.B, self.g, self.cb)
        if self.gates is not None:
            out = torch.einsum("nobgc,nbgo->nobc", out, self.gates[part].to(out.dtype))
        out = out.reshape(n, self.s, self.B * self.cb)
        return out.mean(1) if self.pooled else out.flatten(0, 1)

    def _spectral_rows(self, V: Tensor, part: slice) -> Tensor:
        """The spectra of gated output rows of a chunk, ``(f, B, n, g*cb)``."""
        if self.pooled and self.gates is not None:
            rows = (V[part] / self.s).view(-1, self.B, self.cb).transpose(0, 1)[:, :, None]  # (B, n, 1, cb)
            return (self._gate_spectrum(part)[..., None] * rows).flatten(3)
        tokens = (V[part] / self.s)[:, None].expand(-1, self.s, -1) if self.pooled else None
        rows = V.reshape(self.N, self.s, -1)[part] if tokens is None else tokens
        n = len(rows)
        rows = rows.reshape(n, self.s, self.B, 1, self.cb)
        if self.gates is not None:
            rows = rows * self.gates[part].to(rows.dtype).permute(0, 3, 1, 2)[..., None]
        hat = self._fft(rows.reshape(n, self.s, -1)).view(n, -1, self.B, self.g * self.cb)
        return hat.permute(1, 2, 0, 3)

    def _pooled_outputs(self, kernel: Tensor, part: slice) -> Tensor:
        """``Re(conj(D^) X^ Z^)`` summed over gates and frequencies, ``(n, c)``: ``X^ Z^`` first."""
        hat = torch.view_as_real((self._spectrum(part) @ kernel).unflatten(3, (self.g, self.cb)))  # (f, B, n, g, cb, 2)
        gates = torch.view_as_real(self._gate_spectrum(part))[..., None, :]  # (f, B, n, g, 1, 2)
        return (hat * gates).sum((0, 3, 5)).transpose(0, 1).flatten(1)

    def _features(self, part: slice) -> Tensor:
        """``conj(D^) X^`` as real numbers, ``(B, n, g*f*db*2)``."""
        gates = self._gate_spectrum(part).permute(1, 2, 3, 0)[..., None].conj()  # (B, n, g, f, 1)
        spectrum = self._spectrum(part).permute(1, 2, 0, 3)[:, :, None]  # (B, n, 1, f, db)
        return torch.view_as_real(gates * spectrum).flatten(2)

    def _gate_spectrum(self, part: slice) -> Tensor:
        """``(f, B, n, g)``."""
        assert self.gates is not None
        gates = self.gates[part].to(self.like.dtype)  # (n, B, g, s)
        n = len(gates)
        hat = self._fft(gates.permute(0, 3, 1, 2).reshape(n, self.s, -1))
        return hat.view(n, -1, self.B, self.g).permute(1, 2, 0, 3).contiguous()

    def _spectrum(self, part: slice) -> Tensor:
        """``(f, B, n, db)``: one matrix of samples by channels for each frequency and block."""
        whole = self.spectrum if worth_storing(2 * self.N * self.n_frequencies * self.d, self.like) else None
        return self._spectrum_of(part) if whole is None else whole[:, :, part]

    @cached_property
    def spectrum(self) -> Tensor:
        """That of all samples."""
        return self._spectrum_of(slice(None))

    def _spectrum_of(self, part: slice) -> Tensor:
        hat = self._fft(self.X[part].to(self.like.dtype))
        return hat.view(len(hat), -1, self.B, self.db).permute(1, 2, 0, 3).contiguous()

    @cached_property
    def _multiplicity(self) -> Tensor:
        """``(f,)``: how many frequencies of the whole spectrum each of the half stands for."""
        last = self.grid[-1]
        twice = torch.full((last // 2 + 1,), 2.0, dtype=self.like.dtype, device=self.like.device)
        twice[0] = 1.0
        if last % 2 == 0:
            twice[-1] = 1.0  # frequencies that are their own mirror image count once
        return twice.repeat(self.n_frequencies // len(twice))

    @property
    def _feature_numbers(self) -> int:
        return 2 * self.N * self.g * self.n_frequencies * self.d

    @property
    def _features_first(self) -> bool:
        """Whether the products of spectra are formed: not many more numbers than outputs by token."""
        return self.db <= WIDE * self.cb

    def _parts(self) -> list[slice]:
        """Chunks of samples: spectra of tokens, and of what is gated."""
        each = 2 * self.n_frequencies * self.d
        if self.pooled and self.gates is not None and self._features_first:
            each += 3 * (self._feature_numbers // self.N)
            # every chunk goes over the whole result, which is large: chunks as well, where memory is not the limit
            return sample_chunks(self.N, each, self.like, buffered=self.like.is_cuda)
        each += 5 * 2 * self.n_frequencies * self.g * self.B * self.cb
        return sample_chunks(self.N, each, self.like)

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
        return grid_fft(x, self.grid)

    def _ifft(self, hat: Tensor) -> Tensor:
        """Inverse of :meth:`_fft`: ``(n, f, k) -> (n, s, k)``."""
        return grid_ifft(hat, self.grid)


@final
class SpectralOperator(Operator):
    """``Z -> T_f Zhat_f`` for every frequency f, with the factors of Parseval's identity: a compressed Fourier operator.

    ``T: (f, B, k, d/B)`` complex; outputs are the real and imaginary parts, ``(f B k, 2 c/B)``. Only a loss that is the same
    for every output may see them: the squared one.
    """

    def __init__(self, T: Tensor, whole: FourierOperator) -> None:
        self.T, self.whole = T, whole
        self.weight_shape = whole.weight_shape
        self.factor = (whole._multiplicity / whole.s).sqrt().view(-1, 1, 1, 1)
        self.forward = T * self.factor
        self.backward = (T / self.factor).mH.resolve_conj().contiguous()  # 1/factor: irfft counts mirror images
        self.output_shape = (T.shape[:3].numel(), 2 * whole.cb)

    @property
    def like(self) -> Tensor:
        """A tensor of the whole operator."""
        return self.whole.like

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
    for part in sample_chunks(len(X), 4 * s * (X.shape[2] + 4 * B * g), X, torch.float64):
        x = X[part].to(torch.float64)
        operator = FourierOperator(x, grid, B * g, blocks=B)  # each gate is an output of its block
        hidden = operator.apply(h.permute(0, 2, 3, 1).reshape(B, 1, -1, g)).view(-1, s, B, g).permute(0, 2, 3, 1)
        x = x.reshape(-1, s, B, db)
        largest = x.abs().amax((1, 3))[:, :, None, None]
        near = ~(hidden.abs() > reach * largest) & (reach > 0) & (largest > 0)  # NaN of an overflow counts as near
        open_gates = hidden >= 0
        if bool(near.any()):
            open_gates[near] = _direct_sums(x, h, grid, near) >= 0
        parts.append(open_gates)
    return torch.cat(parts)


def grid_fft(x: Tensor, grid: tuple[int, ...]) -> Tensor:
    """Real FFT over the grid of axis 1: ``(n, s, k) -> (n, f, k)``."""
    if x.numel() == 0:  # the transforms of MKL refuse it
        kind = torch.complex128 if x.dtype == torch.float64 else torch.complex64
        return x.new_zeros((x.shape[0], math.prod(grid[:-1]) * (grid[-1] // 2 + 1), x.shape[2]), dtype=kind)
    hat = torch.fft.rfftn(x.unflatten(1, grid), dim=tuple(range(1, 1 + len(grid))))
    return hat.flatten(1, len(grid))


def grid_ifft(hat: Tensor, grid: tuple[int, ...]) -> Tensor:
    """Inverse of :func:`grid_fft`: ``(n, f, k) -> (n, s, k)``."""
    if hat.numel() == 0:
        return hat.new_zeros((hat.shape[0], math.prod(grid), hat.shape[2]), dtype=hat.real.dtype)
    half = (*grid[:-1], grid[-1] // 2 + 1)
    x = torch.fft.irfftn(hat.unflatten(1, half), s=grid, dim=tuple(range(1, 1 + len(grid))))
    return x.flatten(1, len(grid))


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
    near = where.nonzero()
    for part in sample_chunks(len(near), 4 * s * db, x):
        n, b, g, o = near[part].T
        terms = (x[n[:, None], source[o], b[:, None]] * h[b, g]).flatten(1)  # (m, u d/B)
        while (k := terms.shape[1]) > 1:  # halves onto each other: the order of a library's sum may depend on m
            terms[:, : k // 2] += terms[:, k - k // 2 :]
            terms = terms[:, : k - k // 2]
        sums.append(terms[:, 0])
    return torch.cat(sums)

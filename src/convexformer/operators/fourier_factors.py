"""A pooled, gated Fourier operator on low-rank weights: each term is one filter and one row of outputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from convexformer.operators.bilinear import BilinearOperator
from convexformer.operators.budget import sample_chunks
from convexformer.operators.fourier import FourierOperator
from convexformer.operators.last_products import LastProducts
from convexformer.operators.lowrank import LowRank

DENSE_SHARE = 0.5
"""Terms, as a fraction of the columns of all gates, from which one product with a dense ``Z`` is cheaper."""

Spans = Sequence[tuple[int, slice]]
"""Blocks in use, each with the terms that it has."""


@final
class FourierFactors(BilinearOperator):
    """``f_i = sum_j r_ij V_j`` with ``r_ij = 1/s sum_o D[i, o, g_j] sum_u X_i[o - u]^T U_j[u]``.

    Filters ``U: (m, s d/B)`` act on the block of channels of their term, ``V: (m, c/B)`` are the outputs of that block.

    By Parseval's identity ``r_ij = 1/s^2 sum_f Re(conj(D^_i[g_j, f]) X^_i[f] U^_j[f])``: 4 N s d operations a term, where
    the dense operator takes 2 N s d c for each gate, used or not. Dense weights go through that operator.
    """

    def __init__(self, whole: FourierOperator) -> None:
        assert whole.pooled
        assert whole.gates is not None
        self.whole = whole
        self.weight_shape, self.output_shape = whole.weight_shape, whole.output_shape
        self._known: LastProducts[Tensor] = LastProducts()

    @property
    def like(self) -> Tensor:
        """A tensor of the whole operator."""
        return self.whole.like

    @property
    def data_size(self) -> int:
        """The tokens."""
        return self.whole.X.numel()

    def to(self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> FourierFactors:
        """Move the whole operator."""
        return FourierFactors(self.whole.to(device=device, dtype=dtype))

    def exact(self) -> FourierFactors:
        """The same with wider products."""
        return FourierFactors(self.whole.exact())

    def apply_factors(self, Z: LowRank) -> Tensor:
        """Responses of the filters, times the rows of outputs."""
        spans = Z.spans()
        return self._responses_of(Z.U, spans) @ self._rows(Z.V, spans)

    def matvec(self, D: Tensor, V: Tensor, b: int) -> Tensor:
        """``M_b V_j``: filters along which the responses grow."""
        spans = [(b, slice(0, len(V)))]
        return self._filters(D @ self._rows(V, spans).T, spans)

    def rmatvec(self, D: Tensor, U: Tensor, b: int) -> Tensor:
        """``M_b^T U_j``."""
        spans = [(b, slice(0, len(U)))]
        return self._own(self._responses(U, spans).T @ D, spans)

    def factor_gradients(self, D: Tensor, Z: LowRank) -> tuple[Tensor, Tensor]:
        """All gates at once."""
        if self.dense_pays(Z.n_terms):
            return super().factor_gradients(D, Z)
        spans = Z.spans()
        responses = self._responses_of(Z.U, spans)
        return self._filters(D @ self._rows(Z.V, spans).T, spans), self._own(responses.T @ D, spans)

    def apply_dense(self, Z: Tensor) -> Tensor:
        """Apply the whole operator."""
        return self.whole.apply(Z)

    def adjoint(self, V: Tensor) -> Tensor:
        """Apply its adjoint."""
        return self.whole.adjoint(V)

    def adjoint_block(self, V: Tensor, b: int) -> Tensor:
        """One block of the adjoint, which is formed once for each ``V``."""
        return self.dense_adjoint(V).reshape(-1, *self.weight_shape[-2:])[b]

    @property
    def block_cost(self) -> float:
        """All blocks are formed at once."""
        return 0.0

    def dense_pays(self, m: int) -> bool:
        """Compare the operations of both ways."""
        return m > DENSE_SHARE * self.n_blocks * self.whole.cb

    # ------------------------------------------------------------------ pieces

    def _responses_of(self, U: Tensor, spans: Spans) -> Tensor:
        """The same as :meth:`_responses`, which the last two ``U`` leave behind."""
        responses = self._known.of(U)
        if responses is None:
            responses = self._responses(U, spans)
            self._known.keep(U, responses)
        return responses

    def _responses(self, U: Tensor, spans: Spans) -> Tensor:
        """``r: (N, m)``."""
        A, m = self.whole, len(U)
        hat = A._fft(U.view(m, A.s, A.db)).permute(1, 2, 0)  # (f, db, m)
        hat = hat * (A._multiplicity / A.s**2).view(-1, 1, 1)
        parts = []
        for part in self._parts(m):
            mixed = self._by_channels(hat, part, spans)  # (f, n, m)
            gates = self._gate_spectra(part, spans)
            parts.append((torch.view_as_real(mixed) * torch.view_as_real(gates)).sum((0, 3)))
        return torch.cat(parts)

    def _filters(self, r: Tensor, spans: Spans) -> Tensor:
        """``sum_i r_ij dr_ij / dU_j``, ``(m, s d/B)``, for ``r: (N, m)``."""
        A, m = self.whole, r.shape[1]
        total: Tensor | None = None
        for part in self._parts(m):
            weighted = self._gate_spectra(part, spans) * (r[part] / A.s)  # (f, n, m)
            spectrum = A._spectrum(part).conj()  # (f, B, n, db)
            new = torch.cat([spectrum[:, b].mT @ weighted[:, :, own] for b, own in self._channel_spans(spans)], 2)
            total = new if total is None else total.add_(new)
        assert total is not None
        return A._ifft(total.permute(2, 0, 1)).reshape(m, -1)

    def _by_channels(self, hat: Tensor, part: slice, spans: Spans) -> Tensor:
        """``X^ U^``, each filter on its block of channels, ``(f, n, m)``."""
        spectrum = self.whole._spectrum(part)
        parts = [spectrum[:, b] @ hat[:, :, own] for b, own in self._channel_spans(spans)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 2)

    def _gate_spectra(self, part: slice, spans: Spans) -> Tensor:
        """``D^`` of the gate of each term, ``(f, n, m)``; only the gates in use are transformed."""
        A = self.whole
        assert A.gates is not None
        used = torch.stack([A.gates[part, b // A.g, b % A.g] for b, _ in spans], 2).to(A.like.dtype)  # (n, s, k)
        hat = A._fft(used).transpose(0, 1)
        return torch.cat(
            [hat[:, :, k, None].expand(-1, -1, own.stop - own.start) for k, (_, own) in enumerate(spans)], 2
        )

    def _channel_spans(self, spans: Spans) -> list[tuple[int, slice]]:
        """Blocks of channels with their terms: gates of the same block are neighbours."""
        joined: list[tuple[int, slice]] = []
        for b, own in spans:
            channels = b // self.whole.g
            if joined and joined[-1][0] == channels:
                joined[-1] = (channels, slice(joined[-1][1].start, own.stop))
            else:
                joined.append((channels, own))
        return joined

    def _rows(self, V: Tensor, spans: Spans) -> Tensor:
        """``V: (m, c/B)`` at the outputs of their blocks, ``(m, c)``."""
        if self.whole.B == 1:
            return V
        out = V.new_zeros((len(V), self.whole.B, self.whole.cb))
        for b, own in self._channel_spans(spans):
            out[own, b] = V[own]
        return out.flatten(1)

    def _own(self, G: Tensor, spans: Spans) -> Tensor:
        """The outputs of the block of each term, ``(m, c) -> (m, c/B)``."""
        G = G.view(len(G), self.whole.B, self.whole.cb)
        return torch.cat([G[own, b] for b, own in self._channel_spans(spans)])

    def _parts(self, m: int) -> list[slice]:
        return sample_chunks(self.whole.N, 2 * self.whole.n_frequencies * (4 * m + self.whole.d), self.like)

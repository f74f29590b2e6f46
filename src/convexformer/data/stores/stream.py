"""Tokens of a store as a stream of batches: what stands for a :class:`TokenDataset` that does not fit into memory."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from queue import Queue
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from convexformer.data.stores.index import StoreError
from convexformer.data.stores.store import TokenStore
from convexformer.data.tokens import TokenDataset, constant_as_one, pick_device, pick_dtype, sample_places

BATCH = 1 << 20  # numbers of a batch: 8 MiB in float64; larger ones cost page faults (benchmarks/store.py)
AHEAD = 2  # batches that are read while another one is at work


@final
@dataclass(frozen=True, eq=False)
class TokenStream:
    """Samples of a store, in batches: some of its rows, in some order, standardised on the way.

    It has the sizes, moments and selections of a :class:`TokenDataset`; :meth:`batches` yields the tokens as such. A stream
    is frozen: a selection or another precision is a new one, on the same files.
    """

    store: TokenStore
    rows: np.ndarray | None = None
    """Which samples; None for all, in order."""
    dtype: torch.dtype = torch.float64
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    scaling: tuple[tuple[Tensor, Tensor], ...] = ()
    """``(mean, scale)`` of each standardisation, in turn."""
    length: int | None = None
    """Tokens to pad to, masked."""
    anchor: Tensor = field(default_factory=lambda: torch.empty(0))
    """Lives as long as the stream: the key of what others keep for it."""

    ndim = 3

    # ------------------------------------------------------------------ sizes

    @property
    def n_samples(self) -> int:
        """N, the number of samples."""
        return len(self.store) if self.rows is None else len(self.rows)

    @property
    def n_tokens(self) -> int:
        """s, the number of token positions."""
        return self.store.shape[1] if self.length is None else self.length

    @property
    def width(self) -> int:
        """d, the size of a token."""
        return self.store.shape[2]

    @property
    def shape(self) -> tuple[int, int, int]:
        """``(N, s, d)``."""
        return self.n_samples, self.n_tokens, self.width

    def __len__(self) -> int:
        return self.n_samples

    @property
    def n_bytes(self) -> int:
        """What the tokens take in memory."""
        return self.n_samples * self.n_tokens * self.width * self.dtype.itemsize

    @cached_property
    def mask(self) -> Tensor | None:
        """``(N, s)`` True where a token is real; None where all are."""
        mask = self.store.mask
        if mask is not None and self.rows is not None:
            mask = mask[torch.from_numpy(self.rows)]
        if self.n_tokens > self.store.shape[1]:
            real = torch.ones((self.n_samples, self.store.shape[1]), dtype=torch.bool) if mask is None else mask
            mask = torch.nn.functional.pad(real, (0, self.n_tokens - real.shape[1]))
        if mask is None or bool(mask.all()):
            return None
        return mask.to(self.device)

    # ------------------------------------------------------------------ variants

    def to(self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> TokenStream:
        """Return the same tokens on another device or in another dtype."""
        where, kind = self.device if device is None else torch.device(device), self.dtype if dtype is None else dtype
        if (where, kind) == (self.device, self.dtype):
            return self
        return self._twin(device=where, dtype=kind)

    def standardized(self, mean: Tensor, scale: Tensor) -> TokenStream:
        """Return ``(X - mean) / scale``; masked tokens stay zero."""
        return self._twin(scaling=(*self.scaling, (mean, scale)))

    def select(self, rows: Tensor | np.ndarray) -> TokenStream:
        """Return the samples ``rows``."""
        index = np.asarray(rows.cpu() if isinstance(rows, Tensor) else rows)
        return self._twin(rows=np.arange(len(self.store))[index] if self.rows is None else self.rows[index])

    def padded(self, length: int) -> TokenStream:
        """Return samples of ``length`` tokens, the further ones masked."""
        s = self.store.shape[1]
        if length < s or (length > s and self.store.mask is None):
            raise ValueError(
                f"{self.store.folder} has {s} tokens per sample and the model was fitted with {length}, which its head "
                "requires. Embed texts with --pad and one --max-length for all, images at one size."
            )
        return self if length == self.n_tokens else self._twin(length=length)

    def __getitem__(self, rows: Any) -> TokenStream:
        if isinstance(rows, tuple):  # X[rows, ...]: how scikit-learn takes samples
            rows = rows[0]
        return self.select(np.atleast_1d(np.arange(self.n_samples)[rows]))

    # ------------------------------------------------------------------ tokens

    def batches(self) -> Iterator[TokenDataset]:
        """Yield all samples, in order, some at a time; the next ones are read by another thread meanwhile."""
        step = max(1, BATCH // (self.n_tokens * self.width))
        parts = [slice(a, min(a + step, self.n_samples)) for a in range(0, self.n_samples, step)]
        if len(parts) == 1:
            yield self._finish(self._read(parts[0]), parts[0])
            return
        yield from self._prefetched(parts)

    def load(self) -> TokenDataset:
        """Read everything into memory, if that is within the limit of the store."""
        if self.n_bytes > self.store.memory:
            raise StoreError(
                f"the tokens of {self.store.folder} take {self.n_bytes / 2**30:.1f} GiB in {self.dtype}, and this needs "
                f"them in memory, of which {self.store.memory / 2**30:.1f} GiB are granted. Raise "
                "open(store, memory=bytes), take some rows, store[:10_000], or choose another head."
            )
        X = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        start = 0
        for batch in self.batches():
            X[start : start + batch.n_samples] = batch.X
            start += batch.n_samples
        return TokenDataset(X, self.mask)

    def first(self) -> TokenDataset:
        """Return the first sample."""
        return self._finish(self._read(slice(0, 1)), slice(0, 1))

    def moments(self, w: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """``(d,), (d,)`` mean and standard deviation over the real tokens, as those of a :class:`TokenDataset`; one pass."""
        weight = torch.ones(self.n_samples, dtype=torch.float64) if w is None else w.cpu().double()
        total = torch.zeros((), dtype=torch.float64)
        origin: Tensor | None = None
        sums = torch.zeros((2, self.width), dtype=torch.float64)
        start = 0
        for batch in self.batches():
            own, X = weight[start : start + batch.n_samples], batch.X.cpu().double()
            start += batch.n_samples
            rows = own[:, None].expand(X.shape[:2]) if batch.mask is None else own[:, None] * batch.mask.cpu()
            if origin is None and bool((rows > 0).any()):  # deviations from one token: exact for constant channels
                origin = X.flatten(0, 1)[int(rows.flatten().gt(0).to(torch.uint8).argmax())]
            X = X - (0 if origin is None else origin)
            total += rows.sum()
            sums[0] += torch.einsum("ns,nsd->d", rows, X)
            sums[1] += torch.einsum("ns,nsd->d", rows, X.square_())
        assert origin is not None, "the weights of a problem are not all zero"
        shift = sums[0] / total
        scale = (sums[1] / total - shift.square()).clamp_min(0).sqrt()
        return constant_as_one(origin + shift, scale, torch.empty(0, dtype=self.dtype, device=self.device))

    def signature(self) -> dict[str, object]:
        """Return what tells these tokens from others, for a fingerprint: that of the store, and what is done to it."""
        return {
            "store": self.store.fingerprint,
            "array": self.store.array,
            "rows": self.rows,
            "scaling": [[mean, scale] for mean, scale in self.scaling],
            "length": self.length,
        }

    def largest(self) -> float:
        """Return the largest entry, in absolute value."""
        return max(batch.largest() for batch in self.batches())

    def scatter(self, mean: Tensor) -> Tensor:
        """``(d, d)`` the sum over real tokens of ``(x - mean)(x - mean)^T``."""
        parts = (batch.scatter(mean) for batch in self.batches())
        return sum(parts, start=torch.zeros((), dtype=self.dtype, device=self.device))

    def sampled_tokens(self, count: int, seed: int) -> Tensor:
        """``(min(count, R), d)`` real tokens drawn at random: those that a :class:`TokenDataset` draws."""
        R = self.n_samples * self.n_tokens if self.mask is None else int(self.mask.sum())
        places = sample_places(R, count, seed)
        order = places.argsort()
        found = torch.empty((len(places), self.width), dtype=self.dtype, device=self.device)
        start, sorted_places = 0, places[order]
        for batch in self.batches():
            real = batch.real_tokens
            inside = (sorted_places >= start) & (sorted_places < start + len(real))
            found[order[inside]] = real[(sorted_places[inside] - start).to(self.device)]
            start += len(real)
        return found

    # ------------------------------------------------------------------ inside

    def _twin(self, **changes: Any) -> TokenStream:
        return replace(self, **changes, anchor=torch.empty(0))

    def _read(self, part: slice) -> Tensor:
        """Read some samples and check them, on the host."""
        rows = np.arange(part.start, part.stop) if self.rows is None else self.rows[part]
        X = self.store.read(rows, self.dtype)
        mask = self.store.mask
        if mask is not None:
            own = mask[torch.from_numpy(rows)]
            X = torch.where(own[..., None], X, X.new_zeros(()))  # padding may hold anything, NaN included
        self.store.check_finite(X, rows)
        return X

    def _finish(self, X: Tensor, part: slice) -> TokenDataset:
        """Pad, move and standardise."""
        mask = None if self.mask is None else self.mask[part]
        if self.n_tokens > X.shape[1]:
            X = torch.nn.functional.pad(X, (0, 0, 0, self.n_tokens - X.shape[1]))
        X = X.to(self.device)
        for mean, scale in self.scaling:
            X.sub_(mean.to(X)).div_(scale.to(X))  # in place: this copy is nobody else's
        if mask is not None and self.scaling:
            X *= mask[..., None]
        return TokenDataset(X, mask)

    def _prefetched(self, parts: list[slice]) -> Iterator[TokenDataset]:
        """Read ahead on a thread; an error there is raised here, and leaving early stops the thread."""
        ready: Queue[tuple[slice, Tensor] | BaseException] = Queue(AHEAD)
        stop = threading.Event()
        space = threading.Semaphore(AHEAD)

        def work() -> None:
            try:
                for part in parts:
                    space.acquire()
                    if stop.is_set():
                        return
                    ready.put((part, self._read(part)))
            except BaseException as error:
                ready.put(error)

        _ = self.mask  # read before the thread: both would map shards
        thread = threading.Thread(target=work, name="token-stream", daemon=True)
        thread.start()
        try:
            for _number in parts:
                found = ready.get()
                if isinstance(found, BaseException):
                    raise found
                space.release()
                yield self._finish(found[1], found[0])
        finally:
            stop.set()
            space.release()
            thread.join()

    def __repr__(self) -> str:
        return f"TokenStream({str(self.store.folder)!r}, shape={self.shape}, {self.dtype})"


Tokens = TokenDataset | TokenStream


def read_tokens(
    X: Any,
    mask: Any = None,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    token_shape: tuple[int, int] | None = None,
    length: int | None = None,
) -> Tokens:
    """Validate tokens as :meth:`TokenDataset.of` does; a store larger than its memory limit becomes a stream."""
    if isinstance(X, TokenStore):
        X = X.stream()
    if not isinstance(X, TokenStream):
        return TokenDataset.of(X, mask, device=device, dtype=dtype, token_shape=token_shape, length=length)
    if mask is not None:
        raise ValueError("X is a token store, which has its own mask; pass mask=None.")
    where = X.device if device is None else pick_device(device)
    stream = X.to(device=where, dtype=pick_dtype(dtype, where))
    if length is not None:
        stream = stream.padded(length)
    return stream if stream.n_bytes > stream.store.memory else stream.load()

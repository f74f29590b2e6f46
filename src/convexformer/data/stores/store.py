"""A token store on disk, opened: its facts, its labels, and its tokens some rows at a time."""

from __future__ import annotations

import hashlib
import json
import os
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch
from torch import Tensor

from convexformer.data.stores.index import DTYPES, SAMPLES_NAME, Backbone, Index, Shard, StoreError, read_index
from convexformer.data.stores.shards import check_size, check_sum, map_shard

if TYPE_CHECKING:
    from convexformer.data.stores.stream import TokenStream
    from convexformer.data.tokens import TokenDataset

MEMORY = 1 << 30  # bytes of tokens, in the precision of the solve, up to which a store is read into memory


def open_store(
    folder: str | os.PathLike[str], array: str | None = None, *, memory: int = MEMORY, verify: bool = True
) -> TokenStore:
    """Open a token store; it is accepted wherever tokens are.

    ``array`` names the tokens where several layers lie side by side. Tokens that take at most ``memory`` bytes in the
    precision of a solve are read into memory; larger ones stay on disk and are streamed. ``verify`` compares the checksum of
    each shard when it is first read, and again if its file has changed.
    """
    path = Path(folder)
    if not path.is_dir():
        raise StoreError(f"{path} is not a folder; expected a token store written by `convexformer embed`.")
    return TokenStore(path, read_index(path), array, memory=memory, verify=verify)


@final
class TokenStore:
    """``N`` samples of ``s`` tokens of size ``d`` in shards; memory-mapped, so that only what is used is read.

    It has a ``shape``, a length and rows (``store[rows]`` is a :class:`TokenStream`), and stands for tokens and mask in
    problems, estimators and on the command line. ``labels``, ``names`` and ``texts`` come with it.
    """

    ndim = 3

    def __init__(
        self, folder: Path, index: Index, array: str | None = None, *, memory: int = MEMORY, verify: bool = True
    ) -> None:
        if array is None and len(index.arrays) > 1:
            raise StoreError(
                f"{folder} holds several arrays of tokens side by side: {', '.join(index.arrays)}. Name one: "
                f"open(store, {next(iter(index.arrays))!r}), or --x on the command line."
            )
        self.array = next(iter(index.arrays)) if array is None else array
        if self.array not in index.arrays:
            raise StoreError(f"{folder} has no array {array!r}; it holds {', '.join(index.arrays)}.")
        self.folder, self.index, self.memory = folder, index, memory
        for shard in index.shards:
            check_size(folder, shard)
        self._ends = np.cumsum([shard.samples for shard in index.shards])
        self._verify = verify
        self._verified: dict[int, tuple[int, int, int]] = {}  # the files whose checksums have been compared
        self._mapped: tuple[int, Tensor, Tensor | None] | None = None

    # ------------------------------------------------------------------ facts

    @property
    def shape(self) -> tuple[int, int, int]:
        """``(N, s, d)``."""
        return self.index.n_samples, self.index.n_tokens, self.index.arrays[self.array]

    def __len__(self) -> int:
        return self.index.n_samples

    @property
    def dtype(self) -> torch.dtype:
        """The precision in which tokens are stored."""
        return DTYPES[self.index.dtype]

    @property
    def grid(self) -> tuple[int, int] | None:
        """Height and width of the grid of the tokens, the class token not counted; None for texts."""
        return self.index.grid

    @property
    def class_token(self) -> int | None:
        """The position of the class token; None where there is none."""
        return self.index.class_token

    @property
    def backbone(self) -> Backbone:
        """The model that made the tokens."""
        return self.index.backbone

    @property
    def fingerprint(self) -> str:
        """A hash of the whole content."""
        return self.index.fingerprint

    @cached_property
    def mask(self) -> Tensor | None:
        """``(N, s)`` True where a token is real; None where all are."""
        if not self.index.masked:
            return None
        found = torch.empty(self.shape[:2], dtype=torch.bool)
        start = 0
        for number, shard in enumerate(self.index.shards):
            mask = self._shard(number)[1]
            assert mask is not None
            found[start : start + shard.samples] = mask
            start += shard.samples
        if not bool(found.any(1).all()):
            row = int((~found.any(1)).nonzero()[0])
            raise StoreError(f"{self._place(row)} has no real token; each sample needs at least one.")
        return None if bool(found.all()) else found

    @property
    def labels(self) -> np.ndarray | None:
        """``(N,)`` class names or numbers; None where the store has none."""
        codes = self._samples.get("labels")
        if codes is None:
            return None
        classes = self.index.classes
        return np.array(codes) if classes is None else np.array(classes)[np.array(codes)]

    @property
    def names(self) -> list[str] | None:
        """The file name of each sample; None for texts."""
        return self._samples.get("names")

    @property
    def texts(self) -> list[str] | None:
        """The text of each sample; None for images."""
        return self._samples.get("texts")

    @property
    def pieces(self) -> list[list[str]] | None:
        """The text that each real token of a sample stands for; None for images."""
        return self._samples.get("pieces")

    # ------------------------------------------------------------------ tokens

    def stream(self) -> TokenStream:
        """Return the tokens, in batches from disk."""
        from convexformer.data.stores.stream import TokenStream  # which is made of stores

        return TokenStream(self)

    def load(self) -> TokenDataset:
        """Read all tokens into memory, if that is within the limit."""
        return self.stream().load()

    def __getitem__(self, rows: Any) -> TokenStream:
        return self.stream()[rows]

    def read(self, rows: np.ndarray, dtype: torch.dtype) -> Tensor:
        """``(n, s, d)`` the tokens of some samples as they lie in the shards, padding included."""
        numbers = np.searchsorted(self._ends, rows, side="right")
        if (
            len(numbers) and numbers[0] == numbers[-1] and bool((np.diff(rows) == 1).all())
        ):  # the common case: one stretch
            X, start = self._shard(numbers[0])[0], int(rows[0]) - self._first(numbers[0])
            return X[start : start + len(rows)].to(dtype, copy=True)
        out = torch.empty((len(rows), *self.shape[1:]), dtype=dtype)
        for number in np.unique(numbers):
            where = np.flatnonzero(numbers == number)
            own = self._shard(number)[0][torch.from_numpy(rows[where] - self._first(number))]
            out[torch.from_numpy(where)] = own.to(dtype)
        return out

    def check_finite(self, X: Tensor, rows: np.ndarray) -> None:
        """Raise where tokens ``X: (n, s, d)`` of these samples hold NaN or infinity; name the shard and the row."""
        if bool(torch.isfinite(X.sum())):
            return
        bad = ~torch.isfinite(X)
        if bool(bad.any()):
            n, t, k = (int(i) for i in bad.nonzero()[0])
            raise StoreError(
                f"{self._place(int(rows[n]))}, token {t}, channel {k}: {float(X[n, t, k])}. Tokens must be finite: embed "
                "that sample again, in full precision if the backbone overflowed."
            )

    # ------------------------------------------------------------------ inside

    def _shard(self, number: int) -> tuple[Tensor, Tensor | None]:
        """Return the views of one shard; one shard at a time stays mapped, so that its pages can be given back."""
        held = self._mapped
        if held is None or held[0] != number:
            shard = self.index.shards[number]
            if self._verify:
                self._compare(int(number), shard)
            held = (int(number), *map_shard(self.folder, shard, self.index, self.array))
            self._mapped = held
        return held[1], held[2]

    def _compare(self, number: int, shard: Shard) -> None:
        """Compare the checksum of a shard when it is first mapped, and again if its file has been written since."""
        try:
            now = (self.folder / shard.file).stat()
        except OSError as error:
            raise StoreError(f"{self.folder} misses {shard.file}, which its index names ({error}).") from error
        seen = (now.st_ino, now.st_size, now.st_mtime_ns)
        if self._verified.get(number) != seen:
            check_sum(self.folder, shard)
            self._verified[number] = seen

    def _first(self, number: int) -> int:
        """Return the first sample of a shard."""
        return int(self._ends[number]) - self.index.shards[number].samples

    def _place(self, row: int) -> str:
        """Say where a sample lies."""
        number = int(np.searchsorted(self._ends, row, side="right"))
        return f"{self.folder / self.index.shards[number].file}, row {row - self._first(number)} (sample {row})"

    @cached_property
    def _samples(self) -> dict[str, Any]:
        """Labels, names and texts, read when first asked for."""
        file = self.folder / SAMPLES_NAME
        try:
            data = file.read_bytes()
        except OSError as error:
            raise StoreError(f"{self.folder} misses {SAMPLES_NAME}, which its index names ({error}).") from error
        if hashlib.sha256(data).hexdigest() != self.index.samples_sha256:
            raise StoreError(f"{file} does not match its checksum in the index: it is damaged or from another store.")
        return json.loads(data)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_mapped": None}  # other processes map the files themselves

    def __repr__(self) -> str:
        source = f", from {self.backbone.model}" if self.backbone.model else ""
        return f"TokenStore({str(self.folder)!r}, shape={self.shape}, {self.index.dtype}{source})"

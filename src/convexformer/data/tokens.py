"""Tokens: one validated dataset from whatever container the user has.

Everything downstream sees ``X: (N, s, d)`` with masked tokens set to zero, on one device, in one dtype.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import Any, Protocol, final, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from convexformer.capability import Capability
from convexformer.data.containers import check_container

TokensLike = Any  # array, tensor, or a list of ragged (s_i, d) arrays
PERMUTED = 1 << 26  # tokens of which a sample is drawn by a permutation of all
TOKEN_CHUNK = 1 << 24  # numbers converted to float64 at a time: 128 MiB
# NumPy types that torch lacks, and the types they are converted to
TORCH_DTYPES: dict[type, type] = {np.longdouble: np.float64, np.clongdouble: np.complex128}


@runtime_checkable
class Loads(Protocol, metaclass=Capability):
    """Tokens on disk: a store, or a stream of one."""

    def load(self) -> TokenDataset:
        """Read everything into memory, if it fits."""


@final
@dataclass(frozen=True)
class TokenDataset:
    """``N`` samples of at most ``s`` tokens of size ``d``.

    ``X: (N, s, d)``; ``mask: (N, s)`` bool, True where a token is real, or None when all are.
    Masked tokens are stored as zeros, so that they do not contribute to sums.
    """

    X: Tensor
    mask: Tensor | None = None

    @classmethod
    def of(
        cls,
        X: TokensLike,
        mask: Any = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        token_shape: tuple[int, int] | None = None,
        length: int | None = None,
    ) -> TokenDataset:
        """Validate tokens and put them on ``device`` in ``dtype``.

        ``X`` is ``(N, s, d)``, or ``(N, p)`` taken as one token of size ``p`` (``token_shape=(s, d)``
        reshapes it), or a list of ragged ``(s_i, d)`` arrays. ``length`` pads to that many tokens.
        An all-true mask is dropped.
        The default dtype is float64 on a CPU and float32 on a GPU.
        """
        if isinstance(X, Loads):
            X = X.load()
        if isinstance(X, TokenDataset):
            if mask is not None:
                raise ValueError("X is a TokenDataset, which has its own mask; pass mask=None.")
            X, mask = X.X, X.mask
        check_container(X)
        if isinstance(X, np.ndarray) and X.dtype == object and X.ndim == 1:
            X = list(X)  # NumPy stores ragged samples as an array of objects
        if isinstance(X, (list, tuple)):
            ragged = _ragged(X)
            if ragged is not None:
                if mask is not None:
                    raise ValueError("a list of ragged token arrays makes its own mask; pass mask=None.")
                X, mask = ragged
        tokens = as_tensor(X, "X")
        tokens = _three_axes(tokens, token_shape)
        if tokens.is_complex():
            raise ValueError("X holds complex numbers; expected real tokens. Complex data is not supported.")
        where = pick_device(device, tokens)
        kind = pick_dtype(dtype, where)
        tokens = tokens.to(device=where, dtype=kind)
        mask_tensor = None if mask is None else _check_mask(mask, tokens)
        if mask_tensor is not None:
            # padding may hold anything, NaN included
            tokens = torch.where(mask_tensor[..., None], tokens, tokens.new_zeros(()))
        check_finite(tokens, "X")
        if length is not None:
            tokens, mask_tensor = _pad(tokens, mask_tensor, length)
        if mask_tensor is not None and bool(mask_tensor.all()):
            mask_tensor = None  # heads that do not take masks accept samples without masked tokens
        return cls(tokens, mask_tensor)

    @property
    def shape(self) -> tuple[int, int, int]:
        """``(N, s, d)``."""
        N, s, d = self.X.shape
        return N, s, d

    @property
    def dtype(self) -> torch.dtype:
        """The precision of the tokens."""
        return self.X.dtype

    @property
    def device(self) -> torch.device:
        """Where the tokens are."""
        return self.X.device

    @property
    def anchor(self) -> Tensor:
        """Lives as long as the tokens: the key of what others keep for them."""
        return self.X

    @property
    def n_samples(self) -> int:
        """N, the number of samples."""
        return self.X.shape[0]

    @property
    def n_tokens(self) -> int:
        """s, the number of token positions."""
        return self.X.shape[1]

    @property
    def width(self) -> int:
        """d, the size of a token."""
        return self.X.shape[2]

    @property
    def lengths(self) -> Tensor:
        """``(N,)`` the number of real tokens of each sample."""
        if self.mask is None:
            return self.X.new_full((self.n_samples,), float(self.n_tokens))
        return self.mask.sum(1).to(self.X.dtype)

    @cached_property
    def mean_token(self) -> Tensor:
        """``(N, d)`` the mean over the real tokens."""
        return self.mean()

    def mean(self) -> Tensor:
        """``(N, d)`` the mean over the real tokens, not kept: tracing compilers know no cached properties."""
        return self.X.sum(1) / self.lengths[:, None]

    @cached_property
    def real_tokens(self) -> Tensor:
        """``(R, d)`` the real tokens of all samples, sample by sample."""
        return self.X.flatten(0, 1) if self.mask is None else self.X[self.mask]

    def to(self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> TokenDataset:
        """Return the same tokens on another device or in another dtype."""
        mask = None if self.mask is None else self.mask.to(device=device)
        return TokenDataset(self.X.to(device=device, dtype=dtype), mask)

    def moments(self, w: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """``(d,), (d,)`` mean and standard deviation over the real tokens, each sample weighted by ``w: (N,)``.

        A channel that is constant, up to the rounding of its own dtype, has the deviation 1.
        """
        weight = self.X.new_ones(self.n_samples, dtype=torch.float64) if w is None else w.to(self.X.device).double()
        rows = weight[:, None].expand(self.X.shape[:2]) if self.mask is None else weight[:, None] * self.mask
        total = rows.sum()
        # deviations from one real token: exactly zero for a constant channel, however many tokens are summed
        first = rows.flatten().gt(0).to(torch.uint8).argmax()
        origin = self.X.flatten(0, 1)[first].double()
        shift = self._sum(rows, origin, power=1) / total
        scale = (self._sum(rows, origin + shift, power=2) / total).sqrt()
        return constant_as_one(origin + shift, scale, self.X)

    def _sum(self, rows: Tensor, origin: Tensor, power: int) -> Tensor:
        """``(d,)`` the sum of ``rows * (X - origin)**power`` in float64, some samples at a time."""
        step = max(1, TOKEN_CHUNK // (self.n_tokens * self.width))
        parts = zip(self.X.split(step), rows.split(step), strict=True)
        return sum(
            (torch.einsum("ns,nsd->d", part, (X.double() - origin).pow(power)) for X, part in parts),
            start=torch.zeros_like(origin),
        )

    def batches(self) -> Iterator[TokenDataset]:
        """Yield all samples at once: they are in memory already."""
        yield self

    def signature(self) -> dict[str, object]:
        """Return what tells these tokens from others, for a fingerprint: sums over the samples, and the mask."""
        ramp = torch.linspace(1.0, 2.0, self.n_samples, dtype=self.dtype, device=self.device)
        return {
            "tokens": torch.einsum("n,nsd->sd", ramp, self.X),
            "mask": torch.ones(self.X.shape[:2], dtype=torch.bool) if self.mask is None else self.mask,
        }

    def largest(self) -> float:
        """Return the largest entry, in absolute value."""
        return float(self.X.abs().max())

    def scatter(self, mean: Tensor) -> Tensor:
        """``(d, d)`` the sum over real tokens of ``(x - mean)(x - mean)^T``."""
        real = self.real_tokens - mean
        return real.T @ real

    def sampled_tokens(self, count: int, seed: int) -> Tensor:
        """``(min(count, R), d)`` real tokens drawn at random."""
        real = self.real_tokens
        return real[sample_places(len(real), count, seed).to(real.device)]

    def standardized(self, mean: Tensor, scale: Tensor) -> TokenDataset:
        """Return ``(X - mean) / scale``; masked tokens stay zero."""
        X = (self.X - mean) / scale
        return TokenDataset(X if self.mask is None else X * self.mask[..., None].to(X.dtype), self.mask)

    def select(self, rows: Tensor | np.ndarray) -> TokenDataset:
        """Return the samples ``rows``."""
        index = torch.as_tensor(rows, device=self.X.device)
        return TokenDataset(self.X[index], None if self.mask is None else self.mask[index])


def constant_as_one(mean: Tensor, scale: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and deviation as ``like``; the deviation of a channel that is constant up to its rounding is 1."""
    constant = scale <= 10 * torch.finfo(like.dtype).eps * mean.abs()
    return mean.to(like), torch.where(constant, torch.ones_like(scale), scale).to(like)


def sample_places(n: int, count: int, seed: int) -> Tensor:
    """Draw ``min(count, n)`` different numbers below ``n``; of many, by draws whose repetitions are dropped."""
    generator = torch.Generator().manual_seed(seed)
    if n <= PERMUTED:
        return torch.randperm(n, generator=generator)[:count]
    drawn = torch.randint(n, (2 * count,), generator=generator).unique()
    return drawn[torch.randperm(len(drawn), generator=generator)[:count]]


def as_tensor(values: Any, name: str) -> Tensor:
    """Turn numbers into a tensor without copying where that is possible; say which argument fails."""
    if isinstance(values, Tensor):
        return values.detach()
    try:
        array = np.asarray(values)
    except ValueError as error:
        raise ValueError(
            f"{name} cannot be read as one array: {error} Samples of different lengths come as a list of (s_i, d) arrays."
        ) from error
    if array.dtype == object or array.dtype.kind in "USV":
        try:
            array = array.astype(np.float64)
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"{name} holds {array.dtype} values; expected numbers. argument must be a string or a number "
                f"that converts to float ({error})."
            ) from error
    if array.dtype.kind in "Mm":
        raise TypeError(f"{name} holds {array.dtype} values; expected numbers.")
    # torch has no other byte orders and no long doubles
    array = array.astype(TORCH_DTYPES.get(array.dtype.type, array.dtype.newbyteorder("=")), copy=False)
    if not (array.flags.writeable and array.flags.c_contiguous) or any(stride < 0 for stride in array.strides):
        array = array.copy()  # ascontiguousarray would give a scalar an axis
    return torch.from_numpy(array)


def check_finite(values: Tensor, name: str) -> None:
    """Raise when a value is NaN or infinite; say how many and where the first one is."""
    # one reduction instead of a mask as large as the data: a sum with NaN or inf in it is not finite
    if values.numel() == 0 or bool(torch.isfinite(values.sum())):
        return
    bad = ~torch.isfinite(values)
    if not bool(bad.any()):
        return
    first = tuple(int(i) for i in bad.nonzero()[0])
    raise ValueError(
        f"{name} contains NaN or infinity: {int(bad.sum())} of {values.numel()} values, the first at index "
        f"{first}. Impute or drop them, or mask the tokens they belong to."
    )


def pick_device(device: torch.device | str | None, like: Tensor | None = None) -> torch.device:
    """Return the device: ``None`` keeps the data where it is, ``"auto"`` takes a GPU where there is one."""
    if device is None:
        return like.device if like is not None else torch.device("cpu")
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"unknown device {device!r}; expected 'cpu', 'cuda', 'cuda:0' or 'auto'.") from error
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device={device!r} was asked for but no CUDA device is available; use device='cpu'.")
    return chosen


def pick_dtype(dtype: torch.dtype | None, device: torch.device) -> torch.dtype:
    """Return the working precision: float64 on a CPU and float32 on a GPU unless told otherwise."""
    if dtype is None:
        return torch.float64 if device.type == "cpu" else torch.float32
    if dtype not in (torch.float32, torch.float64):
        raise ValueError(f"dtype={dtype} was given; expected torch.float64 (the reference) or torch.float32.")
    return dtype


def _three_axes(tokens: Tensor, token_shape: tuple[int, int] | None) -> Tensor:
    """``(N, p)`` -> ``(N, 1, p)`` or ``(N, s, d)``; check the rank and that nothing is empty."""
    if tokens.ndim == 2:
        N, p = tokens.shape
        s, d = token_shape if token_shape is not None else (1, p)
        if s * d != p:
            raise ValueError(f"token_shape={token_shape} needs {s * d} features; X has {p} (shape {(N, p)}).")
        tokens = tokens.reshape(N, s, d)
    elif tokens.ndim != 3:
        how = "X.reshape(len(X), -1, X.shape[-1])" if tokens.ndim > 3 else "X.reshape(len(X), 1, -1)"
        raise ValueError(
            f"X has {tokens.ndim} axes, shape {tuple(tokens.shape)}; expected tokens (N, s, d), or (N, p) for one "
            f"token per sample. Reshape your data, e.g. {how}."
        )
    if 0 in tokens.shape:
        names = dict(zip(("sample(s)", "token(s)", "feature(s)"), tokens.shape, strict=True))
        empty = next(name for name, size in names.items() if size == 0)
        raise ValueError(f"Found array with 0 {empty} (shape={tuple(tokens.shape)}) while a minimum of 1 is required.")
    return tokens


def _ragged(X: Sequence[Any]) -> tuple[Tensor, Tensor] | None:
    """Pad a list of ``(s_i, d)`` arrays to ``(N, s, d)`` with a mask; None when it is no such list."""
    if len(X) == 0:
        raise ValueError("X is an empty list; expected at least one (s_i, d) array of tokens.")
    if not all(isinstance(x, (np.ndarray, Tensor)) and x.ndim == 2 for x in X):
        return None
    rows = [as_tensor(x, f"X[{i}]") for i, x in enumerate(X)]
    widths = {row.shape[1] for row in rows}
    if len(widths) > 1:
        raise ValueError(f"the token arrays of X have different widths d: {sorted(widths)}; expected one.")
    for i, row in enumerate(rows):
        if row.shape[0] == 0:
            raise ValueError(f"X[{i}] has no tokens, shape {tuple(row.shape)}; drop that sample or give it one token.")
    longest = max(row.shape[0] for row in rows)
    dtype = reduce(torch.promote_types, (row.dtype for row in rows))
    out = torch.zeros((len(rows), longest, rows[0].shape[1]), dtype=dtype)
    mask = torch.zeros((len(rows), longest), dtype=torch.bool)
    for i, row in enumerate(rows):
        out[i, : row.shape[0]] = row
        mask[i, : row.shape[0]] = True
    return (out, mask)


def _check_mask(mask: Any, X: Tensor) -> Tensor:
    """Validate ``mask: (N, s)``; True (or 1) marks a real token."""
    values = as_tensor(mask, "mask").to(X.device, copy=True)  # a copy: the caller may change its array later
    if tuple(values.shape) != tuple(X.shape[:2]):
        raise ValueError(
            f"mask has shape {tuple(values.shape)}; expected (N, s) = {tuple(X.shape[:2])}, True where a token is real."
        )
    if values.dtype != torch.bool:
        if not bool(((values == 0) | (values == 1)).all()):
            raise ValueError("mask holds values other than 0 and 1; expected booleans, True where a token is real.")
        values = values == 1
    hidden = ~values.any(1)
    if bool(hidden.any()):
        first = int(hidden.nonzero()[0])
        raise ValueError(
            f"{int(hidden.sum())} samples have every token masked (the first is sample {first}); each sample needs at "
            "least one real token. Drop those samples."
        )
    return values


def _pad(X: Tensor, mask: Tensor | None, length: int) -> tuple[Tensor, Tensor | None]:
    """Pad to ``length`` tokens with masked zeros."""
    N, s, d = X.shape
    if s == length:
        return X, mask
    if s > length or mask is None:
        raise ValueError(
            f"X has {s} tokens per sample and the model was fitted with {length}, which its head requires. Truncate "
            f"longer sequences to {length}; pass shorter ones as a list of (s_i, d) arrays or with a mask."
        )
    full = X.new_zeros((N, length, d))
    full[:, :s] = X
    grown = torch.zeros((N, length), dtype=torch.bool, device=X.device)
    grown[:, :s] = mask
    return full, grown

"""Test data as it is given: arrays with texts or pictures beside them, or a token store that has all of it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, final, runtime_checkable

import numpy as np
from sklearn.base import is_classifier

from convexformer.data import TokenDataset
from convexformer.estimators import TokenEstimator
from convexformer.estimators.inputs import read_labels, read_real


@runtime_checkable
class Described(Protocol):
    """Tokens that know their samples: a token store."""

    grid: tuple[int, int] | None
    labels: np.ndarray | None
    names: Sequence[str] | None
    texts: Sequence[str] | None
    pieces: Sequence[Sequence[str]] | None

    def __len__(self) -> int: ...

    def __getitem__(self, rows: Any) -> Any: ...


@final
@dataclass(frozen=True)
class GivenData:
    """Tokens, targets and what is shown of the samples."""

    X: Any = None
    y: Any = None
    mask: Any = None
    texts: Sequence[str | Sequence[str]] | None = None
    images: Sequence[Any] | None = None
    grid: tuple[int, int] | None = None

    @property
    def n_samples(self) -> int:
        """How many samples there are."""
        if self.X is None:
            return 0
        return self.X.n_samples if isinstance(self.X, TokenDataset) else len(self.X)

    def described(self) -> GivenData:
        """Return the same with what a store knows of its samples, where nothing else is given."""
        if not isinstance(self.X, Described):
            return self
        found = self
        known: dict[str, Any] = {"y": self.X.labels, "grid": self.X.grid, "images": self.X.names}
        for name, value in known.items():
            if value is not None and getattr(found, name) is None:
                found = replace(found, **{name: value})
        texts = self.X.pieces if self.X.pieces is not None else self.X.texts
        return replace(found, texts=texts) if found.texts is None and texts is not None else found

    def check(self, model: TokenEstimator) -> None:
        """Raise where parts do not match."""
        n = self.n_samples
        if self.X is None:
            for name in ("y", "texts", "images"):
                if getattr(self, name) is not None:
                    label = "y_test was" if name == "y" else f"{name} were"
                    raise ValueError(f"{label} given without X_test; pass both, or neither.")
        elif self.y is not None and len(self.y) != n:
            raise ValueError(f"X_test has {n} samples and y_test has {len(self.y)}; they must match.")
        for name, values in (("texts", self.texts), ("images", self.images)):
            if values is not None and (isinstance(values, str) or len(values) != n):
                got = "one string" if isinstance(values, str) else f"{len(values)}"
                raise ValueError(f"{name}: {got} for {n} test samples; expected a list with one for each.")
        _check_grid(self.grid, model.token_shape_[0])

    def drawn(self, most: int) -> GivenData:
        """Return at most so many samples, drawn at random and in their order."""
        n = self.n_samples
        if n <= most:
            return self
        rows = np.sort(np.random.default_rng(0).choice(n, most, replace=False))
        return replace(
            self,
            **{
                name: _rows(values, rows)
                for name in ("X", "y", "mask", "texts", "images")
                if (values := getattr(self, name)) is not None
            },
        )

    def tokens(self, model: TokenEstimator) -> TokenDataset | None:
        """Read the tokens into memory, as the model takes them."""
        if self.X is None:
            return None
        X = self.X if not hasattr(self.X, "load") else self.X.load()  # a store, or some rows of one
        return TokenDataset.of(model._read_tokens(X, self.mask, reset=False))

    def targets(self, model: TokenEstimator) -> np.ndarray | None:
        """Validate the targets."""
        if self.y is None:
            return None
        return read_labels(self.y) if is_classifier(model) else read_real(self.y)

    def pictures(self, root: str | os.PathLike[str] | None) -> Sequence[Any] | None:
        """Return images, names of files as paths under ``root``."""
        if self.images is None or root is None:
            return self.images
        return [Path(root) / image if isinstance(image, (str, os.PathLike)) else image for image in self.images]


def _check_grid(grid: tuple[int, int] | None, n: int) -> None:
    if grid is not None and (len(grid) != 2 or min(grid) < 1 or grid[0] * grid[1] not in (n, n - 1)):
        raise ValueError(
            f"grid={tuple(grid)} was given; expected (rows, columns) with {n} cells, the tokens of a sample, or {n - 1} "
            "where the first token is a class token."
        )


def _rows(values: Any, rows: np.ndarray) -> Any:
    if isinstance(values, (list, tuple)):
        return [values[int(row)] for row in rows]
    return values.select(rows) if isinstance(values, TokenDataset) else values[rows]

"""Token sets of the race, each made or read from one line of text (a *spec*), so that any process can load it again.

digits                      scikit-learn's digits as 16 tokens of 6 channels
made:NAME                   a made-up problem of another shape, see MADE_UP
FILE.npz                    arrays X, y[, mask], or X_train, y_train[, mask_train] with a test part beside them
SPEC@K                      the same tokens with K pseudo-classes: clusters of the mean tokens, with noisy labels
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from sklearn.cluster import KMeans
from sklearn.decomposition import PCA

import convexformer as cf
from convexformer.data import TokenDataset
from convexformer.data.files import read_arrays

TEST_SHARE = 0.25  # held out where a set brings no test part
NOISY_LABELS = 0.1  # share of pseudo-labels drawn from the neighbouring clusters


@dataclass(frozen=True)
class TokenSet:
    """Tokens ``X: (N, s, d)`` in float64, labels ``y: (N,)`` from 0, an optional mask, and a test part of the same."""

    name: str
    X: np.ndarray
    y: np.ndarray
    mask: np.ndarray | None = None
    test: TokenSet | None = None

    @property
    def n_classes(self) -> int:
        return int(self.y.max()) + 1

    def take(self, rows: np.ndarray) -> TokenSet:
        """Some of the samples."""
        return replace(self, X=self.X[rows], y=self.y[rows], mask=None if self.mask is None else self.mask[rows])

    def standardized(self) -> TokenSet:
        """Channels of mean zero and deviation one over the real training tokens, as the estimators do it."""
        mean, scale = TokenDataset.of(self.X, self.mask).moments()

        def scaled(tokens: TokenSet) -> TokenSet:
            X = (tokens.X - mean.numpy()) / scale.numpy()
            return replace(tokens, X=X if tokens.mask is None else X * tokens.mask[..., None])

        return replace(scaled(self), test=None if self.test is None else scaled(self.test))

    def narrowed(self, width: int) -> TokenSet:
        """At most ``width`` principal channels, for heads whose weights grow with ``d^2``."""
        if self.X.shape[2] <= width:
            return self
        real = self.X[self.mask] if self.mask is not None else self.X.reshape(-1, self.X.shape[2])
        axes = PCA(width, random_state=0).fit(real[:20_000])

        def projected(tokens: TokenSet) -> TokenSet:
            X = (tokens.X - axes.mean_) @ axes.components_.T
            return replace(tokens, X=X if tokens.mask is None else X * tokens.mask[..., None])

        return replace(projected(self), test=None if self.test is None else projected(self.test))


def load(spec: str, samples: int | None = None, seed: int = 0) -> TokenSet:
    """Return the token set of a spec, standardised, with at most ``samples`` training samples, drawn with ``seed``."""
    source, _, classes = spec.partition("@")
    if source == "digits":
        tokens = digits()
    elif source.startswith("made:"):
        if source[5:] not in MADE_UP:
            raise ValueError(f"{source!r} is not known; made-up problems are {', '.join(MADE_UP)}.")
        tokens = MADE_UP[source[5:]](np.random.default_rng(seed))
    else:
        tokens = read(Path(source))
    rng = np.random.default_rng(seed)
    if samples is not None and samples < len(tokens.y):
        tokens = tokens.take(np.sort(rng.permutation(len(tokens.y))[:samples]))
    if classes:
        tokens = pseudo_classes(tokens, int(classes), rng)
    if tokens.test is None:
        order = rng.permutation(len(tokens.y))
        cut = max(1, round(TEST_SHARE * len(order)))
        tokens = replace(tokens.take(np.sort(order[cut:])), test=tokens.take(np.sort(order[:cut])))
    return _known_classes(tokens).standardized()


def short_name(spec: str) -> str:
    """The name of a spec in tables: without folders and suffix."""
    source, at, classes = spec.partition("@")
    return Path(source).stem.split("_")[0] + at + classes if source.endswith(".npz") else spec.removeprefix("made:")


# ---------------------------------------------------------------------- files, digits, clusters


def read(path: Path) -> TokenSet:
    """Read an npz file; half precision is widened, masked tokens are set to zero."""
    arrays = read_arrays(path)
    suffix = "_train" if "X_train" in arrays else ""
    if f"X{suffix}" not in arrays or f"y{suffix}" not in arrays:
        raise ValueError(f"{path} holds {', '.join(sorted(arrays))}; expected X and y, or X_train and y_train.")
    train = _part(path, arrays, suffix)
    return replace(train, test=_part(path, arrays, "_test")) if "X_test" in arrays else train


def _part(path: Path, arrays: dict[str, np.ndarray], suffix: str) -> TokenSet:
    X = arrays[f"X{suffix}"].astype(np.float64)
    mask = arrays[f"mask{suffix}"].astype(bool) if f"mask{suffix}" in arrays else None
    return TokenSet(path.stem, X if mask is None else X * mask[..., None], arrays[f"y{suffix}"].astype(np.int64), mask)


def digits() -> TokenSet:
    """The bundled digits."""
    X, y = cf.data.digits(patch=2)
    return TokenSet("digits", X.numpy(), y.numpy())


def pseudo_classes(tokens: TokenSet, k: int, rng: np.random.Generator) -> TokenSet:
    """Label samples by ``k`` clusters of their mean tokens; a tenth of them by one of the three nearest clusters.

    Learnable, since clusters are regions of the mean token, but no head is perfect. The test part keeps no labels.
    """
    mean = _mean_tokens(tokens)
    distances = KMeans(k, n_init=1, max_iter=30, random_state=0).fit(mean).transform(mean)
    nearest = np.argsort(distances, axis=1)[:, :3]
    noisy = rng.random(len(mean)) < NOISY_LABELS
    rank = np.where(noisy, rng.integers(0, nearest.shape[1], len(mean)), 0)
    return replace(tokens, name=f"{tokens.name}@{k}", y=nearest[np.arange(len(mean)), rank], test=None)


def _mean_tokens(tokens: TokenSet) -> np.ndarray:
    if tokens.mask is None:
        return tokens.X.mean(1)
    return tokens.X.sum(1) / tokens.mask.sum(1, keepdims=True).clip(1)


def _known_classes(tokens: TokenSet) -> TokenSet:
    """Number the classes of the training part from 0, and drop test samples of any other class."""
    classes = np.unique(tokens.y)
    assert tokens.test is not None
    known = tokens.test.take(np.flatnonzero(np.isin(tokens.test.y, classes)))
    known = replace(known, y=np.searchsorted(classes, known.y))
    return replace(tokens, y=np.searchsorted(classes, tokens.y), test=known)


# ---------------------------------------------------------------------- made-up problems of other shapes


def _planted(
    rng: np.random.Generator,
    N: int,
    s: int,
    d: int,
    c: int,
    *,
    spectrum: float = 0.0,
    correlation: float = 0.0,
    freedom: float = np.inf,
    imbalance: float = 1.0,
    active: int = 4,
) -> TokenSet:
    """Random tokens, labels by a planted linear map of a few tokens with noise.

    ``spectrum``: channel k has deviation ``k^-spectrum``, in a random basis; ``correlation``: between neighbouring channels;
    ``freedom``: of Student's t, heavy tails where small; ``imbalance``: ratio of the most to the least frequent class.
    """
    noise = rng.standard_normal((N, s, d)) if np.isinf(freedom) else rng.standard_t(freedom, (N, s, d))
    basis = np.eye(d)
    if spectrum:
        basis = np.arange(1, d + 1)[:, None] ** -spectrum * np.linalg.qr(rng.standard_normal((d, d)))[0]
    if correlation:
        basis = np.linalg.cholesky(correlation ** abs(np.subtract.outer(np.arange(d), np.arange(d)))).T @ basis
    X = noise @ basis
    used = rng.choice(s, min(active, s), replace=False)
    logits = np.einsum("nkd,kdc->nc", noise[:, used], rng.standard_normal((len(used), d, c)))
    logits = logits / logits.std() + 0.3 * rng.standard_normal((N, c))
    y = np.argmax(2 * logits + np.log(np.geomspace(imbalance, 1, c)), axis=1)
    return TokenSet("made", X, y)


MADE_UP = {
    "ill_conditioned": lambda rng: _planted(rng, 400, 8, 24, 10, spectrum=2.0),
    "two_classes": lambda rng: _planted(rng, 400, 8, 24, 2, spectrum=2.0),
    "many_classes": lambda rng: _planted(rng, 400, 8, 32, 50),
    "one_token": lambda rng: _planted(rng, 800, 1, 64, 10),
    "wide": lambda rng: _planted(rng, 300, 4, 1024, 5),
    "heavy_tails": lambda rng: _planted(rng, 600, 12, 32, 6, correlation=0.95, freedom=2.5),
    "imbalanced": lambda rng: _planted(rng, 800, 12, 32, 8, imbalance=200.0),
    "large": lambda rng: _planted(rng, 2000, 48, 48, 10, correlation=0.7),
    "tiny": lambda rng: _planted(rng, 200, 20, 8, 3),
}

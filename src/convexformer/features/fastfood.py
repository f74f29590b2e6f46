"""Maps applied to tokens before a head: random features in O(D log D), by Fastfood (Le, Sarlos and Smola 2013).

A head on transformed tokens stays the same convex program with the same certificate: only the tokens change.
"""

from __future__ import annotations

import math
import numbers
from typing import Any, final

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor, nn

from convexformer.data.tokens import TokenDataset, as_tensor, check_finite
from convexformer.registry import one_of

KINDS = ("gaussian", "positive", "chi")  # of features, see :class:`Fastfood`
KERNELS = ("gaussian", "softmax")  # that positive features approximate
RADIX = 32  # size of the Hadamard factors: products of small matrices are faster than log2(D) passes over memory


def hadamard(size: int, like: Tensor | None = None) -> Tensor:
    """Return the Walsh-Hadamard matrix of entries +-1, in Sylvester's order; ``size`` is a power of two."""
    H = torch.ones((1, 1)) if like is None else like.new_ones((1, 1))
    while H.shape[0] < size:
        H = torch.cat([torch.cat([H, H], 1), torch.cat([H, -H], 1)], 0)
    if H.shape[0] != size:
        raise ValueError(f"a Walsh-Hadamard matrix of size {size} was asked for; expected a power of two.")
    return H


def fwht(X: Tensor) -> Tensor:
    """Return ``X H`` along the last axis, whose size D is a power of two, in O(D log D) and unnormalised.

    ``H_D`` is a Kronecker product of Hadamard matrices of size at most 32. Each pass multiplies the leading factor of the
    index and moves it to the end; after all passes the original order is restored.
    """
    D = X.shape[-1]
    rest, out = D, X.reshape(-1, D)
    while rest > 1:
        factor = min(RADIX, rest)
        out = out.reshape(out.shape[0], factor, D // factor).mT @ hadamard(factor, out)  # (N, D / factor, factor)
        rest //= factor
    return out.reshape(X.shape)


@final
class Fastfood(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator, nn.Module):
    """Random features of tokens through ``V = S H G Pi H B / (sigma sqrt(D))``, never formed: O(D log D) a token.

    ``H`` is the Walsh-Hadamard matrix of size D, the next power of two to the token size d (tokens are padded with
    zeros); ``B`` random signs, ``Pi`` a permutation, ``G`` Gaussian, ``S`` gives the rows the lengths of Gaussian
    vectors. Each row of ``V`` is then exactly ``N(0, I / sigma^2)`` (Le, Sarlos and Smola 2013); more rows than D come
    from independent copies. ``kind`` says what is made of ``V x``:

    ``"gaussian"``
        ``[cos Vx, sin Vx] / sqrt(m)``, m frequencies: an unbiased estimate of ``exp(-|x - y|^2 / (2 sigma^2))``.
    ``"positive"``
        ``exp(Vx - |x|^2 / sigma^2) / sqrt(m)``: the same kernel, positive features; with ``kernel="softmax"`` the offset
        is ``|x|^2 / (2 sigma^2)`` and the kernel ``exp(x . y / sigma^2)``. (The offset ``|x|^2`` of Fisher et al.,
        section 4, is right for sigma = 1 only.) The variance grows quickly with ``|x|``.
    ``"chi"``
        ``phi_cvx`` of Fisher et al. (*Convex Self-Attention Mechanisms*), ``S H G_chi Pi H B x / (sigma sqrt(D))``, with
        chi variables of ``dof`` degrees in ``G``. It is a fixed **linear** map, no kernel approximation: a head with it
        has the same functions as without, under another norm. It is here to reproduce their experiments;
        :meth:`matrix` returns it.

    ``n_features`` is the number of outputs: even for ``"gaussian"``, which has pairs. None takes as many projections as
    the padded size D, so D features, or 2D for ``"gaussian"``.

    A torch module (``forward`` draws on first use, gradients pass through, buffers travel with ``state_dict``) and a
    scikit-learn transformer: arrays ``(N, s, d)`` or ``(N, d)``, lists of ragged ``(s_i, d)`` arrays, or a ``TokenDataset``.

    Parameters
    ----------
    kind : {"gaussian", "positive", "chi"}
        What is made of ``V x``, as above.
    n_features : int, optional
        The number of outputs.
    sigma : float
        The width of the kernel.
    seed : int
        Draws ``B``, ``Pi``, ``G`` and ``S``.
    kernel : {"gaussian", "softmax"}
        Which kernel positive features estimate.
    dof : int
        Degrees of freedom of the chi variables of ``kind="chi"``.
    """

    signs: Tensor  # (copies, D) of +-1
    order: Tensor  # (copies, D) permutations
    middle: Tensor  # (copies, D) the diagonal of G
    lengths: Tensor  # (copies, D) the diagonal of S

    def __init__(
        self,
        kind: str = "gaussian",
        n_features: int | None = None,
        sigma: float = 1.0,
        seed: int = 0,
        *,
        kernel: str = "gaussian",
        dof: int = 1,
    ) -> None:
        nn.Module.__init__(self)
        self.kind = kind
        self.n_features = n_features
        self.sigma = sigma
        self.seed = seed
        self.kernel = kernel
        self.dof = dof

    # ------------------------------------------------------------------ as a scikit-learn transformer

    def fit(self, X: Any, y: Any = None) -> Fastfood:
        """Draw the map for the token size of ``X``; its values do not matter."""
        tokens, _ = self._read(X, reset=True)
        return self.build(tokens.shape[-1])

    def transform(self, X: Any) -> Any:
        """Return features of the same kind of container: array, tensor, list of arrays, or ``TokenDataset``."""
        check_is_fitted(self, "n_features_in_")
        if isinstance(X, TokenDataset):
            features = self._checked(X.X)
            return TokenDataset(features if X.mask is None else features * X.mask[..., None], X.mask)
        tokens, rows = self._read(X, reset=False)
        features = self._checked(tokens)
        if rows is not None:
            parts = features.split(rows)
            return [part if isinstance(x, Tensor) else part.numpy() for part, x in zip(parts, X, strict=True)]
        return features if isinstance(X, Tensor) else features.numpy()

    @property
    def n_outputs(self) -> int:
        """The number of features of a token."""
        return self._outputs(self.n_features_in_)

    @property
    def _n_features_out(self) -> int:  # the name that scikit-learn's mixin asks for
        return self.n_outputs

    # ------------------------------------------------------------------ as a torch module

    def build(self, width: int) -> Fastfood:
        """Draw the diagonals for tokens of size ``width``; the same seed and sizes give the same map."""
        outputs = self._outputs(width)
        rows = outputs // 2 if self.kind == "gaussian" else outputs
        D = padded(width)
        copies = -(-rows // D)
        rng = np.random.default_rng(int(self.seed))
        signs = rng.choice([-1.0, 1.0], (copies, D))
        order = np.stack([rng.permutation(D) for _ in range(copies)])
        chi = self.kind == "chi"
        middle = np.sqrt(rng.chisquare(int(self.dof), (copies, D))) if chi else rng.standard_normal((copies, D))
        lengths = np.sqrt(rng.chisquare(D, (copies, D))) / np.linalg.norm(middle, axis=1, keepdims=True)
        for name, values in (("signs", signs), ("order", order), ("middle", middle), ("lengths", lengths)):
            self.register_buffer(name, torch.from_numpy(values))
        self.n_features_in_ = width
        return self

    def forward(self, X: Tensor) -> Tensor:
        """Return features ``(..., n_features)`` of tokens ``(..., d)``."""
        if not hasattr(self, "n_features_in_"):
            self.build(X.shape[-1])
        return self.activate(self.project(X), X)

    def project(self, X: Tensor) -> Tensor:
        """``V x`` for every token, ``(..., rows)``."""
        self._check_width(X)
        copies, D = self.signs.shape
        tokens = nn.functional.pad(X, (0, D - X.shape[-1])) if X.shape[-1] < D else X
        x = fwht(tokens[..., None, :] * self.signs.to(X))  # (..., copies, D)
        shift = D * torch.arange(copies, device=X.device)[:, None]  # one index for all copies: faster than a gather
        x = x.flatten(-2).index_select(-1, (self.order.to(X.device) + shift).flatten()).view(x.shape)
        x = fwht(x * self.middle.to(X)) * (self.lengths.to(X) / (float(self.sigma) * math.sqrt(D)))
        rows = self.n_outputs // 2 if self.kind == "gaussian" else self.n_outputs
        return x.flatten(-2)[..., :rows]

    def activate(self, projected: Tensor, X: Tensor) -> Tensor:
        """Turn projections ``V x: (..., rows)`` of tokens ``X: (..., d)`` into features."""
        if self.kind == "chi":
            return projected
        root = math.sqrt(projected.shape[-1])
        if self.kind == "gaussian":
            return torch.cat([projected.cos(), projected.sin()], -1) / root
        share = 1.0 if self.kernel == "gaussian" else 0.5
        return (projected - share * X.square().sum(-1, keepdim=True) / float(self.sigma) ** 2).exp() / root

    def matrix(self) -> Tensor:
        """``V`` itself, ``(rows, d)`` in float64: all there is to ``"chi"``, the projections of the other kinds."""
        check_is_fitted(self, "n_features_in_")
        return self.project(torch.eye(self.n_features_in_, dtype=torch.float64, device=self.signs.device)).T

    # ------------------------------------------------------------------ inside

    def _outputs(self, width: int) -> int:
        """Check the options and return the number of features."""
        one_of("kind", self.kind, KINDS)
        one_of("kernel", self.kernel, KERNELS)
        if not isinstance(self.sigma, numbers.Real) or not (math.isfinite(self.sigma) and self.sigma > 0):
            raise ValueError(f"sigma={self.sigma} was given; expected a positive number, the width of the kernel.")
        if not isinstance(self.dof, numbers.Integral) or self.dof < 1:
            raise ValueError(f"dof={self.dof} was given; expected a whole number of degrees of freedom from 1.")
        if self.n_features is None:
            return padded(width) * (2 if self.kind == "gaussian" else 1)
        if not isinstance(self.n_features, numbers.Integral) or self.n_features < 1:
            raise ValueError(f"n_features={self.n_features} was given; expected a positive whole number or None.")
        if self.kind == "gaussian" and self.n_features % 2:
            raise ValueError(
                f"n_features={self.n_features} was given; kind='gaussian' makes a cosine and a sine of each projection, "
                f"so expected an even number such as {int(self.n_features) + 1}."
            )
        return int(self.n_features)

    def _read(self, X: Any, reset: bool) -> tuple[Tensor, list[int] | None]:
        """Return real tokens ``(..., d)`` and, for a ragged list, how many of them belong to each sample."""
        if isinstance(X, TokenDataset):
            return X.X, None
        if isinstance(X, (list, tuple)) and X and all(isinstance(x, (np.ndarray, Tensor)) and x.ndim == 2 for x in X):
            parts = [as_tensor(x, f"X[{i}]") for i, x in enumerate(X)]
            widths = sorted({part.shape[1] for part in parts})
            if len(widths) > 1:
                raise ValueError(f"the token arrays of X have different widths d: {widths}; expected one.")
            return _real(torch.cat(parts)), [len(part) for part in parts]
        if not isinstance(X, Tensor) and getattr(X, "ndim", 0) != 3:  # a table, which scikit-learn validates
            X = validate_data(self, X, reset=reset, dtype=[np.float64, np.float32])
        return _real(as_tensor(X, "X")), None

    def _check_width(self, X: Tensor) -> None:
        if X.shape[-1] != self.n_features_in_:
            raise ValueError(
                f"X has {X.shape[-1]} features, but Fastfood is expecting {self.n_features_in_} features as input."
            )

    def _checked(self, tokens: Tensor) -> Tensor:
        with torch.no_grad():
            features = self.forward(tokens)
        vanished = self.kind == "positive" and bool((features.amax(-1) == 0).any())
        if vanished or not bool(torch.isfinite(features.sum())):
            raise ValueError(
                f"{self.kind!r} features leave the range of {features.dtype}: the largest token has norm "
                f"{float(tokens.norm(dim=-1).max()):.3g} and sigma is {self.sigma}. Standardise the tokens or raise sigma."
            )
        return features


def padded(width: int) -> int:
    """Return the next power of two, the size of the Hadamard matrix."""
    return 1 << max(0, width - 1).bit_length()


def _real(tokens: Tensor) -> Tensor:
    """Floating-point and finite."""
    if tokens.ndim not in (2, 3):
        raise ValueError(f"X has shape {tuple(tokens.shape)}; expected tokens (N, s, d) or (N, d). Reshape your data.")
    if tokens.is_complex():
        raise ValueError("X holds complex numbers; expected real tokens. Complex data is not supported.")
    tokens = tokens.detach() if tokens.dtype in (torch.float32, torch.float64) else tokens.detach().double()
    check_finite(tokens, "X")
    return tokens

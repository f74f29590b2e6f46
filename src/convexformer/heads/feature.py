"""Linear heads on a fixed map of the tokens, with weights or with coefficients of training samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from convexformer.data import TokenDataset
from convexformer.data.stores import Tokens, TokenStream
from convexformer.features import RandomFeatures, TokenFeature
from convexformer.features.random_features import n_random_features
from convexformer.gauges import FrobeniusNorm, NuclearNorm, Penalty, RepresenterNorm, RepresenterRidge, Ridge
from convexformer.heads.base import HEADS, Head, Layout, Program
from convexformer.heads.gating import mismatch
from convexformer.networks.feature import DECAYS, FeatureNetwork, KernelNetwork, centred, kernel_values
from convexformer.operators import DenseOperator, KernelOperator, Operator
from convexformer.operators.dense import gram_of
from convexformer.registry import one_of
from convexformer.weights import Weights

ROUNDING = 1e-9  # what a user's kernel may be wrong by, or a hundred units of its precision if that is more
MEMORY = 1 << 30  # bytes of one kernel matrix beyond which a Gaussian kernel becomes random features: 11,585 samples
AUTO_WIDTH = 2.0  # the mean squared distance of normalised training features

_RAW = WeakTensorKeyDictionary()
"""Kernel values of training features, from fitting a head to them until its program is built."""


class _OnFeature(Head):
    """What the two heads share: the map, fitted on training tokens, and what it means for tokens."""

    feature: TokenFeature
    per_token = False
    rebuilds = False

    @property
    def positional(self) -> bool:  # type: ignore[override]
        """Whether the map tells token positions apart."""
        return self.feature.positional

    def traits(self, layout: Layout) -> dict[str, object]:
        """Return the options and the fitted map."""
        return self.config()

    def label(self) -> str:
        """Name the map, and the kernel where it is not linear."""
        kernel = getattr(self, "kernel", "linear")
        name = kernel if isinstance(kernel, str) else "kernel"
        return self.feature.name if name == "linear" else f"{name} {self.feature.name}"

    def _fitted_feature(self) -> TokenFeature:
        if not hasattr(self.feature, "n_features_in_"):
            raise ValueError(f"{self!r} is not fitted: pass it to a Problem, or call head.fitted(tokens).")
        return self.feature


def _check_feature(feature: Any) -> None:
    if not isinstance(feature, TokenFeature):
        raise TypeError(
            f"feature is a {type(feature).__name__}; expected a map from convexformer.features, e.g. CovariancePooling()."
        )


@final
@dataclass(frozen=True, eq=False)
class Feature(_OnFeature):
    """``min_Z sum_i L(Z^T phi(X_i), y_i) + beta g(Z)`` with ``phi`` a fixed map of the tokens, centred and scaled.

    ``decay``: ``g`` is ``1/2 |Z|_F^2`` ("ridge"), ``|Z|_F`` ("frobenius", a block norm: in a sum a block that does not help
    comes out zero) or the nuclear norm. Weights: ``Z: (p, c)``. The map is fitted on the tokens of the problem; the head of
    the problem and its solutions is the fitted one.

    Parameters
    ----------
    feature : TokenFeature
        A map from :mod:`convexformer.features`, such as ``CovariancePooling()``.
    decay : {"ridge", "frobenius", "nuclear"}
        The penalty of ``Z``.
    """

    feature: Any = None
    decay: str = "ridge"

    name = "feature"
    streams = True

    def __post_init__(self) -> None:
        _check_feature(self.feature)
        one_of("decay", self.decay, DECAYS)

    def config(self) -> dict[str, Any]:
        """Return the map, with what it learnt, and the penalty."""
        return {"feature": self.feature, "decay": self.decay}

    def fitted(self, tokens: Tokens) -> Feature:
        """Fit the map."""
        return replace(self, feature=self.feature.fitted(tokens))

    def operator(self, tokens: TokenDataset, layout: Layout) -> Operator:
        """Normalised features."""
        phi = self._fitted_feature().normalised(tokens)
        return DenseOperator(phi, (phi.shape[1],), layout.n_outputs)

    def penalty(self, tokens: TokenDataset, layout: Layout) -> Penalty:
        """By ``decay``."""
        return {"ridge": Ridge, "frobenius": FrobeniusNorm, "nuclear": NuclearNorm}[self.decay]()

    def weight_shape(self, layout: Layout) -> tuple[int, ...]:
        """``(p, c)``."""
        return (self._fitted_feature().n_outputs, layout.n_outputs)

    def recover(self, weights: Weights, layout: Layout) -> FeatureNetwork:
        """Return a linear layer on the map."""
        return FeatureNetwork(
            self._fitted_feature(), weights.dense(), weights.intercept, decay_kind=self.decay, squeeze=layout.squeeze
        )

    def lift(self, network: nn.Module, layout: Layout) -> Weights:
        """Return the layer's weights, after checking sizes."""
        if not isinstance(network, FeatureNetwork):
            raise mismatch(self.name, self.decay, f"it is a {type(network).__name__}, not a FeatureNetwork")
        expected = self.weight_shape(layout)
        if tuple(network.weight.shape) != expected or network.decay_kind != self.decay:
            raise mismatch(self.name, self.decay, f"its sizes (p, c) are {tuple(network.weight.shape)}, not {expected}")
        return network.lift()


@final
@dataclass(frozen=True, eq=False)
class Kernel(_OnFeature):
    """The same on coefficients of the training samples: ``Z = sum_i phi(x_i) alpha_i^T`` and ``K: (N, N)``.

    ``min_alpha sum_i L((K alpha)_i, y_i) + beta/2 tr(alpha^T K alpha)``, or ``beta sqrt(tr(alpha^T K alpha))`` for
    ``decay="frobenius"``. ``K`` is centred in feature space and scaled to a mean diagonal of one. ``kernel``: ``"linear"``,
    ``"gaussian"`` (``exp(-|u - v|^2 / width)``, ``width`` being ``scale`` times the mean squared distance of training
    samples, once for ``"auto"``), or ``kernel(U, V) -> (n, m)`` of normalised features, positive semidefinite. Weights:
    ``alpha: (N, c)``. The head of a solution keeps the training features, ``N p`` numbers. Where ``K`` would take more
    than ``memory`` bytes, the head becomes :class:`Feature`: a Gaussian kernel through
    :class:`~convexformer.features.RandomFeatures`, which ``solution.head`` says.

    Parameters
    ----------
    feature : TokenFeature
        A map from :mod:`convexformer.features`; the kernel is one of its outputs.
    kernel : {"linear", "gaussian"} or callable
        As above.
    scale : float or "auto"
        The width of a Gaussian kernel in units of the mean squared distance of training samples.
    decay : {"ridge", "frobenius"}
        Half the squared norm in the kernel's Hilbert space, or the norm.
    memory : int
        Bytes that one kernel matrix may take before the head becomes :class:`Feature`.
    state : optional
        What a fitted head learnt; leave it out.
    """

    feature: Any = None
    kernel: str | Callable[[Tensor, Tensor], Tensor] = "linear"
    scale: float | str = "auto"
    decay: str = "ridge"
    memory: int = MEMORY
    state: Any = None
    """What :meth:`fitted` learnt: training features, the kernel's means and its unit."""

    name = "kernel"

    def __post_init__(self) -> None:
        _check_feature(self.feature)
        one_of("decay", self.decay, DECAYS[:2])
        if not callable(self.kernel):
            one_of("kernel", self.kernel, ("linear", "gaussian"))
        if self.scale != "auto" and not (isinstance(self.scale, (int, float)) and self.scale > 0):
            raise ValueError(f"scale={self.scale!r} was given; expected 'auto' or a positive number.")

    @property
    def width(self) -> float:
        """The width of a Gaussian kernel, in the units of normalised features."""
        return AUTO_WIDTH * (1.0 if isinstance(self.scale, str) else float(self.scale))

    def config(self) -> dict[str, Any]:
        """Return the options and what was learnt."""
        options = {"kernel": self.kernel, "scale": self.scale, "decay": self.decay, "memory": self.memory}
        return {"feature": self.feature, **options, "state": self.state}

    def traits(self, layout: Layout) -> dict[str, object]:
        """Return the options, the fitted map and the training features."""
        own = self.config()
        own.pop("memory")
        own["state"] = self._state()["column_mean"]  # tells training samples apart as well as their features do
        if callable(self.kernel):
            own["kernel"] = getattr(self.kernel, "__qualname__", type(self.kernel).__name__)
        return own

    def fitted(self, tokens: Tokens) -> Head:
        """Fit the map, and keep the training features; or become random features where ``K`` or they are too large."""
        if self.state is not None:
            return self
        N, size = tokens.n_samples, tokens.dtype.itemsize
        large = N * N * size > self.memory
        if isinstance(tokens, TokenStream) and not large:  # tokens in memory say that their features may be, too
            large = N * self.feature.fitted(tokens).n_outputs * size > self.memory
        if large and isinstance(self.kernel, str):
            many = n_random_features(N, self.memory, size)
            linear = self.kernel == "linear"
            feature = self.feature if linear else RandomFeatures(self.feature, self.width, many)
            return Feature(feature, self.decay).fitted(tokens)
        feature = self.feature.fitted(tokens)
        phi = feature.normalised(tokens)
        raw = self._raw(phi, phi)
        column, total = raw.mean(0), raw.mean()
        diagonal = (raw.diagonal() - 2 * column + total).mean()
        if callable(self.kernel):
            check_kernel(centred(raw, column, total))
        else:
            _RAW.setdefault(phi, {})[self.kernel, self.width] = raw  # for the program that comes next
        state = {
            "centers": phi.detach(),  # the same numbers; inner products kept for phi die with the training tokens
            "column_mean": column,
            "total_mean": total,
            "unit": torch.where(diagonal > 0, 1 / diagonal, torch.ones_like(diagonal)),
        }
        return replace(self, feature=feature, state=state)

    def program(self, tokens: TokenDataset, layout: Layout) -> Program:
        """Return kernel and penalty; a penalty only on the training tokens themselves."""
        return self.program_on(tokens, layout)

    def program_on(self, tokens: Tokens, layout: Layout) -> Program:
        """The same on tokens in memory or on disk: features, which the head keeps, are in memory."""
        operator = self._kernel(self._fitted_feature().normalised(tokens), layout)
        ridge = RepresenterRidge(operator.apply, operator.weight_shape[0])
        return Program(operator, ridge if self.decay == "ridge" else RepresenterNorm(operator.apply))

    def penalty(self, tokens: TokenDataset, layout: Layout) -> Penalty:
        """By ``decay``."""
        return self.program(tokens, layout).penalty

    def operator(self, tokens: TokenDataset, layout: Layout) -> KernelOperator:
        """``K`` of these samples and the training samples."""
        return self._kernel(self._fitted_feature().normalised(tokens), layout)

    def _kernel(self, phi: Tensor, layout: Layout) -> KernelOperator:
        state = self._state()
        centers = state["centers"].to(phi)
        same = phi.data_ptr() == centers.data_ptr()
        trains = phi.shape == centers.shape and (same or bool(torch.allclose(phi, centers, 1e-4, 1e-6)))
        if trains:
            centers = phi  # the same up to precision
        raw = _RAW.get(phi, {}).pop((self.kernel, self.width), None) if same else None
        raw = self._raw(phi, centers) if raw is None else raw
        K = centred(raw, state["column_mean"].to(phi), state["total_mean"].to(phi))
        unit = state["unit"].to(phi)
        K = (K + K.T).mul_(0.5 * unit) if trains else K.mul_(unit)
        return KernelOperator(K, layout.n_outputs, trains=trains, dtype=phi.dtype)

    def weight_shape(self, layout: Layout) -> tuple[int, ...]:
        """``(N, c)``."""
        return (len(self._state()["centers"]), layout.n_outputs)

    def recover(self, weights: Weights, layout: Layout) -> KernelNetwork:
        """Return a kernel machine."""
        like = weights.dense()
        state = {name: values.to(like) for name, values in self._state().items()}
        options: dict[str, Any] = {"kernel": self.kernel, "width": self.width, "decay_kind": self.decay, **state}
        return KernelNetwork(self._fitted_feature(), like, weights.intercept, squeeze=layout.squeeze, **options)

    def lift(self, network: nn.Module, layout: Layout) -> Weights:
        """Return the coefficients, after checking sizes."""
        if not isinstance(network, KernelNetwork):
            raise mismatch(self.name, self.decay, f"it is a {type(network).__name__}, not a KernelNetwork")
        expected = self.weight_shape(layout)
        if tuple(network.alpha.shape) != expected or network.decay_kind != self.decay:
            raise mismatch(self.name, self.decay, f"its sizes (N, c) are {tuple(network.alpha.shape)}, not {expected}")
        return network.lift()

    def _state(self) -> dict[str, Tensor]:
        if self.state is None:
            raise ValueError(f"{self!r} is not fitted: pass it to a Problem, or call head.fitted(tokens).")
        return self.state

    def _raw(self, phi: Tensor, centers: Tensor) -> Tensor:
        """Kernel values before centring; inner products of training features are shared between heads."""
        gram = None if callable(self.kernel) else gram_of(phi, centers)
        return kernel_values(self.kernel, self.width, phi, centers, gram)

    def __repr__(self) -> str:
        kind = self.kernel if isinstance(self.kernel, str) else getattr(self.kernel, "__name__", "callable")
        return f"Kernel({self.feature!r}, kernel={kind!r}, scale={self.scale!r}, decay={self.decay!r})"


def check_kernel(K: Tensor) -> None:
    """Raise unless a user's kernel, centred, is one: symmetric and positive semidefinite, both up to rounding.

    The program of any other is not convex, and its certificate would be wrong.
    """
    tolerance = max(ROUNDING, 100 * torch.finfo(K.dtype).eps)
    K = K.double()
    skew, size = float((K - K.T).abs().max()), float(K.abs().max())
    shifted = 0.5 * (K + K.T)
    shifted.diagonal().add_(max(tolerance * float(K.diagonal().abs().sum()), torch.finfo(torch.float64).tiny))
    indefinite = int(torch.linalg.cholesky_ex(shifted)[1]) != 0
    if indefinite or skew > tolerance * size:
        what = "positive semidefinite" if indefinite else f"symmetric (K and its transpose differ by {skew:.3g})"
        raise ValueError(
            f"kernel(U, V) is not {what} on the training samples, so its program is not convex, and nothing could be "
            "certified. Pass a positive semidefinite kernel: (1 + u^T v)^2 or exp(-|u - v|) are, tanh(u^T v) is not."
        )


HEADS.register("feature", Feature)
HEADS.register("kernel", Kernel)

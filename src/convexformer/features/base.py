"""What a feature map is: tokens of a sample in, one vector out; fitted on training tokens, without labels."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils.validation import check_is_fitted
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from convexformer.data.stores import Tokens, TokenStore, TokenStream
from convexformer.data.tokens import TokenDataset
from convexformer.registry import Registry

BATCH = 1 << 24  # numbers of temporaries in a batch of samples: 128 MiB in float64


class TokenFeature(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator, nn.Module, ABC):
    """A fixed map ``phi`` of a sample's real tokens to a vector ``(p,)``: a linear head on it stays a convex program.

    A torch module (``forward(X, mask)`` on tensors, state in buffers) and a scikit-learn transformer (``fit``,
    ``transform``) in one, on CPU and GPU, some samples at a time. ``fit`` sees training tokens and no labels. It also
    learns where the features lie: :meth:`normalised` centres them and scales them to a mean squared norm of one over the
    training samples, which is what heads and kernels read (centring changes nothing where there is an intercept).

    A subclass writes :meth:`learn` (register buffers), :meth:`compute` and :meth:`batch_size`.
    """

    positional: ClassVar[bool] = False
    """Whether features belong to token positions, so that the number of tokens is fixed."""

    _normalised: WeakTensorKeyDictionary
    _copies: WeakTensorKeyDictionary
    center: Tensor  # (p,) the mean of the training features
    spread: Tensor  # () the root of their mean squared norm, centred; 1 where that is zero

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self._forget()

    # ------------------------------------------------------------------ what a subclass writes

    def learn(self, tokens: Tokens) -> None:
        """Learn from training tokens: register buffers."""

    @abstractmethod
    def compute(self, tokens: TokenDataset) -> Tensor:
        """``(n, p)`` the features of a batch of samples."""

    @abstractmethod
    def sample_size(self, n_tokens: int, width: int) -> int:
        """Return how many numbers of temporaries a sample takes."""

    # ------------------------------------------------------------------ as a scikit-learn transformer

    def fit(self, X: Any, y: Any = None, mask: Any = None) -> TokenFeature:
        """Learn the map from tokens ``X: (N, s, d)``, ragged lists or a ``TokenDataset``; ``y`` is not looked at."""
        tokens = self._read(X, mask)
        self._forget()
        self._buffers.clear()
        with torch.no_grad():
            self.learn(tokens)
            if isinstance(tokens, TokenStream):
                center, spread = self._streamed_moments(tokens)
            else:
                features = self.raw(tokens)
                center = features.mean(0)
                features = features - center
                spread = features.square().sum(1).mean().sqrt()
            self.register_buffer("center", center)
            self.register_buffer("spread", torch.where(spread > 0, spread, torch.ones_like(spread)))
            if isinstance(tokens, TokenDataset):
                self._normalised[tokens.anchor] = features.div_(self.spread)
        self.n_features_in_ = tokens.width
        self.n_tokens_in_ = tokens.n_tokens
        return self

    def transform(self, X: Any, mask: Any = None) -> Any:
        """``(N, p)`` features: a tensor for a tensor or a ``TokenDataset``, else an array."""
        check_is_fitted(self, "n_features_in_")
        with torch.no_grad():
            features = self.raw(self._check(self._read(X, mask)))
        return features if isinstance(X, (Tensor, TokenDataset)) else features.numpy()

    @property
    def n_outputs(self) -> int:
        """p, the number of features."""
        check_is_fitted(self, "n_features_in_")
        return len(self.center)

    @property
    def _n_features_out(self) -> int:  # the name that scikit-learn's mixin asks for
        return self.n_outputs

    # ------------------------------------------------------------------ as a torch module

    def forward(self, X: Tensor, mask: Tensor | None = None) -> Tensor:
        """``(N, p)`` features of tokens ``X: (N, s, d)``: tensors in, tensors out, in one go and without validation."""
        if mask is None:
            return self.compute(TokenDataset(X))
        real = mask != 0
        return self.compute(TokenDataset(torch.where(real[..., None], X, X.new_zeros(())), real))

    def embed(self, tokens: TokenDataset) -> Tensor:
        """What :meth:`normalised` returns, in one go and not kept: for networks."""
        return (self.compute(tokens) - self.center.to(tokens.X)) / self.spread.to(tokens.X)

    def raw(self, tokens: Tokens) -> Tensor:
        """``(N, p)`` features as they come, some samples at a time."""
        if isinstance(tokens, TokenStream):
            return torch.cat([self.raw(batch) for batch in tokens.batches()])
        step = max(1, BATCH // max(1, self.sample_size(tokens.n_tokens, tokens.width)))
        if tokens.n_samples <= step:
            return self.compute(tokens)
        masks = [None] * tokens.n_samples if tokens.mask is None else tokens.mask.split(step)
        return torch.cat([self.compute(TokenDataset(X, m)) for X, m in zip(tokens.X.split(step), masks, strict=False)])

    def normalised(self, tokens: Tokens) -> Tensor:
        """``(N, p)`` features centred and scaled by what :meth:`fit` saw; kept as long as the tokens live."""
        found = self._normalised.get(tokens.anchor)
        if found is None:
            center, spread = (own.to(tokens.device, tokens.dtype) for own in (self.center, self.spread))
            self._check(tokens)
            found = torch.cat([(self.raw(batch) - center).div_(spread) for batch in tokens.batches()])
            self._normalised[tokens.anchor] = found
        return found

    def fitted(self, tokens: Tokens) -> TokenFeature:
        """Return this map if it is fitted, else a copy fitted on these tokens; one copy for all who ask for the same."""
        if hasattr(self, "n_features_in_"):
            return self
        found = self._copies.get(tokens.anchor)
        if found is None:
            found = copy.deepcopy(self).fit(tokens)
            self._copies[tokens.anchor] = found
        return found

    # ------------------------------------------------------------------ files

    @property
    def name(self) -> str:
        """The name of the class, under which it is registered."""
        return type(self).__name__

    def config(self) -> dict[str, Any]:
        """Return the options and, where the map is fitted, all that it learnt."""
        state = {"state": dict(self.state_dict())} if hasattr(self, "n_features_in_") else {}
        sizes = {"sizes": [self.n_tokens_in_, self.n_features_in_]} if state else {}
        return {"params": BaseEstimator.get_params(self, deep=False), **state, **sizes}

    @classmethod
    def of_config(cls, params: dict[str, Any], state: Any = None, sizes: Any = None) -> TokenFeature:
        """Undo :meth:`config`."""
        made = cls(**params)
        if state is not None:
            for name, values in state.items():
                made.register_buffer(name, values)
            made.n_tokens_in_, made.n_features_in_ = (int(size) for size in sizes)
        return made

    # ------------------------------------------------------------------ inside

    def _forget(self) -> None:
        self.__dict__["_normalised"] = WeakTensorKeyDictionary()  # of tokens, as long as they live
        self.__dict__["_copies"] = WeakTensorKeyDictionary()

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)  # copies and pickles take no features of anyone's tokens along
        state.pop("_normalised", None)
        state.pop("_copies", None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        nn.Module.__setstate__(self, state)
        self._forget()

    def _streamed_moments(self, tokens: TokenStream) -> tuple[Tensor, Tensor]:
        """Mean and root mean squared deviation of features, by sums about the first sample's, in one pass."""
        origin: Tensor | None = None
        total, squares = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
        for batch in tokens.batches():
            features = self.raw(batch).double()
            origin = features[0].clone() if origin is None else origin
            features -= origin
            total, squares = total.to(features) + features.sum(0), squares.to(features) + features.square().sum()
        assert origin is not None, "a store has samples"
        shift = total / tokens.n_samples
        spread = (squares / tokens.n_samples - shift.square().sum()).clamp_min(0).sqrt()
        return (origin + shift).to(tokens.dtype), spread.to(tokens.dtype)

    def _read(self, X: Any, mask: Any) -> Any:
        if isinstance(X, TokenStore):
            X = X.stream()
        if isinstance(X, (TokenDataset, TokenStream)):
            return X
        dtype = X.dtype if isinstance(X, Tensor) and X.dtype in (torch.float32, torch.float64) else None
        return TokenDataset.of(X, mask, dtype=dtype)

    def _check(self, tokens: Any) -> Any:
        if tokens.width != self.n_features_in_:
            raise ValueError(
                f"X has tokens of size d={tokens.width}, but {self.name} was fitted with d={self.n_features_in_}. Use the "
                "same embedding as for training."
            )
        if self.positional and tokens.n_tokens != self.n_tokens_in_:
            raise ValueError(
                f"X has {tokens.n_tokens} tokens a sample, but {self.name} was fitted with {self.n_tokens_in_}. Pad or "
                "truncate, with a mask for the padding."
            )
        return tokens

    def __repr__(self, *_: Any) -> str:
        return BaseEstimator.__repr__(self)


FEATURES: Registry[TokenFeature] = Registry("feature")

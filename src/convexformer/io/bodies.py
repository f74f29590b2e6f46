"""Solutions, networks and estimators as JSON: a pair of functions to encode and decode each."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, cast

import numpy as np
from torch import Tensor

from convexformer.certificates import Certificate
from convexformer.estimators import (
    TokenClassifier,
    TokenClassifierCV,
    TokenEstimator,
    TokenRegressor,
    TokenRegressorCV,
)
from convexformer.heads.base import Layout
from convexformer.io.codec import Codec, decode_loss, encode_loss, plain
from convexformer.networks import NETWORKS, StandardizedNetwork, SumNetwork
from convexformer.networks.base import Network
from convexformer.solution import Solution
from convexformer.solvers.status import Record, Status
from convexformer.weights import Weights

ESTIMATORS: dict[str, type[TokenEstimator]] = {
    kind.__name__: kind for kind in (TokenClassifier, TokenClassifierCV, TokenRegressor, TokenRegressorCV)
}
MAX_SAMPLE = 1 << 32  # numbers of a sample: a file that says more is falsified
# fitted attributes of the estimators that choose beta by cross-validation
SEARCH_ATTRIBUTES = (
    *("cv_results_", "beta_ratios_", "best_index_", "best_score_", "beta_ratio_"),
    *("search_seconds_", "winner_", "raced_"),
)


# ---------------------------------------------------------------------- solutions


def encode_solution(solution: Solution, codec: Codec) -> dict[str, Any]:
    """Return a solution as JSON."""
    return {
        "weights": codec.encode_all("", solution.weights.tensors()),
        "shape": list(solution.weights.shape),
        "head": codec.encode_head("head", solution.head),
        "layout": codec.encode_all("", _values(solution.layout)),
        "loss": encode_loss(solution.loss),
        "beta": solution.beta,
        "certificate": _values(solution.certificate),
        "status": solution.status.name,
        "history": [list(record) for record in solution.history],
        "n_iter": solution.n_iter,
        "seconds": solution.seconds,
        "solver": solution.solver,
    }


def decode_solution(body: dict[str, Any], codec: Codec) -> Solution:
    """Undo :func:`encode_solution`."""
    head, layout = codec.decode_head(body["head"]), _layout(codec.decode_all(body["layout"]))
    shape = tuple(body["shape"])
    if layout.n_tokens * layout.width > MAX_SAMPLE:
        raise ValueError(f"it says that a sample has {layout.n_tokens} tokens of size {layout.width}.")
    if shape != tuple(head.weight_shape(layout)):
        raise ValueError(f"its weights are said to have the shape {shape}; its head has {head.weight_shape(layout)}.")
    return Solution(
        weights=Weights.of_tensors(codec.decode_all(body["weights"]), shape),
        head=head,
        layout=layout,
        loss=decode_loss(body["loss"]),
        beta=body["beta"],
        certificate=Certificate(**body["certificate"]),
        status=Status[body["status"]],
        history=tuple(Record(*record) for record in body["history"]),
        n_iter=body["n_iter"],
        seconds=body["seconds"],
        solver=body["solver"],
    )


def _values(record: Layout | Certificate) -> dict[str, Any]:
    return {field.name: getattr(record, field.name) for field in fields(record)}


def _layout(values: dict[str, Any]) -> Layout:
    """Build the layout; one of schema 1 may name channel blocks, which say how the numbers of ``Z`` are ordered."""
    if values.pop("channel_blocks", ()):
        raise ValueError(
            "its weights are separated into channel blocks (corollary 3.2), which a solution no longer stores. Fit the "
            "model again, or load it with version 0.1 and save its network."
        )
    return Layout(**values)


# ---------------------------------------------------------------------- networks


def encode_network(network: Network, codec: Codec, name: str = "network") -> dict[str, Any]:
    """Return a network as JSON; its tensors are stored under names that begin with ``name``."""
    kind = type(network).__name__
    if isinstance(network, StandardizedNetwork):
        inner = encode_network(network.network, codec, f"{name}.inner")
        state = {"mean": network.mean, "scale": network.scale}
        return {"type": kind, "inner": inner, "state": codec.encode_all(f"{name}.", state)}
    if isinstance(network, SumNetwork):
        parts = [encode_network(cast(Network, part), codec, f"{name}.{k}") for k, part in enumerate(network.parts)]
        own: dict[str, Tensor] = {} if network.bias is None else {"bias": network.bias}
        return {"type": kind, "parts": parts, "state": codec.encode_all(f"{name}.", {**own, "scales": network.scales})}
    if kind not in NETWORKS:
        raise TypeError(f"cannot save a {kind}; expected one of {', '.join(NETWORKS)}.")
    tensors = {key: value for key, value in network.state_dict().items() if not key.startswith("feature.")}
    config = {key: codec.encode(f"{name}.{key}", value) for key, value in network.config().items()}
    return {"type": kind, "config": config, "state": codec.encode_all(f"{name}.", tensors)}


def decode_network(body: dict[str, Any], codec: Codec) -> Network:
    """Undo :func:`encode_network`."""
    state = codec.decode_all(body["state"])
    if body["type"] == StandardizedNetwork.__name__:
        return StandardizedNetwork(decode_network(body["inner"], codec), state["mean"], state["scale"])
    if body["type"] == SumNetwork.__name__:
        parts = [decode_network(part, codec) for part in body["parts"]]
        return SumNetwork(parts, state.get("bias"), state.get("scales"))
    config = {key: codec.decode(value) if isinstance(value, dict) else value for key, value in body["config"].items()}
    return NETWORKS[body["type"]](**state, **config)


# ---------------------------------------------------------------------- estimators


def encode_estimator(estimator: TokenEstimator, codec: Codec) -> dict[str, Any]:
    """Return a fitted estimator as JSON."""
    kind = type(estimator).__name__
    if kind not in ESTIMATORS:
        raise TypeError(f"cannot save a {kind}; expected one of {', '.join(ESTIMATORS)}.")
    if not hasattr(estimator, "solution_"):
        raise ValueError(f"this {kind} is not fitted; call fit before save.")
    classes = getattr(estimator, "classes_", None)
    searched = {name: getattr(estimator, name) for name in SEARCH_ATTRIBUTES if hasattr(estimator, name)}
    return {
        "type": kind,
        "params": codec.encode_all("params.", _saved_params(estimator)),
        "solution": encode_solution(estimator.solution_, codec),
        "mean": codec.encode("mean", estimator.mean_),
        "scale": codec.encode("scale", estimator.scale_),
        "classes": None if classes is None else [plain(label) for label in classes],
        "beta_max": estimator.beta_max_,
        "token_shape": list(estimator.token_shape_),
        "masked": estimator.masked_,
        "seed": estimator.seed_,
        "n_iter": int(estimator.n_iter_),
        "search": codec.encode_all("search.", searched),
        "data": getattr(estimator, "data_fingerprint_", None),
        "n_features_in": int(estimator.n_features_in_),
        "feature_names_in": [str(name) for name in getattr(estimator, "feature_names_in_", ())],
    }


def decode_estimator(body: dict[str, Any], codec: Codec) -> TokenEstimator:
    """Undo :func:`encode_estimator`."""
    estimator = ESTIMATORS[body["type"]](**codec.decode_all(body["params"]))
    solution = decode_solution(body["solution"], codec)
    estimator.solution_ = solution
    estimator.mean_, estimator.scale_ = codec.decode(body["mean"]), codec.decode(body["scale"])
    estimator.beta_, estimator.beta_max_ = solution.beta, body["beta_max"]
    estimator.certificate_, estimator.n_iter_ = solution.certificate, body.get("n_iter", solution.n_iter)
    estimator.token_shape_ = tuple(body["token_shape"])
    estimator.masked_, estimator.seed_ = body.get("masked", False), body.get("seed", 0)
    for name, value in codec.decode_all(body.get("search", {})).items():
        setattr(estimator, name, _as_arrays(value))
    if body.get("data") is not None:
        estimator.data_fingerprint_ = body["data"]
    estimator.n_features_in_ = body["n_features_in"]
    if body["feature_names_in"]:
        estimator.feature_names_in_ = np.array(body["feature_names_in"], dtype=object)
    if body["classes"] is not None:
        estimator.classes_ = np.array(body["classes"])
    return estimator


def _saved_params(estimator: TokenEstimator) -> dict[str, Any]:
    """Return the constructor's arguments without splitters, callables and generators, which prediction does not need."""
    params = estimator.get_params(deep=False)
    for name in ("cv", "scoring"):
        if name in params and not isinstance(params[name], (int, str, type(None))):
            params[name] = None
    if not isinstance(params["random_state"], (int, np.integer, type(None))):
        params["random_state"] = estimator.seed_  # the seed drawn from the generator
    return params


def _as_arrays(value: Any) -> Any:
    """Return tensors as NumPy arrays, the type that a search has."""
    if isinstance(value, dict):
        return {key: _as_arrays(item) for key, item in value.items()}
    return value.numpy() if isinstance(value, Tensor) else value

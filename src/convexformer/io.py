"""Files: ``config.json`` + ``model.safetensors``. Plain numbers and text; loading never executes code."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from convexformer.architecture import HEADS, Head, Layout, Network, Weights
from convexformer.certificates import Certificate
from convexformer.crossvalidation import TokenClassifierCV, TokenRegressorCV
from convexformer.estimators import TokenClassifier, TokenEstimator, TokenRegressor
from convexformer.losses import LOSSES, Loss
from convexformer.networks import NETWORKS, StandardizedNetwork, SumNetwork
from convexformer.solution import Record, Solution, Status

FORMAT, SCHEMA = "convexformer", 1
CONFIG, TENSORS = "config.json", "model.safetensors"
ESTIMATORS: dict[str, type[TokenEstimator]] = {
    "TokenClassifier": TokenClassifier,
    "TokenClassifierCV": TokenClassifierCV,
    "TokenRegressor": TokenRegressor,
    "TokenRegressorCV": TokenRegressorCV,
}


SEARCHED = ("cv_results_", "beta_ratios_", "best_index_", "best_score_", "beta_ratio_")  # of a cross-validation


class ModelFileError(ValueError):
    """A model folder that cannot be read: missing, truncated, corrupted, foreign or too new."""


def save(model: Solution | Network | TokenEstimator, folder: str | os.PathLike[str]) -> Path:
    """Write a solution, a network or a fitted estimator to ``folder``; return the folder."""
    shelf = _Shelf({})
    if isinstance(model, Solution):
        kind, body = "solution", _solution_body(model, shelf)
    elif isinstance(model, Network):
        kind, body = "network", _network_body(model, shelf, "network")
    elif isinstance(model, TokenEstimator):
        kind, body = "estimator", _estimator_body(model, shelf)
    else:
        raise TypeError(f"cannot save a {type(model).__name__}; expected a Solution, a network or a fitted estimator.")
    from convexformer import __version__

    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    _replace(target / TENSORS, lambda part: save_file(shelf.tensors, str(part), metadata={"format": FORMAT}))
    config = {"format": FORMAT, "schema": SCHEMA, "version": __version__, "kind": kind, "body": body}
    config["sha256"] = _digest(target / TENSORS)
    text = json.dumps(config, indent=2, allow_nan=True)
    _replace(target / CONFIG, lambda part: part.write_text(text + "\n"))
    return target


def load(folder: str | os.PathLike[str]) -> Any:
    """Read back what :func:`save` wrote; say clearly what is wrong with anything else."""
    source = Path(folder)
    config = _read_config(source)
    tensors = _read_tensors(source, config)
    readers = {"solution": _read_solution, "network": _read_network, "estimator": _read_estimator}
    reader = readers.get(config.get("kind", ""))
    if reader is None:
        raise ModelFileError(f"{source / CONFIG} holds a {config.get('kind')!r}; expected one of {', '.join(readers)}.")
    try:
        return reader(config["body"], _Shelf(tensors))
    except (KeyError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise ModelFileError(
            f"{source} is damaged or was not written by convexformer.save: {type(error).__name__}: {error}"
        ) from error


# ---------------------------------------------------------------------- the two files


def _read_config(source: Path) -> dict[str, Any]:
    if not source.is_dir():
        raise ModelFileError(f"{source} is not a folder; expected one with {CONFIG} and {TENSORS}.")
    for name in (CONFIG, TENSORS):
        if not (source / name).is_file():
            raise ModelFileError(f"{source} has no {name}; expected a folder written by convexformer.save.")
    try:
        config = json.loads((source / CONFIG).read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ModelFileError(
            f"{source / CONFIG} is not valid JSON ({error}); the file is truncated or damaged."
        ) from error
    if not isinstance(config, dict) or config.get("format") != FORMAT:
        raise ModelFileError(f"{source / CONFIG} was not written by convexformer.save.")
    if config.get("schema") != SCHEMA:
        raise ModelFileError(
            f"{source} has schema version {config.get('schema')}; this version of convexformer reads {SCHEMA}. "
            f"It was written by version {config.get('version')}: install that one or a newer one."
        )
    return config


def _read_tensors(source: Path, config: dict[str, Any]) -> dict[str, Tensor]:
    if _digest(source / TENSORS) != config.get("sha256"):
        raise ModelFileError(
            f"{source / TENSORS} does not match its checksum in {CONFIG}: it is truncated, damaged or from another model."
        )
    try:
        return load_file(str(source / TENSORS))
    except (SafetensorError, OSError) as error:
        raise ModelFileError(f"{source / TENSORS} cannot be read: {error}") from error


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _replace(path: Path, write: Any) -> None:
    """Write beside and rename, so that a crash never leaves half a file."""
    part = path.with_name(path.name + ".part")
    write(part)
    os.replace(part, path)


class _Shelf:
    """Tensors by name; in the JSON a tensor is ``{"tensor": name}``."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors

    def put(self, name: str, value: Any) -> Any:
        """Return ``value`` as JSON, its arrays moved to the shelf."""
        if isinstance(value, (Tensor, np.ndarray)):
            tensor = torch.as_tensor(value).detach().cpu().contiguous().clone()
            self.tensors[name] = tensor
            return {"tensor": name}
        if isinstance(value, (tuple, list)):
            return {"tuple": [self.put(f"{name}.{i}", item) for i, item in enumerate(value)]}
        if isinstance(value, dict):
            pairs = [[_plain(key), self.put(f"{name}.{i}", item)] for i, (key, item) in enumerate(value.items())]
            return {"dict": pairs}
        if isinstance(value, Head):
            return {"head": _head_body(value, self, name)}
        return _plain(value)

    def get(self, value: Any) -> Any:
        """Undo :meth:`put`."""
        if not isinstance(value, dict):
            return value
        if "tensor" in value:
            return self.tensors[value["tensor"]]
        if "tuple" in value:
            return tuple(self.get(item) for item in value["tuple"])
        if "head" in value:
            return _read_head(value["head"], self)
        return {key: self.get(item) for key, item in value["dict"]}


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, torch.device):
        return str(value)
    raise TypeError(f"cannot save a {type(value).__name__} in a model file; expected numbers, text or arrays.")


# ---------------------------------------------------------------------- heads, losses, solutions


def _head_body(head: Head, shelf: _Shelf, name: str) -> dict[str, Any]:
    if head.name not in HEADS:
        raise TypeError(f"the head {head!r} is not registered, so a file could not be read back; register it in HEADS.")
    config = {key: shelf.put(f"{name}.{key}", value) for key, value in head.config().items()}
    return {"name": head.name, "config": config}


def _read_head(body: dict[str, Any], shelf: _Shelf) -> Head:
    return HEADS[body["name"]](**{key: shelf.get(value) for key, value in body["config"].items()})


def _loss_body(loss: Loss) -> dict[str, Any]:
    if loss.name not in LOSSES:
        raise TypeError(
            f"the loss {loss!r} is not registered, so a file could not be read back; register it in LOSSES."
        )
    return {"name": loss.name, "config": loss.config()}


def _solution_body(solution: Solution, shelf: _Shelf) -> dict[str, Any]:
    layout, proof = solution.layout, solution.certificate
    return {
        "weights": {name: shelf.put(name, tensor) for name, tensor in solution.weights.tensors().items()},
        "shape": list(solution.weights.Z.shape),
        "head": _head_body(solution.head, shelf, "head"),
        "layout": {name: shelf.put(name, getattr(layout, name)) for name in Layout.__dataclass_fields__},
        "loss": _loss_body(solution.loss),
        "beta": solution.beta,
        "certificate": {name: getattr(proof, name) for name in Certificate.__dataclass_fields__},
        "status": solution.status.name,
        "history": [list(record) for record in solution.history],
        "n_iter": solution.n_iter,
        "seconds": solution.seconds,
        "solver": solution.solver,
    }


def _read_solution(body: dict[str, Any], shelf: _Shelf) -> Solution:
    return Solution(
        weights=Weights.of_tensors({name: shelf.get(item) for name, item in body["weights"].items()}, body["shape"]),
        head=_read_head(body["head"], shelf),
        layout=Layout(**{name: shelf.get(item) for name, item in body["layout"].items()}),
        loss=LOSSES[body["loss"]["name"]](**body["loss"]["config"]),
        beta=body["beta"],
        certificate=Certificate(**body["certificate"]),
        status=Status[body["status"]],
        history=tuple(Record(*record) for record in body["history"]),
        n_iter=body["n_iter"],
        seconds=body["seconds"],
        solver=body["solver"],
    )


# ---------------------------------------------------------------------- networks


def _network_body(network: Network, shelf: _Shelf, name: str) -> dict[str, Any]:
    kind = type(network).__name__
    if isinstance(network, StandardizedNetwork):
        own = {"mean": network.mean, "scale": network.scale}
        return {"type": kind, "inner": _network_body(network.network, shelf, f"{name}.inner"), **_put(shelf, name, own)}
    if isinstance(network, SumNetwork):
        parts = [_network_body(cast(Network, part), shelf, f"{name}.{k}") for k, part in enumerate(network.parts)]
        bias: dict[str, Tensor] = {} if network.bias is None else {"bias": network.bias}
        return {"type": kind, "parts": parts, **_put(shelf, name, bias)}
    if kind not in NETWORKS:
        raise TypeError(f"cannot save a {kind}; expected one of {', '.join(NETWORKS)}.")
    return {"type": kind, "config": network.config(), **_put(shelf, name, network.state_dict())}


def _put(shelf: _Shelf, name: str, state: dict[str, Tensor]) -> dict[str, Any]:
    return {"state": {key: shelf.put(f"{name}.{key}", value) for key, value in state.items()}}


def _read_network(body: dict[str, Any], shelf: _Shelf) -> Network:
    state = {key: shelf.get(value) for key, value in body["state"].items()}
    if body["type"] == "StandardizedNetwork":
        return StandardizedNetwork(_read_network(body["inner"], shelf), state["mean"], state["scale"])
    if body["type"] == "SumNetwork":
        return SumNetwork([_read_network(part, shelf) for part in body["parts"]], state.get("bias"))
    return NETWORKS[body["type"]](**state, **body["config"])


# ---------------------------------------------------------------------- estimators


def _estimator_body(estimator: TokenEstimator, shelf: _Shelf) -> dict[str, Any]:
    kind = type(estimator).__name__
    if kind not in ESTIMATORS:
        raise TypeError(f"cannot save a {kind}; expected one of {', '.join(ESTIMATORS)}.")
    if not hasattr(estimator, "solution_"):
        raise ValueError(f"this {kind} is not fitted; call fit before save.")
    params = estimator.get_params(deep=False)
    for name in ("cv", "scoring"):  # splitters and callables have no place in a file, and prediction needs neither
        if name in params and not isinstance(params[name], (int, str, type(None))):
            params[name] = None
    if not isinstance(params["random_state"], (int, np.integer, type(None))):
        params["random_state"] = estimator.seed_  # nor has a generator; this is what it gave
    classes = getattr(estimator, "classes_", None)
    searched = [name for name in SEARCHED if hasattr(estimator, name)]
    return {
        "type": kind,
        "params": {name: shelf.put(f"params.{name}", value) for name, value in params.items()},
        "solution": _solution_body(estimator.solution_, shelf),
        "mean": shelf.put("mean", estimator.mean_),
        "scale": shelf.put("scale", estimator.scale_),
        "classes": None if classes is None else [_plain(label) for label in classes],
        "beta_max": estimator.beta_max_,
        "token_shape": list(estimator.token_shape_),
        "masked": estimator.masked_,
        "seed": estimator.seed_,
        "n_iter": int(estimator.n_iter_),
        "search": {name: shelf.put(f"search.{name}", getattr(estimator, name)) for name in searched},
        "n_features_in": int(estimator.n_features_in_),
        "feature_names_in": [str(name) for name in getattr(estimator, "feature_names_in_", ())],
    }


def _read_estimator(body: dict[str, Any], shelf: _Shelf) -> TokenEstimator:
    estimator = ESTIMATORS[body["type"]](**{name: shelf.get(value) for name, value in body["params"].items()})
    solution = _read_solution(body["solution"], shelf)
    estimator.solution_ = solution
    estimator.mean_, estimator.scale_ = shelf.get(body["mean"]), shelf.get(body["scale"])
    estimator.beta_, estimator.beta_max_ = solution.beta, body["beta_max"]
    estimator.certificate_, estimator.n_iter_ = solution.certificate, body.get("n_iter", solution.n_iter)
    estimator.token_shape_ = tuple(body["token_shape"])
    estimator.masked_, estimator.seed_ = body.get("masked", False), body.get("seed", 0)
    for name, value in body.get("search", {}).items():
        setattr(estimator, name, _as_arrays(shelf.get(value)))
    estimator.n_features_in_ = body["n_features_in"]
    if body["feature_names_in"]:
        estimator.feature_names_in_ = np.array(body["feature_names_in"], dtype=object)
    if body["classes"] is not None:
        estimator.classes_ = np.array(body["classes"])
    return estimator


def _as_arrays(value: Any) -> Any:
    """NumPy arrays in place of tensors, as a search had them."""
    if isinstance(value, dict):
        return {key: _as_arrays(item) for key, item in value.items()}
    return value.numpy() if isinstance(value, Tensor) else value

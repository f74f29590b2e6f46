"""Saving and loading a solution, a network or a fitted estimator."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from convexformer.estimators import TokenEstimator
from convexformer.io.bodies import (
    decode_estimator,
    decode_network,
    decode_solution,
    encode_estimator,
    encode_network,
    encode_solution,
)
from convexformer.io.codec import Codec
from convexformer.io.folder import ModelFileError, read_config, read_folder, write_folder
from convexformer.io.versions import environment
from convexformer.networks.base import Network
from convexformer.solution import Solution

DECODERS: dict[str, Callable[[dict[str, Any], Codec], Any]] = {
    "solution": decode_solution,
    "network": decode_network,
    "estimator": decode_estimator,
}


def save(model: Solution | Network | TokenEstimator, folder: str | os.PathLike[str]) -> Path:
    """Write a solution, a network or a fitted estimator to ``folder``; return the folder.

    A model that is there already is replaced in one step: a crash leaves the old one or the new one, complete.
    """
    codec = Codec()
    if isinstance(model, Solution):
        kind, body = "solution", encode_solution(model, codec)
    elif isinstance(model, Network):
        kind, body = "network", encode_network(model, codec)
    elif isinstance(model, TokenEstimator):
        kind, body = "estimator", encode_estimator(model, codec)
    else:
        raise TypeError(f"cannot save a {type(model).__name__}; expected a Solution, a network or a fitted estimator.")
    from convexformer import __version__  # the package is complete only when this module has been imported

    target = Path(folder)
    header = {"version": __version__, "environment": environment(), "kind": kind}
    write_folder(target, {**header, "body": body}, codec.tensors)
    return target


def saved_with(folder: str | os.PathLike[str]) -> dict[str, str]:
    """Return the versions of the software that wrote a model folder; earlier versions noted that of convexformer only."""
    config = read_config(Path(folder))
    noted = config.get("environment")
    known = {str(name): str(value) for name, value in noted.items()} if isinstance(noted, dict) else {}
    return {"convexformer": str(config.get("version", "")), **known}


def load(folder: str | os.PathLike[str]) -> Any:
    """Read back what :func:`save` wrote; anything else is a :class:`ModelFileError` that says what is wrong."""
    source = Path(folder)
    config, tensors = read_folder(source)
    decode = DECODERS.get(str(config.get("kind")))
    if decode is None:
        raise ModelFileError(f"{source} holds a {config.get('kind')!r}; expected one of {', '.join(DECODERS)}.")
    try:
        return decode(config["body"], Codec(tensors))
    except (KeyError, TypeError, ValueError, RuntimeError, AttributeError, MemoryError, OverflowError) as error:
        raise ModelFileError(
            f"{source} is damaged or was not written by convexformer.save: {type(error).__name__}: {error}"
        ) from error

"""Shipping a model: its network as an ONNX file or as a ``torch.export`` program, for batches of any size."""

from __future__ import annotations

import copy
import io
import json
import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn

from convexformer.data.files import atomic_write
from convexformer.estimators import TokenClassifier, TokenEstimator
from convexformer.features import CovariancePooling
from convexformer.io.codec import plain
from convexformer.networks import FourierNetwork
from convexformer.networks.base import Network
from convexformer.registry import one_of
from convexformer.solution import Solution

FORMATS = ("onnx", "torch")
DTYPES = {"float32": torch.float32, "float64": torch.float64}
TRIAL = 3  # samples that the network is traced and checked with


@final
class Shipped(nn.Module):
    """Tokens, and a mask where the model takes one, to outputs and, for a classifier, probabilities."""

    def __init__(self, network: Network, probabilities: bool) -> None:
        super().__init__()
        self.network, self.probabilities = network, probabilities

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> tuple[Tensor, ...]:
        """Return ``(outputs,)`` or ``(outputs, probabilities)``, ``(N, ..., classes)``."""
        outputs = self.network(tokens, mask)
        if not self.probabilities:
            return (outputs,)
        if outputs.ndim == 1:  # the log-odds of the second of two classes
            return outputs, torch.stack([(-outputs).sigmoid(), outputs.sigmoid()], 1)
        return outputs, outputs.softmax(-1)


@final
@dataclass(frozen=True)
class Export:
    """What was written: the file, its inputs and outputs by name with their shapes, and its largest deviation.

    ``difference`` is the largest deviation of what the file returns, read back, from the network's outputs in float64 on
    random tokens, relative to the largest of them; None where it could not be run (onnxruntime is not installed).
    """

    path: Path
    format: str
    dtype: str
    inputs: dict[str, tuple[Any, ...]]
    outputs: tuple[str, ...]
    classes: tuple[Any, ...] | None
    difference: float | None


def export(
    model: TokenEstimator | Solution | Network,
    path: str | os.PathLike[str],
    format: str = "onnx",
    *,
    n_tokens: int | None = None,
    mask: bool | None = None,
    dtype: str = "float32",
) -> Export:
    """Write the network of a model to one file that needs no convexformer to run.

    ONNX has no complex numbers and no eigenvectors: there, Fourier networks transform by real matrices, and roots and
    logarithms of covariances are iterations in float64. Both agree with the network to rounding.

    Parameters
    ----------
    model : fitted estimator, Solution or network
        An estimator's standardisation is part of the file; a classifier's file returns probabilities besides outputs.
    path : path
        The file, ``.onnx`` or ``.pt2`` by custom.
    format : "onnx" or "torch"
        An ONNX model (needs ``pip install "convexformer[export]"``) or a program for ``torch.export.load``.
    n_tokens : int, optional
        Tokens a sample; by default as in training. The number of samples is free.
    mask : bool, optional
        Whether the file takes a second input ``mask: (N, s)``, True where a token is real; by default if the model was
        fitted with one.
    dtype : "float32" or "float64"
        Of weights, tokens and outputs. Gates are decided in float64 either way.
    """
    one_of("format", format, FORMATS)
    kind = DTYPES[one_of("dtype", dtype, DTYPES)]
    network, size, masked, classes = _parts(model)
    s = size[0] if n_tokens is None else n_tokens
    if size[0] is not None and s != size[0]:
        raise ValueError(f"n_tokens={n_tokens} was given; this head has weights for {size[0]} tokens a sample.")
    if s is None or s < 1:
        raise ValueError(f"n_tokens={n_tokens} was given; this network takes any number of tokens: say how many.")
    shipped = Shipped(_portable(network, kind, format), classes is not None).eval().requires_grad_(False)
    tokens = torch.randn((TRIAL, s, size[1]), generator=torch.Generator().manual_seed(0), dtype=kind)
    args: tuple[Tensor, ...] = (tokens,)
    if masked if mask is None else mask:
        args = (tokens, torch.ones((TRIAL, s), dtype=torch.bool))
    names = ("outputs",) if classes is None else ("outputs", "probabilities")
    run = (_write_onnx if format == "onnx" else _write_torch)(shipped, args, names, Path(path), json.dumps(classes))
    exact = Shipped(_portable(network, torch.float64, "torch"), classes is not None)
    with torch.no_grad():
        expected = exact(tokens.double(), *args[1:])
    difference = None if run is None else _difference(expected, run)
    shapes = {name: ("N", *values.shape[1:]) for name, values in zip(("tokens", "mask"), args, strict=False)}
    return Export(Path(path), format, dtype, shapes, names, classes, difference)


def _parts(model: Any) -> tuple[Network, tuple[int | None, int], bool, tuple[Any, ...] | None]:
    """Return the network, ``(s, d)``, whether it was fitted with a mask, and the classes that probabilities are of."""
    if isinstance(model, Network):
        return model, model.token_size, False, None
    if isinstance(model, Solution):
        return model.network(), (model.layout.n_tokens, model.layout.width), False, None
    if not isinstance(model, TokenEstimator):
        raise TypeError(
            f"cannot export a {type(model).__name__}; expected a fitted estimator, a Solution or a network."
        )
    classes = None
    if isinstance(model, TokenClassifier) and model.loss != "squared_hinge":
        classes = tuple(plain(label) for label in model.classes_)
    return model.network_, model.token_shape_, model.masked_, classes


def _portable(network: Network, dtype: torch.dtype, format: str) -> Network:
    """Return a copy on the CPU in a dtype, without operations that the format lacks."""
    made = copy.deepcopy(network).to(device="cpu", dtype=dtype)
    for part in made.modules():
        if isinstance(part, FourierNetwork):
            part.fft = format != "onnx"
        elif isinstance(part, CovariancePooling):
            part.eigenvectors = format != "onnx"
    return made


def _write_torch(
    shipped: Shipped, args: tuple[Tensor, ...], names: tuple[str, ...], path: Path, classes: str
) -> list[Tensor] | None:
    """Write the program; return what it computes, read back."""
    program = torch.export.export(shipped, args, dynamic_shapes=_any_batch(args))
    buffer = io.BytesIO()
    torch.export.save(program, buffer, extra_files={"classes.json": classes})
    atomic_write(path, lambda file: file.write(buffer.getvalue()))
    return list(torch.export.load(io.BytesIO(buffer.getvalue())).module()(*args))


def _write_onnx(
    shipped: Shipped, args: tuple[Tensor, ...], names: tuple[str, ...], path: Path, classes: str
) -> list[Tensor] | None:
    """Write the ONNX model; return what onnxruntime computes with it, None where that is not installed."""
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f"an ONNX file needs onnx and onnxscript ({error}): pip install 'convexformer[export]', or write a program for "
            "torch with --torch."
        ) from error
    with _quiet():
        program = torch.onnx.export(
            shipped,
            args,
            dynamo=True,
            verbose=False,
            dynamic_shapes=_any_batch(args),
            input_names=["tokens", "mask"][: len(args)],
            output_names=list(names),
        )
    assert program is not None
    program.model.metadata_props["classes"] = classes
    buffer = io.BytesIO()
    program.save(buffer)  # type: ignore[arg-type]
    atomic_write(path, lambda file: file.write(buffer.getvalue()))
    try:
        from onnxruntime import InferenceSession
    except ImportError:
        return None
    session = InferenceSession(buffer.getvalue(), providers=["CPUExecutionProvider"])
    found = session.run(None, {slot.name: x.numpy() for slot, x in zip(session.get_inputs(), args, strict=True)})
    return [torch.from_numpy(values) for values in found]


def _any_batch(args: tuple[Tensor, ...]) -> tuple[dict[int, Any], ...]:
    return tuple({0: torch.export.Dim("N")} for _ in args)


def _difference(expected: tuple[Tensor, ...], found: list[Tensor]) -> float:
    pairs = zip(expected, found, strict=True)
    return max(float((a - b).abs().max() / a.abs().max().clamp_min(1e-30)) for a, b in pairs)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the exporter, whose warnings are about itself."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)

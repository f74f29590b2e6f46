"""What a backbone is to :func:`embed`: a map of a batch of items to tokens of some layers."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, final

import torch
from torch import Tensor, nn

from convexformer.registry import one_of

LAST = "last"
CLASS_TOKEN = ("keep", "drop", "mark")
COMBINE = ("concatenate", "separate")
PRECISIONS = {"float32": None, "bfloat16": torch.bfloat16, "float16": torch.float16}


@final
@dataclass(frozen=True)
class Options:
    """How tokens are taken from a backbone."""

    layers: tuple[int | str, ...] = (LAST,)
    """Numbers count blocks (or stages) from 1, 0 being what enters the first, -1 the last; ``"last"`` is what the model
    itself returns, after its final normalisation."""
    combine: str = "concatenate"
    class_token: str = "keep"
    max_length: int = 256
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    precision: str = "float32"

    def __post_init__(self) -> None:
        one_of("combine", self.combine, COMBINE)
        one_of("class_token", self.class_token, CLASS_TOKEN)
        one_of("precision", self.precision, tuple(PRECISIONS))
        if not self.layers or len(set(self.layers)) != len(self.layers):
            raise ValueError(f"layers={self.layers} were given; expected at least one, each of them once.")
        if self.max_length < 2:
            raise ValueError(f"max_length={self.max_length} was given; expected at least two tokens a text.")


@final
@dataclass(frozen=True)
class Encoded:
    """Tokens of a batch: one tensor ``(n, s, d)`` for each layer, in order, and where the tokens are."""

    layers: tuple[Tensor, ...]
    mask: Tensor | None = None
    grid: tuple[int, int] | None = None
    class_token: int | None = None

    def arrays(self, options: Options) -> dict[str, Tensor]:
        """Mark the class token, and name the layers or put their channels side by side."""
        layers = self.layers
        if options.class_token == "mark" and self.class_token is not None:
            flag = layers[0].new_zeros((*layers[0].shape[:2], 1))
            flag[:, self.class_token] = 1
            layers = tuple(torch.cat([X, flag], 2) for X in layers)
        if options.combine == "separate" and len(layers) > 1:
            return {f"layer_{name}": X for name, X in zip(options.layers, layers, strict=True)}
        if len({X.shape[1] for X in layers}) > 1:
            sizes = {str(name): X.shape[1] for name, X in zip(options.layers, layers, strict=True)}
            raise ValueError(
                f"the layers have different numbers of tokens, {sizes}; they cannot lie side by side. Embed one."
            )
        return {"X": torch.cat(layers, 2)}


class Encoder(ABC):
    """A frozen model with what it needs to read items: a tokenizer, or the size and colours of images."""

    kind: str
    """``"text"`` or ``"image"``."""
    model: nn.Module
    options: Options

    @abstractmethod
    def encode(self, items: Sequence[str]) -> Encoded:
        """Return the tokens of some texts or image files."""

    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """Return what tokens depend on besides the weights."""

    def pieces(self, items: Sequence[str]) -> list[list[str]] | None:
        """Return the tokens of texts as text; None for images."""
        return None

    def weights_sha256(self) -> str:
        """Return a checksum of the weights."""
        digest = hashlib.sha256()
        for name, tensor in sorted(self.model.state_dict().items()):
            digest.update(name.encode())
            digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()


def autocast(options: Options) -> torch.autocast:
    """Return the context of mixed precision; one that does nothing for float32."""
    dtype = PRECISIONS[options.precision]
    return torch.autocast(options.device.type, dtype=dtype or torch.bfloat16, enabled=dtype is not None)


def pick_layers(states: Sequence[Tensor], last: Tensor, layers: Sequence[int | str]) -> tuple[Tensor, ...]:
    """Return layers by number, ``states`` being what enters the first block and what leaves each."""
    for layer in layers:
        if layer != LAST and not (isinstance(layer, int) and -len(states) <= layer < len(states)):
            raise ValueError(
                f"layer {layer} was asked for; the model has the layers 0 to {len(states) - 1} and 'last'."
            )
    return tuple(last if layer == LAST else states[int(layer)] for layer in layers)


@contextmanager
def quiet(transformers: Any) -> Iterator[None]:
    """Load models of transformers without its bar of weights: there is one of samples."""
    log = transformers.utils.logging
    was = log.is_progress_bar_enabled()
    log.disable_progress_bar()
    try:
        yield
    finally:
        if was:
            log.enable_progress_bar()


def need(name: str, extra: str) -> ModuleType:
    """Import a package of an extra, or say how to install it."""
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ValueError(f"{name} is not installed ({error}); pip install 'convexformer[{extra}]'.") from error
    except RuntimeError as error:  # a torchvision that was built for another torch
        raise ValueError(
            f"{name} cannot be imported: {error}. Its torchvision was built for another torch; install both from the same "
            "package index."
        ) from error

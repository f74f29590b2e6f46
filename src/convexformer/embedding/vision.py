"""Images through vision models of timm and transformers: one token for each place of the feature map."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from convexformer.embedding.base import LAST, Encoded, Encoder, Options, autocast, need, pick_layers, quiet

TIMM_PREFIX = "timm:"
MOST_PREFIX_TOKENS = 16  # class, distillation and register tokens in front of the grid


@final
@dataclass(frozen=True)
class Preprocessing:
    """Resize (the shorter side to ``size / crop``), crop the centre, scale to [0, 1], subtract ``mean``, divide by ``std``.

    That is what timm and transformers do by default; it is done here with Pillow, without torchvision.
    """

    size: tuple[int, int]
    """Height and width that the model sees."""
    mean: tuple[float, ...]
    std: tuple[float, ...]
    crop: float = 1.0
    resample: str = "bicubic"
    squash: bool = False
    """Whether images are resized to ``size`` whatever their shape, and not cropped."""

    def read(self, file: str) -> Tensor:
        """``(3, h, w)`` of one image file."""
        Image = need("PIL.Image", "vision")
        try:
            with Image.open(file) as opened:
                image = opened.convert("RGB")
        except OSError as error:  # Pillow's own error for what is no image is one
            raise ValueError(f"{file} cannot be read as an image: {error}") from error
        h, w = self.size
        scale = max(h / self.crop / image.height, w / self.crop / image.width)
        wide, tall = max(w, round(scale * image.width)), max(h, round(scale * image.height))
        if self.squash:
            wide, tall = w, h
        image = image.resize((wide, tall), getattr(Image.Resampling, self.resample.upper()))
        left, top = (wide - w) // 2, (tall - h) // 2
        values = np.asarray(image.crop((left, top, left + w, top + h)), dtype=np.float32) / 255
        return torch.from_numpy((values - np.array(self.mean, np.float32)) / np.array(self.std, np.float32)).permute(
            2, 0, 1
        )


class ImageEncoder(Encoder):
    """What both libraries share: reading images and cutting outputs into tokens."""

    kind = "image"
    preprocessing: Preprocessing

    def facts(self) -> dict[str, Any]:
        """The preprocessing."""
        return asdict(self.preprocessing)

    def _images(self, items: Sequence[str]) -> Tensor:
        return torch.stack([self.preprocessing.read(item) for item in items]).to(self.options.device)

    def _encoded(self, outputs: Sequence[Tensor], grids: Sequence[tuple[int, int] | None]) -> Encoded:
        """Turn outputs ``(n, C, h, w)`` or ``(n, prefix + h w, d)`` into tokens; of a prefix the class token may stay."""
        found, class_token, grid = [], None, None
        for X, given in zip(outputs, grids, strict=True):
            X = X.float()
            if X.ndim == 4:
                grid = (X.shape[2], X.shape[3])
                tokens, prefix = X.flatten(2).mT, 0
            else:
                grid = given if given is not None else _square(X.shape[1])
                prefix = 0 if grid is None else X.shape[1] - math.prod(grid)
                tokens = X
            if prefix:
                class_token = 0 if self.options.class_token != "drop" else None
                body = tokens[:, prefix:]  # register and distillation tokens are dropped in any case
                tokens = body if class_token is None else torch.cat([tokens[:, :1], body], 1)
            found.append(tokens.contiguous().cpu())
        return Encoded(tuple(found), None, grid, class_token)


@final
class TimmEncoder(ImageEncoder):
    """A model of timm: a name or id (``timm:vit_small_patch16_224``), or a local folder with ``config.json`` and weights."""

    def __init__(self, model: str, options: Options) -> None:
        timm = need("timm", "vision")
        name = model.removeprefix(TIMM_PREFIX)
        name = f"local-dir:{name}" if Path(name).is_dir() else name
        try:
            self.model = timm.create_model(name, pretrained=True, num_classes=0).eval().to(options.device)
        except (OSError, RuntimeError, ValueError, KeyError) as error:
            raise ValueError(f"{model} cannot be read as a model of timm: {error}") from error
        self.options = options
        config: dict[str, Any] = getattr(self.model, "pretrained_cfg")  # noqa: B009  (unknown to type checkers)
        self.preprocessing = Preprocessing(
            size=tuple(config["input_size"][1:]),
            mean=tuple(config["mean"]),
            std=tuple(config["std"]),
            crop=float(config.get("crop_pct") or 1.0),
            resample=str(config.get("interpolation") or "bicubic"),
        )

    @torch.inference_mode()
    def encode(self, items: Sequence[str]) -> Encoded:
        """The last features, or those of some blocks or stages."""
        images = self._images(items)
        model: Any = self.model
        numbers = [layer for layer in self.options.layers if layer != LAST]
        between: dict[int | str, Tensor] = {}
        with autocast(self.options):
            if numbers:
                between = self._between(images, [int(layer) for layer in numbers])
            if LAST in self.options.layers:
                between[LAST] = _channels_first(model, model.forward_features(images))
        outputs = [between[layer] for layer in self.options.layers]
        prefix = int(getattr(model, "num_prefix_tokens", 0))
        grids = [_token_grid(model, X, prefix, images) if X.ndim == 3 else None for X in outputs]
        return self._encoded(outputs, grids)

    def _between(self, images: Tensor, layers: list[int]) -> dict[int | str, Tensor]:
        """Return features of blocks or stages, counted from 1; -1 is the last."""
        model: Any = self.model
        if not hasattr(model, "forward_intermediates"):
            raise ValueError(f"{type(model).__name__} of timm gives no features between its layers; use layers='last'.")
        count = len(model.forward_intermediates(images[:1], intermediates_only=True))
        wanted = [layer if layer < 0 else layer - 1 for layer in layers]
        if not all(-count <= k < count for k in wanted):
            raise ValueError(f"layers {layers} were asked for; the model has the layers 1 to {count} and 'last'.")
        indices = [k % count for k in wanted]
        prefixed = {"return_prefix_tokens": True, "output_fmt": "NLC"} if getattr(model, "num_prefix_tokens", 0) else {}
        found = model.forward_intermediates(images, indices=sorted(indices), intermediates_only=True, **prefixed)
        if prefixed:  # (tokens, prefix) pairs
            found = [torch.cat([pair[1], pair[0]], 1) for pair in found]
        by_index = dict(zip(sorted(indices), found, strict=True))
        return {layer: by_index[k] for layer, k in zip(layers, indices, strict=True)}


@final
class TransformersImageEncoder(ImageEncoder):
    """A vision model of transformers: an id, or a local folder."""

    def __init__(self, model: str, options: Options) -> None:
        transformers = need("transformers", "vision")
        local = Path(model).is_dir()
        try:
            with quiet(transformers):
                loaded = transformers.AutoModel.from_pretrained(model, local_files_only=local, dtype=torch.float32)
        except (OSError, ValueError, KeyError, ImportError) as error:
            raise ValueError(f"{model} cannot be read as a vision model of transformers: {error}") from error
        loaded = getattr(loaded, "vision_model", loaded)  # of CLIP and its kin
        self.model = loaded.eval().to(options.device)
        self.options = options
        size = getattr(self.model.config, "image_size", 224)
        self.preprocessing = _of_config(_preprocessor_config(transformers, model, local), size)

    @torch.inference_mode()
    def encode(self, items: Sequence[str]) -> Encoded:
        """Hidden states of blocks, or the last one after the final normalisation."""
        images = self._images(items)
        with autocast(self.options):
            outputs = self.model(pixel_values=images, output_hidden_states=True)
        chosen = pick_layers(outputs.hidden_states, outputs.last_hidden_state, self.options.layers)
        patch = getattr(getattr(self.model, "config", None), "patch_size", None)
        grids = []
        for X in chosen:
            grid = None
            if X.ndim == 3 and isinstance(patch, int):
                grid = (images.shape[2] // patch, images.shape[3] // patch)
                grid = grid if 0 <= X.shape[1] - math.prod(grid) <= MOST_PREFIX_TOKENS else None
            grids.append(grid)
        return self._encoded(chosen, grids)


def _preprocessor_config(transformers: Any, model: str, local: bool) -> dict[str, Any]:
    """Return what ``preprocessor_config.json`` says; nothing where a model has none."""
    try:
        file = transformers.utils.cached_file(model, "preprocessor_config.json", local_files_only=local)
    except OSError:
        return {}
    return {} if file is None else json.loads(Path(file).read_text())


def _of_config(config: dict[str, Any], image_size: Any) -> Preprocessing:
    """Read a ``preprocessor_config.json``; without one, images are scaled to [-1, 1]."""
    default = _pair(image_size, 224)
    size = _pair(config.get("size"), default[0])
    crops = bool(config.get("do_center_crop", False))
    seen = _pair(config.get("crop_size"), size[0]) if crops else size
    normal = bool(config.get("do_normalize", True))
    number = config.get("resample", 2)
    return Preprocessing(
        size=seen,
        mean=tuple(config.get("image_mean", (0.5, 0.5, 0.5))) if normal else (0.0, 0.0, 0.0),
        std=tuple(config.get("image_std", (0.5, 0.5, 0.5))) if normal else (1.0, 1.0, 1.0),
        crop=min(1.0, seen[0] / size[0]),
        squash=not crops and "shortest_edge" not in str(config.get("size")),
        resample={0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic"}.get(number, "bicubic"),
    )


def _pair(size: Any, default: int) -> tuple[int, int]:
    """Return height and width of one of the ways in which configurations write a size."""
    if isinstance(size, dict):
        side = int(size.get("shortest_edge", default))
        return int(size.get("height", side)), int(size.get("width", side))
    if isinstance(size, (list, tuple)):
        return int(size[0]), int(size[-1])
    side = int(size) if size is not None else default
    return side, side


def _square(n: int) -> tuple[int, int] | None:
    """Return the grid of ``n`` tokens where that is a square, with or without a class token."""
    for count in (n, n - 1):
        side = math.isqrt(count)
        if side * side == count and side > 0:
            return side, side
    return None


def _token_grid(model: Any, X: Tensor, prefix: int, images: Tensor) -> tuple[int, int] | None:
    """Return the grid of a timm transformer's tokens."""
    count = X.shape[1] - prefix
    embed = getattr(model, "patch_embed", None)
    patch = getattr(embed, "patch_size", None)
    if patch is not None:
        h, w = images.shape[2] // patch[0], images.shape[3] // patch[1]
        if h * w == count:
            return h, w
    side = math.isqrt(count)
    return (side, side) if side * side == count else None


def _channels_first(model: Any, X: Tensor) -> Tensor:
    """Models such as Swin put the channels last; others are as they are."""
    channels = getattr(model, "num_features", X.shape[1])
    last = X.ndim == 4 and (getattr(model, "output_fmt", "") == "NHWC" or X.shape[1] != channels)
    return X.permute(0, 3, 1, 2) if last else X

"""Pictures of samples as small data URIs."""

from __future__ import annotations

import base64
import io
import os
from typing import Any

import numpy as np

SIDE = 112  # pixels of the longer side
SMALL = 32  # pictures up to this side are enlarged without smoothing: their pixels are the data


def thumbnail(image: Any) -> str:
    """Return a picture, a file or an array ``(h, w)``, ``(h, w, 3)`` or ``(3, h, w)``, as a data URI; empty if unreadable.

    Floats are in [0, 1], or are scaled to it by their range.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        if isinstance(image, (str, os.PathLike)):
            with Image.open(image) as file:
                picture = file.convert("RGB")
        else:
            picture = Image.fromarray(_pixels(image)).convert("RGB")
    except (OSError, ValueError, UnidentifiedImageError, Image.DecompressionBombError):
        return ""
    scale = SIDE / max(picture.size)
    size = (max(1, round(picture.width * scale)), max(1, round(picture.height * scale)))
    how = Image.Resampling.NEAREST if max(picture.size) <= SMALL else Image.Resampling.LANCZOS
    data = io.BytesIO()
    small = max(picture.size) <= SMALL
    picture.resize(size, how).save(data, "PNG" if small else "JPEG", **({} if small else {"quality": 80}))
    return f"data:image/{'png' if small else 'jpeg'};base64,{base64.b64encode(data.getvalue()).decode()}"


def _pixels(image: Any) -> np.ndarray:
    values = np.asarray(image)
    if values.ndim == 3 and values.shape[0] in (1, 3) and values.shape[2] not in (1, 3):
        values = np.moveaxis(values, 0, 2)
    if values.ndim == 3 and values.shape[2] == 1:
        values = values[:, :, 0]
    if values.ndim not in (2, 3):
        raise ValueError(f"an image has shape {values.shape}; expected (h, w), (h, w, 3) or (3, h, w).")
    if values.dtype == np.uint8:
        return values
    values = np.nan_to_num(values.astype(np.float64))
    low, high = min(values.min(), 0.0), max(values.max(), 1.0) if values.max() <= 1 else values.max()
    return np.round(255 * (values - low) / max(high - low, 1e-300)).astype(np.uint8)

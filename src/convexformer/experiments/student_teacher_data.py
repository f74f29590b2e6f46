"""Data of the student-teacher study: tokens that enter a layer of a transformer, and what its attention makes of them.

Three sources, all with the same result, a :class:`Lesson`:

* an ``npz`` file with the layer's weights: ``X_in_train, X_in_test: (N, s, d)``, ``mask_train, mask_test: (N, s)`` and
  ``W__attention.*``, the parameters of a BERT layer by their Hugging Face names. Targets are the outputs of the attention
  block before the residual connection, computed from the weights, so that the teacher's attention maps are exact;
* a ``safetensors`` file of activations: ``X_in, X_out: (N, s, d)``, ``attention: (N, heads, s, s)``, ``mask: (N, s)``.
  Targets are ``X_out``; a fifth of the samples are for testing;
* no file: a small synthetic layer, whose queries look for positions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import final

import numpy as np
import torch
from torch import Tensor

from convexformer.data.files import read_arrays

TEST_SHARE = 0.2
VALIDATION_SHARE = 0.125
HEAD_WIDTHS = (32, 64)  # of BERT-like models; the one that reproduces X_out is taken


@final
@dataclass(frozen=True)
class Part:
    """Some samples: tokens ``X: (N, s, d)``, targets ``Y: (N, s, c)``, ``mask: (N, s)``."""

    X: Tensor
    Y: Tensor
    mask: Tensor

    def to(self, device: torch.device, dtype: torch.dtype) -> Part:
        """Move to a device."""
        return Part(self.X.to(device, dtype), self.Y.to(device, dtype), self.mask.to(device))

    def r_squared(self, outputs: Tensor) -> float:
        """Return one minus the share of the targets that outputs ``(N, s, c)`` miss, over real tokens."""
        Y = self.Y[self.mask].double()
        missed = (outputs[self.mask].double() - Y).square().sum()
        return 1 - float(missed / Y.square().sum())


@final
@dataclass(frozen=True)
class Lesson:
    """What students are trained, validated and tested on, and the teacher's mean attention map on the test samples."""

    name: str
    target: str
    train: Part
    validation: Part
    test: Part
    teacher_map: Tensor
    """``(s, s)``, the mean over heads and test samples; rows sum to one."""
    n_heads: int

    def to(self, device: torch.device, dtype: torch.dtype) -> Lesson:
        """Move to a device."""
        parts = {name: getattr(self, name).to(device, dtype) for name in ("train", "validation", "test")}
        return replace(self, teacher_map=self.teacher_map.to(device), **parts)

    @property
    def sizes(self) -> dict[str, int]:
        """N, s, d and c."""
        N, s, d = self.train.X.shape
        return {"N": N, "s": s, "d": d, "c": self.train.Y.shape[2]}

    def first_token(self) -> dict[str, float]:
        """Return the share of the teacher's attention that goes to the first token, and how much that token varies."""
        x = self.train.X[:, 0].double()
        varies = float((x - x.mean(0)).square().sum() / x.square().sum())
        return {"attention": float(self.teacher_map[:, 0].mean()), "variance_share": varies}


def load(file: Path | None, *, quick: bool = False) -> Lesson:
    """Read a file of activations, or make the synthetic layer; ``quick`` keeps few samples and channels of a file."""
    if file is None:
        return synthetic()
    arrays = read_arrays(file)
    if "X_in_train" in arrays:
        lesson = _of_layer(arrays, file)
    elif {"X_in", "X_out", "attention", "mask"} <= arrays.keys():
        lesson = _of_activations(arrays, file)
    else:
        raise ValueError(
            f"{file} holds {', '.join(sorted(arrays))}; expected X_in, X_out, attention and mask (safetensors), or "
            "X_in_train, X_in_test, mask_train, mask_test and the layer's weights W__attention.* (npz)."
        )
    return _few(lesson) if quick else lesson


def synthetic(N: int = 240, s: int = 8, d: int = 12, c: int = 6, seed: int = 0) -> Lesson:
    """Return a layer of two heads: one looks one token back, one at the first token, both more or less, by the token.

    Tokens are Gaussian with a one-hot position in their first ``s`` channels.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    X = 0.7 * draw(N, s, d)
    X[:, :, :s] += 2 * torch.eye(s, dtype=torch.float64)[None]
    previous = torch.eye(s, dtype=torch.float64).roll(-1, 1)
    first = torch.zeros(s, s, dtype=torch.float64)
    first[:, 0] = 1.0
    scores = torch.stack([X[:, :, :s] @ back @ X[:, :, :s].mT for back in (previous.T, first)], 1)
    attention = (0.8 * scores).softmax(-1)  # (N, 2, s, s)
    values = draw(2, d, c) / math.sqrt(d)
    Y = torch.einsum("nhrk,nkd,hdc->nrc", attention, X, values)
    mask = torch.ones(N, s, dtype=torch.bool)
    return _lesson("synthetic layer", "its attention output", X, Y, mask, attention, round((1 - TEST_SHARE) * N))


def attention_layer(X: Tensor, mask: Tensor, weights: dict[str, Tensor], n_heads: int) -> tuple[Tensor, Tensor]:
    """Return the attention ``(N, h, s, s)`` of a BERT layer and the output ``(N, s, d)`` of its attention block."""
    N, s, d = X.shape

    def linear(name: str, inputs: Tensor) -> Tensor:
        return inputs @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    q, k, v = (
        linear(f"attention.self.{name}", X).view(N, s, n_heads, -1).transpose(1, 2)
        for name in ("query", "key", "value")
    )
    scores = (q @ k.mT / math.sqrt(d // n_heads)).masked_fill(~mask[:, None, None, :], -math.inf)
    attention = scores.softmax(-1)
    return attention, linear("attention.output.dense", (attention @ v).transpose(1, 2).reshape(N, s, d))


def mean_map(attention: Tensor, mask: Tensor) -> Tensor:
    """``(s, s)`` the mean of attention ``(N, h, s, s)`` over heads and samples whose token r is real; rows sum to one."""
    real = mask.to(attention.dtype)
    total = torch.einsum("nrk,nr->rk", attention.mean(1), real)
    return total / total.sum(1, keepdim=True).clamp_min(torch.finfo(total.dtype).tiny)


def _of_layer(arrays: dict[str, np.ndarray], file: Path) -> Lesson:
    weights = {
        name[3:]: torch.from_numpy(values.astype(np.float64)) for name, values in arrays.items() if name[:3] == "W__"
    }
    X = torch.from_numpy(np.concatenate([arrays["X_in_train"], arrays["X_in_test"]]).astype(np.float64))
    mask = torch.from_numpy(np.concatenate([arrays["mask_train"], arrays["mask_test"]]).astype(bool))
    n_heads = int(arrays["n_heads"]) if "n_heads" in arrays else _count_heads(X, mask, weights, arrays)
    attention, Y = attention_layer(X, mask, weights, n_heads)
    name = "the attention output before the residual connection"
    return _lesson(file.name, name, X, Y, mask, attention, len(arrays["X_in_train"]))


def _of_activations(arrays: dict[str, np.ndarray], file: Path) -> Lesson:
    X, Y, attention = (torch.from_numpy(arrays[name].astype(np.float64)) for name in ("X_in", "X_out", "attention"))
    mask = torch.from_numpy(arrays["mask"].astype(bool))
    order = torch.randperm(len(X), generator=torch.Generator().manual_seed(0))
    X, Y, attention, mask = (each[order] for each in (X, Y, attention, mask))
    return _lesson(file.name, "the output of the layer", X, Y, mask, attention, round((1 - TEST_SHARE) * len(X)))


def _lesson(name: str, target: str, X: Tensor, Y: Tensor, mask: Tensor, attention: Tensor, n_train: int) -> Lesson:
    """Split; scale tokens and targets to mean square one, and subtract the training mean of the targets."""
    X = X * mask[..., None]
    n_fit = n_train - max(1, round(VALIDATION_SHARE * n_train))
    fit = mask[:n_fit]
    Y = Y - Y[:n_fit][fit].mean(0)
    X, Y = X / X[:n_fit][fit].square().mean().sqrt(), Y / Y[:n_fit][fit].square().mean().sqrt()
    spans = (slice(0, n_fit), slice(n_fit, n_train), slice(n_train, None))
    train, validation, test = (Part(X[span], Y[span], mask[span]) for span in spans)
    return Lesson(
        name, target, train, validation, test, mean_map(attention[n_train:], mask[n_train:]), attention.shape[1]
    )


def _few(lesson: Lesson, n: int = 128, tokens: int = 10, channels: int = 16, outputs: int = 8) -> Lesson:
    """Keep some samples, the first tokens, the leading principal channels of the tokens and the first outputs."""
    _, _, V = torch.linalg.svd(lesson.train.X[lesson.train.mask], full_matrices=False)
    basis = V[:channels].T

    def cut(part: Part, most: int) -> Part:
        X = part.X[:most, :tokens] @ basis
        return Part(X, part.Y[:most, :tokens, :outputs], part.mask[:most, :tokens])

    shown = lesson.teacher_map[:tokens, :tokens]
    return replace(
        lesson,
        name=f"{lesson.name} (first {tokens} tokens, {channels} channels, {outputs} outputs)",
        train=cut(lesson.train, n),
        validation=cut(lesson.validation, n // 4),
        test=cut(lesson.test, n // 2),
        teacher_map=shown / shown.sum(1, keepdim=True),
    )


def _count_heads(X: Tensor, mask: Tensor, weights: dict[str, Tensor], arrays: dict[str, np.ndarray]) -> int:
    """Return the number of heads with which the layer reproduces its stored outputs."""
    if "X_out_train" not in arrays:
        raise ValueError(
            "the file has neither n_heads nor X_out_train, so the number of heads is unknown; add n_heads."
        )
    some, d = slice(0, 4), X.shape[2]
    expected = torch.from_numpy(arrays["X_out_train"][some].astype(np.float64))
    errors = {}
    for width in (width for width in HEAD_WIDTHS if d % width == 0):
        _, Y = attention_layer(X[some], mask[some], weights, d // width)
        found = _rest_of_layer(X[some], Y, weights)
        errors[d // width] = float((found - expected)[mask[some]].norm() / expected[mask[some]].norm())
    best = min(errors, key=lambda heads: errors[heads])
    if errors[best] > 0.01:
        raise ValueError(f"the weights do not reproduce X_out_train (relative errors by number of heads: {errors}).")
    return best


def _rest_of_layer(X: Tensor, Y: Tensor, weights: dict[str, Tensor]) -> Tensor:
    """What a BERT layer makes of its attention output: residual connections, LayerNorm, and the feed-forward block."""

    def norm(name: str, inputs: Tensor) -> Tensor:
        return torch.nn.functional.layer_norm(
            inputs, inputs.shape[-1:], weights[f"{name}.weight"], weights[f"{name}.bias"], 1e-12
        )

    middle = norm("attention.output.LayerNorm", X + Y)
    wide = torch.nn.functional.gelu(
        middle @ weights["intermediate.dense.weight"].T + weights["intermediate.dense.bias"]
    )
    out = wide @ weights["output.dense.weight"].T + weights["output.dense.bias"]
    return norm("output.LayerNorm", middle + out)

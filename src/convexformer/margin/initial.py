"""Where a flow starts: a scale, or the weights themselves; one start or a batch of them."""

from __future__ import annotations

import numbers
from typing import Any

import torch
from torch import Tensor

from convexformer.data.tokens import as_tensor, check_finite
from convexformer.margin.data import Sequences
from convexformer.margin.parametrizations import (
    ROOT2,
    Combined,
    Diagonal,
    Parametrization,
    Reparametrized,
    Separate,
)
from convexformer.registry import one_of

SCALES = {"separate": 1e-2, "combined": 0.0, "diagonal": 1.0, "reparametrized": 1.0}
"""Default scales. Keys and queries start small and random; a combined matrix may start at zero; diagonals as in (5)."""


def start(
    data: Sequences, parametrization: str, init: Any, n_init: int | None, width: int | None, seed: int
) -> Parametrization:
    """Build the parametrization ``parametrization`` at ``init``.

    A number is a scale: Gaussian entries of that standard deviation (separate, combined), or ``w0`` of equation (5),
    ``k = sqrt(2) w0, q = 0`` (diagonal; random around the scale in a batch). Otherwise the weights: ``(K, Q)``, ``W``,
    ``(k, q)`` or ``(plus, minus)``, each with a leading axis for a batch.
    """
    name = one_of("parametrization", parametrization, SCALES)
    if init is None:
        init = SCALES[name]
    if n_init is not None and (not isinstance(n_init, numbers.Integral) or n_init < 1):
        raise ValueError(f"n_init={n_init} was given; expected a positive number of random initialisations, or None.")
    d = data.shape[2]
    if isinstance(init, numbers.Real):
        pair = _random(data, name, float(init), n_init, width or d, seed)
    else:
        if n_init is not None:
            raise ValueError(
                "n_init draws random starts; with the weights themselves in init give them a leading axis."
            )
        pair = _given(data, name, init)
    if name == "separate":
        _check_nonzero(pair, "K and Q")
        return Separate(data, *pair)
    if name == "combined":
        return Combined(data, pair[0])
    _check_nonzero(pair, "the two diagonals")
    return Diagonal(data, *pair) if name == "diagonal" else Reparametrized(data, *pair)


def aligned_init(X: Any, z: Any, y: Any, v: Any, *, scale: float = 0.3, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return ``(K, Q)`` aligned with the data (definition 5.1) that satisfy equation (5).

    ``K = U_K sqrt(2) scale V^T`` and ``Q = 0``; ``U_K`` holds the optimal tokens' directions and a completion, ``V`` is a
    random rotation. With ``Q = 0`` any ``U_Q`` fits, that of the queries too. The data should satisfy assumption 4.
    """
    data = Sequences.of(X, z, y, v)
    n, _, d = data.shape
    rows = torch.arange(n, device=data.X.device)
    tokens = torch.nn.functional.normalize(data.X[rows, data.optimal], dim=1)
    overlap = float((tokens @ tokens.mT - torch.eye(n, dtype=tokens.dtype, device=tokens.device)).abs().max())
    if n > d or overlap > 1e-6:
        raise ValueError(
            f"the optimal tokens overlap (largest cosine {overlap:.2g}); alignment needs them orthogonal (assumption 4). "
            'Use sample_data(kind="aligned"), or start from random keys and queries.'
        )
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn((d, d), generator=generator, dtype=torch.float64)
    complete = torch.linalg.qr(torch.cat([tokens.mT.cpu(), noise[:, n:]], 1)).Q
    rotation = torch.linalg.qr(torch.randn((d, d), generator=generator, dtype=torch.float64)).Q
    K = ROOT2 * scale * complete @ rotation.mT
    return K, torch.zeros_like(K)


def _random(data: Sequences, name: str, scale: float, n_init: int | None, width: int, seed: int) -> tuple[Tensor, ...]:
    d, R = data.shape[2], n_init or 1
    if scale < 0 or (scale == 0 and name != "combined"):
        raise ValueError(
            f"init={scale} was given as a scale; expected a positive number: the flow stays at zero weights."
        )
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(data.X)

    if name == "separate":
        return scale * normal(R, d, width), scale * normal(R, d, width)
    if name == "combined":
        return (scale * normal(R, d, d),)
    w0 = data.X.new_full((R, d), scale) if n_init is None else scale * torch.exp(0.5 * normal(R, d))
    return (ROOT2 * w0, torch.zeros_like(w0)) if name == "diagonal" else (w0, w0.clone())


def _given(data: Sequences, name: str, init: Any) -> tuple[Tensor, ...]:
    d = data.shape[2]
    single = name == "combined"
    if not single and not (isinstance(init, (tuple, list)) and len(init) == 2):
        pair = {"separate": "(K, Q)", "diagonal": "(k, q)", "reparametrized": "(plus, minus)"}[name]
        raise ValueError(f"init is a {type(init).__name__}; expected a scale or the pair {pair} for {name!r}.")
    tensors = []
    for part in (init,) if single else init:
        tensor = as_tensor(part, "init").to(data.X)
        check_finite(tensor, "init")
        axes = 1 if name in ("diagonal", "reparametrized") else 2
        if tensor.ndim == axes:
            tensor = tensor[None]
        rows = tensor.shape[1] if tensor.ndim == axes + 1 else -1
        if rows != d or (single and tensor.shape[2] != d):
            wanted = {1: "(d,)", 2: "(d, d)" if single else "(d, d_e)"}[axes]
            raise ValueError(
                f"init holds an array of shape {tuple(tensor.shape)}; expected {wanted} with d={d}, or a batch of them."
            )
        tensors.append(tensor.clone())
    if len({tuple(tensor.shape) for tensor in tensors}) > 1:
        raise ValueError(f"the two arrays of init differ in shape: {[tuple(t.shape) for t in tensors]}.")
    return tuple(tensors)


def _check_nonzero(pair: tuple[Tensor, ...], what: str) -> None:
    size = sum(part.abs().flatten(1).sum(1) for part in pair)
    if not bool((torch.as_tensor(size) > 0).all()):
        raise ValueError(
            f"{what} are both zero in init: a stationary point, the flow never leaves it. Use a small scale."
        )

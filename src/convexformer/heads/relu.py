"""Exact ReLU heads: from tokens to hidden rows, one function for each architecture, and the program on them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from convexformer.arrangements import Arrangement
from convexformer.data import TokenDataset
from convexformer.gauges import ReLUNorm
from convexformer.heads.base import Layout, Program
from convexformer.operators import HiddenLayer, Neurons, ReLUOperator
from convexformer.weights import Weights

MAX_NUMBERS = 1 << 27  # entries of hidden rows: 1 GiB in float64


def relu_operator(layers: Sequence[HiddenLayer], tokens: TokenDataset, layout: Layout) -> ReLUOperator:
    """Return the operator of these hidden layers."""
    n_rows = len(tokens.real_tokens) if layout.per_token else tokens.n_samples
    return ReLUOperator(layers, n_rows, layout.n_outputs)


def relu_program(layers: Sequence[HiddenLayer], tokens: TokenDataset, layout: Layout, outer: str, seed: int) -> Program:
    """``min sum_i L(sum_j relu(rows u_j) v_j^T, Y_i) + beta sum_j |u_j| |v_j|``: operator and gauge on training tokens."""
    operator = relu_operator(layers, tokens, layout)
    arrangements = [Arrangement(np.asarray(rows.detach().cpu().double())) for rows in operator.hidden_rows()]
    return Program(operator, ReLUNorm(arrangements, outer, seed=seed))


def as_neurons(weights: Weights) -> Neurons:
    """Return the neurons that weights are."""
    Z = weights.Z
    if not isinstance(Z, Neurons):
        raise TypeError(f"weights of shape {weights.shape} are no neurons; those of a head with activation='relu' are.")
    return Neurons(Z.U, Z.V, Z.block, Z.shape)


def balanced_neurons(weights: Weights, outer: str = "l2") -> Neurons:
    """Return neurons whose factors have equal norms, so that weight decay is the gauge."""
    Z = as_neurons(weights)
    return Z.balanced(Z.V.norm(dim=1) if outer == "l2" else Z.V.abs().sum(1))


# ---------------------------------------------------------------------- hidden rows


def token_layer(tokens: TokenDataset, layout: Layout) -> HiddenLayer:
    """Real tokens (mixed ones, for PoolFormer and FNet) as hidden rows."""
    rows = tokens.real_tokens
    return HiddenLayer(rows, None, *_to_outputs(_sample_of_token(tokens), tokens, layout), slice(None))


def position_layers(tokens: TokenDataset, layout: Layout) -> list[HiddenLayer]:
    """One block for each token position: its token in every sample."""
    every = torch.arange(tokens.n_samples, device=tokens.X.device)
    return [HiddenLayer(tokens.X[:, k], None, every, None, slice(None)) for k in range(layout.n_tokens)]


def shift_layers(tokens: TokenDataset, layout: Layout, grid: tuple[int, ...], blocks: int) -> list[HiddenLayer]:
    """``circ(X)`` of each block of channels: row ``(i, o)`` holds ``X_i[o - u]`` for every shift u, column ``u d/B + a``."""
    (N, s, d), c = tokens.X.shape, layout.n_outputs
    _check_size(N * s * s * d, "FNO")
    field = tokens.X.view(N, *grid, d)
    axes = tuple(range(1, 1 + len(grid)))
    shifts = [torch.unravel_index(torch.tensor(u), grid) for u in range(s)]
    rolled = torch.stack([torch.roll(field, tuple(int(k) for k in u), axes).reshape(N, s, d) for u in shifts], 2)
    output, weight = _to_outputs(_sample_of_token(tokens), tokens, layout)
    db, cb = d // blocks, c // blocks
    return [
        HiddenLayer(
            rolled[..., b * db : (b + 1) * db].reshape(N * s, s * db), None, output, weight, slice(b * cb, (b + 1) * cb)
        )
        for b in range(blocks)
    ]


def mixer_layer(tokens: TokenDataset, layout: Layout) -> HiddenLayer:
    """Row ``(i, o, a)`` takes ``W1[o] X_i[:, a]``; columns are ``vec_F(W1)``, ``t s + o``."""
    N, s, d = tokens.X.shape
    _check_size(N * s * d * s * s, "mixer")
    rows = tokens.X.new_zeros((N, s, d, s, s))  # (i, o, a, t, o')
    each = torch.arange(s, device=tokens.X.device)
    rows[:, each, :, :, each] = tokens.X.transpose(1, 2)
    channel = torch.eye(d, dtype=tokens.X.dtype, device=tokens.X.device).repeat(N * s, 1)
    token = torch.arange(N * s, device=tokens.X.device).repeat_interleave(d)
    output, weight = _to_outputs(token // s, tokens, layout, token)
    return HiddenLayer(rows.reshape(N * s * d, s * s), channel, output, weight, slice(None))


def pair_layer(tokens: TokenDataset, layout: Layout) -> HiddenLayer:
    """Row ``(i, o, t)`` takes ``x_o^T W1 x_t``; columns are ``vec_F(W1)``, ``e d + a`` for the entry ``(a, e)``."""
    N, s, d = tokens.X.shape
    _check_size(N * s * s * d * d, "self-attention")
    X = tokens.X
    rows = torch.einsum("noa,nte->notea", X, X).reshape(N, s, s, d * d)
    values = X[:, None].expand(N, s, s, d)
    token = torch.arange(N * s, device=X.device).view(N, s, 1).expand(N, s, s)
    if tokens.mask is not None:
        pairs = tokens.mask[:, :, None] & tokens.mask[:, None, :]
        rows, values = rows[pairs], values[pairs]
        number = tokens.mask.flatten().cumsum(0) - 1  # the row of each real token
        sample, place = token[pairs] // s, number[token[pairs]]
    else:
        rows, values, place = rows.reshape(-1, d * d), values.reshape(-1, d), token.flatten()
        sample = place // s
    output, weight = _to_outputs(sample, tokens, layout, place)
    return HiddenLayer(rows, values.contiguous(), output, weight, slice(None))


def _sample_of_token(tokens: TokenDataset) -> Tensor:
    """``(real tokens,)`` the sample of each."""
    N, s = tokens.X.shape[:2]
    samples = torch.arange(N, device=tokens.X.device)[:, None].expand(N, s)
    return samples.flatten() if tokens.mask is None else samples[tokens.mask]


def _to_outputs(
    sample: Tensor, tokens: TokenDataset, layout: Layout, token: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Return the output row of each hidden row, and its pooling weight: ``1 / length`` where outputs are pooled."""
    if layout.per_token:
        return (torch.arange(len(sample), device=sample.device) if token is None else token), None
    return sample, 1.0 / tokens.lengths.to(tokens.X.dtype)[sample]


def _check_size(numbers: int, head: str) -> None:
    if numbers > MAX_NUMBERS:
        raise ValueError(
            f"exact ReLU on this {head} head forms {numbers:,} numbers of hidden rows, more than {MAX_NUMBERS:,}. Use "
            "activation='gated_relu', whose solution convexformer.relu.from_gated turns into a ReLU network, or fewer "
            "samples, tokens or channels."
        )

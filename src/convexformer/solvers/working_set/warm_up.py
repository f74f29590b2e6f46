"""Compile the loops of block descent before they are needed, on two samples of one token."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch

from convexformer.jit import Kernels
from convexformer.operators import TokenFeatures
from convexformer.solvers.working_set import compiled
from convexformer.solvers.working_set.newton import GroupModel, newton_step
from convexformer.solvers.working_set.options import NewtonOptions
from convexformer.solvers.working_set.store import BlockStore
from convexformer.solvers.working_set.token_sweep import token_gradients, token_sweep


def kernels(quadratic: bool) -> Kernels:
    """Return what compiles the sweeps of a quadratic loss, or those of others."""
    return {f"working sets{', squared loss' if quadratic else ''}": partial(_compile_all, quadratic)}


def _compile_all(quadratic: bool) -> None:
    features = torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]], dtype=torch.float64)  # (N, s, d) = (2, 1, 2)
    store = BlockStore(TokenFeatures(features, None), torch.ones(2, dtype=torch.float64), 2, True)
    groups, starts = np.arange(2), np.array([0, 2])
    store.load(np.zeros(1, int))
    Z, correction, R, G = np.zeros((4, 2, 2))
    compiled.gradients(groups, store.index, store.data, R, G)
    token_gradients(groups, starts, store.index, store.X, store.gates, store.gated, R, G)
    if quadratic:
        compiled.sweep(groups, store.index, store.data, store.spectra, 1.0, Z, correction, R)
    H, own, D, scales = np.full((2, 2), 0.5), np.full((2, 2), 0.25), np.zeros((2, 2)), np.ones(2)
    model: tuple[Any, ...] = (1.0, Z, correction, R, H, own, not quadratic, scales, 1.0, D)
    token_sweep(groups, starts, store.index, store.data, store.gates, store.gated, store.spectra, *model)
    if not quadratic:
        compiled.prox_newton_sweep(groups, store.index, store.data, store.spectra, *model)
    for gates in (None, torch.ones((2, 1), dtype=torch.bool)):  # only slices with gates are turned
        store = BlockStore(TokenFeatures(features, gates), torch.ones(2, dtype=torch.float64), 2, True)
        store.load(np.zeros(1, int))
        support = store.support(groups)
        ones, zero, H = np.ones((2, 2)), np.zeros(2), np.full((2, 2), 0.5, np.float32)
        near = GroupModel(support, H, not quadratic, ones[:, :1], zero, (ones, zero), lambda U: 0.0, 0 * ones, 1.0)
        newton_step(near, ones, 1.0, 2, NewtonOptions(), lambda: False)

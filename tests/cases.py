"""Tables of what the library has. A new loss, gauge, operator or head gets a row here and inherits every check."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

import convexformer as cf
from convexformer.gauges import FrobeniusNorm, Gauge, GroupNorm, L1Norm, NuclearNorm
from convexformer.heads.base import Head, Layout
from convexformer.losses import CrossEntropy, Huber, Logistic, Loss, Squared, SquaredHinge
from convexformer.networks import LinearNetwork
from convexformer.networks.base import Network
from convexformer.operators import DenseOperator, GatedOperator, KernelOperator, Operator
from convexformer.operators.row_space import RowSpaceOperator

Rng = np.random.Generator

# ---------------------------------------------------------------------- losses, and targets for them


def real(rng: Rng, n: int, c: int = 1) -> np.ndarray:
    return 2 * rng.standard_normal(n if c == 1 else (n, c))


def signs(rng: Rng, n: int, c: int = 1) -> np.ndarray:
    """-1 and +1, both of them there."""
    return np.concatenate([[-1.0, 1.0], rng.choice([-1.0, 1.0], n - 2)])


def labels(rng: Rng, n: int, c: int = 3) -> np.ndarray:
    """Integers 0..c-1, all of them there when n >= c."""
    return np.concatenate([np.arange(c), rng.integers(0, c, max(n - c, 0))])[:n]


def probabilities(rng: Rng, n: int, c: int = 3) -> np.ndarray:
    return rng.dirichlet(np.ones(c), n)


@dataclass(frozen=True)
class LossCase:
    """``targets(rng, n)`` as a user would pass them."""

    loss: Loss
    targets: Callable[[Rng, int], np.ndarray]


LOSSES: dict[str, LossCase] = {
    "squared": LossCase(Squared(), real),
    "squared, 2 outputs": LossCase(Squared(), lambda rng, n: real(rng, n, 2)),
    "huber": LossCase(Huber(), real),
    "huber(0.3), 2 outputs": LossCase(Huber(0.3), lambda rng, n: real(rng, n, 2)),
    "logistic": LossCase(Logistic(), signs),
    "squared_hinge": LossCase(SquaredHinge(), signs),
    "cross_entropy": LossCase(CrossEntropy(), labels),
    "cross_entropy, probabilities": LossCase(CrossEntropy(), probabilities),
}

# ---------------------------------------------------------------------- gauges, for weights (..., d, c)

GAUGES: dict[str, Gauge] = {
    "group per token and class": GroupNorm("class_token"),
    "group per token": GroupNorm("token"),
    "nuclear": NuclearNorm(),
    "nuclear, scaled": NuclearNorm(scale=0.4),
    "frobenius": FrobeniusNorm(),
    "l1": L1Norm(),
}

# ---------------------------------------------------------------------- operators


def tensor(rng: Rng, *shape: int) -> torch.Tensor:
    return torch.from_numpy(rng.standard_normal(shape))


OPERATORS: dict[str, Callable[[Rng, int, int, int, int], Operator]] = {
    "dense": lambda rng, R, s, d, c: DenseOperator(tensor(rng, R, d), (d,), c),
    "row spaces": lambda rng, R, s, d, c: RowSpaceOperator(tensor(rng, R, s, 2, d), c),
    "dense, two axes": lambda rng, R, s, d, c: DenseOperator(tensor(rng, R, s * d), (s, d), c),
    "gated": lambda rng, R, s, d, c: GatedOperator(tensor(rng, R, d), tensor(rng, R, 4) >= 0, (d,), c),
    "gated, two axes": lambda rng, R, s, d, c: GatedOperator(tensor(rng, R, s * d), tensor(rng, R, 3) >= 0, (s, d), c),
    "kernel": lambda rng, R, s, d, c: KernelOperator((phi := tensor(rng, R, d)) @ phi.T, c, trains=True),
    "kernel, other samples": lambda rng, R, s, d, c: KernelOperator(tensor(rng, R, s), c, trains=False),
}

# ---------------------------------------------------------------------- heads


@dataclass(frozen=True)
class HeadCase:
    """A head with gates of its own.

    ``gates(rng, s, d)`` draws them (None for a linear head), ``build(gates)`` makes the head, ``network(head)`` returns
    the function that draws its random networks; ``model``, ``penalty`` and ``extra`` name the formula in ``reference.py``.
    """

    model: str
    penalty: str
    build: Callable[[Any], Head]
    gates: Callable[[Rng, int, int], Any] = lambda rng, s, d: None
    per_token: bool = False
    masks: bool = True
    extra: dict[str, Any] = field(default_factory=dict)

    def network(self, head: Head) -> Callable[[Layout, int], Network]:
        return random_linear if self.model == "linear" else lambda layout, seed: head.random_network(layout, 6, seed)


def random_linear(layout: Layout, seed: int) -> LinearNetwork:
    return LinearNetwork(tensor(np.random.default_rng(seed), layout.width, layout.n_outputs), squeeze=layout.squeeze)


def pair_of_gates(rng: Rng, s: int, d: int, g: int = 3) -> tuple[np.ndarray, np.ndarray]:
    return rng.standard_normal((g, s)), rng.standard_normal((g, d))


def token_gate(rng: Rng, s: int, d: int, g: int = 3) -> np.ndarray:
    return rng.standard_normal((g, d))


def gated_attention(decay: str) -> Callable[[Any], Head]:
    return lambda gates: cf.heads.Attention("gated_relu", decay, gates=gates)


def gated_mlp(gates: Any) -> Head:
    return cf.heads.MLP("gated_relu", gates=gates)


HEADS: dict[str, HeadCase] = {
    "attention l1": HeadCase("attention", "group", lambda _: cf.heads.Attention("linear", "l1")),
    "attention l2": HeadCase("attention", "nuclear", lambda _: cf.heads.Attention("linear", "l2")),
    "gated attention l1": HeadCase("attention", "group", gated_attention("l1"), pair_of_gates),
    "gated attention l2": HeadCase("attention", "nuclear", gated_attention("l2"), pair_of_gates),
    "mlp": HeadCase("mlp", "nuclear", lambda _: cf.heads.MLP()),
    "gated mlp": HeadCase("mlp", "nuclear", gated_mlp, token_gate),
    "mlp per token": HeadCase("mlp", "nuclear", lambda _: cf.heads.MLP(), per_token=True),
    "gated mlp per token": HeadCase("mlp", "nuclear", gated_mlp, token_gate, per_token=True),
    "linear": HeadCase("linear", "ridge", lambda _: cf.heads.Linear()),
}

# the heads below are for tokens (s, d) = (4, 2) and an even number of outputs: blocks and grids must divide


def gated(make: Callable[..., Head], **extra: Any) -> Callable[[Any], Head]:
    return lambda gates: make("gated_relu", gates=gates, **extra)


def linear(make: Callable[..., Head], **extra: Any) -> Callable[[Any], Head]:
    return lambda _: make("linear", **extra)


def shape(*axes: str | int) -> Callable[[Rng, int, int], np.ndarray]:
    """Gates of a shape with "s" and "d" in it."""
    return lambda rng, s, d: rng.standard_normal([{"s": s, "d": d, "d/2": d // 2}.get(axis, axis) for axis in axes])


NUCLEAR: list[tuple[Callable[..., Head], Callable[[Rng, int, int], Any], bool, dict[str, Any]]] = [
    (cf.heads.SelfAttention, shape(2, "d", "d"), True, {}),
    (cf.heads.MLPMixer, shape(2, "s", "s"), False, {}),
    (cf.heads.FNO, shape(2, "s", "d"), False, {}),
    (cf.heads.FNO, shape(2, "s", "d"), False, {"grid": (2, 2)}),
    (cf.heads.BlockFNO, shape(2, 2, "s", "d/2"), False, {"blocks": 2}),
    (cf.heads.PoolFormer, shape(2, "d"), True, {"window": 3}),
    (cf.heads.PoolFormer, shape(2, "d"), True, {"window": 3, "grid": (2, 2)}),
    (cf.heads.FNet, shape(2, "d"), False, {}),
]

MORE_HEADS: dict[str, HeadCase] = {
    "sum": HeadCase("sum", "several", lambda _: cf.heads.Sum(["attention", "mlp"])),
    "block self-attention": HeadCase(
        "block_self_attention", "several", lambda _: cf.heads.BlockSelfAttention([[1], [0]])
    ),
}
for make, gates, masks, extra in NUCLEAR:
    name = " ".join([make.name, *("on a grid" for key in extra if key == "grid")])
    pooled = HeadCase(make.name, "nuclear", linear(make, **extra), masks=masks, extra=extra)
    MORE_HEADS[name] = pooled
    MORE_HEADS[f"gated {name}"] = replace(pooled, build=gated(make, **extra), gates=gates)
    for key in (name, f"gated {name}"):
        MORE_HEADS[f"{key} per token"] = replace(MORE_HEADS[key], per_token=True)

ALL_HEADS = {**HEADS, **MORE_HEADS}
EVEN_LOSSES = {
    "squared, 2 outputs": LOSSES["squared, 2 outputs"],
    "cross_entropy, 2 classes": LossCase(CrossEntropy(), lambda rng, n: labels(rng, n, 2)),
}

# ---------------------------------------------------------------------- data for a head and a loss

OPTIONS = ("plain", "intercept", "weights", "mask", "all")


@dataclass(frozen=True)
class Data:
    """Tokens, targets and options of one random problem, in NumPy."""

    X: np.ndarray
    Y: np.ndarray
    options: dict[str, Any]
    gates: Any


def random_mask(rng: Rng, n: int, s: int) -> np.ndarray:
    """About a third of the tokens masked, at least one real a sample."""
    mask = rng.random((n, s)) > 0.35
    mask[np.arange(n), rng.integers(0, s, n)] = True
    return mask


def random_data(head: HeadCase, loss: LossCase, option: str, rng: Rng, n: int = 9, s: int = 3, d: int = 3) -> Data:
    """Draw a problem; ``option`` is one of ``OPTIONS``. Masked tokens and their targets hold junk, which must not matter."""
    X = rng.standard_normal((n, s, d))
    options: dict[str, Any] = {"loss": loss.loss, "intercept": option in ("intercept", "all")}
    if option in ("weights", "all"):
        options["sample_weight"] = rng.uniform(0.2, 3.0, n)
    mask = np.ones((n, s), dtype=bool)
    if option in ("mask", "all"):
        options["mask"] = mask = random_mask(rng, n, s)
        X[~mask] = np.nan
    Y = per_token(loss.targets(rng, int(mask.sum())), mask) if head.per_token else loss.targets(rng, n)
    return Data(X, Y, options, head.gates(rng, s, d))


def per_token(rows: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Targets of the real tokens on the grid: ``(N, s)`` for labels, ``(N, s, c)`` otherwise."""
    if rows.dtype.kind == "i":
        grid = np.full(mask.shape, 10**9)
    else:
        rows = rows.reshape(len(rows), -1)
        grid = np.full((*mask.shape, rows.shape[1]), np.nan)
    grid[mask] = rows
    return grid

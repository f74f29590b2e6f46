"""Draws the pictures of the pages of the heads: `python docs/make_head_pictures.py` writes docs/images/head_*.png.

Two panels show which tokens each output reads, at two samples: the size of the change of output o when token t changes,
for a random network of the head. The third is the optimum of a small problem whose targets a network of two heads of the
same kind has made, with noise: the groups or singular values that the penalty adds up.
"""

from pathlib import Path

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import convexformer as cf
from convexformer import heads
from convexformer.data import TokenDataset
from convexformer.heads.base import Layout

IMAGES = Path(__file__).parent / "images"
N, S, D, C = 80, 16, 6, 4  # samples, tokens (4 x 4 where a grid matters), channels, outputs
STEP = 1e-4  # of the difference quotients
BETA_RATIO = 0.1
GRID = (4, 4)

PICTURES: dict[str, heads.Head] = {
    "attention": heads.Attention(),
    "self_attention": heads.SelfAttention(),
    "mlp_mixer": heads.MLPMixer(),
    "fno": heads.FNO(),
    "block_fno": heads.BlockFNO(blocks=2),
    "poolformer": heads.PoolFormer(window=3, grid=GRID),
    "fnet": heads.FNet(),
    "mlp": heads.MLP(activation="gated_relu", gates=4),
    "linear": heads.Linear(),
}
MAPS = {
    "mean": cf.features.MeanPooling(),
    "flattened": cf.features.Flatten(),
    "covariance": cf.features.CovariancePooling(),
    "queries": cf.features.SoftmaxQueries(n_queries=4),
}


def reads(function, X: torch.Tensor) -> np.ndarray:
    """``(o, s)`` the size of the change of each output row when one token changes, on the average over directions."""
    base = function(X[None])[0]
    base = base[None] if base.ndim == 1 else base
    sizes = []
    for t in range(X.shape[0]):
        change = 0.0
        for a in range(X.shape[1]):
            moved = X.clone()
            moved[t, a] += STEP
            change = change + ((function(moved[None])[0].reshape(base.shape) - base) / STEP).square().sum(-1)
        sizes.append(change.sqrt())
    return torch.stack(sizes, 1).detach().numpy()


def show_reads(axis: Axes, sizes: np.ndarray, title: str) -> None:
    axis.imshow(sizes, cmap="Blues", vmin=0, aspect="auto")
    axis.set_title(title, fontsize=9)
    axis.set_xticks(range(0, sizes.shape[1], 5))
    axis.set_xlabel("token t")
    axis.set_ylabel("output o" if len(sizes) > 1 else "")
    axis.set_yticks(range(0, len(sizes), 5) if len(sizes) > 1 else [])


def show_optimum(axis: Axes, head: heads.Head, solution: cf.Solution) -> None:
    Z = solution.dense()
    if isinstance(head, heads.Attention):
        norms = Z.norm(dim=1).T.numpy()  # (c, s)
        axis.imshow(norms, cmap="Oranges", vmin=0, aspect="auto")
        axis.set_title(f"optimum: {np.count_nonzero(norms)} of {norms.size} groups in use", fontsize=9)
        axis.set_xlabel("token")
        axis.set_ylabel("output")
        return
    if isinstance(head, heads.Linear):
        axis.imshow(Z.T.abs().numpy(), cmap="Oranges", vmin=0, aspect="auto")
        axis.set_title("optimum: |Z|, no zeros", fontsize=9)
        axis.set_xlabel("channel")
        axis.set_ylabel("output")
        return
    values = torch.linalg.svdvals(Z.reshape(-1, *Z.shape[-2:]))  # a row for each gate or block
    kept = int((values > 1e-4 * values.max()).sum())
    for k, row in enumerate(values):
        place = np.arange(len(row)) + k * (len(row) + 1)
        axis.bar(place, row.numpy(), color=f"C{k + 1}")
    axis.set_title(f"optimum: {kept} of {values.numel()} singular values", fontsize=9)
    axis.set_xlabel("singular value" + (", by gate or block" if len(values) > 1 else ""))
    axis.spines[["top", "right"]].set_visible(False)


def draw(name: str, head: heads.Head, X: torch.Tensor) -> Path:
    """Draw one head."""
    layout = Layout(S, D, C, per_token=head.per_token and name != "attention")
    teacher = head.random_network(layout, 2 if name != "mlp" else 4, seed=3)
    network = head.random_network(layout, 3, seed=1)
    with torch.no_grad():
        Y = teacher(X)
        Y = Y + 0.1 * Y.std() * torch.randn(Y.shape, generator=torch.Generator().manual_seed(1), dtype=Y.dtype)
        figure = Figure(figsize=(9.6, 2.7), layout="constrained")
        axes = figure.subplots(1, 3)
        show_reads(axes[0], reads(network, X[0]), "which tokens an output reads, sample 1")
        show_reads(axes[1], reads(network, X[1]), "sample 2")
    solution = cf.solve(cf.Problem(head, X, Y, beta_ratio=BETA_RATIO, loss="squared"), tolerance=1e-6)
    show_optimum(axes[2], head, solution)
    file = IMAGES / f"head_{name}.png"
    figure.savefig(file, dpi=110)
    print(f"{name}: relative gap {solution.certificate.relative_gap:.1e}")
    return file


def draw_maps(X: torch.Tensor) -> Path:
    """Draw what the maps of the feature heads read, at two samples."""
    figure = Figure(figsize=(9.6, 3.2), layout="constrained")
    axes = figure.subplots(2, len(MAPS), squeeze=False)
    for column, (name, feature) in enumerate(MAPS.items()):
        fitted = feature.fitted(TokenDataset(X))
        for row in range(2):
            sizes = reads(lambda tokens, map_=fitted: map_.normalised(TokenDataset(tokens)), X[row])
            show_reads(axes[row, column], sizes, f"{name}, sample {row + 1}")
    file = IMAGES / "head_features.png"
    figure.savefig(file, dpi=110)
    return file


def main() -> None:
    X = torch.randn((N, S, D), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for name, head in PICTURES.items():
        draw(name, head, X)
    draw_maps(X)


if __name__ == "__main__":
    main()

"""The unit ball of the nuclear norm constrained to a cone, beside that of the nuclear norm (appendix C.1 of Sahiner et al.).

    python benchmarks/relu_ball.py            # writes docs/relu_ball.html and docs/images/relu_ball.png

``Z = [[z1, z2], [0, z4]]`` and ``K = I``: neurons ``u v^T`` with ``u >= 0``. The norm is ``min_U (tr U + tr Z^T U^-1
Z) / 2`` over completely positive ``U``, which for two rows are the PSD matrices with ``U_12 >= 0``. Without that
constraint the best ``U`` is ``(Z Z^T)^(1/2)``, whose off-diagonal entry has the sign of ``<row 1, row 2>``; so, in
closed form,

    ||Z||_{*,K} = ||Z||_*                    where the rows of Z have a nonnegative inner product,
                  |row 1|_2 + |row 2|_2      elsewhere.

The script checks this against linear programs over atoms and against the polar of ``ConeNuclearNorm`` before it draws.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from scipy.optimize import linprog

from convexformer.gauges import ConeNuclearNorm

DOCS = Path(__file__).parent.parent / "docs"
RINGS, SPOKES = 56, 112  # of the mesh


def nuclear(Z: np.ndarray) -> float:
    return float(np.linalg.svd(Z, compute_uv=False).sum())


def constrained(Z: np.ndarray) -> float:
    """``||Z||_{*,I}`` of a matrix of two rows."""
    return nuclear(Z) if Z[0] @ Z[1] >= 0 else float(np.linalg.norm(Z, axis=1).sum())


def check(rng: np.random.Generator, n: int = 20) -> tuple[float, float]:
    """Return the largest relative distance to an inner approximation by atoms, and the largest violation of the polar."""
    theta, phi = np.meshgrid(np.linspace(0, np.pi / 2, 61), np.linspace(0, 2 * np.pi, 120, endpoint=False))
    u = np.stack([np.cos(theta), np.sin(theta)], -1).reshape(-1, 2)
    v = np.stack([np.cos(phi), np.sin(phi)], -1).reshape(-1, 2)
    atoms = np.einsum("ka,kb->abk", u, v).reshape(4, -1)
    gauge = ConeNuclearNorm(torch.eye(2))
    apart = above = 0.0
    for _ in range(n):
        Z, M = rng.standard_normal((2, 2)), rng.standard_normal((2, 2))
        inner = linprog(np.ones(atoms.shape[1]), A_eq=atoms, b_eq=Z.ravel(), method="highs").fun
        apart = max(apart, abs(inner / constrained(Z) - 1))
        above = max(above, float((M * Z).sum()) / (gauge.polar(torch.from_numpy(M)).value * constrained(Z)) - 1)
    return apart, above


def surface(norm) -> np.ndarray:
    """``(RINGS + 1, SPOKES, 3)`` points ``(z1, z2, z4)`` of norm one."""
    polar, turn = np.linspace(0, np.pi, RINGS + 1), np.linspace(0, 2 * np.pi, SPOKES, endpoint=False)
    polar, turn = np.meshgrid(polar, turn, indexing="ij")
    points = np.stack([np.sin(polar) * np.cos(turn), np.sin(polar) * np.sin(turn), np.cos(polar)], -1)
    sizes = [norm(np.array([[a, b], [0.0, c]])) for a, b, c in points.reshape(-1, 3)]
    return points / np.array(sizes).reshape(*points.shape[:2], 1)


def rank_one() -> list[np.ndarray]:
    """Outlines of the neurons themselves, ``u v^T`` with ``u >= 0`` and ``z3 = 0``: a disc and two quarters of one."""
    t = np.linspace(0, 2 * np.pi, 97)
    quarter = np.r_[0.0, np.linspace(0, np.pi / 2, 25), 0.0]
    size = np.r_[0.0, np.ones(25), 0.0]
    disc = np.stack([np.cos(t), np.sin(t), 0 * t], 1)
    wedge = np.stack([0 * quarter, size * np.cos(quarter), size * np.sin(quarter)], 1)
    return [disc, wedge, -wedge]


def png(meshes: list[np.ndarray], outlines: list[np.ndarray], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 5.2))
    figure.subplots_adjust(left=0.02, right=0.95, bottom=0.02, top=0.92, wspace=0.05)
    titles = ["ReLU: $\\|Z\\|_{*,K} \\leq 1$, $K = I$", "linear, gated: $\\|Z\\|_* \\leq 1$"]
    for k, (mesh, title) in enumerate(zip(meshes, titles, strict=True)):
        axes = figure.add_subplot(1, 2, k + 1, projection="3d")
        closed = np.concatenate([mesh, mesh[:, :1]], 1)
        colour = ("#e8883a", "#5b8fc9")[k]
        axes.plot_surface(*np.moveaxis(closed, -1, 0), color=colour, rstride=1, cstride=1, shade=True, alpha=0.8)
        for line in outlines if k == 0 else ():
            axes.plot(*line.T, color="#1d7a3c", lw=2, zorder=10)
        axes.set(xlabel="$z_1$", ylabel="$z_2$", zlabel="$z_4$", title=title, xlim=(-1, 1), ylim=(-1, 1), zlim=(-1, 1))
        axes.set_box_aspect((1, 1, 1), zoom=0.88)
        axes.view_init(elev=18, azim=-28)
        for axis in (axes.xaxis, axes.yaxis, axes.zaxis):
            axis.set_ticks([-1, 0, 1])
    figure.savefig(path, dpi=110)


def html(meshes: list[np.ndarray], outlines: list[np.ndarray], path: Path) -> None:
    data = {
        "rings": RINGS,
        "spokes": SPOKES,
        "balls": [np.round(mesh, 3).ravel().tolist() for mesh in meshes],
        "lines": [np.round(line, 3).ravel().tolist() for line in outlines],
    }
    template = (Path(__file__).parent / "relu_ball.template.html").read_text()
    path.write_text(template.replace("/*DATA*/", json.dumps(data, separators=(",", ":"))))


def main() -> None:
    apart, above = check(np.random.default_rng(0))
    print(
        f"closed form: within {apart:.1e} of linear programs over 7,320 atoms; <M, Z> exceeds polar * norm by {above:.1e}"
    )
    assert apart < 2e-3
    assert above < 1e-9
    meshes, outlines = [surface(constrained), surface(nuclear)], rank_one()
    html(meshes, outlines, DOCS / "relu_ball.html")
    png(meshes, outlines, DOCS / "images" / "relu_ball.png")
    print(f"relu_ball.html: {(DOCS / 'relu_ball.html').stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()

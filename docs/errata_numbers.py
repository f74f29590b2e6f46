"""Prints the numbers of docs/errata.md: `python docs/errata_numbers.py`. Small instances, float64, seconds."""

import itertools

import numpy as np
import torch

import convexformer as cf


def half_the_loss() -> tuple[float, float, float]:
    """Equation (8) of Ergen et al.: the program, the recovered network's objective, and the program with loss / 2."""
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(5, 3, 2)), rng.normal(size=5)
    problem = cf.Problem("attention", X, y, beta=0.3)
    solution = cf.solve(problem, tolerance=1e-10)
    network = solution.network()
    with torch.no_grad():
        own = 0.5 * float((network(torch.tensor(X)) - torch.tensor(y)).square().sum()) + 0.3 * float(network.decay())
    halved = cf.solve(cf.Problem("attention", X, y, beta=0.3, sample_weight=np.full(5, 0.5)), tolerance=1e-10)
    return solution.objective, own, halved.objective


def row_stochastic() -> tuple[float, float]:
    """Theorem A.1 of Ergen et al.: row-stochastic attention, and the program as printed, which is substochastic."""
    X, Y = np.ones((1, 2, 1)), np.array([[[1.0], [0.0]]])
    found = [
        cf.solve(cf.Problem(cf.heads.Attention(stochastic=kind), X, Y, beta=0.05, loss="squared"), tolerance=1e-8)
        for kind in ("row", "sub")
    ]
    return found[0].objective, found[1].objective


def vectorisation() -> float:
    """Appendix A.2 of Sahiner et al.: the error of outputs, relative, with columns of ``W2`` one after the other."""
    rng = np.random.default_rng(0)
    X, W1, W2 = rng.normal(size=(3, 2)), rng.normal(size=(2, 2)), rng.normal(size=(2, 2))
    right = X @ W1 @ X.T @ X @ W2
    wrong = X @ W1 @ X.T @ X @ W2.T  # for c = d, reading vec(W2) by rows transposes it
    return float(np.linalg.norm(right - wrong) / np.linalg.norm(right))


def without_decay() -> tuple[float, float]:
    """Section 3 of Sahiner et al.: least squares at beta = 0 of linear self-attention and of a linear map."""
    rng = np.random.default_rng(0)
    X, Y = rng.normal(size=(3, 3, 2)), rng.normal(size=(3, 3, 1))
    attention = np.stack([np.einsum("oa,kl->oakl", x, x.T @ x).reshape(3, -1) for x in X]).reshape(9, -1)
    losses = []
    for features in (attention, X.reshape(9, 2)):
        fit = np.linalg.lstsq(features, Y.reshape(9), rcond=None)[0]
        losses.append(0.5 * float(np.square(features @ fit - Y.reshape(9)).sum()))
    return losses[0], losses[1]


def arrangements() -> int:
    """Cells of the gates of ReLU self-attention, n = s = d = 2: sign patterns of ``x^T H x'`` for random ``H``."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(2, 2, 2))
    rows = np.array([np.outer(x[a], x[b]).ravel() for x in X for a, b in itertools.product(range(2), repeat=2)])
    signs = rows @ rng.normal(size=(4, 400_000)) >= 0
    return len(np.unique(np.packbits(signs, axis=0)))


def pooled_fourier() -> tuple[float, float]:
    """Pooled linear FNO with ``beta``, and the linear MLP on the mean token with ``beta / sqrt(s)``."""
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(30, 9, 3)), rng.integers(0, 3, 30)
    one = cf.solve(cf.Problem("fno", X, y, beta=1.5), tolerance=1e-9).objective
    other = cf.solve(cf.Problem("mlp", X, y, beta=0.5), tolerance=1e-9).objective
    return one, other


def one_neuron_a_gate() -> tuple[float, float]:
    """Gated MLP with one gate that is always open: the optimum, and the best of rank one (one neuron)."""
    X, Y = np.eye(2)[:, None, :], 3 * np.eye(2)
    head = cf.heads.MLP(activation="gated_relu", gates=np.ones((1, 2)))
    optimum = cf.solve(cf.Problem(head, X, Y, beta=1.0, loss="squared"), tolerance=1e-10).objective
    # Y = 3 I: singular values (3, 3) shrink by beta; with one neuron only one of them is fitted
    return optimum, (0.5 + 2.0) + 0.5 * 9.0


def main() -> list[str]:
    right, own, halved = half_the_loss()
    row, sub = row_stochastic()
    attention, linear = without_decay()
    fourier, mlp = pooled_fourier()
    several, one = one_neuron_a_gate()
    d = c = 100
    lines = [
        f"(8): program {right:.4f}, network {own:.4f}, with 1/2 on the loss {halved:.4f}",
        f"theorem A.1: row-stochastic {row:.6f}, as printed {sub:.6f}",
        f"vec of W2 by columns: outputs off by {vectorisation():.0%} of their size",
        f"beta = 0: self-attention {attention:.3f}, linear {linear:.3f}",
        f"cells for n = s = d = 2: {arrangements()}",
        f"pooled linear FNO {fourier:.6f}, mean token {mlp:.6f}",
        f"one gate: several neurons {several:.3f}, one neuron {one:.3f}",
        f"weights for s = 196, d = c = 100: self-attention {d * d * d * c / 1e6:.0f}M, symmetric "
        f"{d * (d + 1) / 2 * d * c / 1e6:.1f}M, mixer {196**2 * d * c / 1e6:.0f}M",
    ]
    print("\n".join(lines))
    return lines


if __name__ == "__main__":
    main()

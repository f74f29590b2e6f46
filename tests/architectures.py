"""The architectures of Sahiner et al., one atom at a time, in NumPy loops from the definitions.

An architecture is a list of blocks; a block knows the sizes of its two factors and the token outputs ``(N, s, c)`` of the
atom ``(u, v)``. Designs for CVXPY come from unit atoms. Nothing here uses the library's operators or networks.
"""

from collections.abc import Callable
from dataclasses import dataclass

import cvxpy as cp
import numpy as np

Atom = Callable[[np.ndarray, np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Block:
    rows: int
    cols: int
    atom: Atom

    def design(self, pooled: bool) -> np.ndarray:
        """``(outputs, rows * cols)``: the outputs of every unit atom."""
        columns = []
        for p in range(self.rows):
            for q in range(self.cols):
                f = self.atom(np.eye(self.rows)[p], np.eye(self.cols)[q])
                columns.append((f.mean(1) if pooled else f).ravel())
        return np.stack(columns, 1)


def self_attention(X, c, H=None):
    d = X.shape[2]

    def atom(u, v):
        W1, W2 = u.reshape(d, d).T, v.reshape(d, c)  # column by column, row by row
        scores = [x @ W1 @ x.T for x in X]
        if H is not None:
            scores = [score * (x @ H @ x.T >= 0) for score, x in zip(scores, X, strict=True)]
        return np.stack([score @ x @ W2 for score, x in zip(scores, X, strict=True)])

    return Block(d * d, d * c, atom)


def mixer(X, c, H=None):
    s, d = X.shape[1:]

    def atom(u, v):
        W1, W2 = u.reshape(s, s).T, v.reshape(d, c)
        return np.stack([((W1 @ x) * (1 if H is None else H @ x >= 0)) @ W2 for x in X])

    return Block(s * s, d * c, atom)


def circulant(x, grid):
    """``[roll(x, u) for all shifts u]``, side by side, with ``roll(x, u)[o] = x[o - u]`` on the grid."""
    cube = x.reshape(*grid, -1)
    shifts = [np.roll(cube, u, axis=tuple(range(len(grid)))) for u in np.ndindex(*grid)]
    return np.concatenate([shift.reshape(len(x), -1) for shift in shifts], axis=1)


def fourier(X, c, grid, h=None, block=0, blocks=1):
    d, s = X.shape[2] // blocks, X.shape[1]
    own = X[:, :, block * d : (block + 1) * d]
    C = np.stack([circulant(x, grid) for x in own])  # (N, s, s*d)
    gate = 1.0 if h is None else (C @ h.ravel() >= 0)[..., None]
    cb = c // blocks

    def atom(u, v):
        out = np.zeros((len(X), s, c))
        out[:, :, block * cb : (block + 1) * cb] = gate * (C @ u)[..., None] * v
        return out

    return Block(s * d, cb, atom)


def token_mlp(H, c, h=None):
    gate = 1.0 if h is None else (H @ h >= 0)[..., None]
    return Block(H.shape[2], c, lambda u, v: gate * (H @ u)[..., None] * v)


def local_means(X, window, grid):
    """The mean of the tokens that exist in a window centred at each token."""
    N, s, d = X.shape
    cube, reach = X.reshape(N, *grid, d), window // 2
    out = np.zeros_like(cube)
    for place in np.ndindex(*grid):
        near = [
            cube[(slice(None), *other)]
            for other in np.ndindex(*grid)
            if all(abs(a - b) <= reach for a, b in zip(place, other, strict=True))
        ]
        out[(slice(None), *place)] = np.mean(near, axis=0)
    return out.reshape(N, s, d)


def fourier_tokens(X):
    """``Re(F_s X F_d^T)`` with the matrices written out."""

    def transform(n):
        return np.exp(-2j * np.pi * np.outer(np.arange(n), np.arange(n)) / n)

    return np.stack([(transform(x.shape[0]) @ x @ transform(x.shape[1]).T).real for x in X])


def optimum(blocks, Y, beta, pooled):
    """CVXPY's optimum: squared loss on tokens, cross-entropy on pooled outputs (``Y`` one-hot)."""
    Z = [cp.Variable((block.rows, block.cols)) for block in blocks]
    f = sum(block.design(pooled) @ cp.vec(z, order="C") for block, z in zip(blocks, Z, strict=True))
    if pooled:
        F = cp.reshape(f, Y.shape, order="C")
        loss = cp.sum(cp.log_sum_exp(F, axis=1)) - cp.sum(cp.multiply(Y, F))
    else:
        loss = 0.5 * cp.sum_squares(f - Y.ravel())
    problem = cp.Problem(cp.Minimize(loss + beta * sum(cp.normNuc(z) for z in Z)))
    value = problem.solve(solver=cp.CLARABEL, tol_gap_abs=1e-9, tol_gap_rel=1e-9, tol_feas=1e-9)
    if problem.status != cp.OPTIMAL:
        raise RuntimeError(f"CVXPY ended with status {problem.status!r}: no reference")
    return float(value)


def beta_max(blocks, V, pooled):
    """The largest spectral norm of the dense constructions of ``A^T V``, block by block."""
    return max(
        np.linalg.norm((block.design(pooled).T @ V.ravel()).reshape(block.rows, block.cols), 2) for block in blocks
    )

"""The objective, evaluated in float64 by NumPy alone, in the same way for every tool.

    squared:  1/2 ||A(Z) - y||^2              + beta sum_groups ||Z_group||_2
    softmax:  sum_i lse(A(Z)_i) - A(Z)_{i,y_i} + beta sum_groups ||Z_group||_2

A group is one token (of one gate, of one class): ``d`` numbers. ``Z`` is ``(s, d)``, gated ``(g, s, d)``, with softmax
``(s, d, c)``.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np


class Objective:
    """One problem at one beta. ``gates`` is ``(N, g)`` of zeros and ones, or None; ``n_classes`` is 0 for real targets."""

    name = "token-sparse attention"

    def __init__(self, X, y, *, n_classes=0, gates=None, gate_vectors=None, beta_ratio=0.1, beta=None):
        self.X, self.y, self.n_classes = X, y, n_classes
        self.gates, self.gate_vectors = gates, gate_vectors
        self.beta_ratio = beta_ratio
        self._design = None
        self.beta = beta_ratio * self.beta_max() if beta is None else beta

    @property
    def width(self):
        """d, the size of a group."""
        return self.X.shape[2]

    @property
    def design(self):
        """``(N, p)`` as tools for plain design matrices need it; gated copies of the tokens side by side."""
        if self._design is None:
            N = len(self.X)
            flat = self.X.reshape(N, -1)
            self._design = flat if self.gates is None else (self.gates[:, :, None] * flat[:, None]).reshape(N, -1)
        return self._design

    @property
    def n_features(self):
        """p, the columns of the design."""
        return self.X[0].size * (1 if self.gates is None else self.gates.shape[1])

    def outputs(self, Z):
        """``(N,)``, or ``(N, c)`` for softmax; never forms the gated design."""
        flat = self.X.reshape(len(self.X), -1)
        if self.gates is not None:
            return ((flat @ Z.reshape(self.gates.shape[1], -1).T) * self.gates).sum(1)
        return flat @ Z.reshape(flat.shape[1], *([self.n_classes] if self.n_classes else []))

    def value(self, Z):
        """The objective at ``Z``, flat or in its own shape."""
        Z = np.asarray(Z, dtype=np.float64)
        F = self.outputs(Z)
        if self.n_classes:
            top = F.max(1)
            lse = top + np.log(np.exp(F - top[:, None]).sum(1))
            loss = float((lse - F[np.arange(len(F)), self.y]).sum())
        else:
            loss = 0.5 * float(np.sum((F - self.y) ** 2))
        return loss + self.beta * float(self.group_norms(Z).sum())

    def group_norms(self, Z):
        """The Euclidean norm of every group."""
        d = self.width
        if self.n_classes:
            return np.linalg.norm(Z.reshape(-1, d, self.n_classes), axis=1)
        return np.linalg.norm(Z.reshape(-1, d), axis=1)

    def beta_max(self):
        """The smallest beta at which ``Z = 0`` is optimal."""
        flat = self.X.reshape(len(self.X), -1)
        if self.n_classes:
            residual = np.eye(self.n_classes)[self.y] - 1.0 / self.n_classes
        else:
            residual = self.y[:, None] if self.gates is None else self.gates * self.y[:, None]
        correlation = flat.T @ residual  # (p, 1), (p, c), or (p, g): one column per gate
        return float(np.linalg.norm(correlation.reshape(-1, self.width, correlation.shape[1]), axis=1).max())

    # ------------------------------------------------------------------ files, for tools in environments of their own

    def save(self, folder):
        """Write arrays and numbers that :meth:`load` reads back in another process."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        arrays = {"X": self.X, "y": self.y, "gates": self.gates}
        if self.gate_vectors is not None:
            arrays |= {"u1": self.gate_vectors[0], "u2": self.gate_vectors[1]}
        for name, array in arrays.items():
            if array is not None:
                np.save(folder / f"{name}.npy", array)
        numbers = {"n_classes": self.n_classes, "beta": self.beta, "beta_ratio": self.beta_ratio}
        (folder / "numbers.json").write_text(json.dumps(numbers))

    @classmethod
    def load(cls, folder, mapped=False):
        """Read what :meth:`save` wrote; ``mapped`` leaves large arrays in their files."""
        mode = "c" if mapped else None
        arrays = {file.stem: np.load(file, mmap_mode=mode) for file in Path(folder).glob("*.npy")}
        vectors = (arrays["u1"], arrays["u2"]) if "u1" in arrays else None
        numbers = json.loads((Path(folder) / "numbers.json").read_text())
        return cls(arrays["X"], arrays["y"], gates=arrays.get("gates"), gate_vectors=vectors, **numbers)

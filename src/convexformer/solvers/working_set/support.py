"""The features of some groups, as :class:`~convexformer.solvers.working_set.newton.SupportMap` has them."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, final

import numpy as np

from convexformer.jit import njit
from convexformer.solvers.working_set.newton import SupportMap


@final
class TokenSupport(SupportMap):
    """Token-major features: one product a token, with the columns in use of all its gates side by side.

    ``X: (s, N, d)`` in float32, whose rows carry ``root: (N,)``; ``gates: (g, N)`` or None; ``token, gate, output: (J,)`` of
    each group, sorted by token, then gate; spectra ``values: (B, d)`` and ``vectors: (B, d, d)`` of slices
    ``gate * s + token``.
    """

    def __init__(
        self,
        X: np.ndarray,
        root: np.ndarray,
        gates: np.ndarray | None,
        index: tuple[np.ndarray, np.ndarray, np.ndarray],
        values: np.ndarray,
        vectors: np.ndarray,
    ) -> None:
        token, gate, _ = index
        self.X, self.index, self.root = X, index, root
        self.single_root = root.astype(np.float32)
        self.gated, self.gates = gates is not None, np.empty((0, 0), np.float32) if gates is None else gates
        slices = gate * len(X) + token
        self.values = values[slices]
        self.token_starts, self.slice_starts = _runs(token), _runs(slices)
        runs = slices[self.slice_starts[:-1]]
        self.axes = vectors[runs if self.gated else runs[:0]].astype(np.float32)  # (runs, d, d)

    def apply(self, P: np.ndarray, b: np.ndarray, *, exact: bool = False) -> np.ndarray:
        """``sum_j D_j X_k p_j`` into the rows of the outputs."""
        if exact:
            return self._exact(P, b)
        U = np.outer(b.astype(np.float32), self.single_root)
        _apply(P.astype(np.float32), self.token_starts, self.index, self.X, self.gates, self.gated, U)
        return U

    def adjoint(self, V: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """``X_k^T D_j v_l`` for each group, and ``sum_n root_n v_n``."""
        G = np.empty(self.values.shape)
        _adjoint(V, self.token_starts, self.index, self.X, self.gates, self.gated, G)
        return G, V @ self.root

    def _exact(self, P: np.ndarray, b: np.ndarray) -> np.ndarray:
        """The outputs in float64."""
        token, gate, output = self.index
        U = np.outer(b, self.root)
        for first, end in pairwise(self.token_starts):
            moved = P[first:end] @ self.X[token[first]].T.astype(np.float64)
            np.add.at(U, output[first:end], moved * self.gates[gate[first:end]] if self.gated else moved)
        return U

    def curvatures(self, own: np.ndarray) -> np.ndarray:
        """``(J, 1)`` the mean of the curvatures ``own: (c, N)`` that each group meets, weighted by its rows' squares."""
        token, gate, output = self.index
        used, place = np.unique(token, return_inverse=True)
        squares = np.stack([np.einsum("na,na->n", self.X[k], self.X[k]) for k in used])  # (tokens, N)
        found = np.empty((len(token), 1))
        for j in range(len(token)):
            weights = squares[place[j]] * self.gates[gate[j]] if self.gated else squares[place[j]]
            found[j] = own[output[j]] @ weights / max(float(weights.sum()), 1e-30)
        return found

    def turn(self, P: np.ndarray) -> np.ndarray:
        """``U^T p`` for each group; without gates the channels are those axes."""
        return self._turned(P, back=False) if self.gated else P

    def turn_back(self, P: np.ndarray) -> np.ndarray:
        """``U p`` for each group."""
        return self._turned(P, back=True) if self.gated else P

    def _turned(self, P: np.ndarray, *, back: bool) -> np.ndarray:
        out = np.empty(P.shape)
        _turned(P.astype(np.float32), self.slice_starts, self.axes, back, out)
        return out


def _runs(numbers: np.ndarray) -> np.ndarray:
    """Return where runs of equal numbers begin, and the end of the last."""
    return np.concatenate([[0], np.flatnonzero(np.diff(numbers)) + 1, [len(numbers)]])


@njit(cache=True, fastmath=True, nogil=True)
def _apply(P: Any, starts: Any, index: Any, X: Any, gates: Any, gated: bool, U: Any) -> None:
    """``U[output_j] += gate_j * (X_k p_j)`` for all groups, token by token."""
    token, gate, output = index
    for i in range(starts.shape[0] - 1):
        a, b = starts[i], starts[i + 1]
        moved = np.dot(P[a:b], X[token[a]].T)  # (columns, N)
        for j in range(a, b):
            row = U[output[j]]
            if gated:
                switch = gates[gate[j]]
                for n in range(row.shape[0]):
                    row[n] += moved[j - a, n] * switch[n]
            else:
                for n in range(row.shape[0]):
                    row[n] += moved[j - a, n]


@njit(cache=True, fastmath=True, nogil=True)
def _adjoint(V: Any, starts: Any, index: Any, X: Any, gates: Any, gated: bool, G: Any) -> None:
    """``G_j = X_k^T (gate_j * V[output_j])`` for all groups, token by token."""
    token, gate, output = index
    for i in range(starts.shape[0] - 1):
        a, b = starts[i], starts[i + 1]
        own = np.empty((b - a, V.shape[1]), np.float32)
        for j in range(a, b):
            row = V[output[j]]
            if gated:
                switch = gates[gate[j]]
                for n in range(row.shape[0]):
                    own[j - a, n] = row[n] * switch[n]
            else:
                own[j - a] = row
        G[a:b] = np.dot(own, X[token[a]])


@njit(cache=True, nogil=True)
def _turned(P: Any, starts: Any, axes: Any, back: bool, out: Any) -> None:
    """``out_j = U^T p_j`` for all groups of each slice, or (``back``) ``U p_j``."""
    for i in range(starts.shape[0] - 1):
        a, b = starts[i], starts[i + 1]
        out[a:b] = np.dot(P[a:b], axes[i].T) if back else np.dot(P[a:b], axes[i])

"""The map from some groups of weights to outputs: token-major features, and the spectra of their slices."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, final

import numpy as np

from convexformer.solvers.working_set import conjugate


@final
class TokenSupport:
    """The map from groups ``P: (J, d)`` and an intercept ``b: (c,)`` to outputs ``U: (c, N)``.

    One product a token, with the columns in use of all its gates side by side. ``X: (s, N, d)`` in float32, whose rows
    carry ``root: (N,)``; ``gates: (g, N)`` or None; ``token, gate, output: (J,)`` of each group, sorted by token, then gate;
    spectra ``values: (B, d)`` and ``vectors: (B, d, d)`` of slices ``gate * s + token``, whose vectors are the channels of
    ``X`` where it is ``rotated``.
    """

    def __init__(
        self,
        X: np.ndarray,
        root: np.ndarray,
        gates: np.ndarray | None,
        index: tuple[np.ndarray, np.ndarray, np.ndarray],
        values: np.ndarray,
        vectors: np.ndarray,
        *,
        rotated: bool,
    ) -> None:
        token, gate, _ = index
        self.X, self.index, self.root = X, index, root
        self.gated, self.gates = gates is not None, np.empty((0, 0), np.float32) if gates is None else gates
        slices = gate * len(X) + token
        self.values = values[slices]
        """``(J, d)`` eigenvalues of each group's Gram matrix."""
        self.token_starts, slice_starts = _runs(token), _runs(slices)
        runs = slices[slice_starts[:-1]]
        axes = vectors[runs[:0] if rotated else runs].astype(
            np.float32
        )  # (runs, d, d), none where they are the channels
        self.features: tuple[Any, ...] = (X, self.token_starts, slice_starts, index, self.gates, self.gated, axes, root)
        """What the loops of :mod:`~convexformer.solvers.working_set.conjugate` need."""

    def apply(self, P: np.ndarray, b: np.ndarray) -> np.ndarray:
        """``sum_j D_j X_k p_j`` and the intercept into the rows of the outputs, in float64."""
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
        if not self.gated:
            total = np.maximum(squares.sum(1), 1e-30)
            return (squares @ own.T / total[:, None])[place, output][:, None]
        found = np.empty((len(token), 1))
        for j in range(len(token)):
            weights = squares[place[j]] * self.gates[gate[j]]
            found[j] = own[output[j]] @ weights / max(float(weights.sum()), 1e-30)
        return found

    def turn(self, P: np.ndarray) -> np.ndarray:
        """``(J, d)`` each group in the principal axes of its slice."""
        out = np.empty(P.shape)
        conjugate.turn(P, self.features, False, out)
        return out


def _runs(numbers: np.ndarray) -> np.ndarray:
    """Return where runs of equal numbers begin, and the end of the last."""
    return np.concatenate([[0], np.flatnonzero(np.diff(numbers)) + 1, [len(numbers)]])

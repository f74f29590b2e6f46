"""The features of some groups, as :class:`~convexformer.solvers.working_set.newton.SupportMap` has them."""

from __future__ import annotations

from typing import final

import numpy as np
import torch
from torch import Tensor

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
        X: Tensor,
        root: Tensor,
        gates: Tensor | None,
        index: tuple[np.ndarray, np.ndarray, np.ndarray],
        values: np.ndarray,
        vectors: np.ndarray,
        n_outputs: int,
    ) -> None:
        token, gate, output = index
        self.X, self.root, self.c = X, root, n_outputs
        slices = gate * len(X) + token
        self.values = torch.from_numpy(values[slices])
        cuts = np.flatnonzero(np.diff(token)) + 1
        ends = list(zip([0, *cuts.tolist()], [*cuts.tolist(), len(token)], strict=True))
        columns = [torch.from_numpy(output[a:b]) for a, b in ends]
        switches = [None if gates is None else gates[torch.from_numpy(gate[a:b])] for a, b in ends]
        self.parts = [
            (slice(a, b), X[int(token[a])], columns[i], switches[i]) for i, (a, b) in enumerate(ends)
        ]  # rows, features (N, d), outputs, gates (rows, N)
        cuts = np.flatnonzero(np.diff(slices)) + 1
        self.axes = [
            (slice(a, b), torch.from_numpy(vectors[slices[a]]).float())
            for a, b in zip([0, *cuts.tolist()], [*cuts.tolist(), len(slices)], strict=True)
        ]

    def apply(self, P: Tensor, b: Tensor, *, exact: bool = False) -> Tensor:
        """``sum_j D_j X_k p_j`` into the rows of the outputs."""
        dtype = torch.float64 if exact else torch.float32
        P, U = P.to(dtype), torch.outer(b.to(dtype), self.root.to(dtype))
        for rows, X, columns, gates in self.parts:
            moved = P[rows] @ X.to(dtype).T
            U.index_add_(0, columns, moved if gates is None else moved.mul_(gates))
        return U

    def adjoint(self, V: Tensor) -> tuple[Tensor, Tensor]:
        """``X_k^T D_j v_l`` for each group, and ``sum_n root_n v_n``."""
        intercept = V.double() @ self.root.double()
        V = V.float()
        G = torch.empty(self.values.shape, dtype=torch.float32)
        for rows, X, columns, gates in self.parts:
            own = V[columns]
            torch.mm(own if gates is None else own.mul_(gates), X, out=G[rows])
        return G.double(), intercept

    def curvatures(self, own: Tensor) -> Tensor:
        """``(J, 1)`` the mean of the curvatures ``own: (c, N)`` that each group meets, weighted by its rows' squares."""
        found = torch.empty(len(self.values), 1, dtype=torch.float64)
        own = own.float()
        for rows, X, columns, gates in self.parts:
            squares = X.square().sum(1)
            weights = squares.expand(len(columns), -1) if gates is None else gates * squares
            found[rows, 0] = ((own[columns] * weights).sum(1) / weights.sum(1).clamp_min(1e-30)).double()
        return found

    def turn(self, P: Tensor) -> Tensor:
        """``U^T p`` for each group."""
        return self._turned(P, transposed=False)

    def turn_back(self, P: Tensor) -> Tensor:
        """``U p`` for each group."""
        return self._turned(P, transposed=True)

    def _turned(self, P: Tensor, *, transposed: bool) -> Tensor:
        P, out = P.float(), torch.empty(P.shape, dtype=torch.float32)
        for rows, axes in self.axes:
            torch.mm(P[rows], axes.T if transposed else axes, out=out[rows])
        return out.double()

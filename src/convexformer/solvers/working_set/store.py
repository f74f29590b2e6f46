"""Token-major features for sweeps over groups, and the spectra of their Gram matrices."""

from __future__ import annotations

from typing import final

import numpy as np
from torch import Tensor

from convexformer.objective import Objective
from convexformer.operators import TokenFeatures
from convexformer.solvers.base import Workspace
from convexformer.solvers.working_set import compiled
from convexformer.solvers.working_set.spectra import prepare_slices
from convexformer.solvers.working_set.support import TokenSupport


@final
class BlockStore:
    """Token-major features in float32, filled token by token as the working set grows, with Gram matrices' spectra.

    Where it is ``rotated`` the channels of a token that moves are its principal axes, and so must be those of its weights
    (:meth:`to_axes`, :meth:`from_axes`); with gates, whose slices of one token have different axes, they stay. Untouched
    tokens cost no memory. The rows carry ``sqrt(w)``. One store serves all betas of a path.
    """

    def __init__(
        self,
        parts: TokenFeatures,
        w: Tensor,
        n_outputs: int,
        intercept: bool,
        *,
        single_spectra: bool = False,
        rotated: bool = True,
    ) -> None:
        self.source = parts.features.numpy()  # (R, s, d)
        R, s, d = self.source.shape
        gates = np.ones((R, 1), bool) if parts.gates is None else parts.gates.numpy() > 0
        g = gates.shape[1]
        self.root, self.n_outputs = np.sqrt(w.numpy()), n_outputs
        self.X = np.empty((s, R, d), np.float32)
        self.filled = np.zeros(s, bool)
        rows = np.concatenate([np.flatnonzero(gates[:, u]) for u in range(g)])
        first = np.concatenate([[0], np.cumsum(gates.sum(0))])
        self.data = (self.X, rows, first, self.root, float(w.sum()) if intercept else 0.0)
        self.gated, self.gates = parts.gates is not None, np.ascontiguousarray(gates.T, np.float32)  # (g, R)
        values, vectors, means = np.empty((g * s, d)), np.empty((g * s, d, d)), np.empty((g * s, d))
        self.rotated = rotated and not self.gated
        self.spectra = (values, vectors, means, np.zeros(g * s, bool), self.rotated, single_spectra)
        gate, token, output = (np.ascontiguousarray(row) for row in np.indices((g, s, n_outputs)).reshape(3, -1))
        self.index = (token, gate, output)
        self.slice = gate * s + token  # of each group
        self._last: tuple[np.ndarray, np.ndarray] | None = None

    @classmethod
    def of(cls, objective: Objective, *, single_spectra: bool = False, rotated: bool = True) -> BlockStore:
        """Return the store of this objective, made once for all its betas.

        ``single_spectra``: computed in float32, in half the time, which leaves relative gaps of 1e-6. ``rotated``: tokens
        without gates are turned to their axes, so that blocks are diagonal; else blocks are turned at each visit.
        """
        w, intercept = objective.sample_weight, objective.intercept

        def make() -> BlockStore:
            parts = objective.operator.token_features()
            assert parts is not None, "the working-set solver requires slices of tokens"
            return cls(parts, w, objective.n_outputs, intercept, single_spectra=single_spectra, rotated=rotated)

        return STORES.get(objective.operator, make, w, intercept, single_spectra, rotated)

    def load(self, slices: np.ndarray) -> None:
        """Copy the features of the tokens of these slices, where they are not there yet."""
        tokens = np.unique(slices % len(self.X))
        new = tokens[~self.filled[tokens]]
        compiled.load(self.source, new, self.root, self.X)
        self.filled[tokens] = True

    def prepare(self, slices: np.ndarray) -> None:
        """Compute the spectra of these slices, which are loaded, where they are not known yet."""
        prepare_slices(slices, self.data, self.spectra)

    def to_axes(self, Z: np.ndarray, slices: np.ndarray) -> None:
        """Turn the weights or gradients ``Z: (J, d)`` of these slices to the channels of the store, in place."""
        if self.rotated:
            by_slice, slices = Z.reshape(-1, self.n_outputs, Z.shape[1]), slices[self.spectra[3][slices]]
            by_slice[slices] = by_slice[slices] @ self.spectra[1][slices]

    def from_axes(self, Z: np.ndarray, slices: np.ndarray) -> None:
        """Undo :meth:`to_axes`."""
        if self.rotated:
            by_slice, slices = Z.reshape(-1, self.n_outputs, Z.shape[1]), slices[self.spectra[3][slices]]
            by_slice[slices] = by_slice[slices] @ self.spectra[1][slices].transpose(0, 2, 1)

    def used(self, Z: np.ndarray) -> np.ndarray:
        """Return the slices whose weights are not all zero."""
        return np.flatnonzero(Z.reshape(len(Z) // self.n_outputs, -1).any(1))

    def starts(self, groups: np.ndarray) -> np.ndarray:
        """Return where the slices of these groups, which are in order, begin, and the end of the last.

        Remembered for the last groups, over which sweeps go again and again: they are not to be written to.
        """
        if self._last is None or self._last[0] is not groups:
            cuts = np.flatnonzero(np.diff(self.slice[groups])) + 1
            self._last = groups, np.concatenate([[0], cuts, [len(groups)]])
        return self._last[1]

    def support(self, groups: np.ndarray) -> TokenSupport:
        """Return the map of these groups, sorted by token, for Newton's method; their tokens are loaded."""
        self.prepare(np.unique(self.slice[groups]))
        token, gate, output = (row[groups] for row in self.index)
        gates = self.gates if self.gated else None
        return TokenSupport(self.X, self.root, gates, (token, gate, output), *self.spectra[:2], rotated=self.rotated)


STORES: Workspace[BlockStore] = Workspace()

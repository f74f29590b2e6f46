"""P3: gated attention, squared loss; twenty (gate, token) pairs carry the signal."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from objective import Objective

from datasets.planted import autoregressive_tokens, noisy, planted_groups


@dataclass(frozen=True)
class Gated:
    N: int
    s: int
    d: int
    g: int
    beta_ratio: float = 0.1

    @property
    def name(self):
        return f"P3 gated attention, squared, ({self.N}, {self.s}, {self.d}, g={self.g}), beta {self.beta_ratio:g}"

    def get_data(self, seed=0):
        rng = np.random.default_rng(seed)
        X = autoregressive_tokens(rng, self.N, self.s, self.d)
        u1, u2 = rng.standard_normal((self.g, self.s)), rng.standard_normal((self.g, self.d))
        gates = (np.einsum("gs,nsd,gd->ng", u1, X, u2, optimize=True) >= 0).astype(np.float64)
        Z = planted_groups(rng, self.g * self.s, self.d, min(20, self.s))
        outputs = ((X.reshape(self.N, -1) @ Z.reshape(self.g, -1).T) * gates).sum(1)
        return Objective(X, noisy(rng, outputs), gates=gates, gate_vectors=(u1, u2), beta_ratio=self.beta_ratio)

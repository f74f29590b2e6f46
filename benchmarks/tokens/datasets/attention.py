"""P1: attention with one real output, squared loss; a tenth of the tokens carry the signal."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from objective import Objective

from datasets.planted import autoregressive_tokens, noisy, planted_groups


@dataclass(frozen=True)
class Attention:
    N: int
    s: int
    d: int
    beta_ratio: float = 0.1

    @property
    def name(self):
        return f"P1 attention, squared, ({self.N}, {self.s}, {self.d}), beta {self.beta_ratio:g}"

    def get_data(self, seed=0):
        rng = np.random.default_rng(seed)
        X = autoregressive_tokens(rng, self.N, self.s, self.d)
        Z = planted_groups(rng, self.s, self.d, max(3, self.s // 10))
        return Objective(X, noisy(rng, X.reshape(self.N, -1) @ Z.ravel()), beta_ratio=self.beta_ratio)

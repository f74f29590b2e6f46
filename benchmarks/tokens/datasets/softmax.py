"""P2: attention with ``c`` classes, softmax cross-entropy; each class has tokens of its own."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from objective import Objective

from datasets.planted import autoregressive_tokens, planted_groups


@dataclass(frozen=True)
class Softmax:
    N: int
    s: int
    d: int
    c: int
    beta_ratio: float = 0.1

    @property
    def name(self):
        return f"P2 attention, softmax, ({self.N}, {self.s}, {self.d}, c={self.c}), beta {self.beta_ratio:g}"

    def get_data(self, seed=0):
        rng = np.random.default_rng(seed)
        X = autoregressive_tokens(rng, self.N, self.s, self.d)
        active = max(2, self.s // 10)
        Z = np.stack([planted_groups(rng, self.s, self.d, active) for _ in range(self.c)], axis=2)
        logits = X.reshape(self.N, -1) @ Z.reshape(-1, self.c)
        logits *= 3 / logits.std()
        y = (logits + rng.gumbel(size=logits.shape)).argmax(1)
        return Objective(X, y, n_classes=self.c, beta_ratio=self.beta_ratio)

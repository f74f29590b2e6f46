"""What the generators share: correlated tokens, few planted groups, noise."""

from __future__ import annotations

import numpy as np


def autoregressive_tokens(rng, N, s, d, correlation=0.7):
    """``(N, s, d)`` Gaussian tokens of unit variance; neighbours have the given correlation."""
    X = rng.standard_normal((N, s, d))
    for k in range(1, s):
        X[:, k] *= np.sqrt(1 - correlation**2)
        X[:, k] += correlation * X[:, k - 1]
    return X


def planted_groups(rng, n_groups, d, n_active):
    """``(n_groups, d)``, Gaussian in ``n_active`` rows and zero elsewhere."""
    Z = np.zeros((n_groups, d))
    active = rng.choice(n_groups, n_active, replace=False)
    Z[active] = rng.standard_normal((n_active, d))
    return Z


def noisy(rng, y, level=0.3):
    """``y`` with noise of ``level`` times its deviation, scaled to unit variance."""
    y = y + level * y.std() * rng.standard_normal(len(y))
    return y / y.std()

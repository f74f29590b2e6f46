"""Checks of what Sahiner et al. read off their convex programs: sizes of blocks, shared weights, counts, whitened data."""

from __future__ import annotations

import warnings

import numpy as np

from convexformer import heads
from convexformer.counts import cost
from convexformer.experiments.claims_structure import RNG_SEED
from convexformer.experiments.deep_study import Measured
from convexformer.experiments.study import Verdict
from convexformer.problem import Problem
from convexformer.solving import solve

DRAWS = 10  # random problems of a directional claim


def weights_follow_correlation() -> Measured:
    """(13): blocks ``Z^(k,l)`` of highly correlated features are larger; the rank correlation of |Z^(k,l)| and |G[k,l]|.

    Tokens have four features of different variances, mixed at random; G is the root mean square over samples.
    """
    found = []
    for seed in range(DRAWS):
        rng = np.random.default_rng(seed)
        d, c = 4, 2
        X = rng.standard_normal((20, 5, d)) @ rng.standard_normal((d, d))
        problem = Problem(heads.SelfAttention(), X, rng.standard_normal((20, 5, c)), beta_ratio=0.1, loss="squared")
        Z = solve(problem, tolerance=1e-6).dense().numpy().reshape(d, d, d, c)  # [k, :, l, :] is Z^(k,l)
        size = np.sqrt((Z**2).sum((1, 3)))
        size = (size + size.T) / 2  # G is symmetric: it cannot tell (k, l) from (l, k)
        gram = np.sqrt(((X.transpose(0, 2, 1) @ X) ** 2).mean(0))
        upper = np.triu_indices(d)
        ranks = [np.argsort(np.argsort(each[upper])).astype(float) for each in (size, gram)]
        found.append(float(np.corrcoef(ranks[0], ranks[1])[0, 1]))
    text = (
        f"rank correlation of block norms and correlations: {min(found):.2f} to {max(found):.2f} in {DRAWS} draws, "
        f"median {np.median(found):.2f}"
    )
    every = min(found) > 0
    return Measured(text, Verdict.YES if every else Verdict.PARTLY if np.median(found) > 0 else Verdict.NO)


def uncorrelated_weights() -> Measured:
    """Corollary 3.2: blocks ``Z^(k,l)`` of features that are uncorrelated in every sample are zero."""
    X, Y = _uncorrelated(), np.random.default_rng(1).standard_normal((5, 4, 2))
    problem = Problem(heads.SelfAttention(), X, Y, beta_ratio=0.1, loss="squared")
    Z = solve(problem, tolerance=1e-9).dense().numpy().reshape(3, 3, 3, 2)
    apart = np.array([[0, 0, 1], [0, 0, 1], [1, 1, 0]], dtype=bool)  # [k, l]: G[k, l] = 0 in every sample
    largest = np.abs(Z).max((1, 3))
    text = f"largest weight {largest[apart].max():.0e} between uncorrelated features, {largest[~apart].max():.2f} elsewhere"
    zero = largest[apart].max() <= 1e-5 * largest.max()  # weights are as close as the root of the gap, 1e-9
    return Measured(text, Verdict.YES if zero else Verdict.NO)


def _uncorrelated() -> np.ndarray:
    """Tokens of three features; the third is on other tokens than the first two."""
    X, rng = np.zeros((5, 4, 3)), np.random.default_rng(RNG_SEED)
    X[:, :2, :2], X[:, 2:, 2] = rng.standard_normal((5, 2, 2)), rng.standard_normal((5, 2))
    return X


def outputs_share_weights() -> Measured:
    """Section 4.1: the nuclear norm of a linear mixer makes the weights of its outputs alike.

    ``Z`` has a row for each pair of tokens (how tokens are mixed) and a column for each channel and output. The share of its
    squared norm in the leading mixing of tokens, of the joint program and of one program for each output, at one beta.
    """
    joint, alone = [], []
    for seed in range(DRAWS):
        rng = np.random.default_rng(seed)
        X, Y = rng.standard_normal((10, 3, 2)), rng.standard_normal((10, 3, 3))
        whole = Problem(heads.MLPMixer(), X, Y, beta_ratio=0.2, loss="squared")
        own = [Problem(heads.MLPMixer(), X, Y[..., p : p + 1], beta=whole.beta, loss="squared") for p in range(3)]
        joint.append(_leading_share(solve(whole, tolerance=1e-6).dense().numpy()))
        alone.append(_leading_share(np.concatenate([solve(each, tolerance=1e-6).dense().numpy() for each in own], 1)))
    wins = sum(one > other for one, other in zip(joint, alone, strict=True))
    text = (
        f"share of the leading mixing of tokens: {np.median(joint):.2f} in the joint program, {np.median(alone):.2f} with "
        f"one program for each output (medians); larger in {wins} of {DRAWS} draws"
    )
    return Measured(text, Verdict.YES if wins == DRAWS else Verdict.PARTLY if wins > DRAWS // 2 else Verdict.NO)


def _leading_share(Z: np.ndarray) -> float:
    sizes = np.linalg.svd(Z, compute_uv=False) ** 2
    return float(sizes[0] / sizes.sum())


def gated_token_weighted() -> Measured:
    """(21): a ReLU mixer is a sum of predictions ``Z^(t,k)`` weighted by entries of X and by its arrangements."""
    rng = np.random.default_rng(RNG_SEED)
    X, W1, W2 = rng.standard_normal((3, 2)), rng.standard_normal((5, 3, 3)), rng.standard_normal((5, 2, 4))
    hidden = W1 @ X  # (m, s, d)
    D = (hidden >= 0).astype(float)
    outputs = np.maximum(hidden, 0) @ W2
    Z = np.einsum("mot,mkp->motkp", W1, W2)
    summed = np.einsum("mok,tk,motkp->op", D, X, Z)
    error = float(np.abs(summed - outputs.sum(0)).max())
    return Measured(
        f"largest difference from a network of five neurons {error:.0e}", Verdict.YES if error <= 1e-9 else Verdict.NO
    )


def mixer_is_smaller() -> Measured:
    """Section 4.1: the mixer's program is smaller than that of self-attention, as s < d; at the sizes of section 5."""
    sizes = {"ViT-base, s = 196, d = 768": (196, 768), "their heads, s = 196, d = 100": (196, 100)}
    ratios = {}
    for name, (s, d) in sizes.items():
        mixer, attention = (
            cost(head, s, d, 100, per_token=True)["convex"].parameters
            for head in (heads.MLPMixer(), heads.SelfAttention())
        )
        ratios[name] = mixer / attention
    text = "convex weights of the mixer over those of self-attention: "
    text += "; ".join(f"{ratio:.2f} ({name})" for name, ratio in ratios.items())
    smaller = sum(ratio < 1 for ratio in ratios.values())
    return Measured(text, Verdict.YES if smaller == len(ratios) else Verdict.PARTLY if smaller else Verdict.NO)


def whitened_relu() -> Measured:
    """Appendix C.1: on orthonormal rows, n <= d, a ReLU MLP is a linear model under the constrained norm of K = I.

    With one output that norm is ``|z+| + |z-|``, and with squared loss each part is shrunk by beta on its own.
    """
    rng = np.random.default_rng(RNG_SEED)
    n, d, beta = 4, 6, 0.3
    X = np.linalg.qr(rng.standard_normal((d, n)))[0].T[:, None, :]  # (n, 1, d)
    y = rng.standard_normal(n)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = solve(Problem(heads.MLP("relu"), X, y[:, None, None], beta=beta, loss="squared"), tolerance=1e-8)
    expected = sum(_shrunk(float(np.linalg.norm(np.maximum(sign * y, 0))), beta) for sign in (1, -1))
    off = abs(found.objective / expected - 1)
    text = f"optimum of the ReLU MLP {found.objective:.8f}, of the linear model {expected:.8f}"
    return Measured(text, Verdict.YES if off <= 1e-6 else Verdict.NO)


def _shrunk(size: float, beta: float) -> float:
    """``min_a (a - size)^2 / 2 + beta |a|``."""
    return beta * size - beta**2 / 2 if size > beta else size**2 / 2

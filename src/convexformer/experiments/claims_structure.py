"""Checks of identities and relations: layouts, Fourier lemmas, blocks, relations between heads, rates, ReLU norms."""

from __future__ import annotations

import math
import warnings

import numpy as np
import torch

from convexformer import heads
from convexformer.data import digits
from convexformer.estimators import TokenClassifier
from convexformer.experiments.deep_study import Measured
from convexformer.experiments.study import Verdict
from convexformer.gauges import ConeNuclearNorm
from convexformer.problem import Problem
from convexformer.solving import solve

RNG_SEED = 0


def _agree(text: str, error: float, bound: float = 1e-9) -> Measured:
    return Measured(text, Verdict.YES if error <= bound else Verdict.NO)


def _tokens(*shape: int) -> np.ndarray:
    return np.random.default_rng(RNG_SEED).standard_normal(shape)


# ---------------------------------------------------------------------- layouts of Sahiner et al.


def gram_weighted() -> Measured:
    """(13): outputs are ``sum_kl G[k,l] X Z^(k,l)`` with the blocks of Z by columns of W1 and rows of W2."""
    X, d, c = _tokens(5, 3, 2), 2, 2
    solution = solve(
        Problem(heads.SelfAttention(), X, _tokens(5, 3, 2), beta_ratio=0.1, loss="squared"), tolerance=1e-6
    )
    Z = solution.dense().numpy().reshape(d, d, d, c)  # [k, :, l, :] is the block Z^(k,l)
    outputs = np.einsum("nkl,nsx,kxlc->nsc", X.transpose(0, 2, 1) @ X, X, Z)
    error = float(np.abs(outputs - solution.predict(X).numpy()).max())
    return _agree(f"largest difference from the library's outputs {error:.0e}", error)


def token_weighted() -> Measured:
    """(19): outputs of the mixer are ``sum_tk X[t,k] Z^(t,k)``; the nuclear norm does not depend on the order of columns."""
    X, s, d, c = _tokens(5, 3, 2), 3, 2, 2
    solution = solve(Problem(heads.MLPMixer(), X, _tokens(5, 3, 2), beta_ratio=0.1, loss="squared"), tolerance=1e-6)
    Z = solution.dense().numpy().reshape(s, s, d, c)
    outputs = np.einsum("ntk,tskc->nsc", X, Z)
    error = float(np.abs(outputs - solution.predict(X).numpy()).max())
    return _agree(f"largest difference from the library's outputs {error:.0e}", error)


def mixer_vectorisation() -> Measured:
    """(18): ``f_p = Z^(p) vec(X)`` with blocks ``Z^(p,t)`` for each token, ``vec`` by columns or by rows."""
    X, s = _tokens(3, 2)[None], 3
    W1, W2 = _tokens(3, 3), _tokens(2, 1)
    right = (W1 @ X[0] @ W2)[:, 0]
    blocks = np.concatenate([np.outer(W1[:, t], W2[:, 0]) for t in range(s)], 1)  # Z^(p,t)[:, k] = W1[:, t] W2[k]
    errors = [float(np.abs(blocks @ X[0].reshape(-1, order=order) - right).max()) for order in ("F", "C")]
    text = f"error {errors[0]:.2f} with columns one after the other (the paper's vec), {errors[1]:.0e} with rows"
    return Measured(text, Verdict.PARTLY if errors[1] <= 1e-9 < errors[0] else Verdict.NO)


def inverse_map() -> Measured:
    """End of appendix A.2: ``Z = sum vec(W1) vec(W2)^T`` with one ``vec``, against columns of W1 and rows of W2."""
    rng = np.random.default_rng(RNG_SEED)
    X, W1, W2 = rng.standard_normal((3, 2)), rng.standard_normal((2, 2)), rng.standard_normal((2, 2))
    right = X @ W1 @ X.T @ X @ W2
    errors = []
    for order in ("F", "C"):
        Z = np.outer(W1.reshape(-1, order="F"), W2.reshape(-1, order=order)).reshape(2, 2, 2, 2)
        G = X.T @ X
        outputs = sum(G[k, l] * X @ Z[k, :, l, :] for k in range(2) for l in range(2))
        errors.append(float(np.linalg.norm(outputs - right) / np.linalg.norm(right)))
    text = f"outputs off by {errors[0]:.0%} as printed, by {errors[1]:.0e} with rows of W2 one after the other"
    return Measured(text, Verdict.PARTLY if errors[1] <= 1e-9 < errors[0] else Verdict.NO)


def local_correlation() -> Measured:
    """(16): ``G^(k,l) = sum_t X[t,k] X[t,l] D^(t)`` is block (k, l) of ``(X (x) I)^T D (X (x) I)``."""
    X, s, d = _tokens(4, 3), 4, 3
    D = np.random.default_rng(1).random((s, s)) > 0.5  # [t, o]: gate of key t for query o
    K = np.kron(X, np.eye(s))
    G = K.T @ np.diag(D.ravel().astype(float)) @ K
    error = max(
        float(np.abs(G[k * s : (k + 1) * s, l * s : (l + 1) * s] - np.diag((X[:, k] * X[:, l]) @ D)).max())
        for k in range(d)
        for l in range(d)
    )
    return _agree(f"largest difference {error:.0e}", error)


def uncorrelated_blocks() -> Measured:
    """Corollary 3.2: with block diagonal Gram matrices the program splits into its blocks."""
    rng = np.random.default_rng(RNG_SEED)
    X = np.zeros((5, 4, 3))
    X[:, :2, :2], X[:, 2:, 2] = rng.standard_normal((5, 2, 2)), rng.standard_normal((5, 2))
    Y = rng.standard_normal((5, 4, 2))
    whole = Problem(heads.SelfAttention(), X, Y, beta_ratio=0.1, loss="squared")
    split = Problem(heads.BlockSelfAttention([[0, 1], [2]]), X, Y, beta=whole.beta, loss="squared")
    one, other = (solve(each, tolerance=1e-9).objective for each in (whole, split))
    return _agree(f"whole {one:.9f}, by blocks {other:.9f}", abs(one / other - 1), 1e-7)


def low_rank() -> Measured:
    """Rank of the optimum of linear self-attention for stronger and stronger penalties, of at most nine."""
    X, Y = _tokens(12, 5, 3), np.random.default_rng(1).standard_normal((12, 5, 3))
    ranks = []
    for ratio in (1e-3, 0.03, 0.3, 0.9):
        Z = solve(Problem(heads.SelfAttention(), X, Y, beta_ratio=ratio, loss="squared"), tolerance=1e-8).dense()
        sizes = torch.linalg.svdvals(Z)
        ranks.append(int((sizes > 1e-6 * sizes[0]).sum()))
    text = "rank " + ", ".join(map(str, ranks)) + " of at most 9 at 0.001, 0.03, 0.3, 0.9 beta_max"
    return Measured(text, Verdict.YES if ranks == sorted(ranks, reverse=True) and ranks[-1] < ranks[0] else Verdict.NO)


# ---------------------------------------------------------------------- Fourier lemmas


def fourier_lemma(grid: str) -> Measured:
    """Lemma 4.3: a matrix for each frequency between two Fourier transforms is a multiplication by circulant shifts."""
    h, w = (int(side) for side in grid.split("x"))
    s, d, m = h * w, 2, 3
    rng = np.random.default_rng(RNG_SEED)
    X, L, W1 = rng.standard_normal((s, d)), rng.standard_normal((s, d, d)), rng.standard_normal((d, m))
    frequencies = np.fft.fft2(X.reshape(h, w, d), axes=(0, 1)).reshape(s, d)
    V = np.fft.fft2(L.reshape(h, w, d, d), axes=(0, 1)).reshape(s, d, d)
    mixed = np.einsum("sa,sab->sb", frequencies, V).reshape(h, w, d)
    hidden = np.fft.ifft2(mixed, axes=(0, 1)).real.reshape(s, d) @ W1
    merged = np.einsum("sab,bm->sam", L, W1).reshape(s * d, m)
    two = np.concatenate([np.roll(X.reshape(h, w, d), u, axis=(0, 1)).reshape(s, d) for u in np.ndindex(h, w)], 1)
    one = np.concatenate([np.roll(X, u, axis=0) for u in range(s)], 1)
    errors = [float(np.abs(shifts @ merged - hidden).max()) for shifts in (two, one)]
    text = f"grid {grid}: error {errors[0]:.0e} with shifts on the grid, {errors[1]:.1g} with shifts of the first dimension"
    exact = errors[0] <= 1e-9
    return Measured(text, Verdict.NO if not exact else Verdict.YES if errors[1] <= 1e-9 else Verdict.PARTLY)


def block_fourier_lemma() -> Measured:
    """Lemma 4.6: with block diagonal matrices each block of channels is shifted and multiplied by itself."""
    s, d, B = 4, 4, 2
    rng = np.random.default_rng(RNG_SEED)
    X, L = rng.standard_normal((s, d)), np.zeros((s, d, d))
    L[:, :2, :2], L[:, 2:, 2:] = rng.standard_normal((s, 2, 2)), rng.standard_normal((s, 2, 2))
    hidden = np.fft.ifft(np.einsum("sa,sab->sb", np.fft.fft(X, axis=0), np.fft.fft(L, axis=0)), axis=0).real
    parts = []
    for b in range(B):
        own = X[:, 2 * b : 2 * b + 2]
        shifts = np.concatenate([np.roll(own, u, axis=0) for u in range(s)], 1)
        parts.append(shifts @ L[:, 2 * b : 2 * b + 2, 2 * b : 2 * b + 2].reshape(2 * s, 2))
    error = float(np.abs(np.concatenate(parts, 1) - hidden).max())
    return _agree(f"largest difference {error:.0e}; m is the number of neurons of a block, not of all", error)


# ---------------------------------------------------------------------- relations between heads


def _least_squares(features: np.ndarray, Y: np.ndarray) -> float:
    fit = np.linalg.lstsq(features, Y, rcond=None)[0]
    return 0.5 * float(np.square(features @ fit - Y).sum())


def _columns(X: np.ndarray, head: str) -> np.ndarray:
    """Outputs of every unit weight: rows are tokens of all samples, one output."""
    if head == "self_attention":
        return np.concatenate([np.einsum("oa,kl->oakl", x, x.T @ x).reshape(len(x), -1) for x in X])
    if head == "mlp_mixer":
        return np.concatenate([np.kron(np.eye(len(x)), x.ravel()) for x in X])
    return X.reshape(-1, X.shape[2])


def without_decay(head: str) -> Measured:
    """Least squares at beta = 0 of a linear head and of the linear MLP on the tokens."""
    rng = np.random.default_rng(RNG_SEED)
    n = 3 if head == "self_attention" else 12
    X, Y = rng.standard_normal((n, 3, 2)), rng.standard_normal(3 * n)
    own, mlp = (_least_squares(_columns(X, each), Y) for each in (head, "mlp"))
    ranks = [int(np.linalg.matrix_rank(_columns(X, each))) for each in (head, "mlp")]
    both = int(np.linalg.matrix_rank(np.concatenate([_columns(X, head), _columns(X, "mlp")], 1)))
    same = abs(own - mlp) <= 1e-9
    text = f"squared losses {own:.4f} and {mlp:.4f} (MLP); ranks {ranks[0]} and {ranks[1]}, together {both}"
    if head == "self_attention":  # the statement is that they are equivalent
        return Measured(text, Verdict.YES if same else Verdict.NO)
    return Measured(text, Verdict.NO if same else Verdict.YES)  # that they are not


def relu_without_decay() -> Measured:
    """ReLU self-attention is not a ReLU MLP even without decay: scaling tokens by 2 scales outputs by 8, not by 2."""
    x = _tokens(2, 2)
    X = np.stack([x, 2 * x])
    Y = np.stack([np.maximum(x, 0).sum(1, keepdims=True), 2 * np.maximum(x, 0).sum(1, keepdims=True)])
    values = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for head in (heads.MLP("relu"), heads.SelfAttention("relu")):
            values.append(solve(Problem(head, X, Y, beta_ratio=1e-5, loss="squared"), tolerance=1e-4).objective)
    floor = 0.5 * float(np.square(Y[0]).sum()) * 36 / 65  # the best a(1, 8) for targets (1, 2): 36/65 of y^2 / 2
    text = f"near beta = 0: ReLU MLP {values[0]:.1e}, ReLU self-attention {values[1]:.4f} (at least {floor:.4f})"
    return Measured(text, Verdict.YES if values[0] < 0.1 * floor and values[1] >= floor * 0.999 else Verdict.NO)


def pooled_fourier() -> Measured:
    """A pooled linear FNO is a linear head on the mean token, so no gain of one over the other can come from the program."""
    rng = np.random.default_rng(RNG_SEED)
    X, y = rng.standard_normal((30, 9, 3)), rng.integers(0, 3, 30)
    one = solve(Problem("fno", X, y, beta=1.5), tolerance=1e-9).objective
    other = solve(Problem("mlp", X, y, beta=0.5), tolerance=1e-9).objective
    same = abs(one / other - 1) <= 1e-7
    text = f"optimum of the pooled linear FNO {one:.6f}, of the mean token's linear head at beta / sqrt(s) {other:.6f}"
    return Measured(text, Verdict.NO if same else Verdict.YES)


# ---------------------------------------------------------------------- solvers, norms, accuracies


def proximal_rate() -> Measured:
    """Iterations of accelerated proximal gradient to accuracy epsilon grow no faster than one over its root."""
    X, Y = _tokens(40, 4, 8) / np.arange(1, 9) ** 2, np.random.default_rng(1).standard_normal((40, 4, 2))
    problem = Problem(heads.FNO(), X, Y, beta_ratio=1e-4, loss="squared")
    return _rate(problem, "fista", 0.5)


def frank_wolfe_rate() -> Measured:
    """Iterations of Frank-Wolfe to accuracy epsilon grow no faster than one over it."""
    X, Y = _tokens(40, 4, 3), np.random.default_rng(1).standard_normal((40, 4, 2))
    problem = Problem(heads.Attention(stochastic="row"), X, Y, beta_ratio=0.1, loss="squared")
    return _rate(problem, "frank_wolfe", 1.0)


def _rate(problem: Problem, solver: str, power: float) -> Measured:
    optimum = solve(problem, tolerance=1e-10).objective
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        history = solve(problem, tolerance=1e-7, solver=solver, max_iter=5000).history
    points = [
        (record.iteration, record.primal / optimum - 1) for record in history if record.primal / optimum - 1 > 1e-9
    ]
    points = points[1:]
    logs = np.log(np.array(points))
    slope = float(-np.polyfit(logs[:, 1], logs[:, 0], 1)[0])
    text = (
        f"iterations grow like epsilon^-{slope:.2f} (bound {power:g}), from {points[0][1]:.0e} at {points[0][0]:,.0f} to "
        f"{points[-1][1]:.0e} at {points[-1][0]:,.0f}"
    )
    return Measured(text, Verdict.YES if slope <= power + 0.05 else Verdict.NO)


def constrained_norm() -> Measured:
    """Figure 2: the norm with a nonnegative left factor is at least the nuclear norm, and differs where signs disagree."""
    rng, above, equal = np.random.default_rng(RNG_SEED), 0, 0
    for _ in range(50):
        z = rng.standard_normal((2, 1))
        value = float(ConeNuclearNorm(torch.eye(2).double()).value(torch.from_numpy(z)))
        nuclear = float(np.linalg.norm(z))
        agree = z[0, 0] * z[1, 0] >= 0
        expected = nuclear if agree else float(np.abs(z).sum())
        above += value >= nuclear - 1e-9
        equal += abs(value - expected) <= 1e-6
    text = (
        f"one column: at least the nuclear norm in {above} of 50, in closed form (|z|_1 where signs differ) in {equal}"
    )
    return Measured(text, Verdict.YES if above == equal == 50 else Verdict.NO)


def decay_of_outputs() -> Measured:
    """The l1 norm on w3 of theorem 2 against ordinary decay: test accuracy on handwritten digits."""
    X, y = digits(patch=2)
    train, test = slice(0, 900), slice(900, None)
    scores = {
        decay: TokenClassifier(heads.Attention(decay=decay), beta_ratio=0.02)
        .fit(X[train], y[train])
        .score(X[test], y[test])
        for decay in ("l1", "l2")
    }
    apart = abs(scores["l1"] - scores["l2"])
    text = f"test accuracy on digits {scores['l1']:.1%} with the l1 norm, {scores['l2']:.1%} with ordinary decay"
    return Measured(text, Verdict.YES if apart <= 0.02 else Verdict.NO)


def heads_on_digits() -> Measured:
    """Tables 1 and 3 in small: accuracy on handwritten digits of linear heads, on 16 tokens, each at its best of 6 betas."""
    X, y = digits(patch=2)
    train, validate, test = slice(0, 700), slice(700, 1000), slice(1000, None)
    scores = {}
    for head in ("self_attention", "mlp_mixer", "fno", "mlp", "linear"):
        best = max(
            (
                TokenClassifier(head, beta_ratio=ratio, tolerance=1e-2).fit(X[train], y[train])
                for ratio in np.logspace(-0.5, -3, 6)
            ),
            key=lambda probe: float(probe.score(X[validate], y[validate])),
        )
        scores[head] = float(best.score(X[test], y[test]))
    text = ", ".join(f"{head} {score:.1%}" for head, score in scores.items())
    baseline = max(scores["mlp"], scores["linear"])
    wins = sum(scores[head] > baseline + 0.005 for head in ("self_attention", "mlp_mixer", "fno"))
    return Measured(
        f"handwritten digits, linear heads: {text}",
        Verdict.YES if wins == 3 else Verdict.PARTLY if wins else Verdict.NO,
    )


def softmax_is_stochastic() -> Measured:
    """For any scores there are weights in the simplex with the same outputs, and not for all weights of small rank."""
    rng = np.random.default_rng(RNG_SEED)
    worst = 0.0
    for _ in range(20):
        scores = torch.from_numpy(rng.standard_normal((4, 4)) * math.exp(rng.standard_normal()))
        weights = torch.softmax(scores, 1)
        worst = max(worst, float((weights.sum(1) - 1).abs().max()), float((-weights).clamp_min(0).max()))
    return _agree(f"rows of 20 random softmaxes: nonnegative, sums off by {worst:.0e}", worst)


def gates_on_products() -> Measured:
    """The sign of a product of two tokens: no linear function of them tells, gates do."""
    rng = np.random.default_rng(RNG_SEED)
    X = rng.standard_normal((600, 2, 1))
    y = (X[:, 0, 0] * X[:, 1, 0] > 0).astype(int)
    train, test = slice(0, 400), slice(400, None)
    scores = {
        activation: TokenClassifier(heads.Attention(activation, gates=20), beta_ratio=0.01)
        .fit(X[train], y[train])
        .score(X[test], y[test])
        for activation in ("linear", "gated_relu")
    }
    text = f"sign of a product of two tokens, test accuracy: linear {scores['linear']:.1%}, gated {scores['gated_relu']:.1%}"
    return Measured(text, Verdict.YES if scores["gated_relu"] > scores["linear"] + 0.2 else Verdict.NO)

"""Checks of Fisher et al.: the dual program, optimality conditions, and the kernel map that they put before attention."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from scipy import stats
from torch.utils.flop_counter import FlopCounterMode

from convexformer import heads
from convexformer.experiments.deep_study import Measured
from convexformer.experiments.study import Verdict
from convexformer.features import Fastfood
from convexformer.problem import Problem
from convexformer.solving import solve

WIDTHS = (1024, 2048, 4096, 8192, 32_768)  # of a token, where operations are counted
SAME = 1e-7  # relative difference below which two optima agree


def _data(n: int = 8, s: int = 4, d: int = 4, c: int = 3) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.standard_normal((n, s, d)), rng.standard_normal((n, c))


def dual_program() -> Measured:
    """(8): the dual with ``alpha = L'(f)`` is feasible, and has the value of the primal (5); squared loss."""
    X, Y = _data()
    problem = Problem(heads.Attention(), X, Y, beta_ratio=0.2, loss="squared")
    solution = solve(problem, tolerance=1e-12)
    alpha = solution.predict(X).numpy() - Y
    pull = np.linalg.norm(np.einsum("nc,nkd->kdc", alpha, X), axis=1)
    dual = -float((0.5 * alpha**2 + alpha * Y).sum())  # the conjugate of (f - y)^2 / 2
    off, largest = abs(dual / solution.objective - 1), float(pull.max() / problem.beta)
    text = f"primal {solution.objective:.8f}, dual {dual:.8f}; largest constraint {largest:.7f} beta"
    return Measured(text, Verdict.YES if off <= 1e-5 and largest <= 1 + 1e-5 else Verdict.NO)


def optimality_conditions() -> Measured:
    """The printed conditions at the optimum: sums over classes, and zero as the subgradient of a zero row."""
    X, Y = _data()
    problem = Problem(heads.Attention(), X, Y, beta_ratio=0.5, loss="squared")
    solution = solve(problem, tolerance=1e-13)
    Z = solution.dense().numpy()  # (s, d, c)
    multiplier = -np.einsum("nc,nkd->kdc", solution.predict(X).numpy() - Y, X)  # Lambda
    size = np.linalg.norm(Z, axis=1, keepdims=True)
    printed = problem.beta * np.divide(Z, size, out=np.zeros_like(Z), where=size > 0)
    summed = float(np.abs(printed.sum(2) - multiplier.sum(2)).max())
    active = np.broadcast_to(size > 0, Z.shape)
    own = float(np.abs((printed - multiplier)[active]).max())
    inside = float(np.linalg.norm(multiplier, axis=1)[size[:, 0] == 0].max() / problem.beta)
    text = (
        f"as printed a residual of {summed:.2f}; for each class alone {own:.0e} on nonzero rows, and multipliers of norm "
        f"up to {inside:.2f} beta, not 0, on zero rows"
    )
    return Measured(text, Verdict.PARTLY if summed > 1e-3 and own <= 1e-3 and inside <= 1 else Verdict.NO)


def unbounded_restatement() -> Measured:
    """Appendix C restates the problem without a bound on w2: its infimum is the loss without a penalty."""
    X, Y = _data(c=1)
    problem = Problem(heads.Attention(), X, Y, beta_ratio=0.2, loss="squared")
    network: Any = solve(problem, tolerance=1e-8).network()
    off, penalties = 0.0, []
    with torch.no_grad():
        outputs = network(X)
        for scale in (1.0, 1e3, 1e6):
            scaled = type(network)(network.w1, scale * network.w2, network.w3 / scale, **network.config())
            off = max(off, float((scaled(X) - outputs).abs().max()))
            penalties.append(0.5 * problem.beta * float(scaled.w3.abs().sum()))
    listed = ", ".join(f"{penalty:.1e}" for penalty in penalties)
    text = f"penalty with w2 scaled by 1, 10^3, 10^6 and w3 by the inverse: {listed}; outputs off by {off:.0e}"
    return Measured(text, Verdict.NO if off <= 1e-6 and penalties[-1] <= 1e-3 * penalties[0] else Verdict.YES)


def kernel_functions() -> Measured:
    """(9) against (5): a head on mapped tokens has the functions of a head without the map, nearly at another beta."""
    X, Y = _data(n=10, d=64, c=1)
    food: Any = Fastfood("chi", sigma=1.0, dof=64, seed=0)  # fit_transform comes from scikit-learn, untyped
    mapped = food.fit_transform(X)
    T = food.matrix().detach().numpy()
    linear = float(np.abs(X @ T.T - mapped).max() / np.abs(mapped).max())
    condition = float(np.linalg.cond(T))
    with_map = solve(Problem(heads.Attention(), mapped, Y, beta=3.0, loss="squared"), tolerance=1e-8)
    size = (
        float(np.linalg.norm(T, 2) * np.linalg.norm(np.linalg.inv(T), 2) ** -1) ** 0.5
    )  # geometric mean of its singular values
    without = solve(Problem(heads.Attention(), X, Y, beta=3.0 / size, loss="squared"), tolerance=1e-8)
    ratio = with_map.objective / without.objective
    text = (
        f"the map is linear (residual {linear:.0e}), condition {condition:.2f}; optimum {with_map.objective:.4f} with it, "
        f"{without.objective:.4f} without at beta / {size:.1f} (ratio {ratio:.3f})"
    )
    return Measured(text, Verdict.NO if linear <= 1e-6 else Verdict.YES)


def kernel_approximated(kind: str) -> Measured:
    """Inner products of features against the Gaussian kernel, for more and more features."""
    X = 0.25 * np.random.default_rng(0).standard_normal((40, 16))
    exact = np.exp(-0.5 * np.square(X[:, None] - X[None]).sum(2))
    errors = []
    for features in (64, 1024, 16384):
        food: Any = Fastfood(kind, features, sigma=1.0, seed=1)
        phi = food.fit_transform(X).reshape(40, -1)
        gram = phi @ phi.T
        if kind == "chi":  # the best multiple of it, since it is not normalised
            gram = gram * float((gram * exact).sum() / (gram * gram).sum())
        errors.append(float(np.sqrt(np.mean((gram - exact) ** 2))))
    text = "root mean square error for 64, 1,024, 16,384 features: " + ", ".join(f"{error:.3f}" for error in errors)
    return Measured(text, Verdict.YES if errors[-1] < 0.5 * errors[0] and errors[-1] < 0.1 else Verdict.NO)


def positive_variance() -> Measured:
    """Positive features of the softmax kernel against trigonometric ones, for opposite and for equal tokens."""
    generator = torch.Generator().manual_seed(0)
    W = torch.randn((200_000, 8), generator=generator, dtype=torch.float64)
    x = torch.nn.functional.normalize(torch.randn(8, generator=generator, dtype=torch.float64), dim=0) * 1.2
    spreads = {}
    for name, y in (("opposite", -x), ("equal", x)):
        positive = (W @ x - x @ x / 2).exp() * (W @ y - y @ y / 2).exp()
        trigonometric = ((x @ x + y @ y) / 2).exp() * (W @ (x - y)).cos()
        exact = float((x @ y).exp())
        spreads[name] = (float(positive.std()) / exact, float(trigonometric.std()) / exact)
    text = "; ".join(
        f"{name} tokens: relative spread {positive:.2f} positive, {trigonometric:.2f} trigonometric"
        for name, (positive, trigonometric) in spreads.items()
    )
    better = [positive < trigonometric for positive, trigonometric in spreads.values()]
    return Measured(text, Verdict.YES if all(better) else Verdict.PARTLY if any(better) else Verdict.NO)


def positive_offset() -> Measured:
    """The printed offset ``|x|^2`` of the positive features of a Gaussian kernel, at sigma = 2."""
    generator = torch.Generator().manual_seed(0)
    sigma = 2.0
    V = torch.randn((400_000, 4), generator=generator, dtype=torch.float64) / sigma
    x, y = torch.randn((2, 4), generator=generator, dtype=torch.float64)
    exact = float((-(x - y).square().sum() / (2 * sigma**2)).exp())

    def estimate(scale: float) -> float:
        return float(((V @ x - scale * (x @ x)) + (V @ y - scale * (y @ y))).exp().mean())

    printed, right = estimate(1.0), estimate(1 / sigma**2)
    text = f"kernel {exact:.3f}, estimate as printed {printed:.4f}, with |x|^2 / sigma^2 {right:.3f}"
    return Measured(text, Verdict.NO if abs(printed - exact) > 0.1 else Verdict.YES)


def log_linear_operations() -> Measured:
    """Multiply-adds of the structured projection of a token, counted as it runs, over ``D log2 D`` and over ``D^2``."""
    counts = []
    for size in WIDTHS:
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            Fastfood("positive", size).build(size).project(torch.ones(1, size))
        counts.append(counter.get_total_flops() / 2)
    shares = [count / (size * np.log2(size)) for count, size in zip(counts, WIDTHS, strict=True)]
    dense = [count / size**2 for count, size in zip(counts, WIDTHS, strict=True)]
    text = (
        f"multiply-adds a token at D = {WIDTHS[0]:,} to {WIDTHS[-1]:,}: {min(shares):.1f} to {max(shares):.1f} D log2 D, "
        f"{dense[0]:.2f} to {dense[-1]:.1g} of a dense projection's"
    )
    bounded = max(shares) <= 2 * shares[0] and dense[-1] < dense[0]
    return Measured(text, Verdict.YES if bounded else Verdict.NO)


def chi_against_gaussian() -> Measured:
    """Largest difference of the distribution functions of a standardised chi variable and a Gaussian one."""
    x, apart = np.linspace(-6, 6, 10_001), {}
    for degrees in (1, 10, 100, 1000):
        chi = stats.chi(degrees)
        apart[degrees] = float(np.abs(chi.cdf(chi.mean() + chi.std() * x) - stats.norm.cdf(x)).max())
    text = f"distribution functions apart by {', '.join(f'{each:.3f}' for each in apart.values())} for "
    text += f"{', '.join(f'{each:,}' for each in apart)} degrees of freedom, whatever the number of features"
    return Measured(text, Verdict.PARTLY if apart[1000] < apart[1] / 10 else Verdict.NO)


def sign_flips() -> Measured:
    """Share of negative entries of the map's matrix, with a chi diagonal and with a Gaussian one: H and B have signs."""
    shares = []
    for kind in ("chi", "gaussian"):
        features = Fastfood(kind, 256 if kind == "chi" else 512).build(256)
        matrix = features.project(torch.eye(256))
        shares.append(float((matrix < 0).double().mean()))
    text = f"negative entries of the map: {shares[0]:.0%} with chi variables, {shares[1]:.0%} with Gaussian ones"
    return Measured(text, Verdict.YES if shares[0] == 0 else Verdict.NO)

"""What exact ReLU gains on frozen tokens: linear, gated and ReLU heads side by side, and ``auto`` beside them.

    OMP_NUM_THREADS=1 python benchmarks/relu.py digits tokens.npz ... [--samples 600] [--channels 16] [--json out.json]

``digits`` is the built-in set; a file holds ``X_train (N, s, d)``, ``y_train``, ``X_test``, ``y_test`` and,
optionally, ``mask_train`` and ``mask_test``. Tokens are centred and rotated to ``channels`` principal channels of the
training tokens. Every head chooses beta among ``RATIOS`` on a quarter of the training part and is then fitted to all
of it. ``from`` is the lower end of what the certificate proves about the optimal value (``objective`` is the upper
end); a ReLU head on many tokens has too many cells for an exact polar. The gated MLP is also turned into a ReLU
network (cone decomposition) and polished. Seconds are CPU seconds of the last fit.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from pathlib import Path

import numpy as np
import torch

import convexformer as cf

RATIOS = (0.1, 0.03, 0.01)
HEADS = {
    "mlp": lambda activation: cf.heads.MLP(activation),
    "attention": lambda activation: cf.heads.Attention(activation, "l2"),
}


def load(name: str, samples: int, channels: int):
    if name == "digits":
        X, y = (np.asarray(part) for part in cf.data.digits(patch=2))
        order = np.random.default_rng(0).permutation(len(y))
        train, test = order[:1200], order[1200:]
        parts = [X[train], y[train], X[test], y[test]]
        masks = [None, None]
    else:
        file = np.load(name)
        parts = [file[key] for key in ("X_train", "y_train", "X_test", "y_test")]
        masks = [file[key].astype(bool) if key in file else None for key in ("mask_train", "mask_test")]
    X, y = parts[0][:samples].astype(float), parts[1][:samples].astype(int)
    Xt, yt = parts[2].astype(float), parts[3].astype(int)
    mask = None if masks[0] is None else masks[0][:samples]
    real = X.reshape(-1, X.shape[2]) if mask is None else X[mask]
    mean = real.mean(0)
    _, sigma, Vh = np.linalg.svd(real - mean, full_matrices=False)
    keep = Vh[: min(channels, X.shape[2])].T
    scale = sigma[: keep.shape[1]].mean() / np.sqrt(len(real))
    return (X - mean) @ keep / scale, y, mask, (Xt - mean) @ keep / scale, yt, masks[1]


def accuracy(model, X, y, mask=None) -> float:
    with torch.no_grad():
        outputs = model(X) if mask is None else model(X, mask)
    return float((outputs.argmax(1).numpy() == y).mean())


def fit(head, X, y, mask, ratio, seconds):
    problem = cf.Problem(head, X, y, beta_ratio=ratio, mask=mask, intercept=True)
    start = time.process_time()
    solution = cf.solve(problem, tolerance=1e-3, max_time=seconds)
    return problem, solution, time.process_time() - start


def choose(make, X, y, mask, seconds) -> float:
    """The ratio with the best accuracy on the last quarter of the training part."""
    n = 3 * len(y) // 4
    first, last = (None, None) if mask is None else (mask[:n], mask[n:])
    scores = {}
    for ratio in RATIOS:
        _, solution, _ = fit(make(), X[:n], y[:n], first, ratio, seconds)
        scores[ratio] = accuracy(solution.predict, X[n:], y[n:], last)
    return max(scores, key=scores.get)


def report(name: str, samples: int, channels: int, seconds: float) -> list[dict]:
    X, y, mask, Xt, yt, mask_test = load(name, samples, channels)
    label = Path(name).stem
    print(
        f"\n{label}: {X.shape[0]} training samples, {X.shape[1]} tokens of {X.shape[2]} channels, {len(yt)} test samples"
    )
    print(f"{'head':20} {'ratio':>6} {'train':>6} {'test':>6} {'objective':>10} {'from':>10} {'heads':>6} {'CPU s':>7}")
    rows = []

    def row(head, ratio, train, test, objective, low, n_heads, cpu):
        rows.append(
            {"data": label, "head": head, "ratio": ratio, "train": train, "test": test, "objective": objective}
            | {"lower": low, "heads": n_heads, "cpu_seconds": cpu}
        )
        print(
            f"{head:20} {ratio:6.3g} {train:6.1%} {test:6.1%} {objective:10.2f} {low:10.2f} {n_heads:6d} {cpu:7.1f}",
            flush=True,
        )

    for head, make in HEADS.items():
        for activation in ("linear", "gated_relu", "relu"):
            ratio = choose(lambda: make(activation), X, y, mask, seconds)  # noqa: B023
            problem, solution, cpu = fit(make(activation), X, y, mask, ratio, seconds)
            low, high = solution.certificate.interval
            scores = accuracy(solution.predict, X, y, mask), accuracy(solution.predict, Xt, yt, mask_test)
            network = solution.network()
            row(f"{head} {activation}", ratio, *scores, high, low, len(network.w2), cpu)
            if head == "mlp" and activation == "gated_relu":
                start = time.process_time()
                found = cf.relu.from_gated(solution, X, mask)
                exact = cf.Problem(found.head, X, y, beta=problem.beta, mask=mask, intercept=True)
                same = float((found.network(X, mask).detach() - solution.predict(X, mask)).abs().max())
                polished = cf.relu.polish(found.network, exact, steps=150)
                for text, network in (("  as ReLU", found.network), ("  as ReLU, polished", polished)):
                    proof = cf.certify(network, exact)
                    scores = accuracy(network, X, y, mask), accuracy(network, Xt, yt, mask_test)
                    spent = time.process_time() - start
                    row(text, ratio, *scores, proof.primal, proof.dual, len(network.w2), spent)
                print(f"  outputs of the conversion differ by {same:.1e}; price in norm {found.price:.4g}")
    start = time.process_time()
    auto = cf.TokenClassifierCV("auto", n_betas=5, cv=3, n_jobs=1).fit(X, y, **({} if mask is None else {"mask": mask}))
    scores = [auto.score(A, b, **({} if m is None else {"mask": m})) for A, b, m in ((X, y, mask), (Xt, yt, mask_test))]
    proof = auto.certificate_
    row("auto", auto.beta_ratio_, *scores, proof.primal, proof.dual, 0, time.process_time() - start)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", nargs="+")
    parser.add_argument("--samples", type=int, default=600)
    parser.add_argument("--channels", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=20.0, help="limit of each fit")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rows = [row for name in options.data for row in report(name, options.samples, options.channels, options.seconds)]
    if options.json is not None:
        options.json.write_text(json.dumps({"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()

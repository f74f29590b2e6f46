"""Many classes with few samples each out of a token file with few classes: k-means clusters within each class.

    python benchmarks/pseudo_classes.py tokens.npz out.npz [--classes 101] [--samples 25]

Files as in ``benchmarks/probes.py``. At most ``--samples`` of a pseudo-class, and at most three quarters of it, are for
training; the rest is the test part.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from sklearn.cluster import KMeans


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--classes", type=int, default=101)
    parser.add_argument("--samples", type=int, default=25)
    options = parser.parse_args()
    with np.load(options.source) as z:
        X, y = (np.concatenate([z[f"{name}_train"], z[f"{name}_test"]]) for name in ("X", "y"))
        scale = {"scale": z["scale"]} if "scale" in z.files else {}
    means = X.astype(np.float32).mean(1)
    means = (means - means.mean(0)) / means.std(0)
    labels, parts = np.unique(y), np.empty(len(y), int)
    counts = [len(part) for part in np.array_split(np.arange(options.classes), len(labels))]
    for label, count, first in zip(labels, counts, np.cumsum([0, *counts[:-1]]), strict=True):
        rows = np.flatnonzero(y == label)
        parts[rows] = first + KMeans(count, n_init=3, random_state=0).fit_predict(means[rows])
    rng, train, test = np.random.default_rng(0), [], []
    for part in range(options.classes):
        rows = rng.permutation(np.flatnonzero(parts == part))
        cut = min(options.samples, max(1, int(0.75 * len(rows))))
        train.extend(rows[:cut])
        test.extend(rows[cut:])
    a, b = rng.permutation(train), rng.permutation(test)
    np.savez(options.target, X_train=X[a], y_train=parts[a], X_test=X[b], y_test=parts[b], **scale)
    print(f"{len(a):,} training and {len(b):,} test samples of {options.classes} pseudo-classes")


if __name__ == "__main__":
    main()

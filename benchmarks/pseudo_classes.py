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
        masked = ("mask",) if "mask_train" in z.files else ()
        parts = {name: np.concatenate([z[f"{name}_train"], z[f"{name}_test"]]) for name in ("X", "y", *masked)}
        scale = {"scale": z["scale"]} if "scale" in z.files else {}
    X, y = parts["X"], parts.pop("y")
    real = parts.get("mask", np.ones(X.shape[:2])).astype(np.float32)[..., None]
    means = (X * real).sum(1) / real.sum(1)
    means = (means - means.mean(0)) / means.std(0)
    labels, clusters = np.unique(y), np.empty(len(y), int)
    counts = [len(part) for part in np.array_split(np.arange(options.classes), len(labels))]
    for label, count, first in zip(labels, counts, np.cumsum([0, *counts[:-1]]), strict=True):
        rows = np.flatnonzero(y == label)
        clusters[rows] = first + KMeans(count, n_init=3, random_state=0).fit_predict(means[rows])
    rng, train, test = np.random.default_rng(0), [], []
    for part in range(options.classes):
        rows = rng.permutation(np.flatnonzero(clusters == part))
        cut = min(options.samples, max(1, int(0.75 * len(rows))))
        train.extend(rows[:cut])
        test.extend(rows[cut:])
    a, b = rng.permutation(train), rng.permutation(test)
    sides = {
        f"{name}_{side}": values[rows] for side, rows in (("train", a), ("test", b)) for name, values in parts.items()
    }
    np.savez(options.target, y_train=clusters[a], y_test=clusters[b], **sides, **scale)
    print(f"{len(a):,} training and {len(b):,} test samples of {options.classes} pseudo-classes")


if __name__ == "__main__":
    main()

"""Which head on frozen tokens: test accuracy and CPU seconds of ``head="auto"`` beside scikit-learn's probes.

    OMP_NUM_THREADS=1 python benchmarks/probes.py digits tokens.npz ... [--jobs 2] [--json out.json]

``digits`` is the built-in set; a file holds ``X_train (N, s, d)``, ``y_train``, ``X_test``, ``y_test`` and, optionally,
``mask_train``, ``mask_test`` and ``scale`` (by which tokens are multiplied). Every model chooses its hyperparameters by the
same number of folds on the training part and is scored once on the test part. Seconds are CPU seconds of this process and
its children, all fits included. Errors are standard deviations over bootstrap samples of the test set. ``log-loss`` and
``ECE`` (15 bins) measure the probabilities.
"""

from __future__ import annotations

import argparse
import json
import resource
import warnings
from pathlib import Path

import numpy as np
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import convexformer as cf

STRENGTHS = [1e-4, 1e-3, 1e-2, 1e-1, 1.0]


def cpu() -> float:
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in usage)


def load(name: str):
    if name == "digits":
        X, y = (np.asarray(part) for part in cf.data.digits(patch=2))
        order = np.random.default_rng(0).permutation(len(y))
        X, y = X[order], y[order]
        return X[:1200], y[:1200], None, X[1200:], y[1200:], None
    with np.load(name) as z:
        scale = z["scale"] if "scale" in z.files else 1.0
        mask = {
            part: z[f"mask_{part}"].astype(bool) if f"mask_{part}" in z.files else None for part in ("train", "test")
        }
        X = {part: z[f"X_{part}"].astype(np.float32) * scale for part in ("train", "test")}
        return X["train"], z["y_train"], mask["train"], X["test"], z["y_test"], mask["test"]


def calibration(p: np.ndarray, correct: np.ndarray, bins: int = 15) -> float:
    """Expected calibration error of the most likely class."""
    confidence = p.max(1)
    at = np.minimum((confidence * bins).astype(int), bins - 1)
    gaps = [
        abs(correct[at == b].mean() - confidence[at == b].mean()) * (at == b).mean()
        for b in range(bins)
        if (at == b).any()
    ]
    return float(sum(gaps))


def measured(name: str, p: np.ndarray, y: np.ndarray, classes: np.ndarray, seconds: float, **more) -> dict:
    correct = classes[p.argmax(1)] == y
    draws = np.random.default_rng(0).integers(0, len(y), (1000, len(y)))
    return {
        "model": name,
        "test": 100 * float(correct.mean()),
        "error": 100 * float(correct[draws].mean(1).std()),
        "log-loss": float(log_loss(y, p, labels=classes)),
        "ECE": calibration(p, correct),
        "cpu seconds": seconds,
        **more,
    }


def rows_of(name: str, folds: int, jobs: int):
    X, y, mask, X_test, y_test, mask_test = load(name)
    start = cpu()
    ours = cf.TokenClassifierCV(head="auto", cv=folds, n_jobs=jobs, device="cpu").fit(X, y, mask=mask)
    seconds = cpu() - start
    blocks = {label: round(norm, 2) for label, norm in ours.solution_.block_norms.items() if norm > 0}
    p = ours.predict_proba(X_test, mask=mask_test)
    yield measured(
        "auto", p, y_test, ours.classes_, seconds, cv=100 * ours.best_score_, gap=ours.certificate_.relative_gap,
        setting=f"beta_ratio {ours.beta_ratio_:.2g}", blocks=blocks,
    )  # fmt: skip
    for label, feature in (("mean token", cf.features.MeanPooling()), ("flattened", cf.features.Flatten())):
        start = cpu()
        train, test = feature.fit(X, mask=mask).transform(X, mask=mask), feature.transform(X_test, mask=mask_test)
        probe = make_pipeline(StandardScaler(), LogisticRegression(max_iter=300))
        search = GridSearchCV(probe, {"logisticregression__C": STRENGTHS}, cv=folds, n_jobs=jobs).fit(train, y)
        seconds = cpu() - start
        setting = f"C {search.best_params_['logisticregression__C']:g}"
        p = search.predict_proba(test)
        yield measured(
            f"logistic regression, {label}",
            p,
            y_test,
            search.classes_,
            seconds,
            cv=100 * search.best_score_,
            setting=setting,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="+")
    parser.add_argument("--folds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    tables = {}
    for name in options.data:
        print(f"\n{Path(name).stem}\n| model | test | cv | log-loss | ECE | gap | CPU s | setting |\n{'|---' * 8}|")
        tables[Path(name).stem] = []
        for row in rows_of(name, options.folds, options.jobs):
            tables[Path(name).stem].append(row)
            gap = f"{row['gap']:.1e}" if "gap" in row else "none"
            print(
                f"| {row['model']} | {row['test']:.1f} ± {row['error']:.1f} | {row['cv']:.1f} | {row['log-loss']:.3f} | "
                f"{row['ECE']:.3f} | {gap} | {row['cpu seconds']:.1f} | {row['setting']} |", flush=True,
            )  # fmt: skip
    if options.json:
        options.json.write_text(json.dumps(tables, indent=1))


if __name__ == "__main__":
    main()

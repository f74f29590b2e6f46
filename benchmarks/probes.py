"""Which head on frozen tokens: ``head="auto"`` beside scikit-learn's probes and the attentive probes of the field.

    OMP_NUM_THREADS=1 python benchmarks/probes.py digits tokens.npz ... [--seeds 3] [--quick] [--json out.json]

``digits`` is the built-in set; a file holds ``X_train (N, s, d)``, ``y_train``, ``X_test``, ``y_test`` and, optionally,
``mask_train``, ``mask_test`` and ``scale`` (by which tokens are multiplied). Seed 0 has the file's own split; every
other seed draws a new one of the same sizes out of all samples. Each model chooses its hyperparameters on the training
part alone (``auto`` and logistic regression by the same number of folds, the attentive probes on 20% of it) and is
scored once on the test part. Seconds are CPU seconds of this process and its children, all fits included, after one fit
to 100 digits that loads libraries. ``±`` is the standard deviation over 1,000 bootstrap samples of the test set of seed
0, ``spread`` that over seeds. ``log-loss`` and ``ECE`` (15 bins) measure the probabilities. ``--models`` names the
models to run; ``auto, folds of its own`` fits maps and block weights in each fold.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import convexformer as cf

sys.path.insert(0, str(Path(__file__).parent))
from attentive import PROBES, Sweep, TunedProbe

STRENGTHS = [1e-4, 1e-3, 1e-2, 1e-1, 1.0]
STRICT = "auto, folds of its own"
LOGISTIC = {
    "logistic regression, mean token": cf.features.MeanPooling(),
    "logistic regression, flattened": cf.features.Flatten(),
}
MODELS = ["auto", *LOGISTIC, *PROBES]
QUICK = Sweep(rates=(1e-3, 3e-3), decays=(1e-2,), epochs=10)
REDUCED = Sweep(rates=(1e-3, 3e-3), decays=(1e-2,), epochs=20)


@dataclass(frozen=True)
class Split:
    """Tokens, labels and masks of the training part and of the test part."""

    X: np.ndarray
    y: np.ndarray
    mask: np.ndarray | None
    X_test: np.ndarray
    y_test: np.ndarray
    mask_test: np.ndarray | None

    def drawn(self, seed: int) -> Split:
        """Return a split of the same sizes out of all samples; the file's own for seed 0."""
        if seed == 0:
            return self
        X, y = np.concatenate([self.X, self.X_test]), np.concatenate([self.y, self.y_test])
        mask = None if self.mask is None or self.mask_test is None else np.concatenate([self.mask, self.mask_test])
        order = np.random.default_rng(seed).permutation(len(y))
        a, b = np.split(order, [len(self.y)])
        return Split(X[a], y[a], None if mask is None else mask[a], X[b], y[b], None if mask is None else mask[b])

    def first(self, n: int) -> Split:
        """Return at most ``n`` training and ``n`` test samples."""
        return Split(*(None if part is None else part[:n] for part in vars(self).values()))


@dataclass(frozen=True)
class Row:
    """What a model did on one split."""

    model: str
    seed: int
    test: float
    error: float
    validation: float
    log_loss: float
    ece: float
    seconds: float
    fits: int
    gap: float | None
    setting: str


def cpu() -> float:
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in usage)


def load(name: str):
    """Return ``X_train, y_train, mask_train, X_test, y_test, mask_test``."""
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


def fitted(model: str, split: Split, folds: int, jobs: int, sweep: Sweep, seed: int, device: str):
    """Fit a model; return probabilities of the test part, classes, validation score, number of fits, gap and setting."""
    if model.startswith("auto"):
        validation = "folds" if model == STRICT else "shared"
        ours = cf.TokenClassifierCV(head="auto", cv=folds, n_jobs=jobs, device=device, validation=validation)
        ours.fit(split.X, split.y, mask=split.mask)
        scores = np.array([ours.cv_results_[f"split{k}_test_score"] for k in range(folds)])
        paths = int((~np.isnan(scores)).any(0).sum()) if validation == "shared" else 0
        used = {label: round(norm, 1) for label, norm in ours.solution_.block_norms.items() if norm > 0}
        setting = f"beta_ratio {ours.beta_ratio_:.2g}; " + ", ".join(f"{k} {v}" for k, v in used.items())
        p = ours.predict_proba(split.X_test, mask=split.mask_test)
        fits = int((~np.isnan(scores)).sum()) + paths + 1
        return p, ours.classes_, ours.best_score_, fits, ours.certificate_.relative_gap, setting
    if model in PROBES:
        probe = TunedProbe(model, sweep, seed, device).fit(split.X, split.y, split.mask)
        p = probe.predict_proba(split.X_test, split.mask_test)
        return p, probe.classes, probe.score, probe.fits, None, probe.setting
    feature = LOGISTIC[model].fit(split.X, mask=split.mask)
    train = feature.transform(split.X, mask=split.mask)
    probe = make_pipeline(StandardScaler(), LogisticRegression(max_iter=300))
    search = GridSearchCV(probe, {"logisticregression__C": STRENGTHS}, cv=folds, n_jobs=jobs).fit(train, split.y)
    p = search.predict_proba(feature.transform(split.X_test, mask=split.mask_test))
    setting = f"C {search.best_params_['logisticregression__C']:g}"
    return p, search.classes_, search.best_score_, folds * len(STRENGTHS) + 1, None, setting


def measured(model: str, split: Split, folds: int, jobs: int, sweep: Sweep, seed: int, device: str) -> Row:
    start = cpu()
    p, classes, score, fits, gap, setting = fitted(model, split, folds, jobs, sweep, seed, device)
    seconds = cpu() - start
    known = np.isin(split.y_test, classes)
    correct = classes[p.argmax(1)] == split.y_test
    draws = np.random.default_rng(0).integers(0, len(correct), (1000, len(correct)))
    return Row(
        model=model,
        seed=seed,
        test=100 * float(correct.mean()),
        error=100 * float(correct[draws].mean(1).std()),
        validation=100 * float(score),
        log_loss=float(log_loss(split.y_test[known], p[known], labels=classes)),
        ece=calibration(p, correct),
        seconds=seconds,
        fits=fits,
        gap=gap,
        setting=setting,
    )


def line(rows: list[Row]) -> str:
    """Return a line of the table: means over seeds; bootstrap error, gap and setting are those of the first seed."""
    first = rows[0]
    mean = {name: float(np.mean([getattr(row, name) for row in rows])) for name in vars(first) if name != "setting"
            and name != "model" and name != "gap"}  # fmt: skip
    spread = f"{np.std([row.test for row in rows], ddof=1):.1f}" if len(rows) > 1 else "-"
    gap = "none" if first.gap is None else f"{max(row.gap for row in rows):.1e}"
    return (
        f"| {first.model} | {mean['test']:.1f} ± {first.error:.1f} | {spread} | {mean['validation']:.1f} | "
        f"{mean['log_loss']:.3f} | {mean['ece']:.3f} | {gap} | {sum(row.fits for row in rows)} | "
        f"{sum(row.seconds for row in rows):.1f} | {first.setting} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="+")
    parser.add_argument("--folds", type=int, default=5)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--device", default="cpu", help="of auto and of the attentive probes")
    parser.add_argument("--models", nargs="+", choices=[*MODELS, STRICT], default=MODELS)
    parser.add_argument("--sweep", choices=("whole", "reduced"), default="whole", help="of the attentive probes")
    parser.add_argument("--quick", action="store_true", help="300 samples, 2 learning rates, 10 epochs")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    sweep = QUICK if options.quick else {"whole": Sweep(), "reduced": REDUCED}[options.sweep]
    tables: dict[str, list[dict]] = {}
    print(f"attentive probes: {sweep}")
    for name in options.data:
        whole = Split(*load(name))
        print(
            f"\n{Path(name).stem}\n\n| model | test | spread | validation | log-loss | ECE | gap | fits | CPU s | setting |"
        )
        print(f"{'|---' * 10}|", flush=True)
        tables[Path(name).stem] = []
        for model in options.models:
            fitted(model, Split(*load("digits")).first(100), 2, options.jobs, QUICK, 0, options.device)
            splits = (whole.drawn(seed) for seed in range(options.seeds))
            rows = []
            for seed, part in enumerate(splits):
                part = part.first(300) if options.quick else part
                rows.append(measured(model, part, options.folds, options.jobs, sweep, seed, options.device))
            tables[Path(name).stem].extend(asdict(row) for row in rows)
            print(line(rows), flush=True)
    if options.json:
        options.json.write_text(json.dumps({"sweep": str(sweep), "tables": tables}, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Settings of the implicit-bias experiment, and the numbers in its findings."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, final

import numpy as np

from convexformer.experiments.study import Finding, Study
from convexformer.margin import AttentionSVM, Flow, Sample, check_assumptions

SVM_TOLERANCE = 1e-6  # certified relative gap of every SVM
Curve = tuple[str, Flow, AttentionSVM]  # for the overview: a name, a flow, and the SVM it should converge to


@final
@dataclass(frozen=True)
class Config:
    """All settings that the numbers depend on."""

    quick: bool
    seed: int = 0
    log_time: float = 1e8  # horizon of the factored parametrizations: diagonal, separate, aligned
    combined_log_time: float = 1e5
    starts: int = 32  # random starts of keys and queries, run at once
    draws: int = 8  # data sets drawn with clear=False
    records: int = 60
    counterexample_scales: tuple[float, ...] = (0.05, 0.5, 2.0)

    @classmethod
    def of(cls, quick: bool) -> Config:
        """Return the settings of a quick or a full run."""
        full = cls(quick=False)
        return replace(full, quick=True, log_time=1e7, combined_log_time=3e4, starts=8, draws=3) if quick else full


@final
@dataclass
class FlowStudy:
    """The study of the gradient flows: its settings, and curves for the overview."""

    study: Study
    config: Config
    curves: list[Curve] = field(default_factory=list)


def certificate_finding(name: str, svm: AttentionSVM) -> Finding:
    """State that an SVM was solved and certified."""
    gap = svm.certificate_.relative_gap
    predicted, measured = f"relative gap <= {SVM_TOLERANCE:.0e}", f"gap {gap:.0e}, {svm.certificate_.kind}"
    return Finding.of_prediction("duality", f"{name}, solved and certified", predicted, measured, gap <= SVM_TOLERANCE)


def svm_numbers(svm: AttentionSVM) -> dict[str, Any]:
    """Return the numbers of a fitted SVM for ``results.json``."""
    proof = svm.certificate_
    return {
        "objective": svm.objective_,
        "dual": proof.dual,
        "relative_gap": proof.relative_gap,
        "kind": proof.kind,
        "rank": svm.rank_,
        "support_tokens": len(svm.support_),
        "seconds": svm.seconds_,
    }


def applies(data: Sample, theorem: str) -> bool:
    """Tell whether theorem 4.1 or 5.1 applies to the data."""
    report = check_assumptions(*data)
    return report.theorem_4_1 if theorem == "4.1" else report.theorem_5_1


def holding(data: Sample) -> str:
    """Name the assumptions that hold."""
    report = check_assumptions(*data)
    return "hold: " + ", ".join(str(a.number) for a in report.assumptions if a.holds)


def at(flow: Flow, series: Any, log_time: float) -> float:
    """Return a series at the first record after a time."""
    return float(np.asarray(series)[min(int(np.searchsorted(flow.log_time, log_time)), len(flow.log_time) - 1)])


def difference(one: Flow, two: Flow) -> np.ndarray:
    """``|b_1 - b_2| / |b_1|`` at each record of the first; the second is interpolated in time where clocks differ."""
    mine, theirs = (np.diagonal(flow.W, axis1=1, axis2=2) for flow in (one, two))
    if np.allclose(one.times, two.times, rtol=1e-9, atol=1e-12):
        matched = theirs
    else:
        matched = np.stack([np.interp(one.times, two.times, theirs[:, j]) for j in range(theirs.shape[1])], 1)
    size = np.linalg.norm(mine, axis=1)
    return np.linalg.norm(mine - matched, axis=1) / np.where(size > 0, size, 1.0)


def slack(data: Sample, svm: AttentionSVM) -> float:
    """Return the smallest dual slack ``1 - |B^T lam|_j`` of a zero weight."""
    rows = np.arange(len(data.X))
    p = data.X[rows, svm.optimal_tokens_][:, None] - data.X
    force = np.abs(np.einsum("il,ild,id->d", svm.dual_coef_, p, data.z))
    zero = np.abs(np.diag(svm.W_)) < 1e-9 * np.abs(svm.W_).max()
    return float(1 - force[zero].max()) if zero.any() else 1.0

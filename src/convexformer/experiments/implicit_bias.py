"""Where training keys and queries ends up: every claim of Sheen et al. 2024 beside what was measured.

Each part draws data, solves the attention SVMs with a certificate, follows the gradient flow, and compares. The claims
and their verdicts go to ``summary.md`` and ``results.json``, the curves to figures, the settings to ``config.json``.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from convexformer import __version__
from convexformer.experiments import implicit_bias_figures as figures
from convexformer.margin import AttentionSVM, Flow, Sample, aligned_init, check_assumptions, gradient_flow, sample_data

TOLERANCE = 1e-6
Curve = tuple[str, Flow, AttentionSVM]  # for the overview: a name, a flow, and the SVM it is said to solve


@dataclass(frozen=True)
class Config:
    """Everything that decides the numbers."""

    quick: bool
    seed: int = 0
    log_time: float = 1e8  # factors: diagonal, separate, aligned
    combined_log_time: float = 1e5
    starts: int = 32  # random starts of keys and queries, run at once
    draws: int = 8  # draws of diagonal data, clear or not
    records: int = 60
    counterexample_scales: tuple[float, ...] = (0.05, 0.5, 2.0)

    @classmethod
    def of(cls, quick: bool) -> Config:
        """Return the settings of a quick or a full run."""
        full = cls(quick=False)
        return replace(full, quick=True, log_time=1e7, combined_log_time=3e4, starts=8, draws=3) if quick else full


@dataclass(frozen=True)
class Claim:
    """One row of the table: what theory says, what was measured, and whether they agree to the stated bound."""

    source: str
    claim: str
    predicted: str
    measured: str
    holds: bool


def run(output: Path, *, quick: bool = False, console: Console | None = None) -> dict[str, Any]:
    """Run the experiment; write figures, ``summary.md``, ``results.json`` and ``config.json`` to ``output``."""
    console = console or Console()
    output = Path(output)
    output.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    config = Config.of(quick)
    settings = {"convexformer": __version__, "experiment": "implicit-bias", **asdict(config)}
    (output / "config.json").write_text(json.dumps(settings, indent=2) + "\n")
    claims: list[Claim] = []
    numbers: dict[str, Any] = {}
    files: list[Path] = []
    curves: list[Curve] = []
    with _spinner(console) as tick:
        for title, part in PARTS.items():
            tick(title)
            curves += part(config, output, claims, numbers, files)
        files.insert(0, figures.overview(curves, output / "overview.png"))
    seconds = time.perf_counter() - started
    result = {
        "certified": all(bool(claim.holds) for claim in claims),
        "claims": [{**asdict(claim), "holds": bool(claim.holds)} for claim in claims],
        "numbers": numbers,
        "figures": [str(file) for file in files],
        "seconds": seconds,
    }
    (output / "results.json").write_text(json.dumps(result, indent=2) + "\n")
    (output / "summary.md").write_text(_summary(config, claims, numbers, files, seconds))
    _print(console, claims, files, output, seconds)
    return result


# ---------------------------------------------------------------------- the parts


def _diagonal(
    config: Config, output: Path, claims: list[Claim], numbers: dict[str, Any], files: list[Path]
) -> list[Curve]:
    """Theorem 4.1: diagonal keys and queries end at the l1-SVM; also for draws that converge slowly."""
    data = sample_data("diagonal", seed=config.seed)
    svm = AttentionSVM("diagonal", tolerance=TOLERANCE).fit(*data)
    flow = gradient_flow(*data, parametrization="diagonal", log_time=config.log_time, records=config.records)
    distance, rate, theory = float(flow.distance_to(svm)), float(flow.rate()), flow.expected_rate(svm)
    early = _at(flow, flow.distance_to(svm, along=True), math.log(1e4))
    claims += [
        _certificate_claim("l1-SVM", svm),
        Claim("assumptions", "theorem 4.1 applies to the data", "2 and 3 hold", _holding(data), _applies(data, "4.1")),
        Claim(
            "theorem 4.1",
            "diagonal K, Q: the direction tends to the l1-SVM",
            "distance -> 0 (bound 1%)",
            f"{distance:.2%} at log t = {flow.log_time[-1]:.1e}",
            distance <= 0.01,
        ),
        Claim(
            "rate of 4.1",
            "d ln(mu)/d tau -> 2/|b*|_1",
            f"{theory:.4f} (bound 0.5%)",
            f"{rate:.4f} ({rate / theory - 1:+.2%})",
            abs(rate / theory - 1) <= 0.005,
        ),
        Claim(
            "physical time",
            "training to t = 10^4 is not enough",
            "error above 10%",
            f"{early:.0%} at t = 1e4",
            early > 0.1,
        ),
    ]
    numbers["diagonal"] = {
        **_svm_numbers(svm),
        "distance": distance,
        "distance_at_t_1e4": early,
        "suboptimality": float(flow.suboptimality(svm)),
        "rate": rate,
        "expected_rate": theory,
        "flow_relative_gap": flow.certificate().relative_gap,
        "steps": flow.n_steps,
        "stationarity_paper_multipliers": float(flow.kkt.stationarity[-1]),
        "stationarity_recent_multipliers": float(flow.recent_kkt.stationarity[-1]),
    }
    draws = []
    for seed in range(config.draws):
        plain = sample_data("diagonal", seed=seed, clear=False)
        own = AttentionSVM("diagonal", tolerance=TOLERANCE).fit(*plain)
        walk = gradient_flow(*plain, parametrization="diagonal", log_time=config.log_time, records=config.records // 2)
        draws.append((_slack(plain, own), walk, own))
    excess = [float(walk.suboptimality(own)) for _, walk, own in draws]
    far = sum(float(walk.distance_to(own)) > 0.01 for _, walk, own in draws)
    claims.append(
        Claim(
            "theorem 4.1",
            f"{config.draws} draws as they come: objective |b|_1/mu",
            "excess -> 0 (bound 2%)",
            f"largest excess {max(excess):.2%}; {far} of {config.draws} directions still more than 1% off",
            max(excess) <= 0.02,
        )
    )
    numbers["diagonal_draws"] = [
        {"dual_slack": slack, "distance": float(walk.distance_to(own)), "suboptimality": float(walk.suboptimality(own))}
        for slack, walk, own in draws
    ]
    files.append(figures.diagonal(flow, svm, draws, output / "diagonal.png"))
    return [("diagonal K, Q: l1-SVM", flow, svm)]


def _lemma(
    config: Config, output: Path, claims: list[Claim], numbers: dict[str, Any], files: list[Path]
) -> list[Curve]:
    """Lemma 4.1: ``b = k q`` and ``b = (p^2 - m^2)/2`` move alike if their squares sum to the same, and only then."""
    data = sample_data("diagonal", seed=config.seed)
    d, rng = data.X.shape[2], np.random.default_rng(config.seed)
    w0 = np.exp(0.3 * rng.standard_normal(d))
    # any (k, q) with k q = 0 and k^2 + q^2 = 2 w0^2 will do: either one, of either sign
    k_side, sign = rng.random(d) < 0.5, rng.choice([-1.0, 1.0], d)
    k, q = np.where(k_side, np.sqrt(2) * w0 * sign, 0.0), np.where(k_side, 0.0, np.sqrt(2) * w0 * sign)
    options: dict[str, Any] = {"log_time": 1e3, "records": 40}
    one = gradient_flow(*data, parametrization="diagonal", init=(k, q), **options)
    two = gradient_flow(*data, parametrization="reparametrized", init=(w0, w0), **options)
    other = gradient_flow(*data, parametrization="reparametrized", init=(0.5 * w0, 0.5 * w0), **options)
    same, apart = _difference(one, two), _difference(one, other)
    until = one.log_time <= 100
    claims.append(
        Claim(
            "lemma 4.1",
            "k q and (p^2 - m^2)/2 move alike if k^2 + q^2 = p^2 + m^2",
            "difference 0",
            f"{same[until].max():.0e} to log t = 100 (with half the p, m: {apart[until].max():.2f})",
            bool(same[until].max() < 1e-9 < 1e-2 < apart[until].max()),
        )
    )
    numbers["lemma_4_1"] = {
        "difference_to_log_t_100": float(same[until].max()),
        "difference_to_log_t_1000": float(same.max()),
        "difference_if_condition_fails": float(apart[until].max()),
    }
    files.append(figures.lemma(one, same, apart, output / "lemma_4_1.png"))
    return []


def _general(
    config: Config, output: Path, claims: list[Claim], numbers: dict[str, Any], files: list[Path]
) -> list[Curve]:
    """Outside every theorem: separate K, Q find the nuclear SVM, the combined W the Frobenius SVM, and these differ."""
    data = sample_data("general", seed=config.seed)
    nuclear, frobenius = (AttentionSVM(norm, tolerance=TOLERANCE).fit(*data) for norm in ("nuclear", "frobenius"))
    apart = float(np.linalg.svd(frobenius.W_, compute_uv=False).sum()) / nuclear.objective_ - 1
    options: dict[str, Any] = {"records": config.records}
    separate = gradient_flow(*data, log_time=config.log_time, n_init=config.starts, seed=config.seed, **options)
    combined = gradient_flow(*data, parametrization="combined", log_time=config.combined_log_time, **options)
    excess = np.asarray(separate.suboptimality(nuclear))
    distance, rate = float(combined.distance_to(frobenius)), float(combined.rate())
    rates, theory, slope = (
        np.asarray(separate.rate()),
        separate.expected_rate(nuclear),
        combined.expected_rate(frobenius),
    )
    worst = rates[np.abs(rates / theory - 1).argmax()]
    claims += [
        _certificate_claim("nuclear SVM", nuclear),
        _certificate_claim("Frobenius SVM", frobenius),
        Claim(
            "general data",
            "nuclear and Frobenius SVM differ (nuclear norm at margin one)",
            "more than 5% apart",
            f"Frobenius solution {apart:.1%} above the nuclear optimum",
            apart > 0.05,
        ),
        Claim(
            "general data",
            f"separate K, Q from {config.starts} small random starts: nuclear norm / margin",
            "the nuclear SVM (bound 1%)",
            f"at most {excess.max():.3%} above; rank {nuclear.rank_} of {data.X.shape[2]}",
            bool((excess <= 0.01).all()),
        ),
        Claim(
            "general data",
            "d ln(mu)/d tau -> 2/||W*||_* (separate)",
            f"{theory:.4f} (bound 0.5%)",
            f"{worst:.4f} ({worst / theory - 1:+.3%}), the worst of {config.starts}",
            abs(worst / theory - 1) <= 0.005,
        ),
        Claim(
            "Tarzanagh et al.",
            "combined W: the direction tends to the Frobenius SVM",
            "distance -> 0 (bound 0.5%)",
            f"{distance:.3%} at log t = {combined.log_time[-1]:.1e}",
            distance <= 0.005,
        ),
        Claim(
            "Tarzanagh et al.",
            "d mu/d tau -> 1/||W_F||_F^2 (combined)",
            f"{slope:.4f} (bound 0.5%)",
            f"{rate:.4f} ({rate / slope - 1:+.3%})",
            abs(rate / slope - 1) <= 0.005,
        ),
    ]
    numbers["general"] = {
        "nuclear": _svm_numbers(nuclear),
        "frobenius": _svm_numbers(frobenius),
        "frobenius_solution_excess": apart,
        "separate_suboptimality": excess.tolist(),
        "separate_distance_to_nuclear": np.asarray(separate.distance_to(nuclear)).tolist(),
        "separate_distance_to_frobenius": np.asarray(separate.distance_to(frobenius)).tolist(),
        "separate_rates": rates.tolist(),
        "expected_rate": theory,
        "combined_distance_to_frobenius": distance,
        "combined_distance_to_nuclear": float(combined.distance_to(nuclear)),
        "combined_rate": rate,
        "combined_expected_rate": slope,
        "largest_margin": float(separate.margin.max()),
    }
    numbers["general_draws"] = draws = [_general_draw(config, seed) for seed in range(config.draws)]
    largest = [max(draw[name] for draw in draws) for name in ("separate_suboptimality", "combined_distance")]
    claims.append(
        Claim(
            "general data",
            f"{config.draws} draws as they come: both of the above",
            "excess and distance -> 0 (bounds 1% and 0.5%)",
            f"at most {largest[0]:.2%} (separate), {largest[1]:.2%} (combined)",
            largest[0] <= 0.01 and largest[1] <= 0.005,
        )
    )
    files.append(figures.general(separate, combined, nuclear, frobenius, output / "general.png"))
    files.append(figures.spectrum(separate, combined, nuclear, frobenius, output / "spectrum.png"))
    files.append(figures.rates([(separate, nuclear), (combined, frobenius)], output / "rates.png"))
    return [
        (f"separate K, Q, {config.starts} starts: nuclear SVM", separate, nuclear),
        ("combined W: Frobenius SVM", combined, frobenius),
    ]


def _aligned(
    config: Config, output: Path, claims: list[Claim], numbers: dict[str, Any], files: list[Path]
) -> list[Curve]:
    """Theorem 5.1 and lemma 5.1; and that the theorem's data cannot tell the two norms apart."""
    data = sample_data("aligned", seed=config.seed)
    nuclear, frobenius = (AttentionSVM(norm, tolerance=TOLERANCE).fit(*data) for norm in ("nuclear", "frobenius"))
    apart = float(np.linalg.norm(nuclear.W_ - frobenius.W_) / np.linalg.norm(frobenius.W_))
    start = aligned_init(*data, seed=config.seed)
    flow = gradient_flow(*data, init=start, log_time=config.log_time, records=config.records)
    random = gradient_flow(*data, init=0.1, seed=config.seed, log_time=1e3, records=config.records)
    distance, crooked = float(flow.distance_to(nuclear)), flow.misalignment
    until = flow.log_time <= 100
    claims += [
        Claim(
            "assumptions", "theorem 5.1 applies to the data", "2, 3 and 4 hold", _holding(data), _applies(data, "5.1")
        ),
        Claim(
            "theorem 5.1",
            "aligned K, Q: the direction tends to the nuclear SVM",
            "distance -> 0 (bound 1%)",
            f"{distance:.2%} at log t = {flow.log_time[-1]:.1e}",
            distance <= 0.01,
        ),
        Claim(
            "theorem 5.1",
            "its data cannot tell nuclear from Frobenius: both SVMs have one solution",
            "distance 0 (bound 1e-4)",
            f"{apart:.1e}",
            apart <= 1e-4,
        ),
        Claim(
            "lemma 5.1",
            "the flow preserves alignment",
            "sine 0",
            f"{crooked[until].max():.0e} to log t = 100, {crooked.max():.0e} later (steps of finite size)",
            bool(crooked[until].max() < 1e-9 and crooked.max() < 1e-2),
        ),
    ]
    numbers["aligned"] = {
        "nuclear": _svm_numbers(nuclear),
        "distance": distance,
        "distance_between_the_svms": apart,
        "misalignment_to_log_t_100": float(crooked[until].max()),
        "misalignment_later": float(crooked.max()),
        "misalignment_of_a_random_start": [float(random.misalignment[0]), float(random.misalignment[-1])],
        "rate": float(flow.rate()),
        "expected_rate": flow.expected_rate(nuclear),
    }
    files.append(figures.aligned(flow, random, nuclear, output / "aligned.png"))
    return [("separate K, Q, aligned: nuclear SVM", flow, nuclear)]


def _counterexample(
    config: Config, output: Path, claims: list[Claim], numbers: dict[str, Any], files: list[Path]
) -> list[Curve]:
    """Assumption 3 matters: the diagonal flow ends at a wrong token although the data is separable."""
    data = sample_data("violates_a3")
    svm = AttentionSVM("diagonal", tolerance=TOLERANCE).fit(*data)
    report = check_assumptions(*data)
    d = data.X.shape[2]
    scales = np.array(config.counterexample_scales)
    start = (np.sqrt(2) * scales[:, None] * np.ones((1, d)), np.zeros((len(scales), d)))
    flow = gradient_flow(*data, parametrization="diagonal", init=start, log_time=1e6, records=config.records)
    tokens = data.X.copy()
    tokens[1, 1, 2] = -2.0  # the second sequence now gains as much as the first: assumption 3 holds
    mended = Sample(tokens, *data[1:])
    right = gradient_flow(*mended, parametrization="diagonal", init=0.5, log_time=300.0, records=config.records)
    wrong, token = flow.selected_tokens, int(flow.optimal_tokens[1])
    three = report[3].numbers
    claims += [
        Claim(
            "assumption 3",
            "it fails, with separable data (l1-SVM value " + f"{svm.objective_:.1f})",
            f"initial loss above {three['threshold']:.3f}",
            f"{three['initial_loss']:.3f}",
            not report[3].holds and report[1].numbers["diagonal_margin"] > 0,
        ),
        Claim(
            "assumption 3",
            f"without it the flow ends at a wrong token, for w0 in {list(config.counterexample_scales)}",
            f"sequence 2 leaves token {token}",
            f"margins {flow.margins[-1, 0, 0, 0]:+.1e} / {flow.margins[-1, 0, 1, 0]:+.1e}, token {int(wrong[0, 1])}",
            bool((wrong[:, 1] != token).all() and (wrong[:, 0] == flow.optimal_tokens[0]).all()),
        ),
        Claim(
            "assumption 3",
            "the same tokens with scores that satisfy it",
            "both optimal tokens",
            f"margins {right.margins[-1, 0, 0]:+.1e} / {right.margins[-1, 1, 0]:+.1e}",
            bool((right.selected_tokens == right.optimal_tokens).all() and check_assumptions(*mended)[3].holds),
        ),
    ]
    numbers["counterexample"] = {
        **_svm_numbers(svm),
        **{name: float(value) for name, value in three.items()},
        "scales": list(config.counterexample_scales),
        "final_margins": flow.margins[-1, :, :, 0].tolist(),
        "final_loss": flow.loss[-1].tolist(),
        "infimum": flow.data.infimum,
        "mended_margins": right.margins[-1, :, 0].tolist(),
    }
    files.append(figures.counterexample(flow, right, scales, output / "assumption_3.png"))
    return []


PARTS = {
    "theorem 4.1: diagonal keys and queries": _diagonal,
    "lemma 4.1: an equivalent form": _lemma,
    "general data: nuclear against Frobenius": _general,
    "theorem 5.1: aligned keys and queries": _aligned,
    "assumption 3: a counterexample": _counterexample,
}

# ---------------------------------------------------------------------- small things


def _general_draw(config: Config, seed: int) -> dict[str, float]:
    """Draw general data, clear or not, and follow both flows."""
    data = sample_data("general", seed=seed, clear=False)
    nuclear, frobenius = (AttentionSVM(norm, tolerance=TOLERANCE).fit(*data) for norm in ("nuclear", "frobenius"))
    separate = gradient_flow(*data, log_time=config.log_time, records=20)
    combined = gradient_flow(*data, parametrization="combined", log_time=config.combined_log_time, records=20)
    return {
        "frobenius_solution_excess": np.linalg.svd(frobenius.W_)[1].sum() / nuclear.objective_ - 1,
        "rank": float(nuclear.rank_),
        "separate_suboptimality": float(separate.suboptimality(nuclear)),
        "separate_distance": float(separate.distance_to(nuclear)),
        "combined_distance": float(combined.distance_to(frobenius)),
    }


def _certificate_claim(name: str, svm: AttentionSVM) -> Claim:
    gap = svm.certificate_.relative_gap
    text = f"gap {gap:.0e}, {svm.certificate_.kind}"
    return Claim("duality", f"{name}, solved and certified", f"relative gap <= {TOLERANCE:.0e}", text, gap <= TOLERANCE)


def _svm_numbers(svm: AttentionSVM) -> dict[str, Any]:
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


def _applies(data: Sample, theorem: str) -> bool:
    report = check_assumptions(*data)
    return report.theorem_4_1 if theorem == "4.1" else report.theorem_5_1


def _holding(data: Sample) -> str:
    report = check_assumptions(*data)
    return "hold: " + ", ".join(str(a.number) for a in report.assumptions if a.holds)


def _at(flow: Flow, series: Any, log_time: float) -> float:
    """Return a series at the first record after a time."""
    return float(np.asarray(series)[min(int(np.searchsorted(flow.log_time, log_time)), len(flow.log_time) - 1)])


def _difference(one: Flow, two: Flow) -> np.ndarray:
    """``|b_1 - b_2| / |b_1|`` at each record of the first; the second is interpolated in time where clocks differ."""
    mine, theirs = (np.diagonal(flow.W, axis1=1, axis2=2) for flow in (one, two))
    if np.allclose(one.times, two.times, rtol=1e-9, atol=1e-12):
        matched = theirs
    else:
        matched = np.stack([np.interp(one.times, two.times, theirs[:, j]) for j in range(theirs.shape[1])], 1)
    size = np.linalg.norm(mine, axis=1)
    return np.linalg.norm(mine - matched, axis=1) / np.where(size > 0, size, 1.0)


def _slack(data: Sample, svm: AttentionSVM) -> float:
    """Return the smallest dual slack ``1 - |B^T lam|_j`` of a zero weight."""
    rows = np.arange(len(data.X))
    p = data.X[rows, svm.optimal_tokens_][:, None] - data.X
    force = np.abs(np.einsum("il,ild,id->d", svm.dual_coef_, p, data.z))
    zero = np.abs(np.diag(svm.W_)) < 1e-9 * np.abs(svm.W_).max()
    return float(1 - force[zero].max()) if zero.any() else 1.0


def _summary(config: Config, claims: list[Claim], numbers: dict[str, Any], files: list[Path], seconds: float) -> str:
    mode = "quick" if config.quick else "full"
    held = sum(claim.holds for claim in claims)
    lines = [
        "# Implicit bias: gradient flow on attention against the attention SVMs",
        "",
        f"{held} of {len(claims)} rows as predicted ({mode} run, {seconds:.0f} s; settings in `config.json`).",
        "",
        "| source | claim | predicted | measured | |",
        "|---|---|---|---|---|",
    ]
    for claim in claims:
        cells = (text.replace("|", "\\|") for text in (claim.source, claim.claim, claim.predicted, claim.measured))
        lines.append("| " + " | ".join(cells) + f" | {'yes' if claim.holds else 'NO'} |")
    aligned, general = numbers["aligned"], numbers["general"]
    lines += [
        "",
        "The data of theorem 5.1 cannot tell nuclear from Frobenius: there both SVMs have the same solution (relative "
        f"distance {aligned['distance_between_the_svms']:.0e}). The general data above can: the Frobenius solution's "
        f"nuclear norm is {general['frobenius_solution_excess']:.1%} above the optimum. No theorem covers it.",
        "",
        *(f"![{file.stem}]({file.name})" for file in files),
        "",
    ]
    return "\n".join(lines)


def _print(console: Console, claims: list[Claim], files: list[Path], output: Path, seconds: float) -> None:
    table = Table(title="Gradient flow on attention: claims and measurements", show_lines=True)
    for title in ("claim", "predicted", "measured", ""):
        table.add_column(title)
    for claim in claims:
        verdict = "[green]yes[/]" if claim.holds else "[red]NO[/]"
        table.add_row(f"[bold]{claim.source}:[/] {claim.claim}", claim.predicted, claim.measured, verdict)
    console.print(table)
    console.print("mu: smallest margin; tau: normalised time; log t: natural logarithm of physical time.", style="dim")
    console.print("The data of theorem 5.1 cannot tell nuclear from Frobenius; the general data can.")
    console.print("Figures: " + ", ".join(str(file) for file in files))
    console.print(f"[dim]{seconds:.0f} s in all; {output / 'summary.md'}, results.json, config.json[/]")


@contextmanager
def _spinner(console: Console) -> Iterator[Any]:
    """Yield a function that says what is going on."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("implicit bias", total=None)
        yield lambda text: progress.update(task, description=text)

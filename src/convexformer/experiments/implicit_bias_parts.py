"""The parts of the implicit-bias experiment: each draws data, solves the SVMs, follows the flow, and adds findings."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from convexformer.experiments import implicit_bias_figures as figures
from convexformer.experiments.implicit_bias_study import (
    SVM_TOLERANCE,
    Config,
    FlowStudy,
    applies,
    at,
    certificate_finding,
    difference,
    holding,
    slack,
    svm_numbers,
)
from convexformer.experiments.study import Finding
from convexformer.margin import AttentionSVM, Sample, aligned_init, check_assumptions, gradient_flow, sample_data


def diagonal(flows: FlowStudy) -> None:
    """Theorem 4.1: diagonal keys and queries end at the l1-SVM; also for draws that converge slowly."""
    study, config = flows.study, flows.config
    data = sample_data("diagonal", seed=config.seed)
    svm = AttentionSVM("diagonal", tolerance=SVM_TOLERANCE).fit(*data)
    flow = gradient_flow(*data, parametrization="diagonal", log_time=config.log_time, records=config.records)
    distance, rate, theory = float(flow.distance_to(svm)), float(flow.rate()), flow.expected_rate(svm)
    early = at(flow, flow.distance_to(svm, along=True), math.log(1e4))
    study.findings += [
        certificate_finding("l1-SVM", svm),
        Finding.of_prediction(
            "assumptions", "theorem 4.1 applies to the data", "2 and 3 hold", holding(data), applies(data, "4.1")
        ),
        Finding.of_prediction(
            "theorem 4.1",
            "diagonal K, Q: the direction tends to the l1-SVM",
            "distance -> 0 (bound 1%)",
            f"{distance:.2%} at log t = {flow.log_time[-1]:.1e}",
            distance <= 0.01,
        ),
        Finding.of_prediction(
            "rate of 4.1",
            "d ln(mu)/d tau -> 2/|b*|_1",
            f"{theory:.4f} (bound 0.5%)",
            f"{rate:.4f} ({rate / theory - 1:+.2%})",
            abs(rate / theory - 1) <= 0.005,
        ),
        Finding.of_prediction(
            "physical time",
            "training to t = 10^4 is not enough",
            "error above 10%",
            f"{early:.0%} at t = 1e4",
            early > 0.1,
        ),
    ]
    study.numbers["diagonal"] = {
        **svm_numbers(svm),
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
        own = AttentionSVM("diagonal", tolerance=SVM_TOLERANCE).fit(*plain)
        walk = gradient_flow(*plain, parametrization="diagonal", log_time=config.log_time, records=config.records // 2)
        draws.append((slack(plain, own), walk, own))
    excess = [float(walk.suboptimality(own)) for _, walk, own in draws]
    far = sum(float(walk.distance_to(own)) > 0.01 for _, walk, own in draws)
    study.findings.append(
        Finding.of_prediction(
            "theorem 4.1",
            f"{config.draws} draws as they come: objective |b|_1/mu",
            "excess -> 0 (bound 2%)",
            f"largest excess {max(excess):.2%}; {far} of {config.draws} directions still more than 1% off",
            max(excess) <= 0.02,
        )
    )
    study.numbers["diagonal_draws"] = [
        {
            "dual_slack": smallest,
            "distance": float(walk.distance_to(own)),
            "suboptimality": float(walk.suboptimality(own)),
        }
        for smallest, walk, own in draws
    ]
    study.draw(figures.diagonal, "diagonal.png", "diagonal", flow, svm, draws)
    flows.curves.append(("diagonal K, Q: l1-SVM", flow, svm))


def lemma(flows: FlowStudy) -> None:
    """Lemma 4.1: ``b = k q`` and ``b = (p^2 - m^2)/2`` move alike if their squares sum to the same, and only then."""
    study, config = flows.study, flows.config
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
    same, apart = difference(one, two), difference(one, other)
    until = one.log_time <= 100
    study.findings.append(
        Finding.of_prediction(
            "lemma 4.1",
            "k q and (p^2 - m^2)/2 move alike if k^2 + q^2 = p^2 + m^2",
            "difference 0",
            f"{same[until].max():.0e} to log t = 100 (with half the p, m: {apart[until].max():.2f})",
            bool(same[until].max() < 1e-9 < 1e-2 < apart[until].max()),
        )
    )
    study.numbers["lemma_4_1"] = {
        "difference_to_log_t_100": float(same[until].max()),
        "difference_to_log_t_1000": float(same.max()),
        "difference_if_condition_fails": float(apart[until].max()),
    }
    study.draw(figures.lemma, "lemma_4_1.png", "lemma_4_1", one, same, apart)


def general(flows: FlowStudy) -> None:
    """Outside every theorem: separate K, Q find the nuclear SVM, the combined W the Frobenius SVM, and these differ."""
    study, config = flows.study, flows.config
    data = sample_data("general", seed=config.seed)
    nuclear, frobenius = (AttentionSVM(norm, tolerance=SVM_TOLERANCE).fit(*data) for norm in ("nuclear", "frobenius"))
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
    study.findings += [
        certificate_finding("nuclear SVM", nuclear),
        certificate_finding("Frobenius SVM", frobenius),
        Finding.of_prediction(
            "general data",
            "nuclear and Frobenius SVM differ (nuclear norm at margin one)",
            "more than 5% apart",
            f"Frobenius solution {apart:.1%} above the nuclear optimum",
            apart > 0.05,
        ),
        Finding.of_prediction(
            "general data",
            f"separate K, Q from {config.starts} small random starts: nuclear norm / margin",
            "the nuclear SVM (bound 1%)",
            f"at most {excess.max():.3%} above; rank {nuclear.rank_} of {data.X.shape[2]}",
            bool((excess <= 0.01).all()),
        ),
        Finding.of_prediction(
            "general data",
            "d ln(mu)/d tau -> 2/||W*||_* (separate)",
            f"{theory:.4f} (bound 0.5%)",
            f"{worst:.4f} ({worst / theory - 1:+.3%}), the worst of {config.starts}",
            abs(worst / theory - 1) <= 0.005,
        ),
        Finding.of_prediction(
            "Tarzanagh et al.",
            "combined W: the direction tends to the Frobenius SVM",
            "distance -> 0 (bound 0.5%)",
            f"{distance:.3%} at log t = {combined.log_time[-1]:.1e}",
            distance <= 0.005,
        ),
        Finding.of_prediction(
            "Tarzanagh et al.",
            "d mu/d tau -> 1/||W_F||_F^2 (combined)",
            f"{slope:.4f} (bound 0.5%)",
            f"{rate:.4f} ({rate / slope - 1:+.3%})",
            abs(rate / slope - 1) <= 0.005,
        ),
    ]
    study.numbers["general"] = {
        "nuclear": svm_numbers(nuclear),
        "frobenius": svm_numbers(frobenius),
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
    study.numbers["general_draws"] = draws = [_general_draw(config, seed) for seed in range(config.draws)]
    largest = [max(draw[name] for draw in draws) for name in ("separate_suboptimality", "combined_distance")]
    study.findings.append(
        Finding.of_prediction(
            "general data",
            f"{config.draws} draws as they come: both of the above",
            "excess and distance -> 0 (bounds 1% and 0.5%)",
            f"at most {largest[0]:.2%} (separate), {largest[1]:.2%} (combined)",
            largest[0] <= 0.01 and largest[1] <= 0.005,
        )
    )
    study.draw(figures.general, "general.png", "general", separate, combined, nuclear, frobenius)
    study.draw(figures.spectrum, "spectrum.png", "spectrum", separate, combined, nuclear, frobenius)
    study.draw(figures.rates, "rates.png", "rates", [(separate, nuclear), (combined, frobenius)])
    flows.curves += [
        (f"separate K, Q, {config.starts} starts: nuclear SVM", separate, nuclear),
        ("combined W: Frobenius SVM", combined, frobenius),
    ]


def aligned(flows: FlowStudy) -> None:
    """Theorem 5.1 and lemma 5.1; and that the theorem's data cannot tell the two norms apart."""
    study, config = flows.study, flows.config
    data = sample_data("aligned", seed=config.seed)
    nuclear, frobenius = (AttentionSVM(norm, tolerance=SVM_TOLERANCE).fit(*data) for norm in ("nuclear", "frobenius"))
    apart = float(np.linalg.norm(nuclear.W_ - frobenius.W_) / np.linalg.norm(frobenius.W_))
    start = aligned_init(*data, seed=config.seed)
    flow = gradient_flow(*data, init=start, log_time=config.log_time, records=config.records)
    random = gradient_flow(*data, init=0.1, seed=config.seed, log_time=1e3, records=config.records)
    distance, misalignment = float(flow.distance_to(nuclear)), flow.misalignment
    until = flow.log_time <= 100
    study.findings += [
        Finding.of_prediction(
            "assumptions", "theorem 5.1 applies to the data", "2, 3 and 4 hold", holding(data), applies(data, "5.1")
        ),
        Finding.of_prediction(
            "theorem 5.1",
            "aligned K, Q: the direction tends to the nuclear SVM",
            "distance -> 0 (bound 1%)",
            f"{distance:.2%} at log t = {flow.log_time[-1]:.1e}",
            distance <= 0.01,
        ),
        Finding.of_prediction(
            "theorem 5.1",
            "its data cannot tell nuclear from Frobenius: both SVMs have one solution",
            "distance 0 (bound 1e-4)",
            f"{apart:.1e}",
            apart <= 1e-4,
        ),
        Finding.of_prediction(
            "lemma 5.1",
            "the flow preserves alignment",
            "sine 0",
            f"{misalignment[until].max():.0e} to log t = 100, {misalignment.max():.0e} later (steps of finite size)",
            bool(misalignment[until].max() < 1e-9 and misalignment.max() < 1e-2),
        ),
    ]
    study.numbers["aligned"] = {
        "nuclear": svm_numbers(nuclear),
        "distance": distance,
        "distance_between_the_svms": apart,
        "misalignment_to_log_t_100": float(misalignment[until].max()),
        "misalignment_later": float(misalignment.max()),
        "misalignment_of_a_random_start": [float(random.misalignment[0]), float(random.misalignment[-1])],
        "rate": float(flow.rate()),
        "expected_rate": flow.expected_rate(nuclear),
    }
    study.draw(figures.aligned, "aligned.png", "aligned", flow, random, nuclear)
    flows.curves.append(("separate K, Q, aligned: nuclear SVM", flow, nuclear))


def counterexample(flows: FlowStudy) -> None:
    """Assumption 3 matters: the diagonal flow ends at a wrong token although the data is separable."""
    study, config = flows.study, flows.config
    data = sample_data("violates_a3")
    svm = AttentionSVM("diagonal", tolerance=SVM_TOLERANCE).fit(*data)
    report = check_assumptions(*data)
    d = data.X.shape[2]
    scales = np.array(config.counterexample_scales)
    start = (np.sqrt(2) * scales[:, None] * np.ones((1, d)), np.zeros((len(scales), d)))
    flow = gradient_flow(*data, parametrization="diagonal", init=start, log_time=1e6, records=config.records)
    tokens = data.X.copy()
    tokens[1, 1, 2] = -2.0  # the second sequence now gains as much as the first: assumption 3 holds
    satisfying = Sample(tokens, *data[1:])
    right = gradient_flow(*satisfying, parametrization="diagonal", init=0.5, log_time=300.0, records=config.records)
    wrong, token = flow.selected_tokens, int(flow.optimal_tokens[1])
    three = report[3].numbers
    study.findings += [
        Finding.of_prediction(
            "assumption 3",
            "it fails, with separable data (l1-SVM value " + f"{svm.objective_:.1f})",
            f"initial loss above {three['threshold']:.3f}",
            f"{three['initial_loss']:.3f}",
            not report[3].holds and report[1].numbers["diagonal_margin"] > 0,
        ),
        Finding.of_prediction(
            "assumption 3",
            f"without it the flow ends at a wrong token, for w0 in {list(config.counterexample_scales)}",
            f"sequence 2 leaves token {token}",
            f"margins {flow.margins[-1, 0, 0, 0]:+.1e} / {flow.margins[-1, 0, 1, 0]:+.1e}, token {int(wrong[0, 1])}",
            bool((wrong[:, 1] != token).all() and (wrong[:, 0] == flow.optimal_tokens[0]).all()),
        ),
        Finding.of_prediction(
            "assumption 3",
            "the same tokens with scores that satisfy it",
            "both optimal tokens",
            f"margins {right.margins[-1, 0, 0]:+.1e} / {right.margins[-1, 1, 0]:+.1e}",
            bool((right.selected_tokens == right.optimal_tokens).all() and check_assumptions(*satisfying)[3].holds),
        ),
    ]
    study.numbers["counterexample"] = {
        **svm_numbers(svm),
        **{name: float(value) for name, value in three.items()},
        "scales": list(config.counterexample_scales),
        "final_margins": flow.margins[-1, :, :, 0].tolist(),
        "final_loss": flow.loss[-1].tolist(),
        "infimum": flow.data.infimum,
        "mended_margins": right.margins[-1, :, 0].tolist(),
    }
    study.draw(figures.counterexample, "assumption_3.png", "assumption_3", flow, right, scales)


def _general_draw(config: Config, seed: int) -> dict[str, float]:
    """Draw general data, clear or not, and follow both flows."""
    data = sample_data("general", seed=seed, clear=False)
    nuclear, frobenius = (AttentionSVM(norm, tolerance=SVM_TOLERANCE).fit(*data) for norm in ("nuclear", "frobenius"))
    separate = gradient_flow(*data, log_time=config.log_time, records=20)
    combined = gradient_flow(*data, parametrization="combined", log_time=config.combined_log_time, records=20)
    return {
        "frobenius_solution_excess": np.linalg.svd(frobenius.W_)[1].sum() / nuclear.objective_ - 1,
        "rank": float(nuclear.rank_),
        "separate_suboptimality": float(separate.suboptimality(nuclear)),
        "separate_distance": float(separate.distance_to(nuclear)),
        "combined_distance": float(combined.distance_to(frobenius)),
    }


PARTS: dict[str, Callable[[FlowStudy], None]] = {
    "theorem 4.1: diagonal keys and queries": diagonal,
    "lemma 4.1: an equivalent form": lemma,
    "general data: nuclear against Frobenius": general,
    "theorem 5.1: aligned keys and queries": aligned,
    "assumption 3: a counterexample": counterexample,
}

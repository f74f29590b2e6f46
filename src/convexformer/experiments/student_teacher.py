"""Students of one attention layer: figures 2 and 3 of Ergen et al. 2022, with certificates, seeds and numbers for maps.

A layer's attention block is the teacher. Students see its inputs and outputs: the convex program (independent heads,
which is their (10) with all tokens as outputs), the alternative attention (9) whose optimum it is, and standard
self-attention (3), trained by Adam. Learning rates are chosen by the training objective at each beta, betas by validation
samples, for every student; the objectives are compared at one beta, the convex program's choice, as in the paper.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from convexformer.data.tokens import pick_device
from convexformer.experiments import student_teacher_figures as figures
from convexformer.experiments.document import Document
from convexformer.experiments.student_teacher_data import Lesson, load
from convexformer.experiments.student_teacher_runs import CONVEX, Config, Run, Students
from convexformer.experiments.study import Study, Verdict

TITLE = "Student and teacher: one attention layer, learned by convex and by ordinary attention"
SMOOTHING = 0.01  # share of the uniform map mixed into every map before KL: sparse maps have zeros
ORDER = 5.0  # "almost an order of magnitude", in figures


def run(
    output: Path, *, quick: bool = False, console: Console | None = None, data: Path | str | None = None
) -> dict[str, Any]:
    """Run the experiment; write figures, ``summary.md``, ``results.json``, ``runs.json`` and ``config.json`` to ``output``.

    ``data`` is a file as :mod:`~convexformer.experiments.student_teacher_data` describes it; without one a synthetic layer
    is the teacher. Runs that ``runs.json`` holds already, with the same settings, are not done again.
    """
    study = Study.begin("student-teacher", TITLE, output, quick, console)
    small = quick or data is None
    config = Config.of(small)
    device = pick_device("auto")
    dtype = torch.float32 if device.type == "cuda" else torch.float64
    lesson = load(None if data is None else Path(data), quick=quick).to(device, dtype)

    def say(what: str) -> None:
        study.console.print(f"[dim]{study.seconds:6.1f} s[/] {what}", highlight=False)

    students = Students(lesson, config, study.output / "runs.json", say)
    chosen, common = _grid_search(students)
    finals = _finals(students, chosen)
    at_common = {student: runs["common beta"] for student, runs in finals.items()}
    table, scores = _table(finals), _map_scores(at_common, lesson)
    linear = students.fact("linear_map", students.linear_map)
    machine = students.fact("machine", lambda: _machine(device))
    settings = {**asdict(config), "data": lesson.name, "target": lesson.target, **lesson.sizes, **machine}
    study.write_config(settings)
    bound = _bound(at_common)
    study.numbers |= {
        "beta_max": students.beta_max,
        "common_beta": common,
        "loss_of_zero": students.at_zero,
        "lower_bound": bound,
        "students": table,
        "maps": scores,
        "linear_map_per_token": linear,
        "first_token": lesson.first_token(),
        **machine,
    }
    _find(study, table, scores, linear)
    _draw(study, at_common, students, lesson, scores, bound, common)
    seconds = students.add_seconds(study.seconds)
    convex = at_common[CONVEX][0].certificate or {}
    result = study.finish(
        certified=float(convex["relative_gap"]) <= config.tolerance,
        parts={
            "findings": [
                {"source": f.source, "claim": f.claim, "measured": f.measured, "verdict": f.verdict.value}
                for f in study.findings
            ]
        },
        figures=[file.name for file, _ in study.figures],
        page=_page(study, table, scores, lesson, seconds),
        seconds=seconds,
    )
    verdicts: list[tuple[str, ...]] = [
        (f.measured, f"[{f.verdict.colour}]{f.verdict.value}[/]") for f in study.findings
    ]
    study.print_findings(f"Student and teacher: {lesson.name}", ("measured", ""), verdicts)
    study.print_files(seconds, "results.json, runs.json, config.json")
    return result


# ---------------------------------------------------------------------- runs


def _grid_search(students: Students) -> tuple[dict[str, list[tuple[float, float]]], float]:
    """Return, for each student, (beta, learning rate) at the common beta and at its own; and the common beta.

    The common beta is the convex program's choice: the best on validation samples.
    """
    config, top = students.config, students.beta_max
    betas = [ratio * top for ratio in config.ratios]
    convex = [students.convex(beta, False) for beta in betas]
    common = max(convex, key=lambda run: run.validation_r2).beta
    chosen = {CONVEX: [(common, 0.0), (common, 0.0)]}
    for student in students.networks:
        best_rate: dict[float, Run] = {}
        for beta in [*betas, *(ratio * top for ratio in config.more_ratios)]:
            runs = [
                students.network(student, beta, rate, 0, config.grid_steps, False) for rate in config.learning_rates
            ]
            best_rate[beta] = min(runs, key=lambda run: run.objective if np.isfinite(run.objective) else np.inf)
        own = max(best_rate.values(), key=lambda run: run.validation_r2 if np.isfinite(run.validation_r2) else -np.inf)
        chosen[student] = [(common, best_rate[common].learning_rate), (own.beta, own.learning_rate)]
    return chosen, common


def _finals(students: Students, chosen: dict[str, list[tuple[float, float]]]) -> dict[str, dict[str, list[Run]]]:
    """Run every student at the common beta and at its own, by seed."""
    config = students.config
    finals: dict[str, dict[str, list[Run]]] = {}
    for which, name in enumerate(("common beta", "own beta")):
        for student, settings in chosen.items():
            beta, rate = settings[which]
            seeds = range(1 if student == CONVEX else config.seeds)
            runs = [
                students.convex(beta, True)
                if student == CONVEX
                else students.network(student, beta, rate, seed, config.steps, True)
                for seed in seeds
            ]
            finals.setdefault(student, {})[name] = runs
    return finals


# ---------------------------------------------------------------------- numbers


def _table(finals: dict[str, dict[str, list[Run]]]) -> dict[str, Any]:
    """Mean and spread over seeds of every student."""

    def spread(values: list[float]) -> dict[str, float]:
        return {"mean": float(np.mean(values)), "std": float(np.std(values)), "best": float(np.min(values))}

    table: dict[str, Any] = {}
    for student, by_beta in finals.items():
        table[student] = {}
        for which, runs in by_beta.items():
            gaps = [run.certificate["relative_gap"] for run in runs if run.certificate is not None]
            table[student][which] = {
                "beta": runs[0].beta,
                "learning_rate": runs[0].learning_rate,
                "seeds": len(runs),
                "steps": runs[0].steps,
                "seconds": float(np.mean([run.seconds for run in runs])),
                "objective": spread([run.objective for run in runs]),
                "train_r2": spread([run.train_r2 for run in runs]),
                "validation_r2": spread([run.validation_r2 for run in runs]),
                "test_r2": spread([run.test_r2 for run in runs]),
                "relative_gap": spread(gaps) if gaps else None,
                "groups": runs[0].groups,
            }
    return table


def map_scores(found: np.ndarray, teacher: np.ndarray) -> dict[str, float]:
    """Compare an attention map with the teacher's: mean KL of rows (smoothed), total variation, correlation of entries.

    ``correlation_elsewhere`` leaves out the first row and column: [CLS] is the same in all samples, so attending to it adds
    next to nothing that a student could see, and yet it takes most of the teacher's attention.
    """
    s = len(teacher)
    p, q = ((1 - SMOOTHING) * values + SMOOTHING / s for values in (teacher, found))
    return {
        "kl": float((p * np.log(p / q)).sum(1).mean()),
        "total_variation": float(0.5 * np.abs(teacher - found).sum(1).mean()),
        "correlation": _correlation(found, teacher),
        "correlation_elsewhere": _correlation(found[1:, 1:], teacher[1:, 1:]),
        "from_uniform": float(0.5 * np.abs(found - 1 / s).sum(1).mean()),
    }


def _correlation(a: np.ndarray, b: np.ndarray) -> float:
    """Pearson's, zero where one of the maps is constant."""
    return 0.0 if min(a.std(), b.std()) < 1e-12 else float(np.corrcoef(a.ravel(), b.ravel())[0, 1])


def _map_scores(at_common: dict[str, list[Run]], lesson: Lesson) -> dict[str, dict[str, float]]:
    """Scores of every student's map, means over seeds, beside those of the uniform map."""
    teacher = lesson.teacher_map.cpu().numpy()
    scores = {
        "teacher": map_scores(teacher, teacher),
        "uniform": map_scores(np.full_like(teacher, 1 / len(teacher)), teacher),
    }
    for student, runs in at_common.items():
        each = [map_scores(np.array(run.attention_map), teacher) for run in runs]
        scores[student] = {name: float(np.mean([one[name] for one in each])) for name in each[0]}
    return scores


def _bound(at_common: dict[str, list[Run]]) -> float:
    """Return the best certified lower bound on the optimum of the convex program, which is that of the alternative."""
    return max(
        float(run.certificate["dual"]) for runs in at_common.values() for run in runs if run.certificate is not None
    )


# ---------------------------------------------------------------------- words


def _find(study: Study, table: dict[str, Any], scores: dict[str, Any], linear: dict[str, float]) -> None:
    """Set the paper's claims beside the measurements."""
    source = "Ergen et al., figure 2"
    convex = table[CONVEX]["common beta"]
    value = convex["objective"]["mean"]
    others = {student: rows for student, rows in table.items() if student != CONVEX}
    ratios = {student: rows["common beta"]["objective"]["mean"] / value for student, rows in others.items()}
    plain = ratios["standard"]
    study.find(
        source,
        "the convex objective is almost an order of magnitude below that of standard training, at the same beta",
        "; ".join(f"{student} {ratio:.3g} times the convex objective" for student, ratio in ratios.items()),
        Verdict.YES if plain >= ORDER else Verdict.PARTLY if plain > 1 else Verdict.NO,
    )
    alternative = table["alternative"]["common beta"]
    study.find(
        "Ergen et al., theorem 2",
        "the alternative attention has the optimum of the convex program; training it may end above",
        f"convex certified to {convex['relative_gap']['mean']:.1e}; the trained alternative is "
        f"{ratios['alternative']:.3g} times as high, its own certified gap {alternative['relative_gap']['mean']:.2g}",
        Verdict.YES if ratios["alternative"] >= 1 - 2 * convex["relative_gap"]["mean"] else Verdict.NO,
    )
    best = {student: rows["own beta"]["test_r2"]["mean"] for student, rows in table.items()}
    study.find(
        source,
        "the convex program has a lower test error than standard training, each at its best beta",
        "test R2: " + "; ".join(f"{student} {r2:.3f}" for student, r2 in best.items()),
        Verdict.YES
        if best[CONVEX] > max(r2 for student, r2 in best.items() if "standard" in student)
        else Verdict.PARTLY
        if best[CONVEX] > best["standard"]
        else Verdict.NO,
    )
    study.find(
        "this library",
        "students beat the best linear map of each token by itself, which has no attention",
        f"linear map R2 {linear['test_r2']:.3f}; convex {best[CONVEX]:.3f}",
        Verdict.YES if best[CONVEX] > linear["test_r2"] else Verdict.NO,
    )
    own, plain_map, uniform = scores[CONVEX], scores["standard"], scores["uniform"]
    study.find(
        "Ergen et al., figure 3",
        "the convex attention map is close to the teacher's",
        f"correlation {own['correlation']:.2f}, {own['correlation_elsewhere']:.2f} without the first token; "
        f"KL {own['kl']:.2f} (uniform map: 0, 0, {uniform['kl']:.2f})",
        Verdict.YES
        if own["correlation"] > 0.7 and own["kl"] < uniform["kl"]
        else Verdict.PARTLY
        if max(own["correlation"], own["correlation_elsewhere"]) > 0.5
        else Verdict.NO,
    )
    study.find(
        "Ergen et al., figure 3",
        "standard training ends in a uniform attention map",
        f"distance of its map from the uniform one {plain_map['from_uniform']:.2f} "
        f"(teacher {scores['teacher']['from_uniform']:.2f}); correlation with the teacher "
        f"{plain_map['correlation']:.2f}, KL {plain_map['kl']:.2f}",
        Verdict.YES if plain_map["from_uniform"] < 0.1 else Verdict.NO,
    )


def _draw(
    study: Study,
    at_common: dict[str, list[Run]],
    students: Students,
    lesson: Lesson,
    scores: dict[str, Any],
    bound: float,
    common: float,
) -> None:
    iterations = study.numbers["students"][CONVEX]["common beta"]["steps"]
    caption = f"objective and test loss against seconds; {iterations} iterations of the convex solver"
    study.draw(figures.curves, "curves.png", caption, at_common, students.at_zero, bound, common)
    shown = {"teacher": lesson.teacher_map.cpu().numpy()}
    shown |= {student: np.array(runs[0].attention_map) for student, runs in at_common.items()}
    notes = {name: f"correlation {scores[name]['correlation']:.2f}, KL {scores[name]['kl']:.2f}" for name in shown}
    study.draw(
        figures.maps,
        "maps.png",
        "attention maps: the teacher's mean over heads and test samples, and the students'",
        shown,
        notes,
    )


def _page(study: Study, table: dict[str, Any], scores: dict[str, Any], lesson: Lesson, seconds: float) -> Document:
    page = study.page()
    sizes = ", ".join(f"{name} = {value}" for name, value in lesson.sizes.items())
    page.text(
        f"Data: {lesson.name}; targets: {lesson.target}; {sizes}. {'Quick' if study.quick else 'Full'} run, {seconds:.0f} s."
    )
    page.table(
        ["source", "claim", "measured", "verdict"],
        [[f.source, f.claim, f.measured, f.verdict.value] for f in study.findings],
    )
    page.heading("Students")
    zero = study.numbers["loss_of_zero"]
    rows = []
    for student, by_beta in table.items():
        for which, row in by_beta.items():
            gap = "" if row["relative_gap"] is None else f"{row['relative_gap']['mean']:.2g}"
            rows.append(
                [
                    student,
                    f"{which} {row['beta']:.3g}",
                    f"{row['learning_rate']:g}" if row["learning_rate"] else "",
                    f"{row['objective']['mean'] / zero:.4f} ± {row['objective']['std'] / zero:.4f}",
                    gap,
                    f"{row['train_r2']['mean']:.3f}",
                    f"{row['test_r2']['mean']:.3f} ± {row['test_r2']['std']:.3f}",
                    f"{row['seconds']:.1f}",
                ]
            )
    header = [
        "student",
        "beta",
        "learning rate",
        "objective / loss of zero",
        "certified gap",
        "train R2",
        "test R2",
        "s",
    ]
    page.table(header, rows)
    linear = study.numbers["linear_map_per_token"]
    page.text(f"The best linear map of each token by itself, without attention, has test R2 {linear['test_r2']:.3f}.")
    page.heading("Attention maps")
    page.table(
        [
            "map",
            "correlation with the teacher's",
            "without the first token",
            "KL",
            "total variation",
            "... from uniform",
        ],
        [
            [
                name,
                *(
                    f"{row[key]:.3f}"
                    for key in ("correlation", "correlation_elsewhere", "kl", "total_variation", "from_uniform")
                ),
            ]
            for name, row in scores.items()
        ],
    )
    for file, caption in study.figures:
        page.figure(file, caption)
    return page


def _machine(device: torch.device) -> dict[str, Any]:
    found: dict[str, Any] = {"device": "CPU", "torch": torch.__version__}
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated() / 2**30
        found |= {"device": torch.cuda.get_device_name(device), "peak_memory_GiB": peak}
    return found

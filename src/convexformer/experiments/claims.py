"""Every claim of the papers beside our measurement: numerical checks, and the findings of the other experiments.

The checks are the same in both modes. ``--quick`` runs the quick forms of the other experiments, those that fit into ten
minutes together; what they do not test is "not tested" in this mode. A full run has their full forms.
"""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from convexformer.experiments.claims_ergen import ERGEN
from convexformer.experiments.claims_fisher import FISHER
from convexformer.experiments.claims_registry import HEADER, Check, Claim, Found, Records, findings_of, measured, rows
from convexformer.experiments.claims_sahiner import POSTER, SAHINER
from convexformer.experiments.claims_sheen import SHEEN
from convexformer.experiments.document import Document
from convexformer.experiments.registry import EXPERIMENTS
from convexformer.experiments.study import Finding, Study, Verdict

TITLE = "The claims of the papers, and what was measured"
CLAIMS: tuple[Claim, ...] = (*FISHER, *ERGEN, *SAHINER, *POSTER, *SHEEN)
SOURCES = tuple(sorted({claim.evidence.experiment for claim in CLAIMS if isinstance(claim.evidence, Found)}))
QUICK = ("implicit-bias", "grokking", "periodicity", "spectra", "mod15")  # in ten minutes; student-teacher is left out
CERTIFYING = ("equivalence", "duality", "dual_program")  # checks whose failure is an optimum without a certificate


def run(output: Path, *, quick: bool = False, console: Console | None = None) -> dict[str, Any]:
    """Run checks and experiments; write the table, ``results.json`` and ``config.json`` to ``output``."""
    study = Study.begin("claims", TITLE, output, quick, console)
    names = [name for name in SOURCES if name in QUICK or not quick]
    study.write_config({"torch": torch.__version__, "quick": quick, "experiments": names})
    checks = run_checks(study.console)
    found, certified, seconds = {}, True, {}
    for name in names:
        study.console.print(f"[dim]{study.seconds:6.1f} s[/] experiment {name}")
        started = time.perf_counter()
        result = EXPERIMENTS[name].load()(study.output / name, quick=quick, console=Console(quiet=True))
        found[name] = [{**each, "quick": quick} for each in findings_of(result)]
        seconds[name] = time.perf_counter() - started
        certified &= bool(result["certified"])
    records = Records(checks, found)
    for claim in CLAIMS:
        text, verdict = measured(claim, records)
        study.findings.append(Finding(f"{claim.paper}, {claim.place}", claim.statement, text, Verdict(verdict)))
    study.numbers["seconds_of_experiments"] = seconds
    certified &= all(
        check["verdict"] == Verdict.YES.value for key, check in checks.items() if key.split()[0] in CERTIFYING
    )
    spent = study.seconds
    result = study.finish(
        certified=certified,
        parts={"claims": [each.record() for each in study.findings], "checks": checks},
        figures=[],
        page=_page(study, records, names),
        seconds=spent,
    )
    _print(study, names, spent)
    return result


def run_checks(console: Console) -> dict[str, dict[str, Any]]:
    """Run every check once; return measurement, verdict and seconds by key."""
    checks: dict[str, dict[str, Any]] = {}
    with console.status("checks") as status:
        for claim in CLAIMS:
            check = claim.evidence
            if not isinstance(check, Check) or check.key in checks:
                continue
            status.update(f"check {check.key}")
            started = time.perf_counter()
            torch.manual_seed(0)
            outcome = check.call(*check.arguments)
            checks[check.key] = {
                "measured": outcome.text,
                "verdict": outcome.verdict.value,
                "seconds": time.perf_counter() - started,
            }
    return checks


def counts(verdicts: list[str]) -> str:
    """Write how many claims have each verdict."""
    found = Counter(verdicts)
    return ", ".join(f"{found[each.value]} {each.value}" for each in Verdict if found[each.value])


def write_table(page: Document, records: Records) -> list[list[str]]:
    """Add the table to a page, and the numbers of verdicts by document; return its rows."""
    table = rows(CLAIMS, records)
    summary = [
        [paper, counts([row[4] for row in table if row[0] == paper])]
        for paper in dict.fromkeys(row[0] for row in table)
    ]
    page.table(["document", "claims"], [*summary, ["all", counts([row[4] for row in table])]])
    page.table(HEADER, table)
    return table


def _page(study: Study, records: Records, names: list[str]) -> Document:
    page = study.page()
    left = [name for name in SOURCES if name not in names]
    page.text(
        f"{'Quick' if study.quick else 'Full'} run, {study.seconds:.0f} s: checks, and the experiments {', '.join(names)}."
        + (f" Left out: {', '.join(left)}." if left else "")
    )
    write_table(page, records)
    return page


def _print(study: Study, names: list[str], seconds: float) -> None:
    study.print_findings(
        TITLE,
        ("measured", "verdict"),
        [(each.measured, f"[{each.verdict.colour}]{each.verdict.value}[/]") for each in study.findings],
    )
    study.console.print(counts([each.verdict.value for each in study.findings]))
    left = [name for name in SOURCES if name not in names]
    if left:
        study.console.print(f"Not run in this mode: {', '.join(left)}.")
    if study.untested:
        study.console.print(f"[yellow]{study.untested} claims were not tested[/] in this mode; exit code 4.")
    study.console.print(f"[dim]{seconds:.0f} s in all; {study.output / 'summary.md'}, results.json[/]")

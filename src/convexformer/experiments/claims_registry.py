"""Claims of the papers, each with what measures it, and the table that sets them beside the measurements.

A claim is measured by a check of its own (:class:`Check`), by what another experiment found (:class:`Found`), or not here
(:class:`Beyond`, with the reason). The table is made from the records of checks and experiments, never by hand.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from convexformer.experiments.deep_study import Measured
from convexformer.experiments.study import Verdict

QUOTED = "results that it quotes from other papers"  # why a claim of an earlier paper is not measured here
HEADER = ["document", "place", "claim", "measured", "verdict", "command"]


@final
@dataclass(frozen=True)
class Check:
    """A small numerical test of this experiment: ``call(*arguments)``."""

    call: Callable[..., Measured]
    arguments: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """The name under which ``results.json`` has it."""
        return " ".join((self.call.__name__, *self.arguments))


@final
@dataclass(frozen=True)
class Found:
    """What another experiment found: every claim of it whose source and text match the regular expressions."""

    experiment: str
    source: str
    claim: str
    beyond: str = ""
    """Why longer runs than the recorded ones cannot test it here, if they did not."""
    preset: str = ""
    """The settings of the experiment that measure it; empty where they are several, or all there are."""

    def matches(self, found: dict[str, Any]) -> bool:
        """Tell whether a finding belongs to the claim."""
        return bool(re.search(self.source, found["source"]) and re.search(self.claim, found["claim"]))


@final
@dataclass(frozen=True)
class Beyond:
    """Nothing here measures it."""

    reason: str


@final
@dataclass(frozen=True)
class Claim:
    """A statement of a paper, and what measures it; ``remark`` says why it fails, or what its measure leaves out."""

    paper: str
    place: str
    statement: str
    evidence: Check | Found | Beyond
    remark: str = ""

    @property
    def command(self) -> str:
        """The command that measures it."""
        if isinstance(self.evidence, Beyond):
            return "-"
        if isinstance(self.evidence, Check):
            return "convexformer experiment claims"
        preset = f" --preset {self.evidence.preset}" if self.evidence.preset else ""
        return f"convexformer experiment {self.evidence.experiment}{preset}"


@final
@dataclass(frozen=True)
class Records:
    """What was measured: of the checks by key, and the findings of experiments by name."""

    checks: dict[str, dict[str, str]]
    findings: dict[str, list[dict[str, Any]]]

    @classmethod
    def stored(cls, folder: Path, experiments: Iterable[str]) -> Records:
        """Read the records: ``claims.json``, and the claims in ``EXPERIMENT*.json``."""
        checks = json.loads((folder / "claims.json").read_text())["checks"]
        findings = {name: _findings(sorted(folder.glob(f"{name.replace('-', '_')}*.json"))) for name in experiments}
        return cls(checks, findings)


def _findings(files: list[Path]) -> list[dict[str, Any]]:
    """Collect the claims of recorded runs, with the number of seeds, those of quick runs marked as such."""
    found: list[dict[str, Any]] = []
    for file in files:
        record = json.loads(file.read_text())
        if isinstance(record, dict):
            seeds = record.get("config", {}).get("seeds", ())  # a list, or how many
            own = {"quick": file.stem.endswith("_quick"), "seeds": seeds if isinstance(seeds, int) else len(seeds)}
            found += [{**each, **own} for each in findings_of(record)]
    return found


def findings_of(record: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the claims of an experiment's results, also of those written before claims had one form."""
    verdicts = {True: Verdict.YES.value, False: Verdict.NO.value}
    claims: list[dict[str, Any]] = record.get("claims", record.get("findings", []))
    return [
        {
            **each,
            "source": each["source"].replace("the report,", "Fisher et al.,"),
            "verdict": each["verdict"] if "verdict" in each else verdicts[each["holds"]],
        }
        for each in claims
    ]


def measured(claim: Claim, records: Records) -> tuple[str, str]:
    """Return what was measured and the verdict of a claim."""
    evidence = claim.evidence
    if isinstance(evidence, Beyond):
        return evidence.reason, Verdict.BEYOND.value
    if isinstance(evidence, Check):
        one = records.checks.get(evidence.key)
        return ("", Verdict.OPEN.value) if one is None else (one["measured"], one["verdict"])
    found = [each for each in records.findings.get(evidence.experiment, []) if evidence.matches(each)]
    text, verdict = _of_findings(found)
    if verdict == Verdict.OPEN.value and evidence.beyond and not all(each.get("quick", False) for each in found):
        return f"{text}. {evidence.beyond}", Verdict.BEYOND.value
    return text, verdict


def _of_findings(found: list[dict[str, Any]]) -> tuple[str, str]:
    """Join the findings that were tested: all of one verdict, or partly.

    Of several runs of the same finding a full one counts before a quick one, and then the one with most seeds.
    """
    if not found:
        return "not among the claims of the runs at hand", Verdict.OPEN.value
    tested = [each for each in found if each["verdict"] != Verdict.OPEN.value]
    if not tested:
        shown = [each for each in found if not each.get("quick", False)] or found
        return "; ".join(dict.fromkeys(str(each["measured"]) for each in shown)), Verdict.OPEN.value
    ranked = sorted(tested, key=lambda each: (not each.get("quick", False), int(each.get("seeds", 0))))
    best = {(each["source"], each["claim"]): each for each in ranked}  # the sort is stable: the last is the best
    chosen = [each for each in tested if any(each is one for one in best.values())]
    verdicts = {str(each["verdict"]) for each in chosen}
    limits = [_limit(each) for each in chosen]
    same = len(set(limits)) == 1
    parts = [
        (str(each["measured"]) if len(chosen) == 1 else f"{each['claim']}: {each['measured']}")
        + ("" if same else limit)
        for each, limit in zip(chosen, limits, strict=True)
    ]
    text = "; ".join(parts) + (limits[0] if same else "")
    return text, verdicts.pop() if len(verdicts) == 1 else Verdict.PARTLY.value


def _limit(finding: dict[str, Any]) -> str:
    """Write what a finding rests on, if it is less than five seeds at full budgets."""
    if finding.get("quick", False):
        return " (a quick run)"
    return " (one seed)" if finding.get("seeds") == 1 else ""


def rows(claims: Iterable[Claim], records: Records) -> list[list[str]]:
    """Return the rows of the table, in the order of ``HEADER``."""
    table = []
    for claim in claims:
        text, verdict = measured(claim, records)
        full = ". ".join(part for part in (text, claim.remark) if part)
        command = claim.command if claim.command == "-" else f"`{claim.command}`"
        table.append([claim.paper, claim.place, claim.statement, full, verdict, command])
    return table

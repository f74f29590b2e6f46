"""The race on real tokens: our solvers, ``auto``, and what a user would take instead, in one run.

    make bench-real DATA="trec.npz cifar.npz"                            # about half an hour
    python benchmarks/real/run.py trec.npz cifar.npz --quick             # about three minutes
    python benchmarks/real/run.py mine.npz --only attention,fista,auto   # heads, losses, solvers, token sets by name
    python benchmarks/real/run.py --fit-auto runs/bench-real/real.json   # the constants of ``auto`` from a run's numbers

Token files are npz with ``X`` (N, s, d), ``y`` (N,) and perhaps ``mask`` (N, s), or ``X_train`` and so on with a test part;
digits and made-up problems of other shapes are always raced as well. Times are CPU seconds of one thread, from a problem
that is built (beta_max included, whose time is in the JSON) to a *certified* relative gap. A fit has ``--limit`` seconds.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

import fit
import report
from race import PEERS, probe, race

from cases import HEADS, LOSSES, SUITES
from convexformer.solvers import SOLVERS


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", help="token files, npz")
    parser.add_argument("--suite", choices=list(SUITES), default="default")
    parser.add_argument("--quick", action="store_const", dest="suite", const="quick", help="the suite 'quick'")
    parser.add_argument("--only", default="", help="names of heads, losses, solvers, peers or token sets, by comma")
    parser.add_argument("--limit", type=float, help="seconds a fit may take; default: the suite's")
    parser.add_argument("--ratios", type=float, nargs="+", help="beta / beta_max; default: the suite's")
    parser.add_argument("--jobs", type=int, default=1, help="cases side by side, for a machine with many cores")
    parser.add_argument("--no-probes", action="store_true", help="leave out the searches with scikit-learn")
    parser.add_argument("--only-probes", action="store_true", help="the searches with scikit-learn alone")
    parser.add_argument("--no-paths", action="store_true", help="leave out the warm paths")
    parser.add_argument(
        "--output", type=Path, default=Path("runs/bench-real"), help="folder for JSON, table and figure"
    )
    parser.add_argument(
        "--publish", type=Path, metavar="DOCS", help="also put table, figure and numbers into this folder"
    )
    parser.add_argument(
        "--fit-auto", type=Path, nargs="+", metavar="JSON", help="print auto's constants from such runs"
    )
    a = parser.parse_args(words)
    if a.fit_auto:
        print(fit.report([json.loads(file.read_text()) for file in a.fit_auto]))
        return 0
    missing = [file for file in a.files if not Path(file).exists()]
    if missing:
        parser.error(f"no such file: {', '.join(missing)}")
    suite = SUITES[a.suite](a.files)
    suite = replace(suite, limit=a.limit or suite.limit, ratios=tuple(a.ratios or suite.ratios))
    try:
        cases, solvers, peers = select(suite.cases, [word for word in a.only.split(",") if word])
    except ValueError as error:
        parser.error(str(error))
    suite = replace(suite, cases=() if a.only_probes else cases)
    a.output.mkdir(parents=True, exist_ok=True)
    out: dict = {
        "suite": a.suite,
        "machine": report.machine(),
        "limit": suite.limit,
        "jobs": a.jobs,
        "entries": [],
        "probes": [],
    }
    thorough = a.suite in ("default", "full")
    say = lambda line: print(line, flush=True)  # noqa: E731
    for entry in race(
        suite,
        solvers=solvers,
        peers=peers,
        two_threads=thorough,
        paths=_paths(a.no_paths, thorough),
        jobs=a.jobs,
        say=say,
    ):
        out["entries"].append(entry.as_json())
        write(out, a.output)  # a run that is interrupted leaves what it has
    if not a.no_probes and not a.only:
        out["probes"] = probe(suite, a.jobs, say)
    write(out, a.output)
    text = report.text(out)
    print(f"\n{text}\n\nwritten: {a.output}/real.json, real.md, real.png")
    if a.publish:
        report.publish(text, a.output, a.publish)
    return 0


def _paths(none: bool, thorough: bool) -> str:
    return "none" if none else "all" if thorough else "auto"


def write(out: dict, folder: Path) -> None:
    """Numbers, table and figure of what has been measured so far."""
    (folder / "real.json").write_text(json.dumps(out, indent=1) + "\n")
    (folder / "real.md").write_text(report.text(out) + "\n")
    report.figure(out["entries"], folder / "real.png")


def select(cases, words):
    """Restrict cases, solvers and peers to the names among ``words``; a kind that no word names is not restricted."""
    kinds = {
        "head": list(HEADS),
        "loss": list(LOSSES),
        "solver": ["auto", *SOLVERS],
        "peer": list(PEERS),
        "data": list(dict.fromkeys(case.data for case in cases)),
    }
    named = {kind: [word for word in words if word in names] for kind, names in kinds.items()}
    unknown = [word for word in words if not any(word in names for names in kinds.values())]
    if unknown:
        raise ValueError(f"--only {', '.join(unknown)}: not known; names are {kinds}")
    for kind in ("head", "loss", "data"):
        cases = tuple(case for case in cases if not named[kind] or getattr(case, kind) in named[kind])
    if not cases:
        raise ValueError("--only leaves no case of this suite")
    return cases, named["solver"] or None, named["peer"] or ([] if named["solver"] else PEERS)


if __name__ == "__main__":
    sys.exit(main())

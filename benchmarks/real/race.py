"""The race: every solver that serves, ``auto``, and the peers, on one case after another, in processes of their own."""

from __future__ import annotations

import json
import math
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from cases import MAIN_GOAL, RATIOS, Case, Suite

HERE = Path(__file__).parent
LBFGS, ADAM = "L-BFGS on factors", "Adam"
PEERS = (LBFGS, ADAM)
ADAM_HEADS = ("attention", "self_attention")
GRACE, PATIENCE = (
    5.0,
    2,
)  # CPU seconds: a fit that has no answer after PATIENCE limits and GRACE is one that does not stop
BUSY = 25  # wall seconds of a CPU second on a busy machine, at most
FIRST = 600.0  # wall seconds for a process to import and compile
PATH_LIMITS = 3  # a path of five betas may take as long as so many cold fits
HOPELESS = 0.1  # a solver that ends above this gap at one beta is not asked for smaller ones; ``auto`` always is

Say = Callable[[str], None]


class Worker:
    """A process for cases, started when first asked; one that does not answer in time is ended and started again."""

    def __init__(self, threads: int = 1, warm: bool = True) -> None:
        self.threads, self.warm = threads, warm
        self._process: subprocess.Popen[str] | None = None
        self._held: dict[str, Any] | None = None

    def hold(self, case: Case, limit: float) -> dict[str, Any]:
        """Let the process build a case."""
        self._held = {"case": asdict(case)}
        return self._ask(self._held, limit)

    def ask(self, limit: float, **words: Any) -> dict[str, Any]:
        """Send one command and wait for the answer; a process that had to be ended builds its case anew."""
        if self._process is None and self._held is not None and "probes" not in words:
            held = self._ask(self._held, limit)
            if "build_seconds" not in held:
                return held
        return self._ask({**words, "limit": limit}, limit)

    def _ask(self, words: dict[str, Any], limit: float) -> dict[str, Any]:
        process = self._process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            print(json.dumps(words), file=process.stdin, flush=True)
        except BrokenPipeError:
            self.close()
            return {"failed": "its process died"}
        allowed = PATIENCE * limit + GRACE
        line = _line(process, BUSY * allowed, allowed)
        if line:
            return json.loads(line)
        self.close(now=True)
        return {
            "failed": "its process died"
            if line == ""
            else f"did not stop within {allowed:.0f} s, asked for {limit:.0f}"
        }

    def _start(self) -> subprocess.Popen[str]:
        words = [sys.executable, str(HERE / "worker.py"), str(self.threads), *([] if self.warm else ["cold"])]
        process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        if not _line(process, FIRST):
            raise RuntimeError(f"the worker did not start; try: {' '.join(words)}")
        return process

    def close(self, now: bool = False) -> None:
        """Let the process end; ``now``: end it."""
        if self._process is not None:
            if now:
                self._process.kill()
            self._process.communicate()
        self._process = None


def _line(process: subprocess.Popen[str], wall: float, cpu: float = math.inf) -> str | None:
    """The next line of a process, empty where it has ended; None where there is none in that wall and CPU time."""
    assert process.stdout is not None
    started, used = time.monotonic(), _cpu_seconds(process.pid)
    with selectors.DefaultSelector() as ready:
        ready.register(process.stdout, selectors.EVENT_READ)
        while not ready.select(0.2):
            if time.monotonic() - started > wall or _cpu_seconds(process.pid) - used > cpu:
                return None
    return process.stdout.readline()


def _cpu_seconds(pid: int) -> float:
    """CPU seconds that a process has used, where the system tells; else the time of day, a busy machine's worth."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return time.monotonic()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@dataclass
class Entry:
    """What was measured on one case."""

    case: Case
    facts: dict[str, Any] = field(default_factory=dict)
    cold: list[dict[str, Any]] = field(default_factory=list)
    """One row for each (ratio, tool, threads)."""
    paths: list[dict[str, Any]] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        return {"name": self.case.name, **asdict(self)}


def race(
    suite: Suite,
    *,
    solvers: Iterable[str] | None = None,
    peers: Iterable[str] = PEERS,
    two_threads: bool = True,
    paths: str = "all",
    jobs: int = 1,
    say: Say = print,
) -> Iterable[Entry]:
    """Run the cases in turn, ``jobs`` of them side by side, and yield what was measured.

    ``solvers`` restricts ours (``"auto"`` is one of them); ``paths``: ``"all"`` solvers walk one, ``"auto"`` or ``"none"``.
    """
    idle: SimpleQueue[tuple[Worker, Worker]] = SimpleQueue()
    for _ in range(jobs):
        idle.put((Worker(1, suite.warm), Worker(2, suite.warm)))

    def measured(case: Case) -> Entry:
        worker, second = idle.get()
        lines: list[str] = []
        tell = say if jobs == 1 else lines.append  # cases side by side are told of one after the other
        entry = Entry(case, worker.hold(case, suite.limit))
        tell(f"{case.name}: {_facts(entry.facts)}")
        if "solvers" in entry.facts:
            ours = [name for name in ("auto", *entry.facts["solvers"]) if solvers is None or name in solvers]
            _cold(entry, worker, suite, ours, tell)
            _peers(entry, worker, suite, [name for name in peers if name != LBFGS or entry.facts["factored"]], tell)
            for name in ours if paths == "all" else [name for name in ours if name == paths]:
                entry.paths.append({"tool": name, **_path(worker, name, suite)})
                tell(f"  path, {name}: {_path_line(entry.paths[-1])}")
            if two_threads and "auto" in ours:
                second.hold(case, suite.limit)
                for ratio in suite.ratios:
                    entry.cold.append(_solve(second, "auto", ratio, (MAIN_GOAL,), suite.limit))
        if lines:
            say("\n".join(lines))
        idle.put((worker, second))
        return entry

    with ThreadPoolExecutor(jobs) as pool:
        yield from pool.map(measured, suite.cases)
    for _ in range(jobs):
        for worker in idle.get():
            worker.close()


def probe(suite: Suite, jobs: int = 1, say: Say = print) -> list[dict[str, Any]]:
    """Whole searches for beta, ours and scikit-learn's, on the suite's probe sets."""

    def searched(spec: str, samples: int | None) -> dict[str, Any]:
        worker = Worker(1)
        found = worker.ask(suite.probe_limit, probes=spec, samples=samples)
        worker.close()
        return found

    rows = []
    with ThreadPoolExecutor(jobs) as pool:
        answers = list(pool.map(lambda own: searched(*own), suite.probes))
    for (spec, _), found in zip(suite.probes, answers, strict=True):
        rows.append({"spec": spec, **found})
        for row in found.get("rows", []):
            say(f"  {spec}: {row['tool']}: {row['seconds']:.2f} s, accuracy {row['accuracy']:.3f}")
    return rows


def _cold(entry: Entry, worker: Worker, suite: Suite, ours: list[str], say: Say) -> None:
    hopeless: set[str] = set()
    for ratio in suite.ratios:
        for name in ours:
            if name in hopeless:
                entry.cold.append(_row(name, ratio, 1, {"status": "SKIPPED"}))
                continue
            row = _solve(worker, name, ratio, suite.goals, suite.limit)
            entry.cold.append(row)
            if name != "auto" and not row.get("gap", math.inf) <= HOPELESS:
                hopeless.add(name)
        say(f"  {ratio:g}: {', '.join(_short(row) for row in entry.cold if row['ratio'] == ratio)}")


def _solve(worker: Worker, name: str, ratio: float, goals: tuple[float, ...], limit: float) -> dict[str, Any]:
    """Solve to the main goal and, where that is met, to the tighter ones."""
    row = _row(name, ratio, worker.threads, worker.ask(limit, solve=name, ratio=ratio, tolerance=MAIN_GOAL))
    for goal in goals:
        if goal < MAIN_GOAL and row.get("status") == "CONVERGED":
            tight = worker.ask(limit, solve=name, ratio=ratio, tolerance=goal)
            for kind in ("seconds", "iterations"):
                row[kind][f"{goal:g}"] = tight.get(kind, {}).get(f"{goal:g}")
            row["tight_status"] = tight.get("status", tight.get("failed"))
    return row


def _peers(entry: Entry, worker: Worker, suite: Suite, names: list[str], say: Say) -> None:
    for ratio in suite.ratios:
        bounds = [row["dual"] for row in entry.cold if row["ratio"] == ratio and row.get("dual") is not None]
        for name in names:
            if name == ADAM and (ratio != suite.ratios[len(suite.ratios) // 2] or entry.case.head not in ADAM_HEADS):
                continue  # it is never near, and one beta shows that
            found = worker.ask(suite.limit, peer=name, ratio=ratio, lower_bound=max(bounds, default=None))
            entry.cold.append(_row(name, ratio, 1, found))
            say(f"  {ratio:g}: {_short(entry.cold[-1])}")


def _path(worker: Worker, name: str, suite: Suite) -> dict[str, Any]:
    found = worker.ask(PATH_LIMITS * suite.limit, path=name, ratios=RATIOS, tolerance=MAIN_GOAL)
    return found if "steps" in found else {"steps": [], **found}


def _row(tool: str, ratio: float, threads: int, found: dict[str, Any]) -> dict[str, Any]:
    if "failed" in found:
        found = {"status": "DID NOT STOP" if "did not stop" in found["failed"] else "FAILED", **found}
    return {"tool": tool, "ratio": ratio, "threads": threads, "seconds": {}, "iterations": {}, **found}


def _short(row: dict[str, Any]) -> str:
    seconds = row["seconds"].get(f"{MAIN_GOAL:g}")
    how = f"{seconds:.3g} s" if seconds is not None else f"{row['status']} at {row.get('gap', math.nan):.0e}"
    return f"{row['tool']}{'' if row['threads'] == 1 else ' (2 threads)'} {how}"


def _facts(facts: dict[str, Any]) -> str:
    if "sizes" not in facts:
        return facts.get("skipped") or facts.get("failed") or ""
    return f"(N, s, d, c) = {tuple(facts['sizes'])}, beta_max in {facts['build_seconds']:.2g} s"


def _path_line(path: dict[str, Any]) -> str:
    if not path["steps"]:
        return str(path.get("failed"))
    return (
        " / ".join(f"{step['seconds']:.2g}{'' if step['gap'] <= MAIN_GOAL else '!'}" for step in path["steps"]) + " s"
    )

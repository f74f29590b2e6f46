"""The race: every tool on one problem.

First each tool finds the settings that reach the goals; then these settings are repeated, the tools in turn.
"""

from __future__ import annotations

import json
import math
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

from solvers import solver_class

GOALS = (1e-3, 1e-6)
HERE = Path(__file__).parent


@dataclass
class Entry:
    """What one tool did on one problem; ``note`` says why there are no numbers."""

    solver: str
    note: str = ""
    runs: list = field(default_factory=list)
    versions: dict = field(default_factory=dict)

    def seconds_to(self, goal, optimum):
        """The least CPU seconds after which a run was within ``goal``, or None: the stop of an oracle."""
        bound = optimum + goal * abs(optimum)
        return min((t for run in self.runs for t, value in run["curve"] if value <= bound), default=None)

    def certified_seconds(self, goal):
        """The least CPU seconds of a whole run that certified ``goal``, or None."""
        proofs = [run for run in self.runs if run.get("certified_gap", math.inf) <= goal]
        return min((run["seconds"] for run in proofs), default=None)

    def lowest(self):
        """The lowest objective of any run."""
        return min((value for run in self.runs for _, value in run["curve"]), default=math.inf)

    @property
    def chosen(self):
        """The name of the solver that ``auto`` picked, for our own entries."""
        return next((run["solver"] for run in self.runs if "solver" in run), None)


class Worker:
    """The process of one tool, for all problems of a run."""

    def __init__(self, solver, pythons):
        self.kind = solver_class(solver)
        words = [pythons[self.kind.environment], HERE / "worker.py", solver]
        self._process = subprocess.Popen(
            [str(word) for word in words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def ask(self, **words):
        """Send one command and wait for the answer."""
        try:
            print(json.dumps(words), file=self._process.stdin, flush=True)
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        return (
            json.loads(line) if line else {"failed": f"its process died (code {self._process.poll()}); out of memory?"}
        )

    def close(self):
        """Let the process end."""
        self._process.communicate()


def facts_of(objective):
    """What decides whether a tool applies."""
    kind = "softmax" if objective.n_classes else "squared" if objective.gates is None else "gated"
    return {"kind": kind, "beta_ratio": objective.beta_ratio, "size": len(objective.y) * objective.n_features}


def reference(worker, folder, tolerance, limit):
    """Return the optimum, certified to ``tolerance`` by our own solver; the dual value bounds everyone from below."""
    found = worker.ask(load=str(folder))
    if "ready" in found:
        found = worker.ask(knob=tolerance, goal=-math.inf, limit=limit)
    worker.ask(drop=True)
    if "objective" not in found:
        raise RuntimeError(f"the reference solve failed: {found}")
    return {key: found[key] for key in ("objective", "dual", "certified_gap", "kind", "solver", "seconds")}


def race(objective, folder, workers, optimum, *, limit, repeats, patience, log=print):
    """Run the tools (``workers`` by name) and return an :class:`Entry` for each.

    ``limit`` bounds a tool's first attempts, in CPU seconds. Settings that reached a goal, if they take less than
    ``patience``, are repeated ``repeats`` times, the tools in turn; the least time counts, for every tool alike.
    """
    value = optimum["objective"]
    bounds = [value + goal * abs(value) for goal in GOALS]
    entries, again = {}, {}
    for name, worker in workers.items():
        entry = entries[name] = Entry(name, note=worker.kind.skip(facts_of(objective)) or "")
        first = entries.get("convexformer")
        if first is not None and getattr(worker.kind, "solver", None) == first.chosen:
            entry.note = "what convexformer chose"
        if entry.note:
            continue
        state = worker.ask(load=str(folder))
        entry.versions, entry.note = state.get("versions", {}), state.get("failed", "")
        winners = {} if entry.note else _explore(worker, entry, bounds, limit)
        log(f"  {name}: {' / '.join(_short(entry.seconds_to(goal, value)) for goal in GOALS)} {entry.note}")
        if winners and sum(winners.values()) < patience:
            again[name] = winners
        else:
            worker.ask(drop=True)
    for _ in range(repeats):
        for name, winners in again.items():
            for knob in winners:
                run = workers[name].ask(knob=knob, goal=bounds[-1], limit=limit)
                if "objective" in run:
                    entries[name].runs.append({"knob": knob, **run})
    for name in again:
        workers[name].ask(drop=True)
    return list(entries.values())


def _explore(worker, entry, bounds, limit):
    """Try the knobs, for tolerances from loose to tight; return those worth repeating, with their seconds."""
    spent, winners, certifies = 0.0, {}, False
    for k, knob in enumerate(worker.kind.knobs):
        share = 1 if worker.kind.sampling == "knob" else len(worker.kind.knobs) - k  # rates must all have their turn
        run = worker.ask(knob=knob, goal=bounds[-1], limit=(limit - spent) / share)
        if "objective" not in run:
            entry.note = run["failed"]
            break
        entry.runs.append({"knob": knob, **run})
        spent += run["seconds"]
        certifies = "certified_gap" in run
        for bound in bounds:
            if run["objective"] <= bound:
                winners.setdefault(bound, (knob, run["seconds"]))
        if spent > limit or (worker.kind.sampling == "knob" and run["objective"] <= bounds[-1]):
            break
    # a tool that certifies is timed at each of its tolerances, the others at the loosest that will do
    return {run["knob"]: run["seconds"] for run in entry.runs} if certifies else dict(winners.values())


def _short(seconds):
    return "never" if seconds is None else f"{seconds:.3g}"

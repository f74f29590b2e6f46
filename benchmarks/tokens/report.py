"""Tables, the figure, and the numbers as JSON."""

from __future__ import annotations

import math
import platform
import shutil

from matplotlib.figure import Figure
from race import GOALS
from solvers import SOLVERS

OURS = "convexformer"
BEGIN, END = "<!-- tokens: begin -->", "<!-- tokens: end -->"
COLOURS = (
    *("#000000", "#7f7f7f", "#b0b0b0"),  # ours
    *("#d55e00", "#8c564b", "#e69f00", "#009e73", "#cc79a7", "#b5a642", "#6a3d9a", "#56b4e9"),  # the peers
)


def row(entry, optimum):
    """The numbers of one tool: seconds to each goal by an oracle, and, where it certifies, to its own proof."""
    value = optimum["objective"]
    best = entry.lowest()
    return {
        "solver": entry.solver,
        "seconds": [entry.seconds_to(goal, value) for goal in GOALS],
        "certified_seconds": [entry.certified_seconds(goal) for goal in GOALS],
        "closest": max(0.0, (best - value) / abs(value)) if math.isfinite(best) else None,
        "chosen": entry.chosen,
        "note": entry.note,
        "versions": entry.versions,
    }


def summary(dataset, optimum, entries):
    """All rows of a problem with their ratio to our certified time; checks that nobody is below the lower bound."""
    rows = [row(entry, optimum) for entry in entries]
    ours = next((r["certified_seconds"][-1] for r in rows if r["solver"] == OURS), None)
    for r in rows:
        own = r["certified_seconds"][-1] or r["seconds"][-1]
        r["ratio"] = own / ours if own and ours else None
    lowest = min((entry.lowest() for entry in entries), default=math.inf)
    below = (optimum["dual"] - lowest) / abs(optimum["objective"])
    return {"problem": dataset.name, "optimum": optimum, "below_lower_bound": max(0.0, below), "rows": rows}


def table(results):
    """One Markdown table for all problems, and below it why tools are missing from it."""
    goals = " / ".join(f"{goal:.0e}" for goal in GOALS)
    lines = [f"| problem | tool | seconds to {goals} | certified to {goals} | time / ours |", "|---|---|---|---|---|"]
    missing = {}
    for result in results:
        title = result["problem"]
        for r in result["rows"]:
            if r["closest"] is None:
                missing.setdefault((r["solver"], r["note"]), []).append(_brief(result["problem"]))
                continue
            tool = f"{r['solver']} ({r['chosen']})" if r["solver"] == OURS else r["solver"]
            stuck = f" ({r['closest']:.0e} above)" if r["seconds"][-1] is None else ""
            proof = _pair(r["certified_seconds"]) if any(r["certified_seconds"]) else "-"
            ratio = "-" if r["ratio"] is None else f"{r['ratio']:.2f}x"
            lines.append(f"| {title} | {tool} | {_pair(r['seconds'])}{stuck} | {proof} | {ratio} |")
            title = ""
    absent = [f"- {tool}: {why} ({', '.join(where)})" for (tool, why), where in missing.items()]
    return "\n".join([*lines, *(["", "Not run:", *absent] if absent else [])])


def text(out):
    """The report of a run: the table, what a path costs, memory, and whether anyone beat the lower bound."""
    lines = [table(out["results"]), ""]
    worst = max(result["below_lower_bound"] for result in out["results"])
    gap = max(result["optimum"]["certified_gap"] for result in out["results"])
    verdict = "nobody is" if worst <= 1e-12 else f"SOMEBODY IS, by {worst:.1e},"
    lines.append(f"Reference optima are certified to {gap:.0e} or better; {verdict} below their lower bound.")
    if "path" in out:
        path = out["path"]
        smallest = f"{path['beta_min_ratio']:g} beta_max"
        what = f"{_brief(path['problem'])}, every beta certified to {path['tolerance']:.0e}"
        lines += [
            "",
            f"A path of {path['n_betas']} betas down to {smallest} ({what}) takes {path['path_seconds']:.3g} s, "
            f"{path['path_in_single_fits']:.2f} times a cold fit at the smallest beta ({path['single_seconds']:.3g} s).",
        ]
    for line in out.get("memory", ()):
        peak = line.get("note") or f"{line['multiple_of_tokens']:.2f} times the tokens"
        lines += ["", f"Peak memory of {line['solver']}, {_brief(line['problem'])}: {peak}."]
    return "\n".join(lines)


def publish(text, output, docs):
    """Put the text between its marks in ``benchmarks.md``, and copy numbers and figure beside it."""
    page = docs / "benchmarks.md"
    head, _, rest = page.read_text().partition(BEGIN)
    _, mark, tail = rest.partition(END)
    if not mark:
        raise ValueError(f"{page} has no lines {BEGIN!r} and {END!r} to write between.")
    page.write_text(f"{head}{BEGIN}\n{text}\n{END}{tail}")
    shutil.copy(output / "tokens.json", docs / "results" / "tokens.json")
    shutil.copy(output / "tokens.png", docs / "images" / "tokens.png")


def figure(results, curves, file):
    """Relative suboptimality against CPU seconds, a panel for each problem, a colour for each tool."""
    columns = min(3, len(results))
    height = math.ceil(len(results) / columns)
    picture = Figure(figsize=(4.2 * columns, 3.1 * height + 0.6), layout="constrained")
    axes = picture.subplots(height, columns, squeeze=False).ravel()
    names = sorted({name for curve in curves for name in curve}, key=list(SOLVERS).index)
    style = dict(zip(SOLVERS, COLOURS, strict=True))
    handles = {}
    for axis, result, curve in zip(axes, results, curves, strict=False):
        for name, points in curve.items():
            own = name.startswith(OURS)
            (handles[name],) = axis.plot(
                *zip(*points, strict=True),
                color=style[name],
                linewidth=2.0 if own else 1.3,
                marker="o" if len(points) < 16 else None,
                markersize=3,
                zorder=3 if own else 2,
                label=name,
            )
        for goal in GOALS:
            axis.axhline(goal, color="0.75", linewidth=0.8, linestyle=":", zorder=1)
        proof = next((r["certified_seconds"][-1] for r in result["rows"] if r["solver"] == OURS), None)
        if proof:
            handles["certified to 1e-6"] = axis.axvline(
                proof, color="black", linewidth=1, linestyle="--", label="certified"
            )
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.set_ylim(3e-8, 3.0)
        axis.set_title(result["problem"], fontsize=9)
        axis.grid(alpha=0.25)
    for axis in axes[len(results) :]:
        axis.set_axis_off()
    for axis in axes[max(0, len(results) - columns) : len(results)]:
        axis.set_xlabel("CPU seconds, one thread")
    for axis in axes[::columns]:
        axis.set_ylabel("relative suboptimality")
    shown = [name for name in (*names, "certified to 1e-6") if name in handles]
    picture.legend(
        [handles[name] for name in shown], shown, loc="outside lower center", ncols=min(6, len(shown)), fontsize=8
    )
    picture.savefig(file, dpi=150)


def curve_points(entry, optimum, floor=1e-9):
    """The lower envelope of all runs: ``(seconds, relative suboptimality)``, falling."""
    value = optimum["objective"]
    points, best = [], math.inf
    for seconds, objective in sorted(point for run in entry.runs for point in map(tuple, run["curve"])):
        if objective < best and seconds > 0:
            best = objective
            points.append((seconds, max((best - value) / abs(value), floor)))
    return points


def machine():
    """System, architecture and Python version that the numbers were measured on."""
    return {"system": platform.system(), "machine": platform.machine(), "python": platform.python_version()}


def _pair(seconds):
    return " / ".join("never" if t is None else f"{t:.3g}" for t in seconds)


def _brief(problem):
    """The number of the problem and its beta: enough below the table."""
    return f"{problem.split()[0]} {problem[problem.index('(') :]}"

"""The table, the summary and the figure of a run."""

from __future__ import annotations

import json
import math
import platform
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from race import ADAM, LBFGS, PEERS

from cases import MAIN_GOAL, RATIOS

BEGIN, END = "<!-- real: begin -->", "<!-- real: end -->"
BAD = ("STALLED", "MAX_TIME", "MAX_ITER", "DID NOT STOP", "FAILED")
NEGLIGIBLE = 0.02  # CPU seconds by which auto may be behind the best solver whatever the ratio: Python's noise
COLOURS = {"auto": "#000000", "fista": "#0072b2", "working_set": "#d55e00", "staircase": "#009e73", LBFGS: "#cc79a7"}
MORE_COLOURS = ("#e69f00", "#56b4e9", "#6a3d9a", "#8c564b", "#b5a642")
GOAL = f"{MAIN_GOAL:g}"


def pooled(entry: dict[str, Any], ratio: float) -> dict[str, dict[str, Any]]:
    """Rows of one thread by tool. A solver that ``auto`` took is the same computation: the lesser time counts for both."""
    rows = {row["tool"]: row for row in entry["cold"] if row["ratio"] == ratio and row["threads"] == 1}
    auto = rows.get("auto")
    same = rows.get(auto.get("took", "")) if auto else None
    if auto and same and _met(auto) and _met(same):
        least = {goal: _least(auto["seconds"].get(goal), same["seconds"].get(goal)) for goal in auto["seconds"]}
        rows["auto"], rows[auto["took"]] = ({**row, "seconds": least} for row in (auto, same))
    return rows


def verdict(rows: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """``auto`` over the best of our solvers at the main goal, and over L-BFGS; statuses that are not good."""
    ours = {tool: row["seconds"].get(GOAL) for tool, row in rows.items() if tool not in PEERS}
    done = {tool: seconds for tool, seconds in ours.items() if seconds is not None}
    best = min(done, key=lambda tool: done[tool], default=None)
    auto, ratio = ours.get("auto"), None
    if best is not None and "auto" in ours:
        ratio = math.inf if auto is None else 1.0 if auto - done[best] < NEGLIGIBLE else auto / done[best]
    peer = rows.get(LBFGS, {}).get("seconds", {}).get(GOAL)
    proof = rows.get(LBFGS, {}).get("certificate", 0.0)
    return {
        "best": best,
        "auto_over_best": ratio,
        "auto_over_lbfgs": auto / peer if auto and peer else None,
        "auto_over_certified_lbfgs": auto / (peer + proof) if auto and peer else None,
        "auto_status": rows.get("auto", {}).get("status"),
        "bad": [f"{tool} {row['status']}" for tool, row in rows.items() if tool not in PEERS and row["status"] in BAD],
    }


def table(entries: list[dict[str, Any]]) -> str:
    """One Markdown row for each problem, head and beta: CPU seconds to 1e-3 / 1e-6 (iterations to 1e-3)."""
    tools = _tools(entries)
    head = ["problem", "beta", *tools, "auto / best", "status"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for entry in entries:
        title = f"{entry['name']}, {tuple(entry['facts'].get('sizes', ()))}"
        if not entry["cold"]:
            continue
        for ratio in sorted({row["ratio"] for row in entry["cold"]}, reverse=True):
            rows = pooled(entry, ratio)
            found = verdict(rows)
            over = "-" if found["auto_over_best"] is None else f"{found['auto_over_best']:.2f}"
            cells = [_cell(rows.get(tool)) for tool in tools]
            lines.append(
                f"| {title} | {ratio:g} | {' | '.join(cells)} | {over} | {'; '.join(found['bad']) or 'certified'} |"
            )
            title = ""
    return "\n".join(lines)


def path_table(entries: list[dict[str, Any]]) -> str:
    """CPU seconds of each step of a warm path, to 1e-3, and the last step over the first."""
    lines = ["| problem | solver | " + " | ".join(f"{r:g}" for r in RATIOS) + " | last / first |"]
    lines.append("|" + "---|" * (len(RATIOS) + 3))
    for entry in entries:
        title = entry["name"]
        for path in entry["paths"]:
            steps = path["steps"]
            cells = [
                f"{s['seconds']:.2g}" if s["gap"] <= MAIN_GOAL else f"{s['status']} ({s['gap']:.0e})" for s in steps
            ]
            cells += ["-"] * (len(RATIOS) - len(cells))
            whole = len(steps) == len(RATIOS) and all(s["gap"] <= MAIN_GOAL for s in steps)
            growth = f"{steps[-1]['seconds'] / steps[0]['seconds']:.1f}" if whole else "-"
            lines.append(f"| {title} | {path['tool']} | {' | '.join(cells)} | {growth} |")
            title = ""
    return "\n".join(lines)


def probe_table(probes: list[dict[str, Any]]) -> str:
    """Seconds and test accuracy of whole searches."""
    lines = ["| tokens | tool | CPU seconds | test accuracy | certified gap |", "|---|---|---|---|---|"]
    for probe in probes:
        title = f"{Path(probe['spec']).stem} {tuple(probe.get('sizes', ()))}"
        for row in probe.get("rows", []) or [{"tool": probe.get("failed", "-")}]:
            gap = f"{row['gap']:.0e}" if "gap" in row else "-"
            numbers = f"{row['seconds']:.3g} | {row['accuracy']:.3f}" if "seconds" in row else "- | -"
            lines.append(f"| {title} | {row['tool']} | {numbers} | {gap} |")
            title = ""
    return "\n".join(lines)


def threads_line(entries: list[dict[str, Any]]) -> str:
    """What two threads bring: wall seconds of one thread over those of two, where auto certified with both."""
    ratios = []
    for entry in entries:
        rows = [row for row in entry["cold"] if row["tool"] == "auto" and _met(row)]
        one = {row["ratio"]: row["wall"] for row in rows if row["threads"] == 1}
        ratios += [one[row["ratio"]] / row["wall"] for row in rows if row["threads"] == 2 and row["ratio"] in one]
    if not ratios:
        return ""
    middle = sorted(ratios)[len(ratios) // 2]
    span = f"(from {min(ratios):.2f} to {max(ratios):.2f})"
    return f"Two threads: wall time falls by {middle:.2f} in the median of {len(ratios)} fits {span}."


def summary(entries: list[dict[str, Any]]) -> str:
    """The worst ratio of auto, and how many of its fits failed at 1e-3."""
    found = [
        (verdict(pooled(entry, ratio)), f"{entry['name']}, {ratio:g}")
        for entry in entries
        for ratio in sorted({row["ratio"] for row in entry["cold"]}, reverse=True)
    ]
    found = [(v, name) for v, name in found if v["auto_status"] is not None]
    refused = [entry["name"] for entry in entries if "failed" in entry["facts"]]
    over = [(v["auto_over_best"], name) for v, name in found if v["auto_over_best"] is not None]
    worst, where = max(over, default=(math.nan, "nothing"))
    statuses = [v["auto_status"] for v, _ in found]
    count = lambda status: statuses.count(status)  # noqa: E731
    slow = sum(ratio > 1.2 for ratio, _ in over)
    behind, alone = (
        [v[key] for v, _ in found if v[key] is not None] for key in ("auto_over_certified_lbfgs", "auto_over_lbfgs")
    )
    failed = ", ".join(f"{count(status)} {status}" for status in ("STALLED", "MAX_TIME", "DID NOT STOP"))
    lines = [
        f"auto / best solver at 1e-3: worst {worst:.2f} ({where}), above 1.2 in {slow} of {len(over)} fits. Of {len(found)} "
        f"fits of auto: {failed}. beta_max not reached: {', '.join(refused) or 'never'}."
    ]
    if behind:
        slower, without = (sum(ratio > 1 for ratio in ratios) for ratios in (behind, alone))
        lines.append(
            f"auto / (L-BFGS on factors + one certificate): worst {max(behind):.1f}, slower in {slower} of {len(behind)} "
            f"fits that both finish; without the certificate worst {max(alone):.1f}, slower in {without}."
        )
    return " ".join(lines)


def text(out: dict[str, Any]) -> str:
    """Everything that a run has to say, in Markdown."""
    entries = out["entries"]
    parts = [summary(entries), threads_line(entries), table(entries)]
    if any(entry["paths"] for entry in entries):
        parts += ["Warm paths, CPU seconds of each step to a certified 1e-3:", path_table(entries)]
    if out["probes"]:
        parts += ["Whole searches for beta with default options:", probe_table(out["probes"])]
    return "\n\n".join(part for part in parts if part)


def figure(entries: list[dict[str, Any]], path: Path, most: int = 24) -> None:
    """CPU seconds to 1e-3 against beta, one panel a problem; a cross at the limit where a solver did not get there."""
    entries = [entry for entry in entries if entry["cold"]][:most]
    if not entries:
        return
    columns = min(4, len(entries))
    rows = math.ceil(len(entries) / columns)
    canvas = Figure(figsize=(3.3 * columns, 2.5 * rows + 0.6), layout="constrained")
    panels = canvas.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flatten()
    colours = _colours(entries)
    for panel, entry in zip(panels, entries, strict=False):
        ratios = sorted({row["ratio"] for row in entry["cold"]}, reverse=True)
        by_ratio = [pooled(entry, ratio) for ratio in ratios]
        tools = [tool for tool in colours if any(tool in rows for rows in by_ratio)]
        for tool in tools:
            points = [rows.get(tool, {"seconds": {}}) for rows in by_ratio]
            times = [row["seconds"].get(GOAL) or math.nan for row in points]
            style = {"color": colours[tool], "linewidth": 2.2 if tool == "auto" else 1.3}
            style |= {"linestyle": "--"} if tool in PEERS else {"zorder": 1 if tool == "auto" else 2}
            panel.plot(ratios, times, marker="o", markersize=6 if tool == "auto" else 3.5, label=tool, **style)
            late = [
                (r, row["total"]) for r, row in zip(ratios, points, strict=True) if not _met(row) and "total" in row
            ]
            panel.plot(*(zip(*late, strict=True) if late else ((), ())), "x", color=colours[tool], markersize=6)
        panel.set(xscale="log", yscale="log")
        panel.xaxis.set_major_formatter("{x:g}")
        panel.yaxis.set_major_formatter("{x:g}")
        panel.set_title(entry["name"], fontsize=8)
        panel.invert_xaxis() if panel is panels[0] else None
        panel.grid(True, alpha=0.25, linewidth=0.5)
        panel.tick_params(labelsize=7)
    for panel in panels[len(entries) :]:
        panel.set_visible(False)
    canvas.supxlabel("beta / beta_max", fontsize=9)
    canvas.supylabel("CPU seconds to 1e-3 (cross: not reached)", fontsize=9)
    handles = {h.get_label(): h for panel in panels for h in panel.get_legend_handles_labels()[0]}
    canvas.legend(
        handles.values(), handles.keys(), loc="outside upper center", ncols=len(handles), fontsize=8, frameon=False
    )
    canvas.savefig(path, dpi=130)


def machine() -> dict[str, str]:
    """Where the run was."""
    import torch

    return {"platform": platform.platform(), "python": platform.python_version(), "torch": torch.__version__}


def publish(text: str, output: Path, docs: Path) -> None:
    """Put the text between the marks of docs/benchmarks.md, and figure and numbers beside it."""
    page = docs / "benchmarks.md"
    before, _, rest = page.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}")
    (docs / "images" / "real.png").write_bytes((output / "real.png").read_bytes())
    numbers = json.loads((output / "real.json").read_text())
    for entry in numbers["entries"]:  # where the files of this machine are is nobody's business
        entry["case"]["spec"] = Path(entry["case"]["spec"]).name
    (docs / "results" / "real.json").write_text(json.dumps(numbers, indent=1) + "\n")


def _met(row: dict[str, Any]) -> bool:
    return row.get("seconds", {}).get(GOAL) is not None


def _least(a: float | None, b: float | None) -> float | None:
    return min((t for t in (a, b) if t is not None), default=None)


def _tools(entries: list[dict[str, Any]]) -> list[str]:
    """All tools of a run: auto, our solvers, then the peers."""
    seen = dict.fromkeys(row["tool"] for entry in entries for row in entry["cold"])
    return sorted(seen, key=lambda tool: (tool != "auto", tool in PEERS, tool == ADAM))


def _colours(entries: list[dict[str, Any]]) -> dict[str, str]:
    more = iter(MORE_COLOURS)
    return {tool: COLOURS.get(tool) or next(more, "#999999") for tool in _tools(entries) if tool != ADAM}


def _cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return "-"
    if not _met(row):
        return f"{row['status'].lower()} ({row['gap']:.0e})" if row.get("gap") is not None else row["status"].lower()
    tight = row["seconds"].get("1e-06")
    took = f", {row['took']}" if row["tool"] == "auto" else ""
    return f"{row['seconds'][GOAL]:.3g}{'' if tight is None else f' / {tight:.3g}'} ({row['iterations'][GOAL]}{took})"

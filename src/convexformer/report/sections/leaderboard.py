"""The leaderboard: the model among baselines, and what is proved about each."""

from __future__ import annotations

from convexformer.report.blocks import Block, Note, Section, Table
from convexformer.report.evidence import Evidence, Measured
from convexformer.report.gather import fold_name, test_name
from convexformer.report.text import DASH, clean, number, seconds


def leaderboard(evidence: Evidence) -> Section:
    """Return the rows, best first, by test score or else by cross-validation."""
    tested = any(row.test_score is not None for row in evidence.rows)
    rows = sorted(evidence.rows, key=lambda row: -_key(row, tested))
    cells = [
        [
            clean(row.name, 60),
            number(row.test_score),
            f"{number(row.cv_score)} ± {number(row.spread, 2)}" if row.cv_score is not None else DASH,
            number(row.gap, 2) if row.gap is not None else "not certified",
            DASH if row.seconds is None else seconds(row.seconds),
            clean(row.setting, 60),
            clean(row.reads, 160),
        ]
        for row in rows
    ]
    table = Table(
        caption=f"Models by {'test score' if tested else 'cross-validated score'}, best first; this model is emphasised.",
        columns=[
            "model",
            f"test {test_name(evidence.model)}",
            f"{fold_name(evidence.model)}, folds",
            "certified gap",
            "time",
            "setting",
            "reads",
        ],
        rows=cells,
        numbers=frozenset({1, 2, 3, 4}),
        strong=next((k for k, row in enumerate(rows) if row.ours), None),
    )
    blocks: list[Block] = [table]
    if len(rows) == 1:
        blocks.append(
            Note(
                "Baselines are not shown: they are fitted to the training data, which was not given (X_train, --train)."
            )
        )
    lead = (
        "The certified gap is an upper bound on how far the training objective is above its global minimum, relative to it. "
        "Baselines come without one."
    )
    return Section("leaderboard", "Leaderboard", lead, blocks)


def _key(row: Measured, tested: bool) -> float:
    first = row.test_score if tested else row.cv_score
    if first is not None:
        return first
    return -1e9 + (row.cv_score or 0.0)  # rows without a test score come last

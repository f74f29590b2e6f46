"""The samples that the model gets wrong, the surest mistakes first, with their text or picture."""

from __future__ import annotations

import numpy as np

from convexformer.report.blocks import Block, Note, Omission, Sample, Samples, Section
from convexformer.report.evidence import Evidence
from convexformer.report.samples import Cards
from convexformer.report.sections.predictions import NO_TEST
from convexformer.report.text import count, number, percent

SHOWN = 24


def mistakes(evidence: Evidence) -> Section | Omission:
    """Return cards of misclassified samples, or of those with the largest residuals."""
    title = "Misclassified samples" if evidence.classifies else "Largest residuals"
    if evidence.tokens is None or evidence.y is None:
        return Omission(title, NO_TEST)
    cards = Cards(evidence)
    if not evidence.classifies:
        return _residuals(evidence, cards, title)
    wrong = np.flatnonzero(evidence.predicted != evidence.y)
    if not len(wrong):
        return Omission(title, "every test sample is classified correctly.")
    p = evidence.probabilities
    sure = p.max(1) if p is not None else np.abs(evidence.outputs.reshape(len(evidence.y), -1)).max(1)
    order = wrong[np.argsort(-sure[wrong], kind="stable")][:SHOWN]
    shown = [
        cards.card(
            int(row),
            truth=evidence.name_of(evidence.y[row]),
            predicted=evidence.name_of(evidence.predicted[row]),
            detail=f"probability {percent(float(sure[row]))}"
            if p is not None
            else f"margin {number(float(sure[row]), 3)}",
        )
        for row in order
    ]
    lead = (
        f"{len(wrong):,} of {count(len(evidence.y), 'test sample')} are misclassified. The surest mistakes come first; "
    )
    lead += "on each card the true class, then the predicted one."
    return Section("mistakes", title, lead, [Samples(shown), *_notes(evidence, cards, shown, len(wrong))])


def _residuals(evidence: Evidence, cards: Cards, title: str) -> Section | Omission:
    assert evidence.y is not None
    if evidence.y.ndim > 1:
        return Omission(title, "a sample has several targets.")
    residual = np.asarray(evidence.predicted, dtype=np.float64) - evidence.y
    order = np.argsort(-np.abs(residual), kind="stable")[:SHOWN]
    shown = [
        cards.card(
            int(row),
            truth=number(float(evidence.y[row])),
            predicted=number(float(evidence.predicted[row])),
            detail=f"residual {number(float(residual[row]), 3)}",
        )
        for row in order
    ]
    lead = f"The {count(len(shown), 'sample')} of {len(residual):,} whose prediction is farthest from the target."
    return Section("mistakes", title, lead, [Samples(shown), *_notes(evidence, cards, shown, len(residual))])


def _notes(evidence: Evidence, maker: Cards, cards: list[Sample], total: int) -> list[Block]:
    notes: list[Block] = []
    if len(cards) < total:
        notes.append(Note(f"{len(cards)} of {total:,} are shown."))
    if evidence.texts is None and evidence.images is None:
        notes.append(
            Note("Texts or images of the test samples were not given (texts=, images=), so samples are numbers.")
        )
    unread = sum(not card.picture for card in cards) if evidence.images is not None else 0
    if unread:
        notes.append(Note(f"{count(unread, 'image')} could not be read; the name is shown instead."))
    if maker.occlusion.left <= 0:
        notes.append(Note("The time for contributions of tokens was up; later samples are shown without."))
    return notes

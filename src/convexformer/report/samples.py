"""Samples of the test data as cards: their picture or text, and what their tokens did for the prediction."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import final

import numpy as np

from convexformer.report.blocks import Sample, Word
from convexformer.report.evidence import Evidence
from convexformer.report.occlusion import Occlusion
from convexformer.report.pictures import thumbnail
from convexformer.report.text import clean

WORDS = 120  # words of a text that are shown with their contributions


@final
class Cards:
    """Makes cards; the time for contributions is shared by all of them."""

    def __init__(self, evidence: Evidence) -> None:
        self.evidence = evidence
        assert evidence.tokens is not None
        self.occlusion = Occlusion(evidence.model, evidence.tokens, evidence.seconds)
        self.explains = evidence.model.token_shape_[0] > 1

    def card(self, row: int, truth: str, predicted: str, detail: str) -> Sample:
        """Return the card of one sample."""
        picture = "" if self.evidence.images is None else thumbnail(self.evidence.images[row])
        words, cells = self._words(row), self._cells(row) if picture else ()
        return Sample(
            name=f"sample {row}",
            truth=truth,
            predicted=predicted,
            detail=detail,
            text="" if words else self._text(row),
            words=words,
            picture=picture,
            cells=cells,
        )

    def token_words(self, row: int) -> list[str] | None:
        """Return the strings of a sample's tokens: as given, or the words of its text where there are as many."""
        texts, tokens = self.evidence.texts, self.evidence.tokens
        if texts is None or tokens is None:
            return None
        text = texts[row]
        words = text.split() if isinstance(text, str) else [str(word) for word in text]
        n = tokens.n_tokens if tokens.mask is None else int(tokens.mask[row].sum())
        return words if len(words) == n else None

    def _text(self, row: int) -> str:
        if self.evidence.texts is not None:
            text = self.evidence.texts[row]
            return clean(text if isinstance(text, str) else " ".join(map(str, text)))
        if self.evidence.images is not None and isinstance(self.evidence.images[row], (str, os.PathLike)):
            return clean(os.path.basename(self.evidence.images[row]))
        return ""

    def _words(self, row: int) -> Sequence[Word]:
        words = self.token_words(row)
        found = self.occlusion.of(row) if words is not None and self.explains else None
        if words is None or found is None:
            return ()
        shares = _shares(found)
        return [Word(clean(word, 40), float(share)) for word, share in zip(words[:WORDS], shares, strict=False)]

    def _cells(self, row: int) -> Sequence[Sequence[float]]:
        grid = self.evidence.token_grid
        found = self.occlusion.of(row) if grid is not None and self.explains else None
        if grid is None or found is None or len(found) != self.evidence.model.token_shape_[0]:
            return ()
        return _shares(found[self.evidence.class_token :]).reshape(grid).round(3).tolist()


def _shares(contributions: np.ndarray) -> np.ndarray:
    """Return contributions relative to the largest one, from -1 to 1."""
    largest = float(np.abs(contributions).max(initial=0.0))
    return contributions / largest if largest > 0 else contributions

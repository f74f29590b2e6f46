"""Which tokens matter: over the grid of an image, over the words of texts, or by position."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from convexformer.report.blocks import Block, Figure, Note, Omission, Section, Table
from convexformer.report.charts import bars, chart, heat_map, hint
from convexformer.report.evidence import Evidence
from convexformer.report.samples import Cards
from convexformer.report.text import clean, count, number, sentence

SAMPLES = 120  # test samples whose tokens are left out one by one
WORDS = 25  # words in the chart
POSITIONS = 40  # bars of a sequence up to which each has its name


def token_importance(evidence: Evidence) -> Section | Omission:
    """Return the importance of positions, and of words where there are texts."""
    title = "Token importance"
    s = evidence.model.token_shape_[0]
    if s < 2:
        return Omission(title, "samples have one token.")
    norms = evidence.model.solution_.token_norms()
    found = None if evidence.tokens is None else _Left(evidence)
    blocks: list[Block] = []
    if norms is not None:
        values, what = norms.double().cpu().numpy(), "norm of the weights"
        lead = f"The norm of the weights at each token position: {int((values > 0).sum())} of {s} are in use."
    elif found is not None and found.by_position is not None:
        values, what = found.by_position, "mean contribution"
        lead = (
            "The head has no weights of token positions. Shown is the mean absolute contribution of the token at each "
            f"position to the score of the predicted class, over {count(found.n, 'test sample')}."
        )
    elif found is not None and found.words:
        values, what, lead = None, "", "The mean absolute contribution of words to the score of the predicted class."
    else:
        name = evidence.model.solution_.head.name
        return Omission(
            title, f"the {name} head has no weights of token positions, and there is no test data to try it on."
        )
    if values is not None:
        blocks.append(_positions(evidence, values, what))
    if found is not None and found.words:
        blocks.append(_words(found))
    if found is not None and evidence.texts is not None and not found.words:
        blocks.append(
            Note(
                "Texts do not have a word for each token; pass lists of the tokens' strings as texts to see them by word."
            )
        )
    if found is not None and (norms is None or found.words):
        blocks.append(
            Note(
                "A contribution is how much the score of the predicted class falls when the mean token takes the token's "
                f"place; averages over {count(found.n, 'test sample')} drawn at random."
            )
        )
    return Section("tokens", title, lead, blocks)


class _Left:
    """Mean absolute contributions by position and by word, over some test samples."""

    def __init__(self, evidence: Evidence) -> None:
        assert evidence.tokens is not None
        cards = Cards(evidence)
        need = evidence.model.solution_.token_norms() is None or evidence.texts is not None
        total = np.zeros(evidence.tokens.n_tokens)
        seen = np.zeros(evidence.tokens.n_tokens)
        words: dict[str, list[float]] = defaultdict(list)
        order = np.random.default_rng(0).permutation(evidence.tokens.n_samples)[: SAMPLES if need else 0]
        self.n = 0
        for row in order.tolist():
            found = cards.occlusion.of(row)
            if found is None:
                break
            self.n += 1
            size = np.abs(found)
            mask = evidence.tokens.mask
            places = np.arange(len(found)) if mask is None else np.flatnonzero(mask[row].cpu().numpy())
            total[places] += size
            seen[places] += 1
            for word, value in zip(cards.token_words(row) or (), size.tolist(), strict=False):
                words[clean(word, 40)].append(value)
        self.by_position = total / np.maximum(seen, 1) if self.n and total.any() else None
        ranked = sorted(((float(np.mean(v)), len(v), word) for word, v in words.items()), reverse=True)
        self.words = ranked[:WORDS]


def _words(found: _Left) -> Figure:
    rows = [{"name": word, "value": mean} for mean, _, word in found.words]
    return Figure(
        "word-importance",
        "Words",
        f"The {len(rows)} words that count most, from {found.words[0][2]} down.",
        bars(rows, "mean contribution"),
        Table(
            "Mean absolute contribution of words.",
            ["word", "mean contribution", "times"],
            [[word, number(mean, 3), str(times)] for mean, times, word in found.words],
            frozenset({1, 2}),
        ),
    )


def _positions(evidence: Evidence, values: np.ndarray, what: str) -> Figure:
    top = int(values.argmax())
    if evidence.token_grid is not None and len(values) == evidence.model.token_shape_[0]:
        h, w = evidence.token_grid
        first = evidence.class_token
        grid = values[first:].reshape(h, w)
        rows = [{"row": t // w, "col": t % w, "token": t + first, "value": float(grid.flat[t])} for t in range(h * w)]
        row, col = divmod(int(grid.argmax()), w)
        extra = f" The class token has {number(float(values[0]), 3)}." if first else ""
        return Figure(
            "token-map",
            "Over the grid",
            f"A grid of {h} rows and {w} columns, the stronger the colour the larger the {what}. "
            f"The largest is in row {row + 1}, column {col + 1}: {number(float(grid[row, col]), 3)}.{extra}",
            heat_map(rows, (h, w), what),
            Table(
                f"{sentence(what)} by row and column.",
                ["row", *(f"column {c + 1}" for c in range(w))],
                [[str(r + 1), *(number(float(v), 3) for v in grid[r])] for r in range(h)],
                frozenset(range(w + 1)),
            ),
        )
    rows = [{"token": t, "value": float(v)} for t, v in enumerate(values)]
    x = {"field": "token", "type": "ordinal", "title": "token", "axis": {"labelOverlap": True, "labelAngle": 0}}
    encoding = {
        "x": x,
        "y": {"field": "value", "type": "quantitative", "title": what},
        "tooltip": hint(token="token", value=what),
    }
    return Figure(
        "token-bars",
        "By position",
        f"{sentence(what)} of the tokens at {len(values)} positions; the largest is at position {top}.",
        chart(rows, [{"mark": {"type": "bar", "fill": "var(--first)"}, "encoding": encoding}], 200),
        Table(
            f"{sentence(what)} by position.",
            ["position", what],
            [[str(t), number(float(v), 3)] for t, v in enumerate(values)],
            frozenset({0, 1}),
        ),
    )

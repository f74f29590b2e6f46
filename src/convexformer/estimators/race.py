"""``portfolio="wide"``: the papers' heads race for a place beside ``head="auto"``, by successive halving.

A round gives every head that is left the same samples, twice as many as the round before, a short path of betas, and one
split to be scored on; the better half goes on (Jamieson and Talwalkar 2016). The winner of the race is cross-validated on
all samples, on the folds of ``auto``. Every score belongs to solutions with certified gaps.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, final

import numpy as np
from sklearn.base import clone

from convexformer.clock import Clock
from convexformer.data.stores import Tokens
from convexformer.estimators.base import TokenEstimator
from convexformer.estimators.folds import FoldOptions, Share, score_path
from convexformer.estimators.leaderboard import Entry
from convexformer.heads import MLP, Attention, MLPMixer, PoolFormer, SelfAttention
from convexformer.heads.base import Head
from convexformer.path import beta_ratios

if TYPE_CHECKING:
    from convexformer.estimators.search import CrossValidated

RACERS: dict[str, Head] = {
    "attention, l1": Attention(),
    "attention, l2": Attention(decay="l2"),
    "attention, l1, gated": Attention(activation="gated_relu", gates=4),
    "self-attention": SelfAttention(),
    "mixer": MLPMixer(),
    "mlp, gated": MLP(activation="gated_relu", gates=16),
    "poolformer, gated": PoolFormer(activation="gated_relu", gates=16),
}


@final
@dataclass(frozen=True)
class RaceOptions:
    """Constants of a race."""

    fewest: int = 100
    """Samples of a round at least."""
    rounds: int = 3
    """Rounds; the last one has half of the samples."""
    n_betas: int = 6
    beta_min_ratio: float = 3e-3
    tolerance: float = 1e-2
    """Relative gap of every solution."""
    test_share: float = 0.25
    """Samples of a round that score it."""


@final
class Race:
    """Which of the papers' heads comes out first, on ``tokens`` and ``targets``, in the time of ``clock``."""

    def __init__(
        self,
        estimator: Callable[[Head], TokenEstimator],
        tokens: Tokens,
        targets: np.ndarray,
        w: np.ndarray | None,
        scoring: object,
        clock: Clock,
        options: RaceOptions = RaceOptions(),
    ) -> None:
        self.estimator, self.tokens, self.targets, self.w = estimator, tokens, targets, w
        self.clock, self.options = clock, options
        ratios = beta_ratios(options.n_betas, options.beta_min_ratio)
        self.fold = FoldOptions(ratios, scoring, 2, options.tolerance)
        self.order = np.random.default_rng(0).permutation(tokens.n_samples)

    def run(self, racers: dict[str, Head]) -> list[Entry]:
        """Return an entry for each head that there was time for, the winner first."""
        left, out, ahead = dict(racers), list[Entry](), list[Entry]()
        for size in self._sizes():
            found = sorted(self._round(left, size), key=lambda entry: -entry.score)
            if not found:  # no time
                break
            stay = math.ceil(len(left) / 2)
            ahead = found[:stay]
            out.extend(found[stay:])
            left = {entry.name: left[entry.name] for entry in ahead}
            if len(left) == 1 or self.clock.late:
                break
        return [*ahead, *out]

    def _sizes(self) -> Sequence[int]:
        N, options = self.tokens.n_samples, self.options
        return [min(N, max(options.fewest, N // 2**k)) for k in range(options.rounds, 0, -1)]

    def _round(self, heads: dict[str, Head], size: int) -> list[Entry]:
        """Score each head once on ``size`` samples; heads for which there is no time have no entry."""
        rows = self.order[:size]
        cut = max(1, round(self.options.test_share * size))
        test, train = rows[:cut], rows[cut:]
        share = Share.of(self.clock, len(heads), 1)
        entries = []
        for k, (name, head) in enumerate(heads.items()):
            if self.clock.late:
                break
            began = time.perf_counter()
            scores, gaps = score_path(
                self.estimator(head), self.tokens, self.targets, self.w, train, test, self.fold, share.of_fold(k)
            )
            if np.isnan(scores).all():
                continue
            at = int(np.nanargmax(scores))
            entries.append(
                Entry(
                    name=name,
                    score=float(scores[at]),
                    spread=math.nan,
                    seconds=time.perf_counter() - began,
                    gap=float(np.nanmax(gaps)),
                    reads=head.label(),
                    setting=f"beta_ratio {self.fold.ratios[at]:.2g}",
                    samples=size,
                )
            )
        return entries


def widen(
    search: CrossValidated,
    tokens: Tokens,
    targets: np.ndarray,
    w: np.ndarray | None,
    folds: Sequence[tuple[np.ndarray, np.ndarray]],
    clock: Clock,
) -> None:
    """Let the papers' heads race after a search; cross-validate the winner, and let the search keep it if it does better.

    Where the time is up before the winner is through, the race's own entry stands for it.
    """
    racers = {name: head for name, head in RACERS.items() if head.masks or tokens.mask is None}
    entries = Race(search.single, tokens.to(device="cpu"), targets, w, search.scoring, clock).run(racers)
    if entries and not clock.late:
        name = entries[0].name
        limits = {"max_time": None, "total_time": clock.left()}
        winner = clone(search).set_params(head=racers[name], portfolio="default", cv=folds, **limits)
        try:
            winner.fit(tokens, targets, sample_weight=w)
            through = not clock.late
        except TimeoutError:  # no fold had time for one beta
            through = False
        if through:
            better = winner.best_score_ > search.best_score_
            entries[0] = search.entry() if better else replace(winner.entry(), name=name)
            if better:
                for fitted in (key for key in vars(winner) if key.endswith("_")):
                    setattr(search, fitted, getattr(winner, fitted))
                search.winner_ = name
    search.raced_ = [asdict(entry) for entry in entries]

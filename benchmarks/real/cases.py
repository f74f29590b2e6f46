"""What is raced: heads, losses, betas, and the suites made of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from data import TokenSet, load, short_name

import convexformer as cf

RATIOS = (0.1, 0.03, 0.01, 0.003, 0.001)
GOALS = (1e-2, 1e-3, 1e-6)
MAIN_GOAL = 1e-3  # what the estimators ask for
LOSSES = ("cross_entropy", "squared", "regression", "huber", "logistic", "squared_hinge")
"""``squared`` and ``huber`` on one-hot targets; ``regression`` is the squared loss on one output, the class number."""
INTERCEPT = ("cross_entropy", "regression")
GATED = {"activation": "gated_relu", "gates": 4}


@dataclass(frozen=True)
class HeadVariant:
    """A head, and the most channels it is given: weights of self-attention and of the mixer grow with their square."""

    make: Callable[[], cf.heads.Head]
    width: int = 1024


HEADS = {
    "attention": HeadVariant(lambda: cf.heads.Attention()),
    "attention_gated": HeadVariant(lambda: cf.heads.Attention(**GATED)),
    "attention_l2": HeadVariant(lambda: cf.heads.Attention(decay="l2")),
    "attention_l2_gated": HeadVariant(lambda: cf.heads.Attention(decay="l2", **GATED), 64),
    "mlp": HeadVariant(lambda: cf.heads.MLP()),
    "mlp_gated": HeadVariant(lambda: cf.heads.MLP(**GATED), 128),
    "self_attention": HeadVariant(lambda: cf.heads.SelfAttention(), 32),
    "self_attention_gated": HeadVariant(lambda: cf.heads.SelfAttention(**GATED), 12),
    "mlp_mixer": HeadVariant(lambda: cf.heads.MLPMixer(), 32),
    "mlp_mixer_gated": HeadVariant(lambda: cf.heads.MLPMixer(**GATED), 12),
    "poolformer": HeadVariant(lambda: cf.heads.PoolFormer()),
    "poolformer_gated": HeadVariant(lambda: cf.heads.PoolFormer(**GATED), 128),
    "fno": HeadVariant(lambda: cf.heads.FNO()),
    "fno_gated": HeadVariant(lambda: cf.heads.FNO(**GATED), 12),
    "block_fno": HeadVariant(lambda: cf.heads.BlockFNO(blocks=2), 64),
    "block_fno_gated": HeadVariant(lambda: cf.heads.BlockFNO(blocks=2, **GATED), 12),
    "fnet": HeadVariant(lambda: cf.heads.FNet()),
    "fnet_gated": HeadVariant(lambda: cf.heads.FNet(**GATED), 128),
    "linear": HeadVariant(lambda: cf.heads.Linear()),
}


@dataclass(frozen=True)
class Case:
    """One problem of the race, at all its betas."""

    spec: str
    head: str
    loss: str = "cross_entropy"
    samples: int | None = None

    @property
    def data(self) -> str:
        return short_name(self.spec)

    @property
    def name(self) -> str:
        return f"{self.data}, {self.head}" + ("" if self.loss == "cross_entropy" else f", {self.loss}")

    def tokens(self) -> TokenSet:
        """The tokens, with as many channels as the head is given."""
        return load(self.spec, self.samples).narrowed(HEADS[self.head].width)

    def skip(self, tokens: TokenSet) -> str | None:
        """Why this case makes no sense for these tokens, or None."""
        head = HEADS[self.head].make()
        if tokens.mask is not None and not head.masks:
            return f"the {head.name} head takes no masks"
        if self.loss in ("logistic", "squared_hinge") and tokens.n_classes != 2:
            return f"{self.loss} is for two classes"
        if head.name == "block_fno" and (tokens.X.shape[2] % 2 or tokens.n_classes % 2):
            return "an odd number of channels or classes has no two blocks"
        return None


def build(case: Case, tokens: TokenSet, **beta: float) -> cf.Problem:
    """The problem, built from the tokens up."""
    y: np.ndarray = tokens.y
    if case.loss == "regression":
        y = (y - y.mean()) / y.std()
    elif case.loss in ("logistic", "squared_hinge"):
        y = 2.0 * y - 1.0
    elif case.loss != "cross_entropy":
        y = np.eye(tokens.n_classes)[y]
    loss = "squared" if case.loss == "regression" else case.loss
    head, intercept = HEADS[case.head].make(), case.loss in INTERCEPT
    return cf.Problem(head, tokens.X, y, loss=loss, mask=tokens.mask, intercept=intercept, **beta)


@dataclass(frozen=True)
class Suite:
    """Which cases, betas and tolerances, and how long a fit may take, in seconds."""

    cases: tuple[Case, ...]
    ratios: tuple[float, ...]
    goals: tuple[float, ...]
    limit: float
    probes: tuple[tuple[str, int | None], ...]
    """Token sets, with a number of samples, for the comparison of whole searches for beta."""
    probe_limit: float
    warm: bool = True
    """Whether everything is compiled before the first fit."""


def _cases(spec: str, samples: int | None, heads: str, *losses: str) -> list[Case]:
    return [Case(spec, head, loss, samples) for loss in losses or LOSSES[:1] for head in heads.split()]


def quick(files: list[str]) -> Suite:
    """About three minutes: subsets, the heads that users try first, three betas."""
    cases = []
    for file in files:
        cases += _cases(file, 300, "attention mlp")
    for file in files[-1:]:
        cases += _cases(file, 300, "attention_l2") + _cases(f"{file}@20", 300, "attention")
    cases += _cases("digits", 300, "attention attention_gated mlp_gated self_attention fno")
    cases += _cases("made:ill_conditioned", None, "attention mlp") + _cases("made:tiny", None, "attention", "squared")
    return Suite(tuple(cases), (0.1, 0.01, 0.001), (1e-2, 1e-3), 2.0, (("digits", 300),), 30.0)


def default(files: list[str]) -> Suite:
    """About half an hour: every head on real tokens, other losses and shapes on the heads that show them."""
    token_heads = "attention attention_l2 mlp"
    cases = []
    for file in files:
        cases += _cases(file, 600, " ".join(HEADS))
        cases += _cases(f"{file}@40", 800, "attention attention_l2 mlp self_attention")
        cases += _cases(file, 600, "attention mlp", "squared", "regression", "huber")
    for file in files[-1:]:
        cases += _cases(f"{file}@100", 1500, token_heads)
    cases += _cases("digits", 600, " ".join(HEADS))
    for name in ("ill_conditioned", "many_classes", "one_token", "wide", "heavy_tails", "imbalanced"):
        cases += _cases(f"made:{name}", None, token_heads + " self_attention")
    cases += _cases("made:two_classes", None, "attention mlp", "cross_entropy", "logistic", "squared_hinge")
    cases += _cases("made:tiny", None, token_heads, "squared", "cross_entropy")
    probes = tuple((spec, None) for spec in (*files, "digits"))
    return Suite(tuple(cases), (0.1, 0.01, 0.001), GOALS, 8.0, probes, 300.0)


def full(files: list[str]) -> Suite:
    """Hours: every head, every loss, every beta, on every set, whole."""
    specs = [*files, *(f"{file}@100" for file in files), "digits"]
    specs += [f"made:{name}" for name in ("ill_conditioned", "two_classes", "many_classes", "one_token", "wide")]
    specs += [f"made:{name}" for name in ("heavy_tails", "imbalanced", "tiny")]
    cases = [case for spec in specs for case in _cases(spec, None, " ".join(HEADS), *LOSSES)]
    probes = tuple((spec, None) for spec in (*files, "digits"))
    return Suite(tuple(cases), RATIOS, GOALS, 60.0, probes, 600.0)


def sizes(files: list[str]) -> Suite:
    """For ``--fit-auto``: heads with a choice of solvers, at several sizes, anisotropies and betas, to one goal."""
    cases = []
    for file in files:
        cases += [case for n in (300, 600, 1500) for case in _cases(file, n, "mlp")] + _cases(file, None, "mlp")
        cases += _cases(file, 600, "poolformer fnet fno block_fno mlp_gated") + _cases(f"{file}@40", 800, "mlp")
        cases += _cases(file, 600, "mlp", "squared", "regression", "huber") + _cases(file, 300, "attention_l2")
    for name in ("ill_conditioned", "many_classes", "one_token", "heavy_tails", "imbalanced", "two_classes", "wide"):
        cases += _cases(f"made:{name}", None, "mlp attention_l2")
    cases += _cases("made:tiny", None, "mlp attention_l2", "squared", "cross_entropy")
    cases += _cases("made:large", None, "mlp") + _cases("digits", 1200, "mlp_gated attention_l2")
    cases += _cases("digits", 300, "fno mlp_gated attention_l2_gated")
    cases += _cases("digits", 600, "mlp_mixer poolformer_gated attention_l2")
    return Suite(tuple(cases), (0.1, 0.01, 0.001), (1e-2, 1e-3), 4.0, (), 0.0)


def smoke(files: list[str]) -> Suite:
    """Seconds, for the tests: the plumbing."""
    cases = _cases("made:tiny", 60, "attention mlp") + [Case(file, "attention", samples=40) for file in files]
    return Suite(tuple(cases), (0.1,), (1e-2, 1e-3), 20.0, (("made:tiny", 60),), 20.0, warm=False)


SUITES = {"smoke": smoke, "sizes": sizes, "quick": quick, "default": default, "full": full}

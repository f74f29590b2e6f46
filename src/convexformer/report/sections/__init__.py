"""The sections of a page, in their order; each takes the evidence, and returns itself why it is left out, or None."""

from __future__ import annotations

from collections.abc import Callable

from convexformer.report.blocks import Omission, Section
from convexformer.report.evidence import Evidence
from convexformer.report.sections.betas import betas
from convexformer.report.sections.convergence import convergence
from convexformer.report.sections.leaderboard import leaderboard
from convexformer.report.sections.mistakes import mistakes
from convexformer.report.sections.predictions import confusion_matrix, fit_quality, reliability
from convexformer.report.sections.setup import setup
from convexformer.report.sections.tokens import token_importance
from convexformer.report.sections.weights import blocks, spectrum

SECTIONS: tuple[Callable[[Evidence], Section | Omission | None], ...] = (
    leaderboard,
    convergence,
    betas,
    confusion_matrix,
    reliability,
    fit_quality,
    token_importance,
    blocks,
    spectrum,
    mistakes,
    setup,
)

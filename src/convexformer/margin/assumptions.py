"""Which of the paper's assumptions hold, with the numbers behind each."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from convexformer.gauges import FrobeniusNorm, L1Norm
from convexformer.margin.certificate import margin_certificate
from convexformer.margin.data import Sequences
from convexformer.margin.diagonal import solve_diagonal
from convexformer.margin.frobenius import solve_frobenius
from convexformer.margin.progress import Answer, Limits
from convexformer.margin.pull import log_excess
from convexformer.operators import Operator
from convexformer.threads import few_threads

SEPARABILITY_LIMITS = Limits(1e-3, 5000)  # relative gap and iterations of the SVMs that decide separability


@final
@dataclass(frozen=True)
class Assumption:
    """One assumption: whether it holds, what it says, and the numbers that decide it."""

    number: int
    holds: bool
    statement: str
    numbers: dict[str, float]

    def __str__(self) -> str:
        numbers = ", ".join(f"{name.replace('_', ' ')} {value:.4g}" for name, value in self.numbers.items())
        return f"assumption {self.number} {'holds' if self.holds else 'FAILS'}: {self.statement} ({numbers})"


@final
@dataclass(frozen=True)
class AssumptionReport:
    """The four assumptions of Sheen et al. 2024; ``report[3]`` is the third."""

    assumptions: tuple[Assumption, ...]

    def __getitem__(self, number: int) -> Assumption:
        if number not in (1, 2, 3, 4):
            raise KeyError(f"there are assumptions 1 to 4, not {number!r}.")
        return self.assumptions[number - 1]

    @property
    def theorem_4_1(self) -> bool:
        """Whether the theorem says that the diagonal flow from ``b = 0`` ends at the l1-SVM (if its direction converges)."""
        return self[2].holds and self[3].holds and self[1].numbers["diagonal_margin"] > 0

    @property
    def theorem_5_1(self) -> bool:
        """Whether the theorem says that the aligned flow of K and Q ends at the nuclear SVM (if its direction converges)."""
        return self[2].holds and self[3].holds and self[4].holds

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        rows = {str(a.number): {"holds": a.holds, "statement": a.statement, **a.numbers} for a in self.assumptions}
        return {"assumptions": rows, "theorem_4_1": self.theorem_4_1, "theorem_5_1": self.theorem_5_1}

    def __str__(self) -> str:
        promises = (("4.1 (diagonal)", self.theorem_4_1), ("5.1 (aligned keys and queries)", self.theorem_5_1))
        lines = [str(a) for a in self.assumptions]
        lines += [f"theorem {name}: {'applies' if yes else 'does not apply'}" for name, yes in promises]
        return "\n".join(lines)


def check_assumptions(X: Any, z: Any, y: Any, v: Any, *, W: Any = None, tolerance: float = 1e-8) -> AssumptionReport:
    """Check assumptions 1 to 4 on the data; assumption 3 at the initial attention matrix ``W`` (zero by default).

    ``tolerance`` bounds what counts as equal or orthogonal, relative to the sizes involved.
    """
    if not 0 < tolerance < 1:
        raise ValueError(f"tolerance={tolerance} was given; expected a small positive number such as 1e-8.")
    data = Sequences.of(X, z, y, v)
    d = data.shape[2]
    first = (
        torch.zeros((d, d), dtype=torch.float64, device=data.X.device) if W is None else torch.as_tensor(W).to(data.X)
    )
    if tuple(first.shape) != (d, d):
        raise ValueError(
            f"W has shape {tuple(first.shape)}; expected (d, d) = {(d, d)}, the attention matrix at the start."
        )
    with torch.no_grad(), few_threads(data.X):
        return AssumptionReport(
            (_separability(data), _scores(data, tolerance), _initial_loss(data, first), _structure(data, tolerance))
        )


def _separability(data: Sequences) -> Assumption:
    operator, diagonal = data.operator(), data.diagonal_operator()
    scale = float(operator.row_norms().max())
    full = _margin(operator, FrobeniusNorm(), solve_frobenius(operator, SEPARABILITY_LIMITS)) / max(scale, 1e-300)
    narrow = _margin(diagonal, L1Norm(), solve_diagonal(diagonal, SEPARABILITY_LIMITS)) / max(scale, 1e-300)
    numbers = {"ties": float(len(data.ties)), "margin": full, "diagonal_margin": narrow}
    statement = "optimal tokens are unique and some W separates them (margins for rows and weights of norm one)"
    return Assumption(1, not data.ties and full > 0, statement, numbers)


def _margin(operator: Operator, gauge: FrobeniusNorm | L1Norm, answer: Answer) -> float:
    """Return the margin of weights of norm one; zero when nothing separates beyond rounding."""
    primal = margin_certificate(operator, gauge, answer.W, answer.multipliers).primal
    row = float(operator.adjoint(torch.ones_like(operator.apply(answer.W))).abs().max())
    return 1 / primal if math.isfinite(primal) and 1 / primal > 1e-12 * row else 0.0


def _scores(data: Sequences, tolerance: float) -> Assumption:
    rest = data.scores.gather(1, data.others)
    gap = float((data.optimal_scores[:, None] - rest).min())
    spread = float((rest.amax(1) - rest.amin(1)).max())
    size = float(data.scores.abs().max())
    holds = gap > tolerance * size and spread <= tolerance * size
    statement = "one optimal token per sequence, and equal scores of all others"
    return Assumption(2, holds, statement, {"smallest_gap": gap, "largest_spread": spread})


def _initial_loss(data: Sequences, W: Tensor) -> Assumption:
    """The loss at the start is at most that of an attention that picks one wrong token, so descent cannot end at one."""
    margins = data.operator().apply(W)
    loss = data.infimum + float(log_excess(data, margins).exp())
    best_rest = data.scores.gather(1, data.others).amax(1)
    right, wrong = torch.exp(-data.optimal_scores), torch.exp(-best_rest)
    threshold = float((right.sum() - right + wrong).min()) / data.shape[0]
    statement = "the initial loss is at most that of one wrong token"
    return Assumption(3, loss <= threshold, statement, {"initial_loss": loss, "threshold": threshold})


def _structure(data: Sequences, tolerance: float) -> Assumption:
    """(i) orthogonal optimal tokens and queries, (ii) each parallel to its query, (iii) the others in mirrored pairs."""
    n, L, _ = data.shape
    rows = torch.arange(n, device=data.X.device)
    x = data.X[rows, data.optimal]
    overlap = max(_overlap(x), _overlap(data.z))
    cosine = (x * data.z).sum(1).abs() / (x.norm(dim=1) * data.z.norm(dim=1)).clamp_min(1e-300)
    angle = float((1 - cosine).max())
    pairs, largest_c = (math.inf, math.nan) if L % 2 == 0 else _pairs(data, x)
    numbers = {"overlap": overlap, "one_minus_cosine": angle, "pair_residual": pairs, "largest_c": largest_c}
    holds = max(overlap, angle, pairs) <= tolerance and -1 - tolerance <= largest_c < 1
    return Assumption(
        4, holds, "orthogonal optimal tokens along their queries, other tokens in mirrored pairs", numbers
    )


def _overlap(rows: Tensor) -> float:
    """Return the largest cosine between two different rows."""
    unit = torch.nn.functional.normalize(rows, dim=1)
    return float((unit @ unit.mT - torch.diag((unit * unit).sum(1))).abs().max())


def _pairs(data: Sequences, x: Tensor) -> tuple[float, float]:
    """Pair each token with the one nearest to its mirror image ``2 c x_opt - x_l``; return the worst residual and ``c``."""
    worst, largest = 0.0, -math.inf
    for i in range(data.shape[0]):
        tokens = data.X[i, data.others[i]]
        c = tokens @ x[i] / x[i].square().sum().clamp_min(1e-300)  # (L-1,)
        distance = torch.cdist(2 * c[:, None] * x[i] - tokens, tokens)
        distance.fill_diagonal_(math.inf)
        size, left = float(data.X[i].norm(dim=1).max()), set(range(len(tokens)))
        while left:
            a = left.pop()
            b = min(left, key=lambda l, a=a: float(distance[a, l]))  # type: ignore[misc]
            left.remove(b)
            worst = max(worst, float(distance[a, b]) / max(size, 1e-300))
        largest = max(largest, float(c.max())) if float(c.min()) >= -1 - 1e-9 else math.inf
    return worst, largest

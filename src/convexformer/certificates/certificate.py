"""The certificate of a point: primal and dual value, their gap, and what kind of proof it is."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import final

import torch

from convexformer.html import table


@final
@dataclass(frozen=True)
class Certificate:
    """An upper bound on the distance of a point's objective to the global optimum.

    ``kind`` is ``"exact"``, ``"probabilistic"`` (the dual bound holds with probability ``confidence``) or ``"none"``:
    nothing is claimed, the dual value is minus infinity, and ``reason`` says why.

    Attributes
    ----------
    primal : float
        The objective at the point.
    dual : float
        A lower bound on the optimum, lowered by an allowance for rounding.
    kind : {"exact", "probabilistic", "none"}
        What kind of proof the dual value is.
    confidence : float
        1 where exact, the probability that the bound holds where probabilistic, 0 where none.
    kkt : dict
        Relative residuals of the optimality conditions, and ``scale``, the factor of the dual point.
    reason : str
        Why there is no certificate; empty where there is one.
    polar : {"exact", "upper bound"}
        What the dual point was scaled by. With a bound the certificate is as valid, but may stay open at the optimum.
    """

    primal: float
    dual: float
    kind: str
    confidence: float
    kkt: dict[str, float] = field(default_factory=dict)
    reason: str = ""
    """Why there is no certificate; empty where there is one."""
    polar: str = "exact"
    """What the dual point was scaled by: an ``"exact"`` polar, or an ``"upper bound"`` on it. With a bound the
    certificate is as valid, but the gap may stay open at the optimum itself (exact ReLU heads with many cells)."""

    def __post_init__(self) -> None:
        if self.kind != "none" and not math.isfinite(self.gap):  # an infinite gap certifies nothing
            object.__setattr__(self, "kind", "none")
            object.__setattr__(self, "confidence", 0.0)
            object.__setattr__(self, "reason", self.reason or "the gap is infinite")

    @property
    def gap(self) -> float:
        """``primal - dual``: the point is at most this far above the optimum."""
        return self.primal - self.dual

    @property
    def relative_gap(self) -> float:
        """``gap / |primal|``."""
        return self.gap / max(abs(self.primal), torch.finfo(torch.float64).tiny)

    @property
    def interval(self) -> tuple[float, float]:
        """``(dual, primal)``: the optimal value lies between them; from minus infinity where there is no certificate."""
        return self.dual, self.primal

    def meets(self, tolerance: float) -> bool:
        """Tell whether the relative gap is at most the tolerance."""
        return self.kind != "none" and self.relative_gap <= tolerance

    def to_dict(self) -> dict[str, float | str | dict[str, float]]:
        """Return plain numbers and text."""
        return {
            "primal": self.primal,
            "dual": self.dual,
            "gap": self.gap,
            "relative_gap": self.relative_gap,
            "kind": self.kind,
            "confidence": self.confidence,
            "kkt": dict(self.kkt),
            "reason": self.reason,
            "polar": self.polar,
        }

    def _repr_html_(self) -> str:
        rows: list[tuple[str, str]] = [("objective", f"{self.primal:.8g}")]
        if self.kind == "none":
            rows.append(("certificate", f"none: {self.reason}" if self.reason else "none"))
        else:
            odds = "" if self.kind == "exact" else f", with probability {self.confidence:.6g}"
            rows += [
                ("lower bound on the optimum", f"{self.dual:.8g}"),
                ("gap", f"{self.gap:.3g}"),
                ("relative gap", f"{self.relative_gap:.2e}"),
                ("kind", self.kind + odds),
            ]
        return table(rows, caption="Certificate")

    def __str__(self) -> str:
        if self.kind == "none":
            return f"objective {self.primal:.8g}, not certified" + (f": {self.reason}" if self.reason else "")
        odds = "" if self.kind == "exact" else f" with probability {self.confidence:.4g}"
        return (
            f"objective {self.primal:.8g}, at most {self.gap:.3g} above the global optimum "
            f"(relative {self.relative_gap:.2e}, {self.kind}{odds})"
        )

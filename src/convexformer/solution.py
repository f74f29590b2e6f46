"""What a solver returns: weights, how it went, and the maps to outputs and to an ordinary network."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple, final

from torch import Tensor

from convexformer.architecture import Head, Layout, Network, Weights
from convexformer.data import TokenDataset
from convexformer.losses import Loss
from convexformer.operators.bilinear import as_operand

if TYPE_CHECKING:  # a solution carries its certificate but computes none
    from convexformer.certificates import Certificate


class Status(Enum):
    """How a solve ended, and what to do about it."""

    CONVERGED = "the relative duality gap is below the tolerance"
    MAX_ITER = "stopped at max_iter; raise it, raise the tolerance, or increase beta"
    MAX_TIME = "stopped at max_time; the certificate says how far from optimal this point is"
    INTERRUPTED = "interrupted; this is the best point so far, pass it as warm_start to continue"
    STALLED = (
        "no further progress in this precision; raise the tolerance (or, in float32, solve with dtype=torch.float64)"
    )

    def __str__(self) -> str:
        return self.value


class Record(NamedTuple):
    """One line of a history."""

    iteration: int
    seconds: float
    primal: float
    dual: float
    relative_gap: float


@final
@dataclass(frozen=True)
class Solution:
    """Weights of the convex program with their certificate; holds no training data."""

    weights: Weights
    head: Head
    layout: Layout
    loss: Loss
    beta: float
    certificate: Certificate
    status: Status
    history: tuple[Record, ...] = field(default=(), repr=False)
    n_iter: int = 0
    seconds: float = 0.0
    solver: str = ""

    def __post_init__(self) -> None:
        # weights remember where they belong, so that another problem can refuse them
        object.__setattr__(self, "weights", replace(self.weights, origin=(self.head, self.layout)))

    @property
    def objective(self) -> float:
        """The primal value, computed in float64."""
        return self.certificate.primal

    def predict(self, X: Any, mask: Any = None) -> Tensor:
        """Return outputs (logits or values) for tokens ``X``, in the shape of the targets."""
        Z = self.weights.Z
        length = self.layout.n_tokens if self.head.positional else None
        tokens = TokenDataset.of(X, mask, device=Z.device, dtype=Z.dtype, length=length)
        if tokens.width != self.layout.width:
            raise ValueError(
                f"X has tokens of size d={tokens.width}; this solution was fitted with d={self.layout.width}. "
                "Use the same embedding as for training."
            )
        if tokens.mask is not None and not self.head.masks:
            raise ValueError(
                f"the {self.head.name} head mixes tokens by position, so a mask, or samples of fewer tokens than in the "
                f"fit, have no meaning for it. Pass {self.layout.n_tokens} real tokens a sample."
            )
        outputs = as_operand(self.head.operator(tokens, self.layout), Z)
        if self.weights.intercept is not None:
            outputs = outputs + self.weights.intercept
        return self.layout.shape(outputs, tokens)

    def network(self) -> Network:
        """Return the ordinary network: same outputs, and ``loss + beta * decay()`` equal to the objective."""
        return self.head.recover(self.weights, self.layout)

    def dense(self) -> Tensor:
        """Return ``Z`` as one tensor; its axes are those of the head (``(s, d, c)`` for attention)."""
        return self.weights.dense()

    def token_norms(self) -> Tensor | None:
        """``(s,)`` the weight of each token position; None for heads without weights of their own for positions."""
        return self.head.token_norms(self.weights)

"""The result of a solve: weights, certificate and history, and the maps to outputs and to an ordinary network."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor

from convexformer.certificates import Certificate
from convexformer.data import TokenDataset
from convexformer.data.stores import read_tokens
from convexformer.heads.base import Head, Layout
from convexformer.heads.combined import Sum
from convexformer.html import table
from convexformer.losses import Loss
from convexformer.networks.base import Network
from convexformer.solvers.status import Record, Status
from convexformer.weights import Weights

__all__ = ["Record", "Solution", "Status"]


@final
@dataclass(frozen=True)
class Solution:
    """Weights of the convex program with their certificate; holds no training data.

    Attributes
    ----------
    weights : Weights
        ``Z`` and the intercept; ``weights.Z`` is a tensor or low-rank factors.
    head : Head
        The architecture, with what it learnt from training tokens.
    layout : Layout
        The sizes of the problem.
    loss : Loss
        The loss it was fitted with.
    beta : float
        The strength of the penalty.
    certificate : Certificate
        Recomputed in float64 from the weights alone.
    status : Status
        Why the solve ended; ``str(status)`` says what to do.
    history : tuple of Record
        Iteration, seconds, primal, dual and relative gap at each check.
    n_iter : int
        Iterations.
    seconds : float
        Wall clock.
    solver : str
        Which solver it was.
    """

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
        # weights carry the identity of their problem, so that an incompatible problem rejects them
        own = Weights(self.weights.form, self.weights.intercept, self.head.identity(self.layout))
        object.__setattr__(self, "weights", own)

    @property
    def objective(self) -> float:
        """The primal value, computed in float64."""
        return self.certificate.primal

    def predict(self, X: Any, mask: Any = None) -> Tensor:
        """Return outputs (logits or values) for tokens ``X``, in the shape of the targets."""
        Z = self.weights.Z  # a tensor, or low-rank factors
        length = self.layout.n_tokens if self.head.positional else None
        tokens = read_tokens(X, mask, device=Z.device, dtype=Z.dtype, length=length)
        if tokens.width != self.layout.width:
            raise ValueError(
                f"X has tokens of size d={tokens.width}; this solution was fitted with d={self.layout.width}. "
                "Use the same embedding as for training."
            )
        if tokens.mask is not None and not self.head.masks:
            raise ValueError(
                f"the {self.head.name} head mixes tokens by position, so a mask, or samples of fewer tokens than in the "
                f"fit, have no meaning for it. Pass {self.layout.n_tokens} real tokens per sample."
            )
        return torch.cat([self._outputs(batch) for batch in tokens.batches()])

    def _outputs(self, tokens: TokenDataset) -> Tensor:
        """Return the outputs of some samples."""
        outputs = self.head.outputs(tokens, self.layout, self.weights.Z)
        if self.weights.intercept is not None:
            outputs = outputs + self.weights.intercept
        return self.layout.shape(outputs, tokens)

    def network(self) -> Network:
        """Return the ordinary network: same outputs, and ``loss + beta * decay()`` equal to the objective."""
        return self.head.recover(self.weights, self.layout)

    def dense(self) -> Tensor:
        """Return ``Z`` as one tensor; its axes are those of the head (``(s, d, c)`` for attention)."""
        return self.weights.dense()

    @property
    def block_norms(self) -> dict[str, float]:
        """The penalty of each part of a sum, by its description: how much of each head the program uses."""
        if not isinstance(self.head, Sum):
            raise AttributeError(f"the {self.head.name} head has no blocks; heads.Sum has.")
        return self.head.block_norms(self.weights, self.layout)

    def plot_blocks(self) -> Any:
        """Draw :attr:`block_norms` as bars; return the matplotlib axes."""
        from matplotlib.figure import Figure

        norms = dict(sorted(self.block_norms.items(), key=lambda pair: pair[1]))
        axes = Figure(figsize=(6, 0.4 * len(norms) + 1), layout="constrained").subplots()
        axes.barh(list(norms), list(norms.values()), color="0.35")
        axes.set_xlabel("penalty of the block")
        axes.spines[["top", "right"]].set_visible(False)
        return axes

    def token_norms(self) -> Tensor | None:
        """``(s,)`` the weight of each token position; None for heads without weights per position."""
        return self.head.token_norms(self.weights)

    def attention_map(self) -> Tensor:
        """``(s, s)`` how much each output row draws on each token, as shares of the penalty; rows sum to one."""
        found = self.head.attention_map(self.weights, self.layout)
        if found is None:
            raise ValueError(
                f"the {self.head.name} head has no attention map here; heads.Attention with targets per token, (N, s, c), "
                "has. token_norms() gives the weight of each token of a pooled head."
            )
        return found

    def _repr_html_(self) -> str:
        sizes = f"s = {self.layout.n_tokens}, d = {self.layout.width}, c = {self.layout.n_outputs}"
        rows = [
            ("head", self.head.label()),
            ("tokens, channels, outputs", sizes),
            ("loss", self.loss.name),
            ("beta", f"{self.beta:.6g}"),
            ("status", f"{self.status.name}: {self.status}"),
            ("solver", f"{self.solver or 'unknown'}, {self.n_iter} iterations, {self.seconds:.2f} s"),
        ]
        return table(rows, caption="Solution") + self.certificate._repr_html_()

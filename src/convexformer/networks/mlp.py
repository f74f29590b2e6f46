"""The two-layer network applied to every token."""

from __future__ import annotations

from typing import Any, final

from torch import Tensor

from convexformer.data import TokenDataset
from convexformer.networks.base import FactorNetwork, TokenNetwork, fixed, optional, owned
from convexformer.operators.gates import open_tokens
from convexformer.operators.mixing import fourier_mix, local_mean
from convexformer.registry import one_of
from convexformer.weights import Weights


@final
class MLPNetwork(FactorNetwork):
    """``f(X)_t = sum_j D_j(x_t) (x_t^T w1_j) w2_j + bias``, averaged over tokens unless outputs are per token.

    ``x_t`` are the tokens, local means of them (``mix="pool"``: PoolFormer) or their Fourier transform (``mix="fourier"``:
    FNet). ``w1: (h, d)``, ``w2: (h, c)``; ``D_j(x) = 1{gates[gate_index[j]]^T x >= 0}``, ``1{w1_j^T x >= 0}`` with
    ``relu``, or 1 for a linear network.
    ``decay() = 1/2 sum_j (||w1_j||^2 + ||w2_j||^2)`` (Sahiner et al. 2022).
    """

    def __init__(
        self,
        w1: Tensor,
        w2: Tensor,
        bias: Tensor | None = None,
        *,
        mix: str = "none",
        window: int = 1,
        grid: tuple[int, int] | None = None,
        **shared: Any,
    ) -> None:
        super().__init__(w1, w2, bias, **shared)
        self.mix, self.window = one_of("mix", mix, ("none", "pool", "fourier")), window
        self.grid = None if grid is None else (int(grid[0]), int(grid[1]))

    def forward(self, X: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return outputs ``(N, c)``, ``(N, s, c)`` per token, or ``(N,)`` if the targets were ``(N,)``."""
        tokens = self._mixed(self.tokens(X, mask))
        hidden = tokens.X @ self.w1.T  # (N, s, h); masked tokens give zeros
        if self.gates is not None:
            hidden = hidden * open_tokens(tokens.X.detach(), self.gates)[..., self.gate_index].to(hidden.dtype)
        if self.relu:
            hidden = hidden.relu()
        if not self.per_token:
            hidden = hidden.sum(1) / tokens.lengths[:, None]
        return self.finish(hidden @ self.w2, tokens.mask)

    def _mixed(self, tokens: TokenDataset) -> TokenDataset:
        if self.mix == "pool":
            return local_mean(tokens, self.window, self.grid)
        if self.mix == "fourier" and tokens.mask is not None:
            raise ValueError("FNet mixes tokens by position, so a mask has no meaning for it; pass tokens alone.")
        return fourier_mix(tokens) if self.mix == "fourier" else tokens

    def mixing(self) -> dict[str, Any]:
        """Return how tokens are mixed."""
        return {"mix": self.mix, "window": self.window, "grid": self.grid}

    @property
    def token_size(self) -> tuple[int | None, int]:
        """``(s, d)``; a grid has a number of tokens."""
        return None if self.grid is None else self.grid[0] * self.grid[1], self.w1.shape[1]

    def lift(self) -> Weights:
        """``Z_g = sum_j w1_j w2_j^T`` over the neurons of each gate; with ``relu`` the neurons themselves."""
        w1, w2 = self.w1.detach(), self.w2.detach()
        if self.relu:
            return self.neurons(w1, w2)
        bias = self.own_bias()
        if self.gates is None or self.gate_index is None:
            return Weights(w1.T @ w2, bias)
        Z = w1.new_zeros((self.gates.shape[0], w1.shape[1], w2.shape[1]))
        for gate in self.gate_index.unique():
            own = self.gate_index == gate
            Z[gate] = w1[own].T @ w2[own]
        return Weights(Z, bias)

    def config(self) -> dict[str, Any]:
        """Return the options."""
        return {**super().config(), **self.mixing()}


@final
class LinearNetwork(TokenNetwork):
    """``f(X) = mean token times weight + bias``; ``decay() = 1/2 ||weight||_F^2``."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, squeeze: bool = False) -> None:
        super().__init__()
        self.weight, self.bias = owned(weight), optional(bias)
        self.squeeze = squeeze

    def forward(self, X: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return outputs ``(N, c)``, or ``(N,)`` if the targets were ``(N,)``."""
        outputs = self.tokens(X, mask).mean() @ self.weight
        if self.bias is not None:
            outputs = outputs + self.bias
        return outputs.squeeze(-1) if self.squeeze else outputs

    def decay(self) -> Tensor:
        """Return the ridge."""
        return 0.5 * self.weight.square().sum()

    @property
    def token_size(self) -> tuple[int | None, int]:
        """Any number of tokens."""
        return None, self.weight.shape[0]

    def lift(self) -> Weights:
        """Return the weight itself."""
        return Weights(self.weight.detach().clone(), fixed(self.bias))

    def config(self) -> dict[str, Any]:
        """Return the options."""
        return {"squeeze": self.squeeze}

"""The attentive probes of the field as baselines: cross attention (V-JEPA) and efficient probing, trained by AdamW.

Both read tokens ``(N, s, d)`` by learnt queries and are tuned: every pair of learning rate and weight decay of a
:class:`Sweep` is trained on 80% of the training part, the best on the other 20% is trained once more on all of it.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn


class AttentiveProbe(nn.Module):
    """One learnt query, multi-head cross attention, an MLP block, a linear layer (Bardes et al. 2024, V-JEPA)."""

    def __init__(self, d: int, c: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads if d % heads == 0 else 1
        self.query = nn.Parameter(0.02 * torch.randn(1, d))
        self.key, self.value, self.out = nn.Linear(d, d), nn.Linear(d, d), nn.Linear(d, d)
        self.norm_in, self.norm = nn.LayerNorm(d), nn.LayerNorm(d)
        self.mlp = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))
        self.linear = nn.Linear(d, c)

    def forward(self, X: Tensor, mask: Tensor) -> Tensor:
        n, s, d = X.shape
        X = self.norm_in(X)
        q = self.query.view(1, self.heads, 1, -1)
        k, v = (layer(X).view(n, s, self.heads, -1).transpose(1, 2) for layer in (self.key, self.value))
        scores = (q * k).sum(3) / math.sqrt(d // self.heads)  # (n, heads, s)
        weights = scores.masked_fill(~mask[:, None], -math.inf).softmax(2)
        pooled = self.query + self.out((weights[..., None] * v).sum(2).reshape(n, d))
        return self.linear(pooled + self.mlp(self.norm(pooled)))


class EfficientProbe(nn.Module):
    """``m`` learnt queries on the tokens themselves, each pooling its own share of the values (Psomas et al. 2025)."""

    def __init__(self, d: int, c: int, queries: int = 8) -> None:
        super().__init__()
        self.queries = nn.Parameter(0.02 * torch.randn(queries, d))
        width = math.ceil(d / queries)
        self.value = nn.Linear(d, queries * width)
        self.norm, self.linear = nn.LayerNorm(queries * width), nn.Linear(queries * width, c)

    def forward(self, X: Tensor, mask: Tensor) -> Tensor:
        n, s, d = X.shape
        scores = X @ self.queries.T / math.sqrt(d)  # (n, s, m)
        weights = scores.masked_fill(~mask[..., None], -math.inf).softmax(1)
        v = self.value(X).view(n, s, len(self.queries), -1)
        return self.linear(self.norm((weights[..., None] * v).sum(1).flatten(1)))


PROBES = {"attentive probe": AttentiveProbe, "efficient probing": EfficientProbe}


@dataclass(frozen=True)
class Sweep:
    """What is tried, and for how long."""

    rates: tuple[float, ...] = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2)
    decays: tuple[float, ...] = (1e-4, 1e-2, 1e-1)
    epochs: int = 60
    batch: int = 128

    def __str__(self) -> str:
        return (
            f"learning rates {self.rates}, weight decays {self.decays}, {self.epochs} epochs of AdamW, cosine schedule"
        )


@dataclass
class TunedProbe:
    """A probe that chooses learning rate and weight decay on a validation part, then trains on everything."""

    kind: str
    sweep: Sweep
    seed: int = 0
    device: str = "cpu"
    fits: int = 0
    setting: str = ""
    score: float = 0.0
    network: nn.Module = field(default_factory=nn.Identity)

    def fit(self, X: np.ndarray, y: np.ndarray, mask: np.ndarray | None) -> TunedProbe:
        self.classes, codes = np.unique(y, return_inverse=True)
        real = np.ones(X.shape[:2], bool) if mask is None else mask
        tokens = X[real]
        self.mean, self.scale = tokens.mean(0), tokens.std(0) + 1e-6
        T, M = self._read(X, mask)
        t = torch.from_numpy(codes).to(self.device)
        order = torch.randperm(len(t), generator=torch.Generator().manual_seed(self.seed))
        cut = len(t) // 5
        valid, train = order[:cut], order[cut:]
        found = []
        for rate, decay in itertools.product(self.sweep.rates, self.sweep.decays):
            network = self._train(T[train], t[train], M[train], rate, decay)
            hits = _outputs(network, T[valid], M[valid]).argmax(1) == t[valid]
            found.append((float(hits.double().mean()), -rate, decay))
        self.score, rate, decay = max(found)
        self.setting = f"rate {-rate:g}, decay {decay:g}"
        self.network = self._train(T, t, M, -rate, decay)
        return self

    def predict_proba(self, X: np.ndarray, mask: np.ndarray | None) -> np.ndarray:
        return _outputs(self.network, *self._read(X, mask)).double().softmax(1).cpu().numpy()

    def _read(self, X: np.ndarray, mask: np.ndarray | None) -> tuple[Tensor, Tensor]:
        real = np.ones(X.shape[:2], bool) if mask is None else mask
        tokens = (X - self.mean) / self.scale * real[..., None]
        return torch.from_numpy(tokens.astype(np.float32)).to(self.device), torch.from_numpy(real).to(self.device)

    def _train(self, X: Tensor, y: Tensor, mask: Tensor, rate: float, decay: float) -> nn.Module:
        self.fits += 1
        torch.manual_seed(self.seed)
        network = PROBES[self.kind](X.shape[2], len(self.classes)).to(self.device)
        optimizer = torch.optim.AdamW(network.parameters(), lr=rate, weight_decay=decay)
        batches = math.ceil(len(y) / self.sweep.batch)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.sweep.epochs * batches)
        for _ in range(self.sweep.epochs):
            for rows in torch.randperm(len(y)).split(self.sweep.batch):
                optimizer.zero_grad()
                nn.functional.cross_entropy(network(X[rows], mask[rows]), y[rows]).backward()
                optimizer.step()
                schedule.step()
        return network.eval()


@torch.no_grad()
def _outputs(network: nn.Module, X: Tensor, mask: Tensor) -> Tensor:
    parts = zip(X.split(512), mask.split(512), strict=True)
    return torch.cat([network(x, m) for x, m in parts])

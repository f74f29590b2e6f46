"""The inner loop: a block of AdamW steps, replayed as one CUDA graph on a GPU and run eagerly on a CPU."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor
from torch.nn import functional

from convexformer.deep.base import SequenceModel
from convexformer.deep.batches import Batches, Split
from convexformer.deep.options import Training

# logits (rows times classes times seeds) that an evaluation computes at once; what fits into a cache is a quarter faster
LOGIT_CHUNK = {"cuda": 1 << 22, "cpu": 1 << 16}


@final
class Stepper:
    """Takes blocks of ``size`` steps, all seeds at once: their losses are added, so each seed has its own gradient."""

    def __init__(self, model: SequenceModel, split: Split, training: Training, size: int) -> None:
        self.model, self.training, self.size = model, training, size
        self.split = split
        X, _ = split.train
        self.batches = Batches(model.seeds, X.shape[1], training.batch_size)
        self.index = torch.zeros((size, len(model.seeds), self.batches.size), dtype=torch.long, device=X.device)
        self.parameters = list(model.parameters())
        self.learning_rate = torch.zeros((), device=X.device)
        self.count = torch.zeros((), device=X.device)  # steps taken; on the device for CUDA graphs
        self.optimiser = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam}[training.optimizer](
            self._groups(),
            lr=self.learning_rate,
            betas=training.betas,
            weight_decay=0.0,
            fused=True,
            capturable=X.is_cuda,
        )
        self._graph: torch.cuda.CUDAGraph | None = None

    def take(self, first: int, most: int) -> int:
        """Take the block of steps that begins at iteration ``first``, no more than ``most``; return how many."""
        steps = min(self.size, most)
        if not self.batches.whole:
            self.index[:steps].copy_(self.batches.rows(first, steps), non_blocking=True)
        if self._graph is not None and steps == self.size:
            self._graph.replay()
        else:
            self._block(steps)
        return steps

    def capture(self) -> None:
        """Record a block as a CUDA graph; weights and moments are left as they were."""
        kept = {name: value.clone() for name, value in self.state().items()}
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # warm up: libraries allocate their workspaces on first use
            self._block(self.size)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._block(self.size)
        self._graph = graph
        with torch.no_grad():
            for name, value in self.state().items():
                value.copy_(kept[name]) if name in kept else value.zero_()

    def state(self) -> dict[str, Tensor]:
        """Return all that training changes, by name: weights, moments, counters."""
        own = {"count": self.count, "learning_rate": self.learning_rate}
        for name, parameter in self.model.named_parameters():
            own[f"weight.{name}"] = parameter.data
            for key, value in self.optimiser.state.get(parameter, {}).items():
                own[f"{key}.{name}"] = value
        return own

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Undo :meth:`state`."""
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(tensors[f"weight.{name}"])
                keys = [key for key in ("step", "exp_avg", "exp_avg_sq") if f"{key}.{name}" in tensors]
                for key in keys:
                    self.optimiser.state[parameter][key] = tensors[f"{key}.{name}"].to(parameter.device).clone()
            self.count.copy_(tensors["count"])
            self.learning_rate.copy_(tensors["learning_rate"])

    @torch.no_grad()
    def evaluate(self) -> Tensor:
        """``(4, S)``: train accuracy and loss, test accuracy and loss."""
        series = []
        for X, y in (self.split.train, self.split.test):
            chunk = LOGIT_CHUNK["cuda" if X.is_cuda else "cpu"]
            rows = max(1, chunk // (self.model.n_classes * len(self.model.seeds)))
            right, loss = self.model.zero(), self.model.zero()
            for begin in range(0, X.shape[1], rows):
                part = y[:, begin : begin + rows]
                logits = self.model(X[:, begin : begin + rows])
                right += (logits.argmax(-1) == part).sum(1)
                loss += self._cross_entropy(logits, part).sum(1)
            series += [right / X.shape[1], loss / X.shape[1]]
        return torch.stack(series)

    # ------------------------------------------------------------------ inside

    def _block(self, steps: int) -> None:
        X, y = self.split.train
        seeds = torch.arange(len(self.model.seeds), device=X.device)[:, None]
        for k in range(steps):
            rows = self.index[k]
            x, labels = (X, y) if self.batches.whole else (X[seeds, rows], y[seeds, rows])
            gradients = torch.autograd.grad(self._objective(x, labels), self.parameters)
            for parameter, gradient in zip(self.parameters, gradients, strict=True):
                parameter.grad = gradient
            self.count += 1
            self.learning_rate.copy_(self._rate())
            self.optimiser.step()

    def _rate(self) -> Tensor:
        """The learning rate of the step ``count``, on the device."""
        rate = self.training.learning_rate * (self.count / self.training.warmup).clamp(max=1.0)
        return rate if self.training.half_life is None else rate * torch.exp2(-self.count / self.training.half_life)

    def _objective(self, X: Tensor, y: Tensor) -> Tensor:
        loss = self._cross_entropy(self.model(X), y).mean(1)
        if self.training.penalty == "group":
            loss = loss + self.training.beta * self.model.group_norm()
        elif self.training.penalty == "ridge":
            loss = loss + self.training.beta / y.shape[1] * self.model.ridge()
        return loss.sum()

    @staticmethod
    def _cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
        """``(S, B)``."""
        return functional.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="none").view(y.shape)

    def _groups(self) -> list[dict[str, object]]:
        """Parameters with weight decay and without: gains have none, nor layers that have a penalty of their own."""
        free = self.model.undecayed()
        if self.training.penalty == "group":
            layers = {id(Z) for Z in self.model.matrices().values()}
            free |= {name for name, parameter in self.model.named_parameters() if id(parameter) in layers}
        named = list(self.model.named_parameters())
        decayed = [parameter for name, parameter in named if name not in free]
        others = [parameter for name, parameter in named if name in free]
        groups: list[dict[str, object]] = [{"params": decayed, "weight_decay": self.training.weight_decay}]
        return [*groups, {"params": others}] if others else groups

"""The part of a trained stack that can be certified: its last layer, with the layers below frozen."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any, final

import torch
from sklearn.exceptions import ConvergenceWarning
from torch import Tensor

from convexformer.certificates import Certificate
from convexformer.deep.base import SequenceModel
from convexformer.deep.batches import Data, Split
from convexformer.heads import Attention, Linear
from convexformer.problem import Problem
from convexformer.registry import one_of
from convexformer.solution import Solution
from convexformer.solving import certify, solve
from convexformer.weights import Weights


@final
@dataclass(frozen=True)
class CertifiedLayer:
    """The last layer of one seed's copy, solved to a certified optimum while the rest is frozen.

    ``certificate`` bounds the objective of the last layer alone; it says nothing about the embedding and the layers
    below, which gradient descent found. ``trained`` is the certificate of the layer as it was trained, in the same problem.
    """

    seed: int
    problem: Problem
    solution: Solution
    trained: Certificate
    train_accuracy: float
    test_accuracy: float
    trained_train_accuracy: float
    trained_test_accuracy: float

    @property
    def certificate(self) -> Certificate:
        """The certificate of the solution, recomputed from its weights."""
        return self.solution.certificate

    def summary(self) -> dict[str, Any]:
        """Return the numbers of a table row."""
        proof = self.certificate
        return {
            "seed": self.seed,
            "penalty": self.problem.head.name,
            "beta": self.problem.beta,
            "objective": proof.primal,
            "dual": proof.dual,
            "relative_gap": proof.relative_gap,
            "kind": proof.kind,
            "trained_objective": self.trained.primal,
            "trained_relative_gap": self.trained.relative_gap,
            "train_accuracy": self.train_accuracy,
            "test_accuracy": self.test_accuracy,
            "trained_train_accuracy": self.trained_train_accuracy,
            "trained_test_accuracy": self.trained_test_accuracy,
            "iterations": self.solution.n_iter,
            "seconds": self.solution.seconds,
        }


def certify_last_layer(
    model: SequenceModel,
    data: Data,
    *,
    penalty: str = "ridge",
    beta: float | None = None,
    beta_ratio: float | None = None,
    tolerance: float = 1e-4,
    train_fraction: float = 0.5,
    seeds: list[int] | None = None,
    max_iter: int | None = None,
    max_time: float | None = None,
    progress: bool = False,
    solver: str | None = None,
) -> list[CertifiedLayer]:
    """Freeze the trained lower part of a model and solve its last layer to a certified global optimum::

        min_Z  sum_i L(sum_k H_k(x_i) Z_k, y_i) + beta g(Z),   H = model.last_tokens, fixed

    ``penalty="ridge"`` has ``g = 1/2 |Z|^2`` (weight decay), ``"group"`` the group norm of theorem 3 (Ergen et al. 2022):
    one group for each gate, token and class. The loss is cross-entropy, a **sum** over the training samples. Give
    ``beta`` or ``beta_ratio``; the default is 1e-5 of beta_max for the ridge and 1e-3 for the groups. ``train_fraction``
    must be that of the training, so that the samples are the same. ``seeds`` picks some of the model's. ``solver`` is
    FISTA for the groups unless given: tens of thousands of groups of two weights are cheaper in whole products than one
    after another. Groups are solved in float32 where the model is in float32, and in float64 from where that ends; the
    certificate is always in float64.

    The result is one certified layer per seed. It is the last layer that is certified, never the stack.
    """
    one_of("penalty", penalty, ("ridge", "group"))
    chosen = list(model.seeds) if seeds is None else list(seeds)
    for seed in chosen:
        if seed not in model.seeds:
            raise ValueError(f"seed {seed} was asked for; the model has the seeds {list(model.seeds)}.")
    if beta is None and beta_ratio is None:
        beta_ratio = 1e-5 if penalty == "ridge" else 1e-3
    solver = solver or ("auto" if penalty == "ridge" else "fista")
    split = Split.of(data, train_fraction, model)
    with torch.no_grad():
        sides = [model.last_tokens(X) for X, _ in (split.train, split.test)]  # (S, N, T, w)
    layers = []
    for seed in chosen:
        k = model.seeds.index(seed)
        train, test = ((H[k].double(), y[k]) for H, (_, y) in zip(sides, (split.train, split.test), strict=True))
        Z = model.last_weights()[k].detach().double()
        if penalty == "ridge":  # all features as one token
            train, test, Z = _flat(*train), _flat(*test), Z.flatten(0, 1)
        missing = sorted(set(range(model.n_classes)) - set(train[1].unique().tolist()))
        if missing:
            raise ValueError(f"the training samples of seed {seed} have no label {missing[0]}; raise train_fraction.")
        problem = Problem(
            Linear() if penalty == "ridge" else Attention(),
            *train,
            beta=beta,
            beta_ratio=beta_ratio,
            loss="cross_entropy",
            dtype=torch.float64 if penalty == "ridge" else sides[0].dtype,
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # the status and the certificate say so
            solution = solve(problem, tolerance, solver, max_iter=max_iter, max_time=max_time, progress=progress)
        own = [_accuracy(solution.predict(X), y) for X, y in (train, test)]
        before = [_accuracy(_logits(X, Z), y) for X, y in (train, test)]
        layers.append(CertifiedLayer(seed, problem, solution, certify(Weights(Z), problem), *own, *before))
    return layers


def _flat(tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    return tokens.flatten(1).unsqueeze(1), labels


def _logits(tokens: Tensor, Z: Tensor) -> Tensor:
    return tokens.flatten(1) @ Z.reshape(-1, Z.shape[-1])


def _accuracy(outputs: Tensor, labels: Tensor) -> float:
    return float((outputs.argmax(-1) == labels).double().mean())

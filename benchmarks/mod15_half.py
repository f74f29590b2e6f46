"""Division mod 15 with half of the pairs: what the training pairs determine, and what learners make of them.

    python benchmarks/mod15_half.py                 # both parts; docs/results/mod15_half.json
    python benchmarks/mod15_half.py --parts algebra

**Algebra.** Which test answers follow from the training pairs alone, without knowing what the symbols stand for?
Symbols that occur together as dividend and answer form classes (the orbits of the units: 8, 4, 2 and 1 numbers). Give
every dividend, divisor and answer an unknown element of an abelian group, in each class its own, with ``dividend -
divisor - answer = 0`` for every training pair. A test answer is *determined* if the same relation follows for it, and
for no other answer, from those (membership in an integer lattice, by its Hermite form). Two stronger readers: `classes`
carries relations among divisors over from the largest class to the others; `elimination` also knows that a divisor
never gives one answer twice (nor, in the largest class, a dividend), and repeats both until nothing is new.

**Learners.** The stacks of `mod15-convex-1` and `-2`, changed in one thing each: decay, budget, the answers' weights
tied to the embedding of the symbols. Several initial points a split give an ensemble by averaged logits. Accuracies are
those at the end of training, not the best on the way.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from convexformer import deep
from convexformer.data import SymbolTask, modular_division

P = 15
RESULTS = Path(__file__).parents[1] / "docs" / "results" / "mod15_half.json"
SHARES = (0.5, 0.6, 0.7, 0.8)
READERS = {"law": (False, False), "law, classes": (True, False), "law, classes, elimination": (True, True)}

Basis = list[tuple[int, list[int]]]
Triple = tuple[int, int, int]

# ---------------------------------------------------------------------- algebra


def hermite(rows: list[list[int]]) -> Basis:
    """Echelon basis, with pivots, of the integer lattice that the rows span."""
    rows, basis = [list(row) for row in rows], []
    for column in range(len(rows[0]) if rows else 0):
        while len(live := sorted((row for row in rows if row[column]), key=lambda row: abs(row[column]))) > 1:
            for row in live[1:]:
                times = row[column] // live[0][column]
                row[:] = [x - times * y for x, y in zip(row, live[0], strict=True)]
        if live:
            rows = [row for row in rows if row is not live[0]]
            basis.append((column, live[0]))
    return basis


def inside(vector: list[int], basis: Basis) -> bool:
    """Whether a vector is in the lattice."""
    for column, row in basis:
        if vector[column] % row[column]:
            return False
        times = vector[column] // row[column]
        vector = [x - times * y for x, y in zip(vector, row, strict=True)]
    return not any(vector)


def relation(a: int, b: int, c: int) -> list[int]:
    """``a - b - c`` on the axes dividends, answers, divisors; divisors last, so that a basis ends with theirs."""
    row = [0] * (3 * P)
    row[a] += 1
    row[P + c] -= 1
    row[2 * P + b] -= 1
    return row


def orbits(triples: Sequence[Triple]) -> tuple[list[int], list[int]]:
    """The class of every dividend and every answer: connected components of the pairs seen."""
    own = list(range(2 * P))
    for _ in own:  # labels spread by one step a round, at least
        for a, _, c in triples:
            own[a] = own[P + c] = min(own[a], own[P + c])
    return own[:P], own[P:]


def determined(train: Sequence[Triple], pairs: Sequence[tuple[int, int]], classes: bool, elimination: bool) -> dict:
    """Return the answers that follow, by pair."""
    known = {(a, b): c for a, b, c in train}
    found: dict[tuple[int, int], int] = {}
    while True:
        triples = [(a, b, c) for (a, b), c in known.items()]
        of_dividend, of_answer = orbits(triples)
        relations: dict[int, list[list[int]]] = {}
        for a, b, c in triples:
            relations.setdefault(of_dividend[a], []).append(relation(a, b, c))
        largest = max(relations, key=of_answer.count)
        shared = [row for pivot, row in hermite(relations[largest]) if pivot >= 2 * P] if classes else []
        bases = {own: hermite(rows + shared) for own, rows in relations.items()}
        new = {}
        for a, b in pairs:
            own = of_dividend[a]
            if (a, b) in known or own not in bases:
                continue
            possible = [c for c in range(P) if of_answer[c] == own]
            answers = [c for c in possible if inside(relation(a, b, c), bases[own])]
            if elimination and not answers:
                taken = {c for (x, y), c in known.items() if y == b or (x == a and own == largest)}
                answers = [c for c in possible if c not in taken]
            if len(answers) == 1:
                new[a, b] = answers[0]
        found |= new
        if not new or not elimination:
            return found
        known |= new


def algebra(splits: int) -> list[dict[str, Any]]:
    """The share of the test answers that is determined, and how many of those are wrong (none, if the reasoning holds)."""
    task, rows = modular_division(P), []
    for share in SHARES:
        for name, (classes, elimination) in READERS.items():
            shares, wrong = [], 0
            for seed in range(splits):
                train, test = (triples(part) for part in task.split(share, seed))
                found = determined(train, [(a, b) for a, b, _ in test], classes, elimination)
                shares.append(len(found) / len(test))
                wrong += sum(found.get((a, b), c) != c for a, b, c in test)
            rows.append({"train_share": share, "reader": name, "determined": shares, "wrong": wrong})
            print(
                f"{share:.0%} for training, {name:26s} determines {min(shares):.0%} to {max(shares):.0%} of the test "
                f"answers, median {np.median(shares):.0%}, all on {sum(each == 1 for each in shares)} of {splits} splits",
                flush=True,
            )
    return rows


def triples(task: SymbolTask) -> list[Triple]:
    return [(int(a), int(b), int(c)) for (a, b), c in zip(task.X, task.y, strict=True)]


# ---------------------------------------------------------------------- learners


class TiedStack(deep.SequenceModel):
    """A stack whose last layer gives a vector; the logits are its products with the embedding of the symbols."""

    def __init__(self, seeds: Sequence[int], **shape: Any) -> None:
        super().__init__(P, P, 2, seeds)
        self.stack = deep.ConvexTransformer(P, shape["width"], 2, **shape, seeds=seeds)

    def last_tokens(self, symbols: Tensor) -> Tensor:
        return self.stack.last_tokens(symbols)

    def last_weights(self) -> Tensor:
        return torch.einsum("stwd,scd->stwc", self.stack.last_weights(), self.stack.embedding.table)

    def matrices(self) -> dict[str, Tensor]:
        return self.stack.matrices()

    def config(self) -> dict[str, Any]:
        return self.stack.config()

    def group_norm(self) -> Tensor:
        return self.stack.group_norm()


def variants(iterations: int) -> dict[str, tuple[str, dict[str, Any], dict[str, Any], bool]]:
    """Name: recipe, changes of training, changes of shape, tied."""
    own = {"iterations": iterations}
    return {
        "convex-1": ("mod15-convex-1", own, {}, False),
        "convex-2": ("mod15-convex-2", own, {}, False),
        "convex-1, decay 6": ("mod15-convex-1", {**own, "weight_decay": 6.0}, {}, False),
        "convex-2, decay 6": ("mod15-convex-2", {**own, "weight_decay": 6.0}, {}, False),
        "convex-2, decay 1": ("mod15-convex-2", {**own, "weight_decay": 1.0}, {}, False),
        "convex-2, normalised": ("mod15-convex-2", own, {"normalize": True}, False),
        "convex-1, tied answers": ("mod15-convex-1", own, {}, True),
        "convex-2, tied answers": ("mod15-convex-2", own, {}, True),
        "convex-2, five times longer": ("mod15-convex-2", {"iterations": 5 * iterations}, {}, False),
    }


@torch.no_grad()
def accuracies(model: deep.SequenceModel, test: SymbolTask) -> tuple[list[float], float]:
    """Of each member, and of the members' mean logits."""
    logits = model(test.X)
    single = (logits.argmax(-1) == test.y).double().mean(1)
    return single.tolist(), float((logits.mean(0).argmax(-1) == test.y).double().mean())


def learners(splits: int, members: int, iterations: int, only: str) -> list[dict[str, Any]]:
    task, rows = modular_division(P), []
    for name, (source, training, shape, tied) in variants(iterations).items():
        if only and name not in only.split(";"):
            continue
        recipe = deep.recipe(source).but(shape=shape, **training, target=None, evaluate_every=500)
        single, together, fitted, began = [], [], [], time.perf_counter()
        for seed in range(splits):
            train, test = task.split(0.5, seed)
            inits = range(100 * seed, 100 * seed + members)
            model = TiedStack(inits, **recipe.shape) if tied else recipe.model(task, inits)
            run = deep.train(model, (train, test), recipe.training, device="cpu")
            own, ensemble = accuracies(model, test)
            single.append(own)
            together.append(ensemble)
            fitted.append(float(run.history.train_accuracy[-1].min()))
        rows.append(
            {
                "variant": name,
                "settings": recipe.settings(),
                "tied": tied,
                "members": members,
                "single": single,
                "ensemble": together,
                "lowest_train_accuracy": fitted,
                "seconds": time.perf_counter() - began,
            }
        )
        print(
            f"{name:28s} {recipe.training.iterations} iterations: members {np.mean(single):.0%} "
            f"(best {np.max(single):.0%}), ensemble of {members} {' '.join(f'{value:.0%}' for value in together)}, "
            f"mean {np.mean(together):.0%}; "
            f"train accuracy from {min(fitted):.0%}; {rows[-1]['seconds']:.0f} s",
            flush=True,
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="algebra,learners", help="comma-separated")
    parser.add_argument("--splits", type=int, default=5)
    parser.add_argument("--members", type=int, default=8, help="initial points a split")
    parser.add_argument("--iterations", type=int, default=2000)
    parser.add_argument("--only", default="", help="only these variants, separated by semicolons")
    parser.add_argument("--json", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    result = json.loads(options.json.read_text()) if options.json.exists() else {}
    if "algebra" in options.parts:
        result["algebra"] = algebra(max(options.splits, 10))
    if "learners" in options.parts:
        rows = learners(options.splits, options.members, options.iterations, options.only)
        done = {row["variant"] for row in rows}
        result["learners"] = [row for row in result.get("learners", []) if row["variant"] not in done] + rows
    result |= {"torch": torch.__version__, "splits": options.splits, "iterations": options.iterations}
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

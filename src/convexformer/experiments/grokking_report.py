"""Division mod 97 in the settings of Fisher et al.: their figure 1, the claims of their section 6, and table 1."""

from __future__ import annotations

from typing import Any

import numpy as np

from convexformer.data import SymbolTask
from convexformer.deep import Recipe, Run, recipe
from convexformer.experiments.deep_costs import kernel_map_costs, seconds_a_step
from convexformer.experiments.deep_measures import SUBSTANTIAL
from convexformer.experiments.deep_study import Measured, TrainedStacks, every, median, span, steps
from convexformer.experiments.deep_verdicts import arrival, fewer, in_order, smoother
from convexformer.experiments.study import Verdict

CONVEX, KERNEL, SOFTMAX, ADAM = "report-convex", "report-kernel", "report-softmax", "report-softmax-adam"
REPORT = (CONVEX, KERNEL, SOFTMAX)
QUICK = {CONVEX: 30_000, KERNEL: 18_000, SOFTMAX: 2000, ADAM: 1000}  # iterations in a quick run
PRINTED = {CONVEX: (1556, 0.088), KERNEL: (1475, 0.38), SOFTMAX: (1662, 0.23)}  # table 1: epochs, seconds an epoch
EPOCH = 97 * 96 // 2 / 32  # steps: half of the pairs of division mod 97 in batches of 32
STUCK = 1e-2  # a training loss as near as this to that of zero weights
ADAM_ITERATIONS = 10_000  # of the softmax model with the printed optimiser, whose weights go to zero long before


def report_recipes() -> dict[str, Recipe]:
    """Section 5.2 of Fisher et al.: Adam at 1e-3, batches of 32, 300,000 iterations; ridge 1e-4; decay 1e-6, softmax 1.

    At decay 1e-6 Adam and AdamW are the same to rounding. At decay 1 they are not: with Adam the decay is an l2 penalty in
    the gradient, whose minimum is near zero weights. The softmax model is trained both ways; where the report is compared
    it has AdamW, which is kinder to it.
    """
    softmax = recipe(SOFTMAX)
    return {
        CONVEX: recipe(CONVEX).but(optimizer="adam"),
        KERNEL: recipe(KERNEL).but(optimizer="adam"),
        SOFTMAX: softmax.but("softmax, Fisher et al., AdamW", optimizer="adamw"),
        ADAM: softmax.but("softmax, Fisher et al., Adam", optimizer="adam", iterations=ADAM_ITERATIONS),
    }


def report(stacks: TrainedStacks, task: SymbolTask) -> None:
    """Train the three models as printed; iterations as in figure 1, epochs and seconds as in table 1."""
    for key, each in report_recipes().items():
        stacks.train(key, each, task, quick=QUICK[key])
    stacks.certify(CONVEX, task)
    report_claims(stacks)
    stacks.find(
        "Fisher et al., section 5.2",
        "the softmax transformer trains with Adam and weight decay 1, as printed (99% training accuracy)",
        (ADAM,),
        lambda run: _trained(run, np.log(task.n_classes)),
    )
    _table_1(stacks, task)
    stacks.draw_learning("report.png", "the settings of Fisher et al. (their figure 1)", (*REPORT, ADAM))


def report_claims(stacks: TrainedStacks) -> None:
    """The claims on figure 1, and the epochs of table 1."""
    source = "Fisher et al., figure 1"
    stacks.find(
        source,
        "kernel preconditioning narrows the grokking gap",
        (CONVEX, KERNEL),
        lambda convex, kernel: Measured(
            f"from {steps(convex.grokking_gap())} to {steps(kernel.grokking_gap())} iterations",
            fewer(kernel.grokking_gap(), convex.grokking_gap()),
        ),
    )
    stacks.find(
        source,
        "grokking is diminished in the convex case: fewer iterations from train to test convergence than softmax",
        (CONVEX, SOFTMAX),
        _diminished,
    )
    stacks.find(
        source,
        "grokking still occurs in the convex case: train accuracy first, test accuracy after twice the iterations or more",
        (CONVEX,),
        lambda run: Measured(
            f"train at {arrival(run, 'train')}, test at {arrival(run)}",
            every(int((run.iterations_to() >= 2 * run.iterations_to(part="train")).sum()), stacks.seeds),
        ),
    )
    stacks.find(
        "Fisher et al., section 6",
        "the kernel model needs fewer iterations than the convex one, and that fewer than the softmax transformer",
        (KERNEL, CONVEX, SOFTMAX),
        _ranked,
    )
    stacks.find(
        "Fisher et al., section 6",
        "division: both convex models converge more smoothly than the softmax transformer",
        REPORT,
        lambda convex, kernel, softmax: smoother([convex, kernel], softmax),
    )
    stacks.find(
        "Fisher et al., table 1",
        "epochs to 99%: convex 1,556, kernel 1,475, softmax 1,662, each to a factor of two",
        REPORT,
        _epochs,
    )


def _table_1(stacks: TrainedStacks, task: SymbolTask) -> None:
    """Seconds an epoch of one model, with the kernel map as the transform that it is and as a dense matrix."""
    recipes = report_recipes()
    a_step = {key: seconds_a_step(recipes[key], task, stacks.device) for key in REPORT}
    maps = kernel_map_costs(recipes[KERNEL], task, stacks.device)
    dense = a_step[KERNEL]
    a_step[KERNEL] += maps["transform"] - maps["dense"]
    rows: dict[str, Any] = {}
    for key in REPORT:
        epochs = stacks.runs[key].iterations_to() / EPOCH
        rows[key] = {
            "epochs_printed": PRINTED[key][0],
            "seconds_an_epoch_printed": PRINTED[key][1],
            "epochs": [None if np.isnan(each) else float(each) for each in epochs],
            "seconds_an_epoch": a_step[key] * EPOCH,
            "seconds_in_all": [None if np.isnan(each) else float(each * a_step[key] * EPOCH) for each in epochs],
        }
    rows[KERNEL]["seconds_an_epoch_dense_map"] = dense * EPOCH
    stacks.study.numbers["table_1"] = {"device": str(stacks.device), **rows}
    stacks.study.numbers["kernel_map_seconds_a_step"] = maps
    seconds = {key: rows[key]["seconds_an_epoch"] for key in REPORT}
    stacks.study.find(
        "Fisher et al., table 1",
        "seconds an epoch: convex (0.088) below softmax (0.23) below kernel (0.38, with its transform)",
        f"{stacks.device.type}, one model: convex {seconds[CONVEX]:.2f}, softmax {seconds[SOFTMAX]:.2f}, kernel "
        f"{seconds[KERNEL]:.2f} with the transform, {dense * EPOCH:.2f} with a dense matrix",
        in_order([seconds[key] for key in (CONVEX, SOFTMAX, KERNEL)]),
        "timed over 3 x 100 iterations",
    )
    stacks.find(
        "Fisher et al., table 1",
        "seconds to 99% in all: convex (136) below softmax (391) below kernel (568)",
        (CONVEX, SOFTMAX, KERNEL),
        lambda *runs: _totals(runs, [a_step[key] for key in (CONVEX, SOFTMAX, KERNEL)]),
    )


def _trained(run: Run, loss_of_zero: float) -> Measured:
    """At a training loss of zero weights nothing but the decay is left in the gradient: more iterations stay there."""
    learned = np.isfinite(run.iterations_to(part="train"))
    loss = run.history.train_loss[-1]
    text = (
        f"best training accuracy {run.history.train_accuracy.max():.1%}, training loss after "
        f"{run.history.iteration[-1]:,} iterations {np.median(loss):.3f} (of zero weights: {loss_of_zero:.3f})"
    )
    stuck = bool((np.abs(loss - loss_of_zero) < STUCK).all())
    return Measured(text, every(int(learned.sum()), len(learned)), settled=stuck)


def _diminished(convex: Run, softmax: Run) -> Measured:
    ours, theirs = median(convex.grokking_gap()), median(softmax.grokking_gap())
    learned = softmax.iterations_to(part="train")
    lowest = float(softmax.history.iteration[-1]) - median(learned)  # of a gap that has not ended
    settled = bool(np.isfinite(ours) and np.isfinite(learned).all() and ours < min(lowest, theirs))
    text = f"gap of the convex model {steps(convex.grokking_gap())}; softmax: train at {arrival(softmax, 'train')}, "
    text += f"test at {arrival(softmax)}"
    if not np.isfinite(learned).all():
        last = softmax.history.train_accuracy[-1], softmax.history.test_accuracy[-1]
        text += f" (at its end {span(last[0])} train, {span(last[1])} test)"
    return Measured(text, Verdict.YES if settled or ours < theirs < float("inf") else Verdict.NO, settled)


def _ranked(kernel: Run, convex: Run, softmax: Run) -> Measured:
    values = [median(each.iterations_to()) for each in (kernel, convex, softmax)]
    settled = bool(np.isfinite(values[1]) and values[1] < softmax.history.iteration[-1]) and not values[2] < np.inf
    return Measured(", ".join(arrival(each) for each in (kernel, convex, softmax)), in_order(values), settled)


def _epochs(*runs: Run) -> Measured:
    counts = [median(run.iterations_to()) / EPOCH for run in runs]
    printed = [PRINTED[key][0] for key in REPORT]
    near = [1 / SUBSTANTIAL < ours / theirs < SUBSTANTIAL for ours, theirs in zip(counts, printed, strict=True)]
    text = ", ".join(steps(run.iterations_to() / EPOCH) for run in runs)
    # an arrival far from the printed number stays far, whatever the others do
    refuted = [np.isfinite(ours) and not close for ours, close in zip(counts, near, strict=True)]
    return Measured(text, every(sum(near), len(near)), settled=all(refuted[:2]) and sum(near) == 0)


def _totals(runs: tuple[Run, ...], a_step: list[float]) -> Measured:
    totals = [median(run.iterations_to()) * step for run, step in zip(runs, a_step, strict=True)]
    least = [float(run.history.iteration[-1]) * step for run, step in zip(runs, a_step, strict=True)]
    text = ", ".join(
        f"{total:,.0f}" if np.isfinite(total) else f"more than {low:,.0f}"
        for total, low in zip(totals, least, strict=True)
    )
    # softmax is past the kernel model already, and where the convex model is among the two is known
    later = np.isfinite(totals[2]) and min(totals[1], least[1]) > totals[2]
    known = np.isfinite(totals[0]) or least[0] > totals[2]
    return Measured(f"{text} s", in_order(totals), settled=bool(later and known))

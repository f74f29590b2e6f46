"""Verdicts on iterations to 99%, and how numbers are written beside them."""

from __future__ import annotations

import numpy as np

from convexformer.deep import Run
from convexformer.experiments.deep_measures import (
    SUBSTANTIAL,
    best_test_loss,
    excess_variation,
    loss_at,
    plateau,
)
from convexformer.experiments.deep_study import Measured, every, median, ratio, span, steps
from convexformer.experiments.study import Verdict

TENFOLD = 10.0


def tenfold(fast: Run, slow: Run) -> Measured:
    """Ten times fewer iterations to 99% test accuracy: yes. Fewer at all: partly.

    A slow model that did not arrive needs more than it was given: if that is ten times as many already, it is settled.
    """
    ours, theirs = median(fast.iterations_to()), median(slow.iterations_to())
    least = min(theirs, float(slow.history.iteration[-1]))
    text = f"{arrival(fast)} against {arrival(slow)}"
    if not np.isfinite(ours):
        return Measured(text, Verdict.NO)
    text += f": {'' if np.isfinite(theirs) else 'more than '}{ratio(least, ours)}"
    if TENFOLD * ours <= least:
        return Measured(text, Verdict.YES, settled=True)
    return Measured(text, Verdict.PARTLY if ours < least else Verdict.NO if np.isfinite(theirs) else Verdict.OPEN)


def arrival(run: Run, part: str = "test") -> str:
    """Write the iterations to 99%, or "never in" its budget."""
    found = run.iterations_to(part=part)
    return steps(found) if np.isfinite(found).any() else f"never in {run.history.iteration[-1]:,}"


def memorises_first(run: Run) -> Measured:
    """Grokking: 99% test accuracy takes at least twice as long as 99% training accuracy, on every seed."""
    train, test = run.iterations_to(part="train"), run.iterations_to()
    grokked = test >= 2 * train
    text = f"train at {arrival(run, 'train')}, test at {arrival(run)} iterations"
    return Measured(text, every(int(grokked.sum()), len(grokked)))


def arrives(run: Run) -> Measured:
    """How many seeds reach 99% test accuracy: all of them, some (partly) or none; and where they end."""
    count, seeds = int(np.isfinite(run.iterations_to()).sum()), len(run.iterations_to())
    history = run.history
    text = (
        f"99% on {count} of {seeds} seeds, iterations {steps(run.iterations_to())}; best "
        f"{span(history.test_accuracy.max(0))}, at the end {span(history.test_accuracy[-1])}"
    )
    return Measured(text, every(count, seeds))


def beyond(run: Run, iterations: int) -> Measured:
    """Whether 99% test accuracy takes more than so many iterations."""
    found = run.iterations_to()
    late = np.where(np.isfinite(found), found, run.history.iteration[-1]) > iterations
    arrived = bool(np.isfinite(found).all())
    return Measured(f"99% test accuracy at {arrival(run)}", every(int(late.sum()), len(late)), settled=arrived)


def fewer(ours: np.ndarray, theirs: np.ndarray) -> Verdict:
    """Whether the median is smaller; a seed that never arrived makes it infinite."""
    return Verdict.YES if median(ours) < median(theirs) else Verdict.NO


def in_order(values: list[float]) -> Verdict:
    """Each smaller than the next: yes. The first or second smaller than the last: partly."""
    if np.isfinite(values[0]) and all(values[k] < values[k + 1] for k in range(len(values) - 1)):
        return Verdict.YES
    return Verdict.PARTLY if min(values[:-1]) < values[-1] else Verdict.NO


def depth_helps(one: Run, two: Run) -> Measured:
    """Figure 5 of Ergen et al., the convex model: a second layer at least halves the iterations; partly: it saves some."""
    gain, text = _gain(one, two)
    return Measured(text, Verdict.YES if gain >= SUBSTANTIAL else Verdict.PARTLY if gain > 1 else Verdict.NO)


def depth_makes_no_difference(one: Run, two: Run) -> Measured:
    """Figure 5 of Ergen et al., softmax: a second layer changes the iterations by less than a factor of two."""
    gain, text = _gain(one, two)
    return Measured(text, Verdict.YES if 1 / SUBSTANTIAL < gain < SUBSTANTIAL else Verdict.NO)


def _gain(one: Run, two: Run) -> tuple[float, str]:
    first, second = median(one.iterations_to()), median(two.iterations_to())
    gain = first / second if np.isfinite(second) else 0.0
    return gain, f"L=1 to L=2: {arrival(one)} to {arrival(two)} ({gain:.1f}x as fast)"


def lower_test_loss(ours: Run, theirs: Run) -> Measured:
    """Figure 4c of Ergen et al., at equal iterations: where ours has 99% test accuracy, and where theirs has it.

    A comparison ends where the shorter training ends, so the second one needs ours trained on past 99%. Medians over seeds;
    yes if ours is lower at all of them, partly at some. What is best on the way is stated as well.
    """
    last = min(float(ours.history.iteration[-1]), float(theirs.history.iteration[-1]))
    stops = {min(last, float(np.max(each.iterations_to()))) if _arrived(each) else last for each in (ours, theirs)}
    pairs = {stop: [float(np.median(loss_at(each, stop))) for each in (ours, theirs)] for stop in sorted(stops)}
    best = [float(np.median(best_test_loss(each, last))) for each in (ours, theirs)]
    text = "; ".join(
        f"at {stop:,.0f} iterations {mine:.3f} against {other:.3f}" for stop, (mine, other) in pairs.items()
    )
    lower = sum(mine < other for mine, other in pairs.values())
    return Measured(f"{text}; best so far {best[0]:.3f} against {best[1]:.3f}", every(lower, len(pairs)))


def smoother(ours: list[Run], theirs: Run) -> Measured:
    """Test accuracy falls less on its way to 99% (``excess_variation``): for each of ours, the median over seeds.

    Runs that did not arrive are compared over the iterations that all of them have; more training adds falls to theirs, so
    that it is decided once theirs has more than each of ours in all its training.
    """
    in_all = [float(np.median(excess_variation(each))) for each in (*ours, theirs)]
    if max(in_all[:-1]) < in_all[-1]:
        text = f"falls of test accuracy on the way, in all: {', '.join(f'{each:.3f}' for each in in_all[:-1])} against"
        so_far = "" if _arrived(theirs) else f" up to {theirs.history.iteration[-1]:,}"
        done = all(_arrived(each) for each in ours)
        return Measured(f"{text} {in_all[-1]:.3f}{so_far}", Verdict.YES, settled=done, indifferent=(len(ours),))
    waiting = [float(each.history.iteration[-1]) for each in (*ours, theirs) if not _arrived(each)]
    until = min(waiting, default=np.inf)
    mine, other = ([float(np.median(excess_variation(each, until))) for each in runs] for runs in (ours, [theirs]))
    count = sum(each < other[0] for each in mine)
    text = (
        f"falls of test accuracy on the way, in all: {', '.join(f'{each:.3f}' for each in mine)} against {other[0]:.3f}"
    )
    if np.isfinite(until):
        text += f" (up to {until:,.0f} iterations)"
    done = all(_arrived(each) and float(np.max(each.iterations_to())) <= until for each in ours)
    return Measured(text, every(count, len(mine)), settled=done and count == len(mine))


def together(run: Run) -> Measured:
    """Train and test accuracy reach 99% of their own best within a factor of two of each other, on every seed."""
    train, test = plateau(run, "train"), plateau(run, "test")
    near = np.maximum(train, test) < SUBSTANTIAL * np.minimum(train, test)
    history = run.history
    text = (
        f"99% of their best at {np.median(train):,.0f} (train, best {span(history.train_accuracy.max(0))}) and "
        f"{np.median(test):,.0f} iterations (test, best {span(history.test_accuracy.max(0))})"
    )
    return Measured(text, every(int(near.sum()), len(near)))


def accuracies(*runs: Run) -> str:
    """Write the range of the best test accuracies of each run."""
    return ", ".join(span(each.history.test_accuracy.max(0)) for each in runs)


def _arrived(run: Run) -> bool:
    return bool(np.isfinite(run.iterations_to()).all())

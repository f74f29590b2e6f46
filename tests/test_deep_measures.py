"""The measures behind the claims about training curves and spectra, on curves whose answer is known."""

import numpy as np
import pytest

from convexformer import deep
from convexformer.data import modular_division
from convexformer.deep.history import History, Outcome, Run
from convexformer.experiments import deep_costs, spectra
from convexformer.experiments import deep_measures as measures
from convexformer.experiments import deep_verdicts as verdicts
from convexformer.experiments.study import Verdict


def run_of(test, train=None, loss=None, spectra=None, every=10):
    """A run of one seed with these curves, evaluated every ten iterations."""
    test = np.atleast_2d(np.asarray(test, dtype=float)).T
    train = np.ones_like(test) if train is None else np.atleast_2d(np.asarray(train, dtype=float)).T
    loss = np.zeros_like(test) if loss is None else np.atleast_2d(np.asarray(loss, dtype=float)).T
    clock = every * np.arange(len(test))
    values = {} if spectra is None else {"Z": np.asarray(spectra, dtype=float)[:, None]}
    at = clock if spectra is not None else np.array([], dtype=int)
    history = History(clock, clock / 100, train, loss, test, loss, at, values)
    return Run(None, deep.Training(), history, Outcome.ITERATIONS, "a task", "cpu", 0.0)


def test_excess_variation_is_the_sum_of_the_falls_before_arrival():
    rough = run_of([0.0, 0.5, 0.3, 0.8, 0.6, 1.0, 0.2])
    assert measures.excess_variation(rough) == pytest.approx(0.4)  # the fall after 99% does not count
    assert measures.excess_variation(rough, until=20) == pytest.approx(0.2)
    assert measures.excess_variation(run_of([0.0, 0.5, 0.9])) == 0


def test_losses_are_compared_at_equal_iterations():
    ours = run_of([0, 1, 1, 1], loss=[4, 1.0, 0.5, 0.2])
    theirs = run_of([0, 0, 0, 1], loss=[4, 2.0, 1.5, 0.1])
    assert measures.loss_at(ours, 15) == 1.0
    assert measures.best_test_loss(theirs, 25) == 1.5
    found = verdicts.lower_test_loss(ours, theirs)  # lower at 10 iterations, higher at 30
    assert found.verdict is Verdict.PARTLY
    assert verdicts.lower_test_loss(theirs, ours).verdict is Verdict.PARTLY
    assert verdicts.lower_test_loss(ours, ours).text.count("iterations") == 1  # one stop is one comparison
    assert verdicts.lower_test_loss(ours, run_of([0, 0, 0, 1], loss=[4, 3, 3, 3])).verdict is Verdict.YES


def test_turning_points_of_a_spectrum():
    train = [0.0, 0.2, 1.0, 1.0, 1.0, 1.0]
    test = [0.0, 0.0, 0.0, 0.2, 1.0, 1.0]
    spectra = [[1, 1], [2, 2], [4, 2], [4, 1], [2, 0.0], [1, 0.0]]
    spectrum = measures.Spectrum(run_of(test, train, spectra=spectra), "Z")
    points = ("start", "learning", "memorised", "rising", "generalised", "end")
    assert [int(spectrum.iteration(point)[0]) for point in points] == [0, 10, 20, 30, 40, 50]
    assert spectrum.rank("start") == pytest.approx(2)
    assert spectrum.rank("end") == pytest.approx(1)
    assert spectrum.size("memorised") == pytest.approx(np.sqrt(10))
    assert spectrum.spread("memorised") == pytest.approx(1)
    assert spectrum.lead("memorised") == pytest.approx(4 / 3)
    assert measures.collapses(spectrum.rank("start"), spectrum.rank("end")).tolist() == [
        False
    ]  # half is not below half
    assert measures.shrinks(spectrum.size("rising"), spectrum.size("generalised")).all()


@pytest.mark.parametrize(
    ("test", "verdict"),
    [
        ([0, 1, 1, 1], Verdict.YES),
        ([0, 0, 0, 1], Verdict.OPEN),  # generalised at the last evaluation
        ([0, 0.5, 0.5, 0.5], Verdict.YES),  # a plateau
        ([0, 0.1, 0.3, 0.6], Verdict.BEYOND),  # still rising, far from 99%
    ],
)
def test_ranks_past_generalisation_need_a_model_that_generalises(test, verdict):
    run = run_of(test, spectra=[[1, 0.1], [1, 0.2], [1, 0.5], [1, 1]])
    for layer in ("Z1", "Z2"):
        run.history.spectra[layer] = run.history.spectra["Z"]
    assert spectra.rises_past(run).verdict is verdict


@pytest.mark.parametrize(
    ("with_map", "verdict"),
    [([1, 1], Verdict.YES), ([1, 0.1], Verdict.NO), ([1, 0.11], Verdict.NO)],  # the last grows by less than the bar
)
def test_a_map_that_regularises_ends_at_a_higher_rank_in_both_layers(with_map, verdict):
    runs = [run_of([0, 1], spectra=[[1, 1], end]) for end in ([1, 0.1], with_map)]
    for run in runs:
        run.history.spectra.update(Z1=run.history.spectra["Z"], Z2=run.history.spectra["Z"])
    assert spectra._regularised(*runs).verdict is verdict


def test_how_many_seeds_arrive():
    for curves, verdict in (([[0, 1], [0, 1]], "YES"), ([[0, 1], [0, 0.9]], "PARTLY"), ([[0, 0.5], [0, 0.9]], "NO")):
        assert verdicts.arrives(run_of(curves)).verdict is Verdict[verdict]
    assert verdicts.arrives(run_of([[0, 1, 0.5], [0, 0.9, 0.2]])).text == (
        "99% on 1 of 2 seeds, iterations 10 (1 of 2); best 90.0% to 100.0%, at the end 20.0% to 50.0%"
    )


@pytest.mark.parametrize(
    ("fast", "slow", "verdict", "settled"),
    [
        ([0, 1], [0] * 10 + [1], Verdict.YES, True),
        ([0, 1], [0] * 5 + [1], Verdict.PARTLY, False),
        ([0, 1], [0] * 11, Verdict.YES, True),  # not there after ten times as many
        ([0, 1], [0] * 5, Verdict.PARTLY, False),  # not there yet
        ([0] * 5, [0, 1], Verdict.NO, False),
        ([0] * 5, [0] * 5, Verdict.NO, False),
        ([0] * 4 + [1], [0, 0], Verdict.OPEN, False),  # had fewer iterations than ours needed
    ],
)
def test_ten_times_faster(fast, slow, verdict, settled):
    found = verdicts.tenfold(run_of(fast), run_of(slow))
    assert (found.verdict, found.settled) == (verdict, settled)


def test_what_a_second_layer_does():
    at = {n: run_of([0] * n + [1]) for n in (2, 4, 5)}
    never = run_of([0, 0])
    pairs = [(at[4], at[2]), (at[5], at[4]), (at[4], at[4]), (at[4], never)]
    assert [verdicts.depth_helps(*pair).verdict.name for pair in pairs] == ["YES", "PARTLY", "NO", "NO"]
    assert [verdicts.depth_makes_no_difference(*pair).verdict.name for pair in pairs] == ["NO", "YES", "YES", "NO"]


def test_smoother_is_settled_once_the_other_fell_more():
    smooth, rough, longer = run_of([0, 0.5, 1]), run_of([0, 0.5, 0.2, 0.3]), run_of([0, 0.9, 0.2, 1])
    found = verdicts.smoother([smooth], rough)
    assert found.verdict is Verdict.YES
    assert found.settled
    assert verdicts.smoother([smooth, longer], rough).verdict is Verdict.PARTLY
    assert verdicts.smoother([longer], smooth).verdict is Verdict.NO
    never = run_of([0, 0.5, 0.4, 0.5, 0.4, 0.5])  # all of its falls count, although the other had fewer iterations
    found = verdicts.smoother([smooth, never], rough)
    assert found.verdict is Verdict.YES
    assert found.indifferent == (2,)
    assert not found.settled
    never = run_of([0, 0.5, 0.3, 0.5, 0.3, 0.5])
    assert verdicts.smoother([smooth, never], rough).indifferent == ()


def test_curves_that_level_off_at_the_same_time():
    train = [0.0, 0.5, 1.0, 1.0, 1.0, 1.0]
    assert verdicts.together(run_of([0, 0.3, 0.6, 0.6, 0.6, 0.6], train)).verdict is Verdict.YES
    assert verdicts.together(run_of([0, 0.1, 0.2, 0.3, 0.4, 0.6], train)).verdict is Verdict.NO


@pytest.mark.parametrize(
    ("values", "verdict"),
    [([1, 2, 3], Verdict.YES), ([2, 1, 3], Verdict.PARTLY), ([3, 2, 1], Verdict.NO), ([np.inf] * 3, Verdict.NO)],
)
def test_orders(values, verdict):
    assert verdicts.in_order(values) is verdict


def test_costs_of_a_step_and_of_the_kernel_map(monkeypatch):
    monkeypatch.setattr(deep_costs, "STEPS", 2)
    task, recipe = modular_division(11), deep.recipe("report-kernel")
    maps = deep_costs.kernel_map_costs(recipe, task, deep_costs.torch.device("cpu"))
    assert maps.keys() == {"dense", "transform"}
    assert min(maps.values()) > 0
    assert deep_costs.seconds_a_step(recipe, task, deep_costs.torch.device("cpu")) > 0

"""Thread limits: what was set before comes back, whichever of several threads ends first."""

import threading

import pytest
import torch

from convexformer.threads import _free_blas, _pools, limited_threads, one_thread


def blas():
    """Threads of every BLAS of this process."""
    return [pool["num_threads"] for pool in _pools().info() if pool["user_api"] == "blas"]


@pytest.fixture
def threads():
    """Three threads, where a BLAS has so many; what each has under a limit."""
    _free_blas()
    before, limiter = torch.get_num_threads(), _pools().limit(limits=3)
    torch.set_num_threads(3)
    most = blas()
    if max(most, default=0) < 3:
        pytest.skip("no BLAS here whose threads can be set")
    yield lambda limit: [min(limit, own) for own in most]
    torch.set_num_threads(before)
    limiter.restore_original_limits()


def test_limits_of_overlapping_threads_are_undone(threads):
    inside, leave = threading.Barrier(3), [threading.Event(), threading.Event()]

    def solve(k):
        with limited_threads(1):
            inside.wait(10)
            leave[k].wait(10)

    workers = [threading.Thread(target=solve, args=(k,), daemon=True) for k in range(2)]
    for worker in workers:
        worker.start()
    inside.wait(10)
    assert blas() == threads(1)
    leave[0].set()
    workers[0].join()
    assert blas() == threads(1)  # the other one still works
    leave[1].set()
    workers[1].join()
    assert blas() == threads(3)


def test_the_least_of_nested_limits_counts(threads):
    with limited_threads(2):
        with limited_threads(1):
            assert blas() == threads(1)
        assert blas() == threads(2)
        with one_thread():
            assert (blas(), torch.get_num_threads()) == (threads(1), 1)
            with one_thread():
                assert blas() == threads(1)
        assert (blas(), torch.get_num_threads()) == (threads(2), 2)
    assert (blas(), torch.get_num_threads()) == (threads(3), 3)


def test_limits_are_undone_after_an_error(threads):
    with pytest.raises(ZeroDivisionError), limited_threads(1):
        _ = 1 / 0
    assert (blas(), torch.get_num_threads()) == (threads(3), 3)
